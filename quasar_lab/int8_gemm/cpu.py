"""The CPU backend: a W8A8 linear that runs at the speed of reading its INT8 weights.

One compiled function does the whole linear on torch's threads: quantise the rows, multiply
(cpu_tile.py), scale, add the bias. It reads plain row-major weights, so nothing is packed or kept
twice. It is compiled on first use and kept in numba's disk cache.
"""

import functools
import hashlib
from pathlib import Path

import numba
import numpy as np
import torch
from jaxtyping import Float, Float32, Int8, Int32
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from quasar_lab.int8_gemm import openmp
from quasar_lab.int8_gemm.cpu_tile import (
    COLUMNS,
    INSTRUCTION_SETS,
    best_instruction_set,
    dot_tile,
)
from quasar_lab.int8_gemm.openmp import barrier, thread_count, thread_index
from quasar_lab.int8_gemm.reference import QMAX

# Rows of activations that stay in the second-level cache while all weights pass by.
PANEL_ROWS = 64
# Bytes of scratch a thread: the rest of two weight rows, and one tile of int32 sums.
SCRATCH = 512

_i8, _i16, _i32, _f32 = types.int8, types.int16, types.int32, types.float32


def availability() -> str:
    """ "ok": every processor has at least the portable instruction set."""
    return "ok"


def supports(device: torch.device) -> bool:
    return device.type == "cpu"


@intrinsic(prefer_literal=True)
def pointer(typingctx, address, element):  # type: ignore[no-untyped-def]
    """The int64 address as a pointer to elements of the given numba type."""
    kind = types.CPointer(element.instance_type)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(types.int64, element), codegen


@numba.njit(error_model="numpy")
def quantize_row(x, quantized, length, padded):  # type: ignore[no-untyped-def]
    """Quantise one fp32 row exactly as reference.py does; return (scale, sum of the integers).

    `quantized` is a pointer to int8 or int16; entries from length to padded are set to zero.
    """
    # The bits of non-negative floats order as integers, and an integer maximum vectorises.
    largest = np.int32(0)
    for i in range(length):
        largest = max(largest, np.float32(x[i]).view(np.int32) & np.int32(0x7FFFFFFF))
    scale = np.int32(largest).view(np.float32) / np.float32(QMAX)
    divisor = scale if scale > np.float32(0) else np.float32(1)
    total = np.int32(0)
    for i in range(length):
        value = np.int32(np.rint(x[i] / divisor))
        value = min(max(value, np.int32(-QMAX)), np.int32(QMAX))
        quantized[i] = value
        total = np.int32(total + value)
    for i in range(length, padded):
        quantized[i] = 0
    return scale, total


@numba.njit
def copy_row(integers, quantized, length, padded):  # type: ignore[no-untyped-def]
    """Copy one int8 row into the tile's format; return the sum of its integers."""
    total = np.int32(0)
    for i in range(length):
        quantized[i] = integers[i]
        total = np.int32(total + integers[i])
    for i in range(length, padded):
        quantized[i] = 0
    return total


