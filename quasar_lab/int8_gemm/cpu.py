"""The CPU backend: a W8A8 linear that runs at the speed of reading its INT8 weights.

One compiled function does the whole linear on torch's threads: quantise the rows, multiply, scale,
add the bias (tiles/linear.py). It reads plain row-major weights, so nothing is packed or kept
twice. It is compiled on first use and kept in numba's disk cache.
"""

import functools

import numba
import numpy as np
import torch
from jaxtyping import Float, Float32, Int8, Int32
from numba import types
from torch import Tensor

from quasar_lab.int8_gemm import openmp
from quasar_lab.int8_gemm.openmp import barrier, thread_count, thread_index
from quasar_lab.int8_gemm.reference import around_product
from quasar_lab.tiles import source_revision
from quasar_lab.tiles.instruction_sets import best_instruction_set
from quasar_lab.tiles.linear import int8_linear, integer_row, row_bytes
from quasar_lab.tiles.linear_tile import FORMATS, SUMS


def availability() -> str:
    """ "ok": every processor has at least the portable instruction set."""
    return "ok"


def supports(device: torch.device) -> bool:
    return device.type == "cpu"


@functools.cache
def _compile(name: str) -> int:
    """The address of the compiled linear for one of tiles.linear_tile.FORMATS."""
    openmp.bind_symbols()
    revision = source_revision()
    # int8 rows multiply to int32 sums, float32 rows to a float32 linear
    is_float, element_bytes = (0, 1) if name.endswith(SUMS) else (1, 4)

    @numba.cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def linear(arguments):  # type: ignore[no-untyped-def]
        revision  # noqa: B018  part of the cache's key
        x, rows, k = arguments[0], arguments[1], arguments[2]
        weight, last_weights, weight_scale = arguments[3], arguments[4], arguments[5]
        bias, n, out = arguments[6], arguments[7], arguments[8]
        integers, scales, shifts = arguments[9], arguments[10], arguments[11]
        thread, threads = np.int64(thread_index()), np.int64(thread_count())
        for row in range(thread, rows, threads):
            source = x + row * k * element_bytes
            integer_row(name, is_float, source, row, k, integers, scales, shifts)
        barrier()
        int8_linear(name, integers, row_bytes(name, k), scales, shifts, rows, k, weight,
                    last_weights, weight_scale, bias, n, out, thread, threads)  # fmt: skip

    return linear.address  # type: ignore[return-value]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _run(
    name: str,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    (rows, k), n = x.shape, weight.shape[0]
    if not rows or not n:
        return
    step = FORMATS[name].step
    padded = -(-k // step) * step
    # one allocation for what lives only during the call: integers, scales, shifts, last weights
    vectors = -(-rows * padded * FORMATS[name].input_bytes // 64) * 64
    numbers = -(-4 * rows // 64) * 64
    workspace = torch.empty(vectors + 2 * numbers + padded, dtype=torch.uint8)
    scratch = workspace.data_ptr()
    last_weights = 0
    if 2 * k < step:  # the tile reads whole vectors: past the end of several rows
        weight = torch.cat([weight.flatten(), weight.new_zeros(step)])
    elif padded > k:  # past the end of the last row
        workspace[-padded : k - padded].view(torch.int8).copy_(weight[-1])
        last_weights = scratch + vectors + 2 * numbers
    openmp.run(
        _compile(name),
        [
            *(x.data_ptr(), rows, k),
            *(weight.data_ptr(), last_weights, _address(weight_scale), _address(bias), n),
            out.data_ptr(),
            *(scratch, scratch + vectors, scratch + vectors + numbers),
        ],
    )


def int8_matmul(
    a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"], *, instruction_set: str | None = None
) -> Int32[Tensor, "M N"]:
    """a @ b.T with exact int32 sums. instruction_set: a name of INSTRUCTION_SETS, None the best."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.int32)
    name = (instruction_set or best_instruction_set()) + SUMS
    _run(name, a.contiguous(), b.contiguous(), None, None, out)
    return out


def w8a8_linear(
    x: Float[Tensor, "M K"],
    qweight: Int8[Tensor, "N K"],
    weight_scale: Float32[Tensor, "N"],
    bias: Float[Tensor, "N"] | None = None,
    *,
    instruction_set: str | None = None,
) -> Float[Tensor, "M N"]:
    """Quantise x a row at a time, multiply, scale, add the bias; in x's dtype."""
    if x.dtype == torch.float64:  # the kernel rounds in float32
        product = functools.partial(int8_matmul, instruction_set=instruction_set)
        return around_product(product, x, qweight, weight_scale, bias)
    out = torch.empty(x.shape[0], qweight.shape[0])
    _run(
        instruction_set or best_instruction_set(),
        x.float().contiguous(),
        qweight.contiguous(),
        weight_scale.contiguous(),
        None if bias is None else bias.float().contiguous(),
        out,
    )
    return out.to(x.dtype)
