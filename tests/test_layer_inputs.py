"""Rows that are quantised as they are made: the same numbers, and only where that is possible."""

from types import ModuleType

import pytest
import torch
from torch import nn

from quasar_lab import decoder_weights, layer_inputs
from quasar_lab.int8_gemm import reference
from quasar_lab.layer_inputs import MAX_ROWS, rms_norm
from quasar_lab.model_shapes import ModelShape
from quasar_lab.random_decoder import random_decoder

LAYERS = 2
SHAPE = ModelShape(LAYERS, 64, 2, 1, 32, 96, 128)


def stand_in(calls: list[str]) -> ModuleType:
    """The Triton kernels in plain torch, which rounds where they do."""

    def rmsnorm_quantize(x, weight, eps):
        calls.append("rmsnorm")
        return reference.quantize_activation(rms_norm(x, weight, eps))

    def swiglu_quantize(gate_up):
        calls.append("swiglu")
        gate, up = gate_up.chunk(2, -1)
        return reference.quantize_activation(nn.functional.silu(gate) * up)

    def scaled_matmul(x, x_scale, qweight, weight_scale, bias, *, dtype):
        sums = reference.int8_matmul(x, qweight).float()
        return (sums * x_scale * weight_scale).to(dtype)

    kernels = ModuleType("kernels")
    for function in (rmsnorm_quantize, swiglu_quantize, scaled_matmul):
        setattr(kernels, function.__name__, function)
    return kernels


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The kernels that were called, on a machine on which "triton" works."""
    calls: list[str] = []
    monkeypatch.setattr(layer_inputs, "_triton_on", lambda device: stand_in(calls))

    def w8a8_linear(x, weight, scale, bias, *, backend):
        return reference.w8a8_linear(x, weight, scale, bias)

    monkeypatch.setattr(decoder_weights, "w8a8_linear", w8a8_linear)
    return calls


def logits(count: int, layers: str = "INT8", floats: str = "bf16", backend: str = "triton"):
    decoder = random_decoder(
        SHAPE, layers, floats, max_length=128, backend=backend, engine="torch", head_norms=True
    )
    return decoder.forward(torch.arange(count))


@pytest.mark.parametrize("floats", ["bf16", "fp32"])
def test_the_same_logits_with_one_kernel_for_each(floats, calls) -> None:
    """Guards the wiring: which norm, which weight, gate before up, both halves of a layer."""
    fused = logits(6, floats=floats)
    assert calls == ["rmsnorm", "rmsnorm", "swiglu"] * LAYERS
    assert torch.equal(fused, logits(6, floats=floats, backend="reference"))


@pytest.mark.parametrize(
    "case",
    [
        dict(count=MAX_ROWS + 1),  # a prompt
        dict(count=6, layers="bf16"),  # full precision
        dict(count=6, backend="reference"),  # another backend was asked for
        dict(count=6, backend="auto"),  # on the CPU another one is the fastest
    ],
    ids=lambda case: str(case),
)
def test_elsewhere_one_after_the_other(case, calls) -> None:
    assert logits(**case).isfinite().all() and not calls
