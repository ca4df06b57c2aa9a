"""INT8 rounding and the exact product, in a few lines of torch: what every backend must equal.

Symmetric quantisation maps a row of floats to integers in [-127, 127] by one scale: the row's
largest magnitude over 127. Weights get one scale an output channel, activations one a token,
computed on the fly ("dynamic"), so that a token's result never depends on its neighbours.
Source: SmoothQuant (arXiv 2211.10438), section 3, per-token and per-channel granularity.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float32, Int8, Int32
from torch import Tensor

QMAX = 127

# The largest K whose sum of K products of magnitude 128 * 128 still fits an int32.
MAX_K = (2**31 - 1) // (128 * 128)


def availability() -> str:
    """ "ok": torch alone is needed."""
    return "ok"


def supports(device: torch.device) -> bool:
    return True


def _quantize_rows(
    x: Float[Tensor, "*rows K"],
) -> tuple[Int8[Tensor, "*rows K"], Float[Tensor, "*rows 1"]]:
    """In the precision of x, which is float32 or float64."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    # by a tensor: CUDA turns the division by a number into a product with its reciprocal
    scale = largest / torch.full_like(largest, QMAX)
    # Dividing by the scale (not multiplying by 127 / absmax) is what keeps backends identical.
    # A zero row has no scale; dividing by 1 leaves it exactly 0.
    divisor = torch.where(scale > 0, scale, 1.0)
    return torch.round(x / divisor).clamp_(-QMAX, QMAX).to(torch.int8), scale


def quantize_weight(
    w: Float[Tensor, "N K"],
) -> tuple[Int8[Tensor, "N K"], Float32[Tensor, "N"]]:
    """Quantise a weight matrix to INT8 with one symmetric scale an output channel (row).

    Returns (int8[N, K], float32 scale[N]) with w ~ int8 * scale[:, None]; half-way values round
    to even. An all-zero row has scale 0 and stays exactly zero.
    """
    quantized, scale = _quantize_rows(w.float())
    return quantized, scale.squeeze(-1)


def quantize_activation(
    x: Float[Tensor, "*rows K"],
) -> tuple[Int8[Tensor, "*rows K"], Float32[Tensor, "*rows 1"]]:
    """Quantise activations to INT8 with one symmetric, dynamic scale a token (row).

    Returns (int8[..., K], float32 scale[..., 1]). A row's result depends on that row alone, and an
    all-zero row gives zeros with scale 0.
    """
    return _quantize_rows(x.float())


def int8_matmul(a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"]) -> Int32[Tensor, "M N"]:
    """a @ b.T with exact int32 accumulation, on whichever device the operands are.

    Sums of up to 1,024 products stay within 2^24, where fp32 is exact: so the reference runs
    K in such blocks through the fp32 GEMM, which is exact and much faster than integer torch.
    """
    block = 2**24 // (128 * 128)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[1], block):
        part = a[:, start : start + block].float() @ b[:, start : start + block].float().T
        total += part.to(torch.int32)
    return total


def around_product(
    product: Callable[[Tensor, Tensor], Tensor],
    x: Float[Tensor, "M K"],
    qweight: Int8[Tensor, "N K"],
    weight_scale: Float32[Tensor, "N"],
    bias: Float[Tensor, "N"] | None,
) -> Float[Tensor, "M N"]:
    """Quantise x a row at a time, multiply in integers, scale, add the bias; x's dtype.

    product: (int8[M, K], int8[N, K]) -> int32[M, N]. All but the product is float64 for an x in
    float64, else float32.
    """
    exact = x if x.dtype == torch.float64 else x.float()
    quantized, scale = _quantize_rows(exact)
    out = product(quantized, qweight).to(exact.dtype) * scale * weight_scale
    if bias is not None:
        out += bias.to(exact.dtype)
    return out.to(x.dtype)


def w8a8_linear(
    x: Float[Tensor, "M K"],
    qweight: Int8[Tensor, "N K"],
    weight_scale: Float32[Tensor, "N"],
    bias: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "M N"]:
    """The linear that every backend must equal, bit for bit."""
    return around_product(int8_matmul, x, qweight, weight_scale, bias)
