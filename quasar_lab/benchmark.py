"""Measure decoding methods side by side: same prompts, same counting, taking turns.

For each prompt every method generates before the next prompt begins, and the order rotates, so
that a machine that slows down or speeds up does so for all of them. Greedy runs need one seed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from quasar_lab.calibration import CalibrationStats, calibrate
from quasar_lab.engines import engine_name
from quasar_lab.errors import UserError
from quasar_lab.generation import Generation
from quasar_lab.loading import LanguageModel
from quasar_lab.methods import (
    BASELINE,
    FOUR_CELLS,
    INT8,
    METHODS,
    DraftSettings,
    Method,
    checked_methods,
)
from quasar_lab.progress import ProgressBar
from quasar_lab.quantization import QuantizationConfig, quantize
from quasar_lab.results import ResultFile
from quasar_lab.runners import Runner, make_runners, warm_up
from quasar_lab.sampling import SamplingConfig
from quasar_lab.tasks import TASKS, Prompt, conversation, load_calibration_texts, load_task


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured once for each method: one turn of one prompt at one setting."""

    task: str
    prompt: Prompt
    turn: int
    temperature: float
    seed: int


def calibration_batches(model: LanguageModel, limit: int | None = None) -> list[Tensor]:
    """The built-in calibration texts as token ids, LongTensor[S] each."""
    tokenize = model.tokenizer
    return [torch.tensor(tokenize(text)["input_ids"]) for text in load_calibration_texts(limit)]


def quantize_for_benchmark(
    model: LanguageModel,
    config: QuantizationConfig | None = None,
    stats: CalibrationStats | None = None,
) -> Any:
    """The INT8 verifier of a model: calibrated on the built-in texts unless `stats` are given."""
    config = config or QuantizationConfig()
    if stats is None and config.smoothing != "none":
        stats = calibrate(model.model, calibration_batches(model))
    return quantize(model.model, stats, config)


