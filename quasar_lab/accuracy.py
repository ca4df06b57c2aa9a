"""What W8A8 costs in right answers: the same questions, full precision against INT8.

Through lm-eval (Gao et al., the Language Model Evaluation Harness; extra "accuracy"), so that each
task is asked and scored as everywhere: MMLU-Pro, C-Eval, MATH and GSM8K as in the paper, or any
other of its tasks. A local file of questions works without a network.

Both models answer the same questions, so the comparison is paired: of the questions that one gets
right and the other wrong, McNemar's test asks whether they split evenly.
"""

import dataclasses
import importlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from quasar_lab.errors import UserError
from quasar_lab.loading import LanguageModel
from quasar_lab.tasks import checked_limit, first_line

# The paper's tasks under lm-eval's names; every other task keeps its own.
PAPER_TASKS = {
    "mmlu_pro": "mmlu_pro",
    "ceval": "ceval-valid",
    "math": "hendrycks_math",
    "gsm8k": "gsm8k",
}
_RESAMPLES = 2000


def compare_accuracy(
    model: LanguageModel,
    quantized: Any,
    tasks: Sequence[str] = (),
    *,
    questions: Mapping[str, str | Path] | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    seed: int = 0,
) -> pd.DataFrame:
    """One row a task and metric: both accuracies, their difference, and whether it is one.

    Args:
        model: what `load` returned, in full precision; quantized: its model from `quantize`.
        tasks: names of lm-eval tasks, or keys of `PAPER_TASKS`; they are fetched from the Hub.
        questions: name -> a local file, see `local_task`.
        limit: questions a task, the first ones; num_fewshot: None leaves it to the task.
        chat: ask through the tokenizer's chat template.

    Columns: task, metric, questions, full, int8 (accuracies), difference (int8 - full), its bounds
    difference_low and difference_high (95 % of 2,000 resamplings of the questions), only_full,
    only_int8 (questions that one alone gets right), p_value (McNemar's exact test).
    Raises UserError without lm-eval, for an unknown task and one that cannot be fetched.
    """
    checked_limit(limit)
    settings: dict[str, Any] = dict(limit=limit, num_fewshot=num_fewshot, chat=chat)
    wanted = [PAPER_TASKS.get(task, task) for task in tasks]
    files = [local_task(name, path) for name, path in (questions or {}).items()]
    if not wanted and not files:
        raise UserError(f"no task is named: choose from {', '.join(PAPER_TASKS)} or give a file")
    other = dataclasses.replace(model, model=quantized)
    scores = {
        label: answer_scores(lm, [*wanted, *files], label=label, **settings)
        for label, lm in (("full", model), ("int8", other))
    }
    merged = scores["full"].merge(
        scores["int8"], on=["task", "metric", "question"], suffixes=("_full", "_int8")
    )
    rows = [
        {"task": task, "metric": metric, **_compared(group, seed)}
        for (task, metric), group in merged.groupby(["task", "metric"], sort=False)
    ]
    return pd.DataFrame(rows)


def answer_scores(
    model: LanguageModel,
    tasks: Sequence[str | dict[str, Any]],
    *,
    label: str = "model",
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
) -> pd.DataFrame:
    """Whether each question was answered rightly: columns task, metric, question, score (0 or 1).

    Metrics that are no yes or no for each question are left out. Errors as in `compare_accuracy`.
    """
    lm_eval = require_lm_eval()
    from quasar_lab.harness_model import HarnessModel

    wrapped = HarnessModel(model, label)
    try:
        with _quiet():
            results = lm_eval.simple_evaluate(
                wrapped, tasks=list(tasks), task_manager=_task_manager(tasks), limit=limit,
                num_fewshot=num_fewshot, bootstrap_iters=0, apply_chat_template=chat,
                # the caller's generators stay as they are
                random_seed=None, numpy_random_seed=None, torch_random_seed=None,
            )  # fmt: skip
    except UserError:
        raise
    except Exception as error:  # unknown tasks and failed fetches come in many types
        names = ", ".join(task if isinstance(task, str) else task["task"] for task in tasks)
        raise UserError(
            f"lm-eval could not run {names} ({type(error).__name__}: {first_line(error)}); "
            "check the name and the network, or give a local file of questions"
        ) from error
    rows = []
    for task, samples in results["samples"].items():
        for sample in samples:
            filtered = sample.get("filter", "none")
            for metric in sample["metrics"]:
                score = sample.get(metric)
                if isinstance(score, bool | int | float | np.number) and score in (0, 1):
                    name = metric if filtered == "none" else f"{metric}, {filtered}"
                    rows.append((task, name, sample["doc_id"], int(score)))
    return pd.DataFrame(rows, columns=["task", "metric", "question", "score"])


