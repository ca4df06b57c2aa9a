"""The `torch._int_mm` backend: torch's own int8 x int8 -> int32 product (cuBLASLt on a GPU).

On CUDA it refuses 16 rows or fewer and K or N that are not multiples of 8, and wants its second
operand column-major: so the operands are padded with zeros, which add nothing to a sum, and the
result is cut. On the CPU it takes any shape.
"""

import functools

import torch
from jaxtyping import Float, Float32, Int8, Int32
from torch import Tensor
from torch.nn.functional import pad

from quasar_lab.int8_gemm.reference import QMAX, around_product

# The fewest rows cuBLASLt is given, and what K and N are multiples of.
_MIN_ROWS, _MULTIPLE = 32, 8


@functools.cache
def _exact_here() -> bool:
    """Whether the CPU's product of full-range values is exact: a saturating one would show."""
    a = torch.full((3, 64), QMAX, dtype=torch.int8)
    b = torch.full((16, 64), -QMAX, dtype=torch.int8)
    exact = torch.full((3, 16), -64 * QMAX * QMAX, dtype=torch.int32)
    return torch.equal(torch._int_mm(a, b.T), exact)


def availability() -> str:
    """ "ok", or one line on why not."""
    if not hasattr(torch, "_int_mm"):
        return "this torch has no _int_mm"
    if not _exact_here():
        return "torch._int_mm saturates on this processor"
    return "ok"


def supports(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")


def padded_shape(M: int, N: int, K: int) -> tuple[int, int, int]:
    """The (M, N, K) that CUDA's `_int_mm` accepts for a product of this shape."""

    def up(size: int) -> int:
        return -(-size // _MULTIPLE) * _MULTIPLE

    return max(M, _MIN_ROWS), up(N), up(K)


def padded_int_mm(a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"]) -> Int32[Tensor, "M N"]:
    """a @ b.T through operands of a shape that CUDA accepts.

    A weight whose N or K is no multiple of 8 is copied at each call.
    """
    (M, K), N = a.shape, b.shape[0]
    rows, columns, inner = padded_shape(M, N, K)
    a = pad(a, (0, inner - K, 0, rows - M)) if (rows, inner) != (M, K) else a
    b = pad(b, (0, inner - K, 0, columns - N)) if (columns, inner) != (N, K) else b
    return torch._int_mm(a.contiguous(), b.contiguous().T)[:M, :N]


def int8_matmul(a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"]) -> Int32[Tensor, "M N"]:
    """a @ b.T with exact int32 accumulation."""
    if 0 in (*a.shape, b.shape[0]):
        return torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    return padded_int_mm(a, b) if a.is_cuda else torch._int_mm(a, b.T)


def w8a8_linear(
    x: Float[Tensor, "M K"],
    qweight: Int8[Tensor, "N K"],
    weight_scale: Float32[Tensor, "N"],
    bias: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "M N"]:
    """The reference's torch operators around this product."""
    return around_product(int8_matmul, x, qweight, weight_scale, bias)
