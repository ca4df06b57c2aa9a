"""A W8A8 linear, compiled: quantise the rows, then each thread multiplies its share of the columns.

Everything takes addresses (int64) or pointers, writes into given memory and allocates nothing.
"""

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from quasar_lab.int8_gemm.reference import QMAX
from quasar_lab.tiles.linear_tile import (
    COLUMNS,
    PREFETCH_BYTES,
    even_part,
    format_number,
    linear_tile,
    tile_height,
)
from quasar_lab.tiles.signs import split_signs

# Rows of activations that stay in the second-level cache while all weights pass by, up to 8,192
# numbers of two bytes in 1 MB.
PANEL_ROWS = 64

# Of at most this many numbers, 4 rows of weights stay in a first-level cache of 32 KB while the
# inputs of several tiles pass by.
BLOCK = 2048

# A row of at most this many stays there alone: with its signs, 16 KB.
STREAM = 8192

_i8, _i16, _i32, _f32 = types.int8, types.int16, types.int32, types.float32


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


@numba.njit
def row_bytes(name, k):  # type: ignore[no-untyped-def]
    """Of a quantised row: whole vectors."""
    numba.literally(name)
    step = format_number(name, "step")
    return (k + step - 1) // step * step * format_number(name, "input_bytes")


@numba.njit
def _integers(is_float, source, to, k, padded):  # type: ignore[no-untyped-def]
    """Write a row of float32 (quantised) or int8 numbers to a pointer; (scale, their sum)."""
    if is_float:
        return quantize_row(pointer(source, _f32), to, k, padded)
    return np.float32(1), copy_row(pointer(source, _i8), to, k, padded)


@numba.njit
def integer_row(name, is_float, source, row, k, integers, scales, shifts):  # type: ignore[no-untyped-def]
    """Write a row of float32 (or of int8) numbers as the tile reads it: integers, scale, shift.

    source: the row; integers, scales, shifts: of all rows, addresses. shift: what the tile's sums
    are too large by.
    """
    numba.literally(name)
    num_bytes = row_bytes(name, k)
    padded = num_bytes // format_number(name, "input_bytes")
    to, shift = integers + row * num_bytes, np.int32(0)
    if format_number(name, "widens"):
        scale, _ = _integers(is_float, source, pointer(to, _i16), k, padded)
    elif format_number(name, "signs"):
        scale, _ = _integers(is_float, source, pointer(to + padded, _i8), k, padded)
        shift = split_signs(to, padded // format_number(name, "step"))
    else:
        scale, total = _integers(is_float, source, pointer(to, _i8), k, padded)
        shift = np.int32(128 * total)
    pointer(scales, _f32)[row] = scale
    pointer(shifts, _i32)[row] = shift


@numba.njit
def share(n, thread, threads):  # type: ignore[no-untyped-def]
    """The columns (first, last) of n that a thread computes: whole tiles, evenly."""
    tiles = (n + COLUMNS - 1) // COLUMNS
    return tiles * thread // threads * COLUMNS, min(tiles * (thread + 1) // threads * COLUMNS, n)


@numba.njit
def add_bias(bias, rows, first, last, out, n):  # type: ignore[no-untyped-def]
    """out[r, c] += bias[c] for the columns first to last; bias: an address, 0 for none."""
    if bias:
        biases = pointer(bias, _f32)
        for r in range(rows):
            sums = pointer(out + 4 * r * n, _f32)
            for column in range(first, last):
                sums[column] += biases[column]


@numba.njit
def int8_linear(name, a, a_stride, scales, shifts, rows, k, weight, last_weights, weight_scale,
                bias, n, out, thread, threads):  # type: ignore[no-untyped-def]  # fmt: skip
    """This thread's columns of out = (a Wᵀ) * scales * weight_scale + bias, a and W in INT8, k > 0.

    last_weights: address of a copy of W's last row with a vector of readable memory behind it; 0
    where W itself has that. What stands there does not count, for a is padded with zeros.
    """
    numba.literally(name)
    step, most = format_number(name, "step"), format_number(name, "max_rows")
    vector_bytes = step * format_number(name, "input_bytes")
    steps = (k + step - 1) // step
    first, last = share(n, thread, threads)
    apart = n - 1 if last_weights else n
    for panel in range(0, rows, PANEL_ROWS):
        panel_rows = min(PANEL_ROWS, rows - panel)
        height = tile_height(panel_rows, most)
        block = steps if panel_rows <= height else even_part(steps, BLOCK // step)
        # One row on AVX2 waits for memory alone, which is fastest in the order in which it lies;
        # but the row has to stay in the first-level cache.
        is_stream = panel_rows == 1 and format_number(name, "signs") and k <= STREAM
        columns = 1 if is_stream else COLUMNS
        column = first
        while column < last:
            width = columns if column + columns <= min(last, apart) else 1
            source = last_weights if column == apart else weight + column * k
            following = source + max(columns * k, PREFETCH_BYTES)
            place, column_scale = out + 4 * column, weight_scale + 4 * column
            for start in range(0, steps, block):
                count = min(block, steps - start)
                begin, ahead = source + start * step, following + start * step * COLUMNS
                for top in range(panel, panel + panel_rows, height):
                    own = min(height, panel + panel_rows - top)
                    inputs = a + top * a_stride + start * vector_bytes
                    to = place + 4 * top * n
                    if width == COLUMNS:
                        linear_tile(name, COLUMNS, own, inputs, a_stride, begin, k, count,
                                    ahead, to, 4 * n, scales + 4 * top, shifts + 4 * top,
                                    column_scale, start, start + count == steps)  # fmt: skip
                    else:
                        linear_tile(name, 1, own, inputs, a_stride, begin, k, count,
                                    ahead, to, 4 * n, scales + 4 * top, shifts + 4 * top,
                                    column_scale, start, start + count == steps)  # fmt: skip
            column += width
    add_bias(bias, rows, first, last, out, n)
