"""What the demo is asked for, and what it found: a table, JSON, and the rows behind both."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from quasar_lab.errors import UserError
from quasar_lab.loading import DEFAULT_MODEL
from quasar_lab.methods import DraftSettings
from quasar_lab.sampling import SamplingConfig
from quasar_lab.summary import split_gain
from quasar_lab.tasks import TASKS, load_task


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What `quasar-lab demo` runs; the defaults take a few minutes on two cores.

    limit: prompts a task; max_new_tokens: a turn; temperature 0 is greedy.
    """

    model: str = DEFAULT_MODEL
    tasks: tuple[str, ...] = tuple(TASKS)
    limit: int = 2
    max_new_tokens: int = 96
    draft: DraftSettings = field(default_factory=DraftSettings)
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1")
        if not self.tasks:
            raise UserError(f"no task is named: choose from {', '.join(TASKS)}")
        for task in self.tasks:
            load_task(task, self.limit)
        SamplingConfig(temperature=self.temperature, seed=self.seed)


QUICK = {"limit": 2, "max_new_tokens": 24}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The measured rows and what follows from them."""

    settings: DemoSettings
    machine: dict[str, Any]
    rows: pd.DataFrame
    summary: pd.DataFrame
    fidelity: pd.DataFrame
    verdict: str
    seconds: float

    def table(self) -> pd.DataFrame:
        """The table that is printed: one row a method."""
        summary, kl = self.summary, self.fidelity["kl"].mean()
        int8 = summary.index.isin(["int8", "quasar"])
        gains = {name: split_gain(summary, name, "ngram") for name in summary.index}
        return pd.DataFrame(
            {
                "tokens/s": summary["tokens_per_second"].map("{:.1f}".format),
                "vs plain": summary["speedup"].map("{:.2f}x".format),
                "95 % interval": [
                    f"{low:.2f}-{high:.2f}"
                    for low, high in zip(
                        summary["speedup_low"], summary["speedup_high"], strict=True
                    )
                ],
                "L": summary["mean_acceptance_length"].map("{:.2f}".format),
                "step": summary["verify_step_in_plain_steps"].map("{:.2f}".format),
                "vs n-gram": [f"{gain.speedup:.2f}x" for gain in gains.values()],
                "= L term": [f"{gain.length_term:.2f}" for gain in gains.values()],
                "x step term": [f"{gain.step_term:.2f}" for gain in gains.values()],
                "top-1": [
                    f"{self.fidelity['top1_match'].mean():.1%}" if q else "100%" for q in int8
                ],
                "mean KL": [f"{kl:.4f}" if q else "0" for q in int8],
            },
        ).set_axis(summary["label"].rename("method"))

    def as_json(self) -> dict[str, Any]:
        """Everything, in plain JSON values."""
        gain = split_gain(self.summary, "quasar", "ngram")
        table = self.summary.reset_index(names="method")
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "seconds": round(self.seconds, 1),
            "verdict": self.verdict,
            "methods": json.loads(table.to_json(orient="records")),
            "quasar_over_ngram": asdict(gain),
            "fidelity": {
                "tokens": len(self.fidelity),
                "mean_kl": float(self.fidelity["kl"].mean()),
                "mean_tv": float(self.fidelity["tv"].mean()),
                "top1_agreement": float(self.fidelity["top1_match"].mean()),
            },
            "rows": json.loads(self.rows.to_json(orient="records")),
        }
