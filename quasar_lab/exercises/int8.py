"""Exercises of notebook 03: quantise a token, find the break-even, keep the sums in range."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quasar_lab.exercises import answered, number
from quasar_lab.int8_gemm.reference import quantize_activation
from quasar_lab.roofline import break_even_rows


def int8_per_token(answer: Any) -> str | None:
    """Right: one scale a token, half to even, zero rows stay zero and no row sees another."""
    ties = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.0]])
    before = ties.clone()
    result = answered(answer(ties))
    if not torch.equal(ties, before):
        return "Your function changed its input x: work on a new tensor."
    if not isinstance(result, tuple | list) or len(result) != 2:
        return "Return two tensors: the integers and the scales."
    quantized, scale = result
    for judge in (_kinds, _scale_of_each_row, _rounding, _edge_rows, _all_rows):
        if (wrong := judge(answer, quantized, scale)) is not None:
            return wrong
    return None


_Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def _kinds(answer: _Quantise, quantized: object, scale: object) -> str | None:
    if not isinstance(quantized, Tensor) or quantized.dtype != torch.int8:
        found = quantized.dtype if isinstance(quantized, Tensor) else type(quantized).__name__
        return f"The integers are {found}, not torch.int8: end with `.to(torch.int8)`."
    if not isinstance(scale, Tensor):
        return f"The scale is a {type(scale).__name__}: return a tensor with one scale a row."
    for shape in ((5, 8), (2, 3, 8)):
        q, s = answer(torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape))
        if q.shape != shape:
            return f"For x of shape {list(shape)} the integers have shape {list(q.shape)}."
        if s.shape != (*shape[:-1], 1):
            return (
                f"For x of shape {list(shape)} the scales have shape {list(s.shape)}, not "
                f"{[*shape[:-1], 1]}: take the maximum over the last dimension with keepdim=True."
            )
    if scale.dtype != torch.float32:
        return f"The scale is {scale.dtype}, not torch.float32."
    return None


def _scale_of_each_row(answer: _Quantise, quantized: Tensor, scale: Tensor) -> str | None:
    found = answer(torch.tensor([[1.0, -2.0, 0.5, 0.25]]))[1].item()
    if abs(found - 2 / 128) < 1e-6 or abs(found - 2 / 127.5) < 1e-6:
        return (
            "The scale is max|x| / 127: the integers reach from -127 to 127, evenly on both sides."
        )
    if abs(found - 1 / 127) < 1e-6:
        return "The row [1, -2, .5, .25] has its largest magnitude at -2: take the maximum of |x|."
    if abs(found - 127 / 2) < 1e-3:
        return "Your scale is 127 / max|x|; it is the size of one step, max|x| / 127."
    if abs(found - 2 / 127) > 1e-6:
        return (
            f"For the row [1, -2, .5, .25] the scale is 2 / 127 = {2 / 127:.5f}, not {found:.5f}."
        )
    return None


def _rounding(answer: _Quantise, quantized: Tensor, scale: Tensor) -> str | None:
    found = [int(value) for value in quantized[0]]
    values = "The row [127, .5, 1.5, 2.5, -.5, -1.5, -2.5, 3] has scale 1; you return"
    if found == [127, 0, 2, 2, 0, -2, -2, 3]:
        return None
    if found == [127, 0, 1, 2, 0, -1, -2, 3]:
        return (
            f"{values} {found}: the decimals were cut off. Use torch.round before .to(torch.int8)."
        )
    if found == [127, 1, 2, 3, -1, -2, -3, 3] or found == [127, 1, 2, 3, 0, -1, -2, 3]:
        return f"{values} {found}: a half goes to the *even* neighbour, as torch.round does it."
    return f"{values} {found}, which should be [127, 0, 2, 2, 0, -2, -2, 3]."


def _edge_rows(answer: _Quantise, quantized: Tensor, scale: Tensor) -> str | None:
    x = torch.tensor([[0.3, -0.7, 0.1, 0.2], [0.0, 0.0, 0.0, 0.0], [900.0, -1000.0, 3.0, 0.0]])
    q, s = answer(x)
    alone = answer(x[:1])
    if not torch.equal(q[:1], alone[0]) or not torch.equal(s[:1], alone[1]):
        return (
            f"The first row is {alone[0][0].tolist()} alone but {q[0].tolist()} beside a row with "
            "an outlier: each row needs a scale of its own, from its own maximum."
        )
    if not bool(s.isfinite().all()):
        return "A row of zeros gives a scale that is not finite, but its maximum / 127 is just 0."
    if q[1].any():
        return (
            f"A row of zeros becomes {q[1].tolist()}: it is divided by a scale of 0. Divide by 1 "
            "there (`torch.where(scale > 0, scale, 1.0)`)."
        )
    return None


def _all_rows(answer: _Quantise, quantized: Tensor, scale: Tensor) -> str | None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator) * torch.logspace(-6, 6, 64)[:, None]
    q, s = answer(x)
    if (q == -128).any():
        return "-128 appears among the integers: clamp to -127 .. 127, or use |x| for the scale."
    tiny = s[:, 0] < x.abs().amax(1) / 127 * 0.999
    if tiny.any() or (s[:, 0] > x.abs().amax(1) / 127 * 1.001).any():
        return (
            "Rows of very small values get another scale than max|x| / 127: put no floor under it."
        )
    expected, expected_scale = quantize_activation(x)
    # a product with 1 / scale may turn over a value within a rounding error of a half
    near_a_half = ((x / expected_scale).frac().abs() - 0.5).abs() < 1e-4
    if (wrong := (q != expected) & ~near_a_half).any():
        row, column = wrong.nonzero()[0].tolist()
        return (
            f"{x[row, column]:.6g} with scale {expected_scale[row, 0]:.6g} is "
            f"{expected[row, column]}; you return {q[row, column]}."
        )
    half = x.bfloat16()
    expected, expected_scale = quantize_activation(half)
    q, s = answer(half)
    if s.dtype != torch.float32 or not torch.allclose(s, expected_scale, rtol=1e-6, atol=0):
        return "For bfloat16 input the scale is rounded to 8 bits: convert x to float32 first."
    return None


def int8_break_even(answer: Any) -> str | None:
    """Right: reading a weight takes bytes / bandwidth, its M rows 2 M / rate: equal at this M."""
    # numbers for which each mistake gives another value
    rate, bandwidth, size = 4e11, 2e10, 8.0
    found = number(answer(rate, bandwidth, size))
    right = break_even_rows(rate, bandwidth, size)
    case = f"For {rate:g} operations/s, {bandwidth:g} bytes/s and {size:g} bytes a weight"
    mistakes = {
        2 * right: "a multiply-add is two operations, so M rows do 2 M operations a weight.",
        right / size: "the size of a weight is missing: larger weights take longer to read.",
        2 * right / size: "the size of a weight is missing, and a multiply-add is two operations.",
        right / size**2: "larger weights take longer to read, so *more* rows fit into that time.",
        1 / right: "this is the inverse. Set 2 M / rate equal to bytes / bandwidth; solve for M.",
        right / 2: "the 2 of the multiply-add is in there twice.",
    }
    for value, reason in mistakes.items():
        if abs(found - value) < 1e-9 * max(value, 1):
            return f"{case} you give {found:g}: {reason}"
    for arguments in ((rate, bandwidth, size), (2e15, 4.8e12, 1.0), (1e15, 4.8e12, 2.0)):
        found = number(answer(*arguments))
        # a learner may round to a whole number of rows
        if abs(found - (right := break_even_rows(*arguments))) > 1:
            return "For {:g} operations/s, {:g} bytes/s and {:g} bytes a weight".format(
                *arguments
            ) + (f" you give {found:g}, but at {right:g} rows both take equally long.")
    return None


def int8_largest_k(answer: Any) -> str | None:
    """Right: the worst sum, K times the square of the largest magnitude, fits below 2^(bits-1)."""
    for bits, magnitude in ((32, 128), (32, 127), (16, 127), (16, 128)):
        largest = 2 ** (bits - 1) - 1
        right = largest // magnitude**2
        found = number(answer(bits, magnitude))
        if found == right:
            continue
        case = f"largest_k({bits}, {magnitude}) is {found:,.10g}"
        if found == (2**bits - 1) // magnitude**2 or found == 2**bits // magnitude**2:
            return f"{case}: one of the {bits} bits is the sign, so sums only reach {largest:,}."
        if found == right + 1 and (largest + 1) % magnitude**2 == 0:
            return (
                f"{case}: that many products of {magnitude} x {magnitude} sum to {largest + 1:,}, "
                f"and the largest number of {bits} bits is {largest:,}. The minus one decides."
            )
        if found == largest // magnitude:
            return f"{case}: the worst product is magnitude times magnitude, not magnitude alone."
        if right < found < right + 1:
            return f"{case}: K is a whole number, rounded down (use //)."
        return (
            f"{case}: every product can be {magnitude} x {magnitude} = {magnitude**2:,}, and K of "
            f"them must stay at or below {largest:,}."
        )
    return None
