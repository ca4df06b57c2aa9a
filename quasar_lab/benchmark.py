"""Measure decoding methods side by side: same prompts, same counting, taking turns.

For each prompt every method generates before the next prompt begins, and the order rotates, so
that a machine that slows down or speeds up does so for all of them. Greedy runs need one seed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from quasar_lab.calibration import CalibrationStats, calibrate
from quasar_lab.errors import UserError
from quasar_lab.grid import Cell, Grid, Key, key_of, key_of_row
from quasar_lab.loading import LanguageModel
from quasar_lab.methods import (
    BASELINE,
    BF16,
    FOUR_CELLS,
    FULL,
    INT8,
    INT8_BF16,
    INT8_HEAD,
    METHODS,
    PRUNED,
    DraftSettings,
    Variant,
    checked_methods,
)
from quasar_lab.peers import PeerProcess
from quasar_lab.progress import ProgressBar
from quasar_lab.pruning import prune_layers
from quasar_lab.quantization import QuantizationConfig, quantize
from quasar_lab.results import ResultFile, RowStore
from quasar_lab.runners import Runner, make_runners, precisions, warm_up
from quasar_lab.sampling import SamplingConfig
from quasar_lab.structure import in_bfloat16
from quasar_lab.tasks import TASKS, Prompt, conversation, load_calibration_texts, load_task


def calibration_batches(model: LanguageModel, limit: int | None = None) -> list[Tensor]:
    """The built-in calibration texts as token ids, LongTensor[S], cut to what the model takes."""
    most = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    texts = load_calibration_texts(limit)
    return [torch.tensor(model.tokenizer(text)["input_ids"][:most]) for text in texts]


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


def verifiers(
    model: LanguageModel, precisions: Iterable[str], quantized: Any = None
) -> dict[str, Any]:
    """precision -> the model that verifies in it. quantized: the INT8 one; None makes it."""
    models = {FULL: model.model, INT8: quantized, INT8_BF16: None, INT8_HEAD: None}
    wanted = list(precisions)
    models |= {name: prune_layers(model.model, PRUNED[name]) for name in wanted if name in PRUNED}
    if {BF16, INT8_BF16} & set(wanted):
        models[BF16] = in_bfloat16(model.model)
    missing = [precision for precision in wanted if models[precision] is None]
    stats = calibrate(model.model, calibration_batches(model)) if missing else None
    for precision in missing:
        skip = () if precision == INT8_HEAD else QuantizationConfig().skip
        source = models[BF16 if precision == INT8_BF16 else FULL]
        models[precision] = quantize(source, stats, QuantizationConfig(skip=skip))
    # a bfloat16 model that was only rounded from is not kept
    return {precision: models[precision] for precision in wanted}


def run_benchmark(
    model: LanguageModel,
    methods: Iterable[str] = FOUR_CELLS,
    tasks: Iterable[str] | Mapping[str, Sequence[Prompt]] = tuple(TASKS),
    temperatures: Iterable[float] = (0.0,),
    *,
    seeds: Iterable[int] = (0,),
    limit: int | None = 2,
    max_new_tokens: int = 128,
    draft: DraftSettings | Sequence[DraftSettings] = DraftSettings(),  # noqa: B008 (frozen)
    quantized: Any = None,
    engine: str = "auto",
    results: str | Path | RowStore | None = None,
    peers: Sequence[PeerProcess] = (),
) -> pd.DataFrame:
    """Run every method on every prompt; one row a generation.

    Args:
        model: what `load` returned.
        methods: names out of `methods.METHODS`; "plain", the baseline of every ratio, always runs.
            By default {full precision, INT8} x {plain, n-gram}.
        tasks: names of built-in tasks, or a mapping name -> prompts.
        temperatures: 0 is greedy. seeds: one run for each; a greedy run needs only the first.
        limit: prompts a task, None for all. max_new_tokens: for each turn.
        draft: draft length, n-gram bounds and what else the drafters are built with; each drafting
            method runs with each of several.
        quantized: the INT8 verifier, a model from `quantize`; None makes the default one.
        engine: see `engines.build_target`.
        results: a file that keeps each row as it comes; an interrupted run continues from it. Or
            any other store of rows, whose owner sees to it that its rows are of these settings.
        peers: other software at work on the same model, to take its turns (greedy runs only).

    A second turn is asked after the baseline's own first answer, for all methods: they continue
    the same text. Columns: task, question_id, turn, temperature, seed, method, the fields of
    `DraftSettings` (empty where nothing is drafted), engine, prompt_tokens, tokens (list),
    new_tokens, steps, drafted, accepted, mean_acceptance_length, tokens_per_second,
    decode_seconds, draft_seconds, prefill_seconds, finish_reason.

    Raises UserError for unknown names, settings out of range and a result file of another run.
    """
    grid = lab = plan(methods, tasks, temperatures, seeds=seeds, limit=limit, draft=draft)
    if peers:
        if any(temperature > 0 for temperature in grid.temperatures):
            raise UserError("peers are measured at temperature 0 only: pass temperatures=(0.0,)")
        grid = replace(lab, methods=[*lab.methods, *(peer.variant.method for peer in peers)])
    store = results
    if store is None or isinstance(store, str | Path):
        settings = {"model": model.name, "max_new_tokens": max_new_tokens, "engine": engine}
        store = ResultFile(store, {**settings, **grid.settings()})
    done = {key_of_row(row): row for row in store.rows}
    missing = [key for key in grid.runs() if key not in done]
    if missing:
        variants = lab.variants()
        models = verifiers(model, precisions(variants), quantized)
        ours = make_runners(models, variants, engine)
        warm_up(model, ours)
        runners: list[Runner | PeerProcess] = [*ours, *peers]
        with ProgressBar(len(missing), f"measuring {model.name}", unit="run") as bar:
            for number, cell in enumerate(grid.cells()):
                # the methods take turns in going first
                first = number % len(runners)
                order = runners[first:] + runners[:first]
                _measure_cell(model, order, cell, done, store, bar, max_new_tokens)
    return pd.DataFrame([done[key] for key in grid.runs()])


def plan(
    methods: Iterable[str],
    tasks: Iterable[str] | Mapping[str, Sequence[Prompt]],
    temperatures: Iterable[float],
    *,
    seeds: Iterable[int] = (0,),
    limit: int | None = None,
    draft: DraftSettings | Sequence[DraftSettings] = DraftSettings(),  # noqa: B008 (frozen)
) -> Grid:
    """The runs that `run_benchmark` makes of the same arguments; the same errors."""
    return Grid(
        _prompts(tasks, limit),
        checked_methods(methods),
        list(temperatures),
        list(seeds),
        [draft] if isinstance(draft, DraftSettings) else list(draft),
    )


def _prompts(
    tasks: Iterable[str] | Mapping[str, Sequence[Prompt]], limit: int | None
) -> dict[str, list[Prompt]]:
    if isinstance(tasks, Mapping):
        prompts = {name: list(some)[:limit] for name, some in tasks.items()}
    else:
        names = [tasks] if isinstance(tasks, str) else list(tasks)
        prompts = {name: load_task(name, limit) for name in names}
    return prompts


def _measure_cell(
    model: LanguageModel,
    runners: Sequence[Runner | PeerProcess],
    cell: Cell,
    done: dict[Key, dict[str, Any]],
    store: RowStore,
    bar: ProgressBar,
    max_new_tokens: int,
) -> None:
    answers: list[str] = []
    for turn in range(cell.turn):
        earlier = key_of(replace(cell, turn=turn), Variant(METHODS[BASELINE], None))
        answers.append(model.decode(done[earlier]["tokens"]))
    prompt_ids = model.encode_chat(conversation(cell.prompt, answers))
    sampling = SamplingConfig(temperature=cell.temperature, seed=cell.seed)
    for runner in runners:
        key = key_of(cell, runner.variant)
        if key in done:
            continue
        row = {
            "task": cell.task,
            "question_id": cell.prompt.question_id,
            "turn": cell.turn,
            "temperature": cell.temperature,
            "seed": cell.seed,
            **runner.variant.columns(),
            **runner.measure(prompt_ids, sampling, max_new_tokens),
        }
        done[key] = row
        store.append(row)
        bar.step(f"{cell.task} {cell.prompt.question_id} {runner.variant.method.label}")
