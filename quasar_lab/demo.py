"""The main job: Quasar on a real model, measured on this machine against its own baselines."""

import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from quasar_lab.benchmark import quantize_for_benchmark, run_benchmark
from quasar_lab.errors import UserError
from quasar_lab.fidelity import compare_logits
from quasar_lab.loading import DEFAULT_MODEL, LanguageModel, load
from quasar_lab.machine import describe_machine
from quasar_lab.methods import DraftSettings
from quasar_lab.progress import ProgressBar, say
from quasar_lab.results import write_atomically
from quasar_lab.sampling import SamplingConfig
from quasar_lab.summary import split_gain, summarize, verdict
from quasar_lab.tasks import TASKS, conversation, load_task


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


def measure_fidelity(
    model: LanguageModel,
    quantized: Any,
    rows: pd.DataFrame,
    progress_label: str = "comparing logits",
) -> pd.DataFrame:
    """INT8 against full precision on the baseline's own text: `compare_logits` of every token."""
    baseline = rows[rows["method"] == "plain"]
    prompts = {
        (task, prompt.question_id): prompt
        for task in dict.fromkeys(baseline["task"])
        for prompt in load_task(task)
    }
    answers: dict[tuple[Any, ...], list[str]] = {}
    tables = []
    with ProgressBar(len(baseline), progress_label, unit="text") as bar, torch.no_grad():
        for row in baseline.itertuples():
            earlier = answers.setdefault((row.task, row.question_id, row.temperature, row.seed), [])
            prompt = prompts[row.task, row.question_id]
            head = model.encode_chat(conversation(prompt, earlier))
            ids = torch.cat([head, torch.tensor(row.tokens, device=head.device)])[None, :-1]
            keep = len(row.tokens)
            logits = [m(ids, logits_to_keep=keep).logits[0] for m in (model.model, quantized)]
            tables.append(compare_logits(*logits).assign(task=row.task))
            earlier.append(model.decode(row.tokens))
            bar.step(row.task)
    return pd.concat(tables, ignore_index=True)


def run_demo(settings: DemoSettings, output: Path | None = Path("reports")) -> DemoResult:
    """Load, quantise, measure, compare; write demo.html and demo.json into `output`."""
    start = time.perf_counter()
    if output is not None:
        _check_writable(output)
    model = load(settings.model)
    say(f"calibrating and quantising {model.name}")
    quantized = quantize_for_benchmark(model)
    rows = run_benchmark(
        model,
        tasks=settings.tasks,
        temperatures=(settings.temperature,),
        seeds=(settings.seed,),
        limit=settings.limit,
        max_new_tokens=settings.max_new_tokens,
        draft=settings.draft,
        quantized=quantized,
    )
    summary = summarize(rows)
    result = DemoResult(
        settings=settings,
        machine=describe_machine(),
        rows=rows,
        summary=summary,
        fidelity=measure_fidelity(model, quantized, rows),
        verdict=verdict(summary),
        seconds=time.perf_counter() - start,
    )
    if output is not None:
        from quasar_lab.report import demo_page

        write_atomically(output / "demo.json", json.dumps(result.as_json(), indent=1))
        write_atomically(output / "demo.html", demo_page(result))
    return result


def _check_writable(folder: Path) -> None:
    """Before minutes of measuring, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot write reports to {folder}: {error.strerror}") from error