def _compared(group: pd.DataFrame, seed: int) -> dict[str, Any]:
    return paired(group["score_full"].tolist(), group["score_int8"].tolist(), seed)


def paired(full: Sequence[int], int8: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Two models' scores (0 or 1) on the same questions, compared; see `compare_accuracy`.

    McNemar (1947), the exact two-sided form: under no difference the discordant questions fall
    either way like a fair coin.
    """
    a, b = np.asarray(full), np.asarray(int8)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise UserError(f"{a.size} and {b.size} scores: pass one of each model for each question")
    only_full, only_int8 = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    discordant = only_full + only_int8
    draws = np.random.default_rng(seed).integers(len(a), size=(_RESAMPLES, len(a)))
    low, high = np.quantile((b - a)[draws].mean(axis=1), [0.025, 0.975])
    return {
        "questions": len(a),
        "full": float(a.mean()),
        "int8": float(b.mean()),
        "difference": float((b - a).mean()),
        "difference_low": float(low),
        "difference_high": float(high),
        "only_full": only_full,
        "only_int8": only_int8,
        "p_value": float(binomtest(only_full, discordant).pvalue) if discordant else 1.0,
    }


def local_task(name: str, path: str | Path) -> dict[str, Any]:
    """An lm-eval task of a JSON-lines file, which needs no network.

    Each line is {"question": text, "choices": [texts], "answer": index from 0}, scored by which
    choice the model finds likeliest; or {"question": text, "answer": text} in every line, scored by
    an exact match of the generated line. Raises UserError naming the first bad line.
    """
    require_lm_eval()
    datasets = importlib.import_module("datasets")  # lm-eval brings it
    rows = _questions(Path(path))
    common = {
        "task": name,
        "test_split": "test",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "num_fewshot": 0,
    }
    if "choices" in rows[0]:
        return {
            **common,
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    return {
        **common,
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64},
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
             "ignore_case": True, "ignore_punctuation": True}
        ],
    }  # fmt: skip


def _questions(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_question(line, f"{path}:{number}"))
            if ("choices" in rows[-1]) != ("choices" in rows[0]):
                raise UserError(f"{path}:{number}: choices in every line or in none")
    if not rows:
        raise UserError(f"{path} holds no question: write one JSON object a line")
    return rows


def _question(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({first_line(error)})") from None
    if not isinstance(row, dict) or not isinstance(row.get("question"), str):
        raise UserError(f'{where}: must be a JSON object with a text "question"')
    answer, choices = row.get("answer"), row.get("choices")
    if choices is None:
        if not isinstance(answer, str):
            raise UserError(f"{where}: answer is {answer!r}: without choices it must be a text")
        return {"question": row["question"], "answer": answer}
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise UserError(f"{where}: choices must be a list of texts")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise UserError(
            f"{where}: answer is {answer!r}: the index of a choice, 0 to {len(choices) - 1}"
        )
    return {"question": row["question"], "choices": choices, "answer": answer}


def _task_manager(tasks: Sequence[str | dict[str, Any]]) -> Any:
    """lm-eval's index of tasks; without its own ones (seconds to read) where none is named."""
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    return manager(include_defaults=any(isinstance(task, str) for task in tasks))


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval without its advice on options that nobody sees here."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def require_lm_eval() -> Any:
    """The package, or UserError that says how to get it."""
    try:
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise UserError(
            f"accuracy on tasks needs the package lm-eval ({first_line(error)}); install it with: "
            'pip install "quasar-lab[accuracy]" (perplexity on a text file needs nothing)'
        ) from error
