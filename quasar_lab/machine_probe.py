"""What the decoder reaches on this machine, measured on random models, for the cost model.

A benchmark of memory alone flatters a machine: no kernel reads weights as fast as a sum reads an
array. So the rates come from steps of this very engine, on a model of round numbers that is not
among those predicted: one token shows how fast weights are read, many how fast it computes, and a
model of thin layers what a layer costs beside both.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quasar_lab.cost_model import SHARPNESS, Machine, StepWork
from quasar_lab.decoder import FastDecoder
from quasar_lab.machine import processor_name
from quasar_lab.model_shapes import ModelShape
from quasar_lab.quantization import QuantizationConfig, quantize
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

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def random_model(
    shape: ModelShape, dtype: torch.dtype = torch.float32, *, max_length: int = 8192
) -> PreTrainedModel:
    """A Llama of this shape with random weights, its output layer tied to the embedding."""
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
    )
    config.dtype = dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval().requires_grad_(False)


def _decoders() -> dict[str, FastDecoder]:
    models: dict[str, Any] = {kind: random_model(WIDE, dtype) for kind, dtype in DTYPES.items()}
    models["INT8"] = quantize(models["fp32"], config=QuantizationConfig(smoothing="none"))
    models["thin"] = random_model(THIN)
    models["deep in text"] = random_model(THIN)
    room = {"deep in text": _CONTEXT + _MANY}
    return {
        name: FastDecoder.from_model(model, max_length=room.get(name, _MANY))
        for name, model in models.items()
    }


def probe_machine(*, repeats: int = 15) -> Machine:
    """Measure this machine's rates with the decoder: ten seconds.

    Medians of steps that take turns, for INT8 layers, bf16 and fp32.
    """
    decoders = _decoders()
    decoders["deep in text"].forward(torch.zeros(_CONTEXT, dtype=torch.long))

    def step(name: str, tokens: int, _: int) -> None:
        decoders[name].forward(torch.arange(tokens))
        decoders[name].rollback(tokens)

    cells = {
        f"{name} {tokens}": partial(step, name, tokens)
        for name in decoders
        for tokens in (1, _MANY)
    }
    times = time_interleaved(cells, repeats=repeats)["median"].to_dict()
    return rates_from_times(times, processor_name())


def rates_from_times(times: Mapping[str, float], name: str) -> Machine:
    """The machine whose `predict_step` gives these times, in seconds.

    times: "FORMAT 1" and "FORMAT 16" of the wide model, "thin ..." of the thin one and "deep in
    text ..." of the thin one with a full cache, for steps of 1 and 16 tokens.
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
    return Machine(name, read_rate, operation_rate, _MANY * attention / deep, layer)
