"""What the decoder reaches on this machine's CPU, measured on random models, for the cost model.

A benchmark of memory alone flatters a machine: no kernel reads weights as fast as a sum reads an
array. So the rates come from steps of this very engine, on a model of round numbers that is not
among those predicted: one token shows how fast weights are read, many how fast it computes, and a
model of thin layers what a layer costs beside both. On a GPU these models would be read in the time
that their kernels take to start: for those there are `data_sheets`.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from quasar_lab.cost_model import SHARPNESS, Machine, StepWork
from quasar_lab.decoder import FastDecoder
from quasar_lab.machine import processor_name
from quasar_lab.model_shapes import ModelShape
from quasar_lab.random_decoder import DTYPES, random_decoder
from quasar_lab.timing import time_interleaved

# Larger than any cache in INT8; the head is small, so that one format is measured at a time.
WIDE = ModelShape(
    layers=6, hidden=1536, heads=12, kv_heads=4, head_dim=128, intermediate=4608, vocab=512
)
THIN = ModelShape(
    layers=16, hidden=96, heads=6, kv_heads=2, head_dim=64, intermediate=128, vocab=512
)
_MANY, _CONTEXT = 16, 2048
_TINY = 1e-6  # seconds: what is measured is never less


def _decoders() -> dict[str, FastDecoder]:
    build = partial(random_decoder, max_length=_MANY)
    return {
        **{kind: build(WIDE, kind, kind) for kind in DTYPES},
        "INT8": build(WIDE, "INT8", "fp32"),
        "thin": build(THIN, "fp32", "fp32"),
        "deep in text": build(THIN, "fp32", "fp32", max_length=_CONTEXT + _MANY),
    }


def probe_steps() -> dict[str, Callable[[int], None]]:
    """What `rates_from_times` wants timed, for `time_interleaved`.

    A machine's rates drift while it is shared: whoever compares them with other steps puts these
    among those, in the same turns.
    """
    decoders = _decoders()
    decoders["deep in text"].forward(torch.zeros(_CONTEXT, dtype=torch.long))

    def step(name: str, tokens: int, _: int) -> None:
        decoders[name].forward(torch.arange(tokens))
        decoders[name].rollback(tokens)

    return {
        f"{name} {tokens}": partial(step, name, tokens)
        for name in decoders
        for tokens in (1, _MANY)
    }


def probe_machine(*, repeats: int = 15) -> Machine:
    """Measure the CPU's rates with the decoder: ten seconds.

    Medians of steps that take turns, for INT8 layers, bf16 and fp32.
    """
    times = time_interleaved(probe_steps(), repeats=repeats)["median"].to_dict()
    return rates_from_times(times)


def rates_from_times(times: Mapping[str, float]) -> Machine:
    """This machine, as `predict_step` gives these times, in seconds.

    times: of `probe_steps`, "FORMAT 1" and "FORMAT 16" of the wide model, "thin ..." of the thin
    one and "deep in text ..." of the thin one with a full cache, for steps of 1 and 16 tokens.
    """
    layer = times["thin 1"] / THIN.layers
    weights = WIDE.layer_weights + WIDE.head_weights
    read_rate, operation_rate = {}, {}
    for kind in (*DTYPES, "INT8"):
        read = StepWork(WIDE, kind, "fp32" if kind == "INT8" else kind).bytes.total
        reading = max(times[f"{kind} 1"] - WIDE.layers * layer, _TINY)
        whole = max(times[f"{kind} {_MANY}"] - WIDE.layers * layer, reading * 1.01)
        # what `together` makes of reading and computing, solved for computing
        computing = (whole**SHARPNESS - reading**SHARPNESS) ** (1 / SHARPNESS)
        read_rate[kind] = read / reading
        operation_rate[kind] = 2 * _MANY * weights / computing
    attention = StepWork(THIN, context=_CONTEXT).attention_operations
    deep = max(times[f"deep in text {_MANY}"] - times[f"thin {_MANY}"], _TINY)
    return Machine(processor_name(), read_rate, operation_rate, _MANY * attention / deep, layer)