def run_benchmark(
    model: LanguageModel,
    methods: Iterable[str] = FOUR_CELLS,
    tasks: Iterable[str] | Mapping[str, Sequence[Prompt]] = tuple(TASKS),
    temperatures: Iterable[float] = (0.0,),
    *,
    seeds: Iterable[int] = (0,),
    limit: int | None = 2,
    max_new_tokens: int = 128,
    draft: DraftSettings = DraftSettings(),  # noqa: B008 (frozen)
    quantized: Any = None,
    engine: str = "auto",
    results: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Run every method on every prompt; one row a generation.

    Args:
        model: what `load` returned.
        methods: names out of `methods.METHODS`; "plain", the baseline of every ratio, always runs.
            By default {full precision, INT8} x {plain, n-gram}.
        tasks: names of built-in tasks, or a mapping name -> prompts.
        temperatures: 0 is greedy. seeds: one run for each; a greedy run needs only the first.
        limit: prompts a task, None for all. max_new_tokens: for each turn.
        draft: draft length, n-gram bounds and what else the drafters are built with.
        quantized: the INT8 verifier, a model from `quantize`; None makes the default one.
        engine: see `engines.build_target`.
        results: a file that keeps each row as it comes; an interrupted run continues from it.

    A second turn is asked after the baseline's own first answer, for all methods: they continue
    the same text. Columns: task, question_id, turn, temperature, seed, method, engine,
    prompt_tokens, tokens (list), new_tokens, steps, drafted, accepted, mean_acceptance_length,
    tokens_per_second, decode_seconds, draft_seconds, prefill_seconds, finish_reason.

    Raises UserError for unknown names, settings out of range and a result file of another run.
    """
    chosen = checked_methods(methods)
    prompts = _prompts(tasks, limit)
    temperatures, seeds = list(temperatures), list(seeds)
    if not temperatures or not seeds:
        raise UserError("temperatures and seeds must not be empty: pass at least one of each")
    for temperature in temperatures:
        SamplingConfig(temperature=temperature)
    cells = list(_cells(prompts, temperatures, seeds))
    settings = {
        "model": model.name,
        "methods": [method.name for method in chosen],
        "tasks": {task: [str(p.question_id) for p in some] for task, some in prompts.items()},
        "temperatures": temperatures,
        "seeds": seeds,
        "max_new_tokens": max_new_tokens,
        "draft": asdict(draft),
        "engine": engine,
    }
    store = ResultFile(results, settings)
    done = {_key(row): row for row in store.rows}
    missing = [
        (cell, method) for cell in cells for method in chosen if _key_of(cell, method) not in done
    ]
    if missing:
        if quantized is None and any(method.precision == INT8 for _, method in missing):
            quantized = quantize_for_benchmark(model)
        runners = make_runners(model, quantized, chosen, draft, engine)
        warm_up(model, runners)
        with ProgressBar(len(missing), "measuring", unit="run") as bar:
            for number, cell in enumerate(cells):
                _measure_cell(model, runners, cell, number, done, store, bar, max_new_tokens)
    ordered = [done[_key_of(cell, method)] for cell in cells for method in chosen]
    return pd.DataFrame(ordered)


def _prompts(
    tasks: Iterable[str] | Mapping[str, Sequence[Prompt]], limit: int | None
) -> dict[str, list[Prompt]]:
    if isinstance(tasks, Mapping):
        prompts = {name: list(some)[:limit] for name, some in tasks.items()}
    else:
        names = [tasks] if isinstance(tasks, str) else list(tasks)
        prompts = {name: load_task(name, limit) for name in names}
    if not any(prompts.values()):
        raise UserError("there are no prompts to run: name at least one task")
    return prompts


def _cells(
    prompts: Mapping[str, Sequence[Prompt]], temperatures: list[float], seeds: list[int]
) -> Iterator[Cell]:
    for task, some in prompts.items():
        for prompt in some:
            for temperature in temperatures:
                for seed in seeds if temperature > 0 else seeds[:1]:
                    for turn in range(len(prompt.turns)):
                        yield Cell(task, prompt, turn, float(temperature), seed)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("task", "question_id", "turn", "temperature", "seed", "method")
    return tuple(row[name] for name in names)


def _key_of(cell: Cell, method: Method) -> tuple[Any, ...]:
    question_id = cell.prompt.question_id
    return (cell.task, question_id, cell.turn, cell.temperature, cell.seed, method.name)


def _measure_cell(
    model: LanguageModel,
    runners: list[Runner],
    cell: Cell,
    number: int,
    done: dict[tuple[Any, ...], dict[str, Any]],
    store: ResultFile,
    bar: ProgressBar,
    max_new_tokens: int,
) -> None:
    answers: list[str] = []
    for turn in range(cell.turn):
        earlier = Cell(cell.task, cell.prompt, turn, cell.temperature, cell.seed)
        answers.append(model.decode(done[_key_of(earlier, METHODS[BASELINE])]["tokens"]))
    prompt_ids = model.encode_chat(conversation(cell.prompt, answers))
    sampling = SamplingConfig(temperature=cell.temperature, seed=cell.seed)
    first = number % len(runners)
    for runner in runners[first:] + runners[:first]:
        method = runner.method
        key = _key_of(cell, method)
        if key in done:
            continue
        generation = runner.run(prompt_ids, sampling=sampling, max_new_tokens=max_new_tokens)
        row = {
            "task": cell.task,
            "question_id": cell.prompt.question_id,
            "turn": cell.turn,
            "temperature": cell.temperature,
            "seed": cell.seed,
            "method": method.name,
            "engine": engine_name(runner.target),
            **measurements(generation),
        }
        done[key] = row
        store.append(row)
        bar.step(f"{cell.task} {cell.prompt.question_id} {method.label}")


def measurements(generation: Generation) -> dict[str, Any]:
    """What a generation is counted by; times in seconds, the prefill kept apart."""
    trace = generation.trace
    return {
        "prompt_tokens": len(trace.prompt_ids),
        "tokens": generation.tokens,
        "new_tokens": len(generation.tokens),
        "steps": len(trace.steps),
        "drafted": sum(len(step.draft_tokens) for step in trace.steps),
        "accepted": sum(generation.acceptance_counts),
        "mean_acceptance_length": generation.mean_acceptance_length,
        "tokens_per_second": generation.tokens_per_second,
        "decode_seconds": generation.decode_seconds,
        "draft_seconds": sum(step.draft_seconds for step in trace.steps),
        "prefill_seconds": trace.prefill_seconds,
        "finish_reason": generation.finish_reason,
    }