@numba.njit(error_model="numpy")
def multiply(isa_name, step, max_rows, shift, quantized, stride, scales, sums, m, k,
             weight, weight_scale, bias, n, out, scratch, thread, threads):  # type: ignore[no-untyped-def]  # fmt: skip
    """This thread's share of the output columns: int32 sums, or scaled to fp32 where there are
    weight scales (`weight_scale`, `bias`: addresses, 0 for none)."""
    numba.literally(isa_name)
    weights, weight_scales, biases = (
        pointer(weight, _i8),
        pointer(weight_scale, _f32),
        pointer(bias, _f32),
    )
    float_out, int_out = pointer(out, _f32), pointer(out, _i32)
    tile_sums = scratch + COLUMNS * step
    tails, totals = pointer(scratch, _i8), pointer(tile_sums, _i32)
    whole = k // step * step
    for i in range(COLUMNS * step):
        tails[i] = 0

    blocks = (n + COLUMNS - 1) // COLUMNS
    first = blocks * thread // threads * COLUMNS
    last = min(blocks * (thread + 1) // threads * COLUMNS, n)
    for panel in range(0, m, PANEL_ROWS):
        panel_rows = min(PANEL_ROWS, m - panel)
        tile_count = (panel_rows + max_rows - 1) // max_rows
        for column in range(first, last, COLUMNS):
            width = min(COLUMNS, last - column)
            start = weight + column * k
            for c in range(width):
                for i in range(whole, k):
                    tails[c * step + i - whole] = weights[(column + c) * k + i]
            for tile in range(tile_count):
                top = panel + panel_rows * tile // tile_count
                rows = panel + panel_rows * (tile + 1) // tile_count - top
                source = quantized + top * stride
                if width == COLUMNS:
                    dot_tile(
                        isa_name, COLUMNS, rows, source, stride, start, k, k, scratch, tile_sums
                    )
                else:
                    dot_tile(isa_name, 1, rows, source, stride, start, k, k, scratch, tile_sums)
                for r in range(rows):
                    row = top + r
                    for c in range(width):
                        total = np.int32(totals[r * width + c] - np.int32(shift * sums[row]))
                        where = row * n + column + c
                        if weight_scale:
                            value = np.float32(total) * scales[row] * weight_scales[column + c]
                            if bias:
                                value = value + biases[column + c]
                            float_out[where] = value
                        else:
                            int_out[where] = total


def source_revision(*modules: str) -> str:
    """A hash of files that compiled code is made from: numba's cache only watches one file."""
    here = Path(__file__).parent
    texts = b"".join((here / f"{name}.py").read_bytes() for name in modules)
    return hashlib.sha256(texts).hexdigest()[:16]


@functools.cache
def _compile(isa_name: str) -> int:
    """The address of the compiled linear for one instruction set."""
    openmp.bind_symbols()
    revision = source_revision("cpu_tile", "openmp")

    @numba.cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def linear(arguments):  # type: ignore[no-untyped-def]
        revision  # noqa: B018  part of the cache's key
        step, max_rows, widens = arguments[0], arguments[1], arguments[2]
        is_float, x, m, k = arguments[3], arguments[4], arguments[5], arguments[6]
        weight, weight_scale, bias, n = arguments[7], arguments[8], arguments[9], arguments[10]
        out, quantized, scratch = arguments[11], arguments[12], arguments[15]
        scales, sums = pointer(arguments[13], _f32), pointer(arguments[14], _i32)
        thread, threads = np.int64(thread_index()), np.int64(thread_count())
        padded = (k + step - 1) // step * step
        stride = padded * (1 + widens)

        for row in range(thread, m, threads):
            narrow, wide = (
                pointer(quantized + row * stride, _i8),
                pointer(quantized + row * stride, _i16),
            )
            if is_float:
                source = pointer(x + row * k * 4, _f32)
                if widens:
                    scales[row], sums[row] = quantize_row(source, wide, k, padded)
                else:
                    scales[row], sums[row] = quantize_row(source, narrow, k, padded)
            elif widens:
                sums[row] = copy_row(pointer(x + row * k, _i8), wide, k, padded)
            else:
                sums[row] = copy_row(pointer(x + row * k, _i8), narrow, k, padded)
        barrier()
        multiply(isa_name, step, max_rows, 128 * (1 - widens), quantized, stride, scales, sums,
                 m, k, weight, weight_scale, bias, n, out, scratch + thread * SCRATCH,
                 thread, threads)  # fmt: skip

    return linear.address  # type: ignore[return-value]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _run(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    instruction_set: str | None,
) -> None:
    isa = INSTRUCTION_SETS[instruction_set or best_instruction_set()]
    rows, k = x.shape
    row_bytes = -(-k // isa.step) * isa.step * (1 + isa.widens)
    # one allocation for everything that lives only during the call
    sizes = [rows * row_bytes, 4 * rows, 4 * rows, SCRATCH * torch.get_num_threads()]
    offsets = np.cumsum([0] + [-(-size // 64) * 64 for size in sizes]).tolist()
    workspace = torch.empty(offsets[-1], dtype=torch.uint8)
    openmp.run(
        _compile(isa.name),
        [
            *(isa.step, isa.max_rows, isa.widens),
            *(x.dtype == torch.float32, x.data_ptr(), rows, k),
            *(weight.data_ptr(), _address(weight_scale), _address(bias), weight.shape[0]),
            out.data_ptr(),
            *(workspace.data_ptr() + offset for offset in offsets[:4]),
        ],
    )


def int8_matmul(
    a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"], *, instruction_set: str | None = None
) -> Int32[Tensor, "M N"]:
    """a @ b.T with exact int32 sums. instruction_set: a name of INSTRUCTION_SETS, None the best."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.int32)
    _run(a.contiguous(), b.contiguous(), None, None, out, instruction_set)
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
    out = torch.empty(x.shape[0], qweight.shape[0])
    _run(
        x.float().contiguous(),
        qweight.contiguous(),
        weight_scale.contiguous(),
        None if bias is None else bias.float().contiguous(),
        out,
        instruction_set,
    )
    return out.to(x.dtype)
