"""The decoder's arithmetic on rows of float32 numbers, compiled: one thread's share of each stage.

Everything takes addresses (int64) or pointers, writes into given memory and allocates nothing.
Sums have a fixed order (row_sum.py); a NaN stays a NaN.
"""

import numba
import numpy as np
from numba import types

from quasar_lab.tiles.linear import add_bias, pointer, share
from quasar_lab.tiles.linear_tile import (
    COLUMNS,
    PREFETCH_BYTES,
    format_number,
    linear_tile,
    tile_height,
)
from quasar_lab.tiles.mix_tile import VECTORS, mix_tile
from quasar_lab.tiles.row_sum import row_sum

_f32 = types.float32

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, so that n * ln 2 is exact in float32 for every exponent n
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720, 5040))
_ONE, _LOWEST, _HIGHEST = np.float32(1), np.float32(-87), np.float32(88)


@numba.njit
def exponential(x):  # type: ignore[no-untyped-def]
    """exp(x) within a unit of the last place, in operations that vectorise; x clamped to
    [-87, 88]: 2^n exp(r) with |r| <= ln(2) / 2, where eight terms of the series suffice."""
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    n = np.float32(np.rint(x * _LOG2_E))
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = _C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7))))
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (_ONE + (r + r * r * series)) * power


@numba.njit(error_model="numpy")
def normalise(x, weight, out, n, eps):  # type: ignore[no-untyped-def]
    """RMSNorm of one row: out = x / sqrt(mean(x²) + eps) * weight."""
    total = row_sum(x, 0, n, True)
    scale = _ONE / np.sqrt(np.float32(total / np.float32(n)) + eps)
    for i in range(n):
        out[i] = weight[i] * (x[i] * scale)


@numba.njit
def rotate(x, cos, sin, scale, out, head_dim):  # type: ignore[no-untyped-def]
    """Turn the pairs (x_i, x_{i + head_dim / 2}) and multiply by scale."""
    half = head_dim // 2
    for i in range(half):
        first, second = x[i], x[i + half]
        out[i] = (first * cos[i] - second * sin[i]) * scale
        out[i + half] = (second * cos[i + half] + first * sin[i + half]) * scale


@numba.njit(error_model="numpy")
def swiglu(gate, up, out, n):  # type: ignore[no-untyped-def]
    """out = gate * sigmoid(gate) * up."""
    for i in range(n):
        out[i] = gate[i] / (_ONE + exponential(-gate[i])) * up[i]


# A maximum is the same in every order; without these flags it is not vectorised. It calls nothing:
# what is compiled for a caller with fast maths inherits that.
@numba.njit(fastmath={"reassoc", "nsz"})
def _largest(scores, first, last):  # type: ignore[no-untyped-def]
    largest = scores[first]
    for i in range(first, last):
        largest = scores[i] if scores[i] > largest else largest
    return largest


@numba.njit
def exponentials(scores, first, last):  # type: ignore[no-untyped-def]
    """scores -> exp(scores - largest) between first and last, in place; their sum."""
    largest = _largest(scores, first, last)
    for i in range(first, last):
        scores[i] = exponential(scores[i] - largest)
    return row_sum(scores, first, last, False)


@numba.njit
def number_at(name, address, index):  # type: ignore[no-untyped-def]
    """A weight of a float format as float32."""
    numba.literally(name)
    if format_number(name, "weight_bytes") == 2:
        bits = np.int32(pointer(address, types.uint16)[index])
        return np.int32(bits << np.int32(16)).view(np.float32)
    return pointer(address, _f32)[index]


@numba.njit
def store_numbers(name, x, address, n):  # type: ignore[no-untyped-def]
    """float32 -> weights of a float format; bfloat16 is rounded to the nearest, ties to even."""
    numba.literally(name)
    if format_number(name, "weight_bytes") == 2:
        halves = pointer(address, types.uint16)
        for i in range(n):
            bits = np.float32(x[i]).view(np.int32)
            odd = (bits >> np.int32(16)) & np.int32(1)
            rounded = np.int32(bits + np.int32(0x7FFF) + odd) >> np.int32(16)
            halves[i] = rounded if x[i] == x[i] else np.int32(0x7FC0)
    else:
        floats = pointer(address, _f32)
        for i in range(n):
            floats[i] = x[i]


