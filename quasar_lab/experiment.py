"""The paper's experiments on any model, in one results file that survives a kill.

models x methods x tasks x temperatures x seeds x draft settings: each run is one JSON line with
all that is needed to read it later: the model's hash, the configuration, versions, machine.
Several machines take a shard each; `merging` joins what they wrote.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock, Timeout

from quasar_lab.benchmark import plan, run_benchmark
from quasar_lab.checkpoints.names import DEFAULT_MODEL, resolve
from quasar_lab.engines import ENGINES
from quasar_lab.errors import UserError
from quasar_lab.grid import Grid, key_of_row
from quasar_lab.loading import load
from quasar_lab.machine import describe_machine
from quasar_lab.methods import DraftSettings
from quasar_lab.quantization import QuantizationConfig
from quasar_lab.results import ResultFile
from quasar_lab.tasks import TASKS, load_task

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# of the machine, what changes a speed: rows with two values of one of these are two experiments
_MACHINE = ("processor", "threads", "gpu", "torch", "quasar_lab")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` (from 1) of `count` of an experiment's prompts."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """ "2/3" -> Shard(2, 3); UserError for anything else."""
        match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        shard = cls(*map(int, match.groups())) if match else None
        if shard is None or not 1 <= shard.index <= shard.count:
            raise UserError(f"shard {text!r}: write i/n with i from 1 to n, such as 1/2 and 2/2")
        return shard


@dataclass(frozen=True, slots=True)
class ExperimentSettings:
    """What `quasar-lab bench` runs.

    models: presets, Hub ids or folders; methods: names out of `methods.METHODS`, the baseline
    "plain" always runs; tasks: built-in ones; questions: further tasks, name -> question.jsonl;
    temperatures: 0 is greedy; seeds: sampled runs take each; limit: prompts a task (None: all);
    max_new_tokens: a turn; drafts: each drafting method runs with each. Raises UserError for
    whatever is wrong before anything is loaded.
    """

    models: tuple[str, ...] = (DEFAULT_MODEL,)
    methods: tuple[str, ...] = ("plain", "ngram", "int8", "quasar")
    tasks: tuple[str, ...] = tuple(TASKS)
    questions: Mapping[str, str] = field(default_factory=dict)
    temperatures: tuple[float, ...] = TEMPERATURES
    seeds: tuple[int, ...] = (0,)
    limit: int | None = None
    max_new_tokens: int = 128
    drafts: tuple[DraftSettings, ...] = (DraftSettings(),)
    engine: str = "auto"
    shard: Shard = Shard()

    def __post_init__(self) -> None:
        if not self.models:
            raise UserError("no model is named: give a preset, a Hub id or a folder")
        for model in self.models:
            resolve(model)
        if len(set(self.models)) < len(self.models):
            raise UserError(f"models {', '.join(self.models)}: name each once")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1")
        if self.engine not in ENGINES:
            raise UserError(f"engine {self.engine!r}: choose one of {', '.join(ENGINES)}")
        both = sorted(set(self.tasks) & set(self.questions))
        if both:
            raise UserError(f"task {both[0]!r} is named twice: give your questions another name")

    def grid(self) -> Grid:
        """The runs of one model, all shards together."""
        prompts = {task: load_task(task, self.limit) for task in self.tasks}
        for task, path in self.questions.items():
            prompts[task] = load_task(task, self.limit, path)
        return plan(
            self.methods, prompts, self.temperatures, seeds=self.seeds, draft=self.drafts
        )  # fmt: skip


def run_experiment(settings: ExperimentSettings, path: str | Path | None = None) -> pd.DataFrame:
    """Make every run that `path` does not hold yet; the rows of this shard.

    Each row is on the disk before the next run begins; None keeps them in memory. The columns are
    those of `run_benchmark` and model, model_hash, config, machine. Raises UserError when the file
    belongs to another experiment, another machine or another model of the same name, or when
    another process is writing to it.
    """
    whole = settings.grid()
    mine = whole.share(settings.shard.index, settings.shard.count)
    machine = describe_machine()
    header = {
        "models": list(settings.models),
        "max_new_tokens": settings.max_new_tokens,
        "engine": settings.engine,
        "quantization": asdict(QuantizationConfig()),
        **whole.settings(),
        "shard": [settings.shard.index, settings.shard.count],
        "runs": len(mine.runs()) * len(settings.models),
        **{name: machine[name] for name in _MACHINE},
    }
    if path is None:
        return _run(settings, mine, ResultFile(None, header), machine)
    with _only_writer(Path(path)):
        return _run(settings, mine, ResultFile(path, header), machine)


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Two processes that write to one file would make each run twice."""
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"another run is writing to {path}: wait, or choose another file") from None
    except OSError as error:
        raise UserError(f"cannot use the result file {path}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _run(
    settings: ExperimentSettings, grid: Grid, store: ResultFile, machine: dict[str, Any]
) -> pd.DataFrame:
    rows = []
    for name in settings.models:
        of_model = [row for row in store.rows if row["model"] == name]
        done = {key_of_row(row): row for row in of_model}
        if any(key not in done for key in grid.runs()):
            _measure(settings, name, grid, store, machine)
        rows += [row for row in store.rows if row["model"] == name]
    return frame(rows)


def _measure(
    settings: ExperimentSettings,
    name: str,
    grid: Grid,
    store: ResultFile,
    machine: dict[str, Any],
) -> None:
    model = load(name)
    provenance = {
        "model": name,
        "model_hash": model_hash(model.model),
        "config": {
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "engine": settings.engine,
            "max_new_tokens": settings.max_new_tokens,
            "quantization": asdict(QuantizationConfig()),
        },
        "machine": machine,
    }
    for row in store.rows:
        if row["model"] == name and row["model_hash"] != provenance["model_hash"]:
            raise UserError(
                f"{store.path} was measured with another {name} (hash {row['model_hash']}, this "
                f"one is {provenance['model_hash']}): delete the file or choose another"
            )
    run_benchmark(
        model,
        settings.methods,
        grid.prompts,
        settings.temperatures,
        seeds=settings.seeds,
        limit=None,
        max_new_tokens=settings.max_new_tokens,
        draft=settings.drafts,
        engine=settings.engine,
        results=_ModelRows(store, provenance),
    )


class _ModelRows:
    """The rows of one model in a file of several: adds to each where it comes from."""

    def __init__(self, store: ResultFile, provenance: dict[str, Any]) -> None:
        self._store, self._provenance = store, provenance
        self.rows = [row for row in store.rows if row["model"] == provenance["model"]]

    def append(self, row: dict[str, Any]) -> None:
        self._store.append({**self._provenance, **row})


def frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Stored rows as a table; missing values are NaN."""
    return pd.DataFrame(rows)


def model_hash(model: torch.nn.Module) -> str:
    """16 hex digits of the sha256 over all names, dtypes, shapes and values of a model."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
