"""What a layer's linears read: normalised rows and gated rows, and the linear behind them.

On a GPU a step is many small kernels. Where the linear is W8A8 its rows are quantised as they are
made, by one kernel instead of a dozen (`int8_gemm.triton_backend`); elsewhere one after the other.
"""

import functools
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quasar_lab.decoder_weights import Projection

# Beyond the rows of a verify step the products take longer than what stands before them, and
# another backend may be the fastest.
MAX_ROWS = 64


def rms_norm(
    x: Float[Tensor, "*rows channels"], weight: Float[Tensor, "channels"], eps: float
) -> Float[Tensor, "*rows channels"]:
    """x / sqrt(mean(x²) + eps) * weight, normalised in float32 as the reference models do.

    Source: arXiv 1910.07467, equation 4.
    """
    if x.is_cuda and x.dtype != torch.float64:  # two kernels, not eight, rounded alike
        return weight * nn.functional.rms_norm(x, weight.shape, eps=eps)
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return weight * exact.to(x.dtype)


def norm_linear(
    projection: Projection,
    x: Float[Tensor, "rows K"],
    weight: Float[Tensor, "K"],
    eps: float,
) -> Float[Tensor, "rows N"]:
    """projection(rms_norm(x, weight, eps))."""
    kernels = _kernels(projection, x)
    if kernels is None:
        return projection(rms_norm(x, weight, eps))
    return _products(kernels, projection, kernels.rmsnorm_quantize(x, weight, eps), x.dtype)


def swiglu_linear(
    projection: Projection, gate_up: Float[Tensor, "rows twoK"]
) -> Float[Tensor, "rows N"]:
    """projection(silu(gate) * up). Source: SwiGLU, arXiv 2002.05202, equation 6."""
    kernels = _kernels(projection, gate_up)
    if kernels is None:
        gate, up = gate_up.chunk(2, -1)
        return projection(nn.functional.silu(gate) * up)
    return _products(kernels, projection, kernels.swiglu_quantize(gate_up), gate_up.dtype)


def _kernels(projection: Projection, x: Tensor) -> ModuleType | None:
    """The backend that quantises these rows as it makes them; None: there is none for them."""
    matrices = projection.matrices
    backends = {matrix.backend for matrix in matrices if matrix.scale is not None}
    is_w8a8 = all(matrix.scale is not None and not matrix.simulated for matrix in matrices)
    if not is_w8a8 or len(x) > MAX_ROWS or x.dtype == torch.float64:
        return None
    if backends == {"triton"} or (backends == {"auto"} and x.is_cuda):
        return _triton_on(x.device)
    return None


@functools.cache
def _triton_on(device: torch.device) -> ModuleType | None:
    from quasar_lab.int8_gemm import triton_backend  # not above: it is seldom there

    works = triton_backend.availability() == "ok" and triton_backend.supports(device)
    return triton_backend if works else None


def _products(
    kernels: ModuleType,
    projection: Projection,
    rows: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    outputs = [
        kernels.scaled_matmul(*rows, matrix.weight, matrix.scale, matrix.bias, dtype=dtype)
        for matrix in projection.matrices
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
