"""The judges of notebook 03: right answers pass, each typical mistake gets its own sentence."""

import pytest
import torch

from quasar_lab.exercises import check
from quasar_lab.int8_gemm.reference import quantize_activation


def quantise(x, *, scale=None, rounded=torch.round, limits=(-127, 127), convert=True, guard=True):
    """The right quantiser, with one part at a time replaced by a mistake."""
    x = x.float() if convert else x
    scale = x.abs().amax(-1, keepdim=True) / 127 if scale is None else scale(x)
    divisor = torch.where(scale > 0, scale, 1.0) if guard else scale
    return rounded(x / divisor).clamp(*limits).to(torch.int8), scale


def half_away(x):
    return torch.sign(x) * torch.floor(x.abs() + 0.5)


def in_place(x):
    x /= 2
    return quantise(x)


def dropped_axis(x):
    quantized, scale = quantise(x)
    return quantized, scale[..., 0]


def with_floor(x):
    return quantise(x, scale=lambda x: x.abs().amax(-1, keepdim=True).clamp(min=1e-3) / 127)


def bfloat16_scale(x):
    quantized, scale = quantise(x, convert=False)
    return quantized, scale.float()


def steps_per_unit(x):
    quantized, scale = quantise(x)
    return quantized, 1 / scale


def nan_for_zeros(x):
    quantized, scale = quantise(x)
    return quantized, torch.where(scale > 0, scale, torch.nan)


def garbage_for_zeros(x):
    quantized, scale = quantise(x)
    return torch.where(scale > 0, quantized, torch.ones_like(quantized)), scale


def wrapped(x):
    quantized, scale = quantise(x)
    return torch.where(quantized == -127, -128, quantized).to(torch.int8), scale


@pytest.mark.parametrize(
    "answer",
    [
        quantise,
        quantize_activation,
        # by the reciprocal: some values near a half go to the other side
        lambda x: (
            (x.float() * torch.where(x.any(-1, keepdim=True), 127 / m(x), 1.0))
            .round()
            .clamp(-127, 127)
            .to(torch.int8),
            m(x) / 127,
        ),
    ],
)
def test_right_quantisers(answer) -> None:
    assert check("int8_per_token", answer).state == "right", check("int8_per_token", answer)


def m(x):
    return x.float().abs().amax(-1, keepdim=True)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: quantise(x)[0], "Return two tensors"),
        (lambda x: (quantise(x)[0].float(), quantise(x)[1]), "not torch.int8"),
        (lambda x: (quantise(x)[0], 0.1), "one scale a row"),
        (lambda x: (quantise(x)[0], quantise(x)[1].double()), "not torch.float32"),
        (in_place, "changed its input"),
        (dropped_axis, "keepdim=True"),
        (lambda x: quantise(x, scale=lambda x: x.abs().max() / 127), "keepdim=True"),
        (
            lambda x: quantise(
                x, scale=lambda x: (x.abs().max() / 127).expand(*x.shape[:-1], 1).clone()
            ),
            "a scale of its own",
        ),
        (
            lambda x: quantise(x, scale=lambda x: x.amax(-1, keepdim=True) / 127),
            "largest magnitude",
        ),
        (
            lambda x: quantise(x, scale=lambda x: m(x) / 128, limits=(-128, 127)),
            "127: the integers",
        ),
        (steps_per_unit, "it is the size of one step"),
        (lambda x: quantise(x, scale=lambda x: m(x) / 100), "2 / 127"),
        (lambda x: quantise(x, rounded=torch.trunc), "cut off"),
        (lambda x: quantise(x, rounded=half_away), "*even* neighbour"),
        (lambda x: quantise(x, rounded=torch.floor), "which should be"),
        (nan_for_zeros, "not finite"),
        (garbage_for_zeros, "A row of zeros becomes"),
        (wrapped, "-128 appears"),
        (with_floor, "no floor"),
        (bfloat16_scale, "convert x to float32"),
    ],
)
def test_wrong_quantisers_are_told_what_is_wrong(answer, message: str) -> None:
    feedback = check("int8_per_token", answer)
    assert feedback.state == "wrong" and message in feedback.message, feedback


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda rate, bandwidth, size: rate * size / (2 * bandwidth), "right", ""),
        (lambda rate, bandwidth, size: -(-rate * size // (2 * bandwidth)), "right", ""),
        (lambda rate, bandwidth, size: rate * size / bandwidth, "wrong", "two operations"),
        (lambda rate, bandwidth, size: rate / (2 * bandwidth), "wrong", "size of a weight is"),
        (lambda rate, bandwidth, size: rate / bandwidth, "wrong", "and a multiply-add"),
        (lambda rate, bandwidth, size: rate / size / (2 * bandwidth), "wrong", "*more* rows"),
        (lambda rate, bandwidth, size: 2 * bandwidth / rate / size, "wrong", "inverse"),
        (lambda rate, bandwidth, size: rate * size / bandwidth / 4, "wrong", "twice"),
        (lambda rate, bandwidth, size: 80.0, "wrong", "both take equally long"),
        (lambda rate, bandwidth, size: ..., "open", ""),
    ],
)
def test_break_even(answer, state: str, message: str) -> None:
    feedback = check("int8_break_even", answer)
    assert feedback.state == state and message in feedback.message, feedback


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda bits, q: (2 ** (bits - 1) - 1) // q**2, "right", ""),
        (lambda bits, q: 2 ** (bits - 1) // q**2, "wrong", "The minus one decides"),
        (lambda bits, q: (2**bits - 1) // q**2, "wrong", "is the sign"),
        (lambda bits, q: (2 ** (bits - 1) - 1) // q, "wrong", "magnitude times magnitude"),
        (lambda bits, q: (2 ** (bits - 1) - 1) / q**2, "wrong", "whole number"),
        (lambda bits, q: 133_144, "wrong", "K of them must stay"),
        (lambda bits, q: None, "open", ""),
    ],
)
def test_largest_k(answer, state: str, message: str) -> None:
    feedback = check("int8_largest_k", answer)
    assert feedback.state == state and message in feedback.message, feedback
