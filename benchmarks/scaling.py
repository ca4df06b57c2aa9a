"""How the time of a step grows with context, draft length and model size, beside its prediction.

    python benchmarks/scaling.py [--shapes smollm2-135m,qwen3-0.6b,qwen3-1.7b,qwen3-4b]

Random weights in the models' shapes (the largest takes 5 GB), INT8 layers, all else in bf16. The
cost model's rates are measured in the same turns, on models that are not among these: a shared
machine reads memory at one speed now and at another a minute later. Prints measured and predicted
times and how far they are apart; writes scaling.json and scaling.png into --output.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from quasar_lab.cost_model import Machine, predict_step, step_work
from quasar_lab.decoder import FastDecoder
from quasar_lab.machine import describe_machine
from quasar_lab.machine_probe import probe_steps, rates_from_times
from quasar_lab.model_shapes import SHAPES
from quasar_lab.plots.cost import plot_scaling
from quasar_lab.progress import say
from quasar_lab.random_decoder import random_decoder
from quasar_lab.results import write_atomically
from quasar_lab.timing import time_interleaved

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
TOKENS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16)
DEFAULT, CONTEXT, VERIFIED = "smollm2-135m", 200, 6


def measure(
    cells: dict[tuple[str, int, int], FastDecoder], repeats: int
) -> tuple[dict[tuple[str, int, int], float], Machine]:
    """(what, tokens in the cache, tokens fed) -> median seconds, and the machine in these turns."""

    def step(decoder: FastDecoder, context: int, tokens: int, _: int) -> None:
        decoder.length = context  # what is in the cache makes no difference to the time
        decoder.forward(torch.arange(tokens))
        decoder.rollback(tokens)

    labels = {str(cell): cell for cell in cells}
    steps = {label: partial(step, cells[cell], *cell[1:]) for label, cell in labels.items()}
    times = time_interleaved(steps | probe_steps(), repeats=repeats)["median"].to_dict()
    return {cell: times[label] for label, cell in labels.items()}, rates_from_times(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="smollm2-135m,qwen3-0.6b,qwen3-1.7b,qwen3-4b")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("reports"), metavar="FOLDER")
    options = parser.parse_args()
    names = options.shapes.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"unknown shape {unknown[0]!r}: choose from {', '.join(SHAPES)}")

    panels = {
        "tokens in the cache (135M, 6 fed)": by_context(options.repeats),
        "tokens fed (135M)": by_tokens(options.repeats),
        "INT8 weights, billions": by_size(names, options.repeats),
    }
    worst = {}
    for title, table in panels.items():
        table["off"] = table["predicted_ms"] / table["measured_ms"] - 1
        worst[title] = float(table["off"].abs().max())
        print(f"\n{title}: at most {worst[title]:.0%} off")
        print(table.drop(columns="read_rate").round(2).to_string(index=False))
    result = {
        "machine": describe_machine(),
        "farthest_off": worst,
        "panels": {title: table.to_dict(orient="records") for title, table in panels.items()},
    }
    write_atomically(options.output / "scaling.json", json.dumps(result, indent=1))
    plot_scaling(panels).savefig(options.output / "scaling.png", dpi=120)


def _table(measured: tuple[dict, Machine], x_of: dict, shape_of: dict, kinds: dict) -> pd.DataFrame:
    rows = []
    times, machine = measured
    for cell, seconds in times.items():
        what, context, tokens = cell
        layers, floats = kinds[cell]
        work = step_work(shape_of[cell], layers, floats, context=context)
        predicted = predict_step(work, machine, tokens)
        rows.append({"target": what, "x": x_of[cell], "measured_ms": seconds * 1e3,
                     "predicted_ms": predicted * 1e3,
                     "read_rate": machine.read_rate[layers]})  # fmt: skip
    return pd.DataFrame(rows)


def by_context(repeats: int) -> pd.DataFrame:
    say("context")
    shape = SHAPES[DEFAULT]
    decoder = random_decoder(shape, max_length=max(CONTEXTS) + VERIFIED)
    cells = {("INT8", context, VERIFIED): decoder for context in CONTEXTS}
    times = measure(cells, repeats)
    return _table(times, {cell: cell[1] for cell in cells},
                  dict.fromkeys(cells, shape), dict.fromkeys(cells, ("INT8", "bf16")))  # fmt: skip


def by_tokens(repeats: int) -> pd.DataFrame:
    say("draft length")
    shape = SHAPES[DEFAULT]
    formats = {"bf16": ("bf16", "bf16"), "INT8": ("INT8", "bf16")}
    decoders = {name: random_decoder(shape, *kinds) for name, kinds in formats.items()}
    cells = {(name, CONTEXT, m): decoders[name] for m in TOKENS for name in decoders}
    times = measure(cells, 3 * repeats)
    kinds = {cell: formats[cell[0]] for cell in cells}
    fed = {cell: cell[2] for cell in cells}
    return _table(times, fed, dict.fromkeys(cells, shape), kinds)


def by_size(names: list[str], repeats: int) -> pd.DataFrame:
    tables = []
    for name in names:  # one after the other: together they would fill the memory
        say(name)
        shape = SHAPES[name]
        decoder = random_decoder(shape, head_norms=name.startswith("qwen3"))
        cells = {(f"{m} fed", CONTEXT, m): decoder for m in (1, VERIFIED)}
        times = measure(cells, repeats)
        size = round(shape.layer_weights / 1e9, 2)
        tables.append(_table(times, dict.fromkeys(cells, size),
                             dict.fromkeys(cells, shape),
                             dict.fromkeys(cells, ("INT8", "bf16"))))  # fmt: skip
        del decoder, cells
    return pd.concat(tables, ignore_index=True)


if __name__ == "__main__":
    main()
