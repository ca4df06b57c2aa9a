"""The five tasks as their public benchmarks, from the Hugging Face Hub through `datasets`.

The package `datasets` is an optional extra and is imported only when a task is fetched. Each
data set gets the same form as the prompts of `tasks`; the texts themselves stay as published.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quasar_lab.errors import UserError
from quasar_lab.tasks import Prompt, checked_limit, checked_task_name, first_line


@dataclass(frozen=True, slots=True)
class _HubDataset:
    """A public data set and how one of its rows (with its index) becomes a Prompt."""

    repository: str
    configuration: str | None
    split: str
    to_prompt: Callable[[int, Mapping[str, Any]], Prompt]


def _alpaca_turn(row: Mapping[str, Any]) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]


_HUB_DATASETS = {
    "mt_bench": _HubDataset(
        "HuggingFaceH4/mt_bench_prompts",
        None,
        "train",
        lambda index, row: Prompt(
            row["prompt_id"], row["category"], row["prompt"], row["reference"]
        ),
    ),
    "humaneval": _HubDataset(
        "openai/openai_humaneval",
        None,
        "test",
        lambda index, row: Prompt(
            row["task_id"],
            "code",
            ("Complete the following Python function.\n\n" + row["prompt"],),
            row["canonical_solution"],
        ),
    ),
    "gsm8k": _HubDataset(
        "openai/gsm8k",
        "main",
        "test",
        lambda index, row: Prompt(index, "math", (row["question"],), row["answer"]),
    ),
    "alpaca": _HubDataset(
        "tatsu-lab/alpaca",
        None,
        "train",
        lambda index, row: Prompt(index, "instruction", (_alpaca_turn(row),), row["output"]),
    ),
    "cnn_dm": _HubDataset(
        "abisee/cnn_dailymail",
        "3.0.0",
        "test",
        lambda index, row: Prompt(
            row["id"],
            "summarization",
            ("Summarise the following report in two or three sentences.\n\n" + row["article"],),
            row["highlights"],
        ),
    ),
}


def load_hub_task(name: object, limit: object = None, *, streaming: bool = False) -> list[Prompt]:
    """The public benchmark of a task from the Hugging Face Hub, through the package `datasets`.

    The first `limit` rows of the split (all with None), in its order. The data set is downloaded
    whole and cached (cnn_dm: over a gigabyte), later calls work offline; with `streaming=True`
    only the rows that are used are fetched, each time anew.

    Raises UserError when `datasets` is not installed, when the data set cannot be fetched and
    when it does not have the columns that it is known for.
    """
    source = _HUB_DATASETS[checked_task_name(name)]
    count = checked_limit(limit)
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"the Hub task {name!r} needs the package datasets ({first_line(error)}); "
            'install it with: pip install "quasar-lab[hub]"'
        ) from error
    try:
        rows = datasets.load_dataset(
            source.repository, name=source.configuration, split=source.split, streaming=streaming
        )
        return list(islice(_good_prompts(source, rows), count))
    except KeyError as error:
        raise UserError(
            f"the data set {source.repository} has no column {error}; "
            "pass a question.jsonl file as load_task(name, path=...) instead"
        ) from error
    except Exception as error:  # what a failed fetch raises differs between releases of datasets
        raise UserError(
            f"could not read {source.repository} from the Hub "
            f"({type(error).__name__}: {first_line(error)}); check the network, or pass a "
            "question.jsonl file as load_task(name, path=...)"
        ) from error


def _good_prompts(source: _HubDataset, rows: Iterable[Mapping[str, Any]]) -> Iterator[Prompt]:
    """The rows of a data set as prompts; warns about a row that cannot be one and goes on."""
    for index, row in enumerate(rows):
        try:
            yield source.to_prompt(index, row)
        except UserError as error:
            warnings.warn(
                f"{source.repository} row {index}: {error}; row left out", UserWarning, stacklevel=3
            )