@numba.njit
def dots(name, a, a_stride, rows, height, k, w, w_stride, first, last, out, out_stride):  # type: ignore[no-untyped-def]  # fmt: skip
    """out[r, c] = a[r] · w[c] for the columns first to last; a, out: float32, strides in bytes.

    height: of a tile, at most max_rows.
    """
    numba.literally(name)
    step = format_number(name, "step")
    steps = k // step
    column = first
    while column < last:
        width = COLUMNS if column + COLUMNS <= last else 1
        source, place = w + column * w_stride, out + 4 * column
        ahead = source + PREFETCH_BYTES
        for top in range(0, rows, height):
            own = min(height, rows - top)
            start, to = a + top * a_stride, place + top * out_stride
            if width == COLUMNS:
                linear_tile(name, COLUMNS, own, start, a_stride, source, w_stride, steps, ahead,
                            to, out_stride, 0, 0, 0, 0, 1)  # fmt: skip
            else:
                linear_tile(name, 1, own, start, a_stride, source, w_stride, steps, ahead,
                            to, out_stride, 0, 0, 0, 0, 1)  # fmt: skip
        column += width
    done = steps * step
    if done < k:
        for r in range(rows):
            row, sums = pointer(a + r * a_stride, _f32), pointer(out + r * out_stride, _f32)
            for column in range(first, last):
                for i in range(done, k):
                    sums[column] += row[i] * number_at(name, w + column * w_stride, i)


@numba.njit
def float_linear(name, a, a_stride, rows, k, weight, bias, n, out, thread, threads):  # type: ignore[no-untyped-def]
    """This thread's columns of out = a Wᵀ + bias, out [rows, n]; all but W in float32."""
    numba.literally(name)
    first, last = share(n, thread, threads)
    stride = format_number(name, "weight_bytes") * k
    height = tile_height(rows, format_number(name, "max_rows"))
    dots(name, a, a_stride, rows, height, k, weight, stride, first, last, out, 4 * n)
    add_bias(bias, rows, first, last, out, n)


@numba.njit
def mix(name, p, p_stride, rows, v, steps, out, head_dim):  # type: ignore[no-untyped-def]
    """out[r] = sum_s p[r, s] v[s] for at most max_rows rows; v, out: rows of head_dim numbers.

    All but v is float32.
    """
    numba.literally(name)
    lanes, size = format_number(name, "lanes"), format_number(name, "weight_bytes")
    done, stride, v_stride = 0, 4 * head_dim, size * head_dim
    while done < head_dim // lanes * lanes:
        source, to = v + size * done, out + 4 * done
        if done + VECTORS * lanes <= head_dim:
            mix_tile(name, VECTORS, rows, p, p_stride, source, v_stride, steps, to, stride)
            done += VECTORS * lanes
        else:
            mix_tile(name, 1, rows, p, p_stride, source, v_stride, steps, to, stride)
            done += lanes
    for r in range(rows):
        weights, sums = pointer(p + r * p_stride, _f32), pointer(out + r * stride, _f32)
        for i in range(done, head_dim):
            total = np.float32(0)
            for s in range(steps):
                total += weights[s] * number_at(name, v + s * v_stride, i)
            sums[i] = total


@numba.njit(error_model="numpy")
def attend(name, queries, rows, group, num_tokens, start, window, keys, values, head_dim, scores,
           score_stride, mixed):  # type: ignore[no-untyped-def]  # fmt: skip
    """mixed[r] = softmax(q_r kᵀ) v for at most max_rows query rows of one KV head.

    Keys and values are the format's numbers, all else is float32.
    Row r is token (group + r) % num_tokens of the step, at position start + that; it sees the
    positions up to its own, and not further back than `window` (0: no limit).
    """
    numba.literally(name)
    end = start + num_tokens
    low = max(0, start + 1 - window) if window else 0
    stride = format_number(name, "weight_bytes") * head_dim
    dots(name, queries, 4 * head_dim, rows, rows, head_dim, keys + low * stride, stride, 0,
         end - low, scores, score_stride)  # fmt: skip
    for r in range(rows):
        row = pointer(scores + r * score_stride, _f32)
        position = start + (group + r) % num_tokens
        first = max(0, position + 1 - window) - low if window else 0
        last = position + 1 - low
        total = exponentials(row, first, last)
        for i in range(first):
            row[i] = np.float32(0)
        for i in range(last, end - low):
            row[i] = np.float32(0)
        for i in range(first, last):
            row[i] = row[i] / total
    mix(name, scores, score_stride, rows, values + low * stride, end - low, mixed, head_dim)
