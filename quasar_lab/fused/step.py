"""One decoder step as one compiled function, which all threads run side by side.

Between the multiplications of a small model, a step made of torch operators spends more time on
starting them than on arithmetic. Here the threads enter once per step and only meet at barriers:
each stage (norm and quantise rows; multiply columns; rotate and write the cache; attend; SwiGLU
and quantise) is cut into equal shares that write disjoint memory.

A token's result does not depend on the tokens beside it: alone or one of six, the same bits.
"""

import functools

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from quasar_lab.fused import barrier
from quasar_lab.fused.rows import (
    attend,
    float_linear,
    normalise,
    number_at,
    rotate,
    store_numbers,
    swiglu,
)
from quasar_lab.int8_gemm import openmp
from quasar_lab.int8_gemm.openmp import thread_count, thread_index
from quasar_lab.tiles import source_revision
from quasar_lab.tiles.linear import int8_linear, integer_row, pointer, row_bytes
from quasar_lab.tiles.linear_tile import even_part, format_number

_i64, _f32 = types.int64, types.float32


def _record(*fields: tuple[object, str]) -> np.dtype:
    return np.dtype([(name, kind) for kind, names in fields for name in names.split()])


# What the step reads: addresses and sizes. Strides are in float32 numbers unless they say bytes.
MATRIX = _record((np.int64, "weight scale bias n out"))
PROJECTION = np.dtype([("k", np.int64), ("quantized", np.int64), ("matrices", MATRIX, (3,))])
OUTPUT = _record((np.int64, "at stride"))
LAYER = _record(
    (np.int64, "input_norm q_norm k_norm post_norm window keys values"),
    (PROJECTION, "qkv o gate_up down"),
    (OUTPUT, "q k v gate up"),
)
STEP = _record(
    (np.int64, "layers num_layers embed norm cos sin"),
    (np.int64, "hidden heads kv_heads head_dim ffn capacity"),
    (np.float32, "eps attention_scale"),
    (PROJECTION, "head"),
    # scratch: the residual stream and what is to be added to it; a projection's input as float32
    # and as integers with scales and shifts; turned queries; each thread's attention
    (np.int64, "x added h h_bytes integers scales shifts"),
    (np.int64, "queries scores score_bytes mixed barrier"),
    # the step at hand
    (np.int64, "ids num_tokens start num_logits"),
)


@intrinsic
def _void(typingctx, address):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@numba.njit
def _start(floats, s, row):  # type: ignore[no-untyped-def]
    """x = embed[id], and nothing to add to it yet."""
    numba.literally(floats)
    ids = pointer(s.ids, _i64)
    source = s.embed + format_number(floats, "weight_bytes") * ids[row] * s.hidden
    x = pointer(s.x + 4 * row * s.hidden, _f32)
    added = pointer(s.added + 4 * row * s.hidden, _f32)
    for i in range(s.hidden):
        x[i] = number_at(floats, source, i)
        added[i] = np.float32(0)


@numba.njit
def _quantise(int8, s, projection, row):  # type: ignore[no-untyped-def]
    """A row of s.h as integers, where the projection has an INT8 matrix."""
    numba.literally(int8)
    if projection.quantized:
        source = s.h + row * s.h_bytes
        integer_row(int8, True, source, row, projection.k, s.integers, s.scales, s.shifts)


@numba.njit
def _add_and_normalise(int8, s, row, to, norm, projection):  # type: ignore[no-untyped-def]
    """x += what the last block gave; its norm becomes row `to` of the projection's input."""
    x = pointer(s.x + 4 * row * s.hidden, _f32)
    added = pointer(s.added + 4 * row * s.hidden, _f32)
    for i in range(s.hidden):
        x[i] += added[i]
    normalise(x, pointer(norm, _f32), pointer(s.h + to * s.h_bytes, _f32), s.hidden, s.eps)
    _quantise(int8, s, projection, to)


@numba.njit
def _swiglu(int8, s, layer, row):  # type: ignore[no-untyped-def]
    gate = pointer(layer.gate.at + 4 * row * layer.gate.stride, _f32)
    up = pointer(layer.up.at + 4 * row * layer.up.stride, _f32)
    swiglu(gate, up, pointer(s.h + row * s.h_bytes, _f32), s.ffn)
    _quantise(int8, s, layer.down, row)


@numba.njit
def _project(floats, int8, s, projection, rows, thread, threads):  # type: ignore[no-untyped-def]
    """This thread's columns of a projection of the first rows of s.h."""
    numba.literally(floats)
    numba.literally(int8)
    k = projection.k
    for i in range(3):
        matrix = projection.matrices[i]
        if matrix.n == 0:
            continue
        if matrix.scale:
            int8_linear(int8, s.integers, row_bytes(int8, k), s.scales, s.shifts, rows, k,
                        matrix.weight, 0, matrix.scale, matrix.bias, matrix.n, matrix.out,
                        thread, threads)  # fmt: skip
        else:
            float_linear(floats, s.h, s.h_bytes, rows, k, matrix.weight, matrix.bias, matrix.n,
                         matrix.out, thread, threads)  # fmt: skip


@numba.njit
def _rotate_head(s, source, norm, position, scale, to):  # type: ignore[no-untyped-def]
    x = pointer(source, _f32)
    if norm:
        normalise(x, pointer(norm, _f32), x, s.head_dim, s.eps)
    cos = pointer(s.cos + 4 * position * s.head_dim, _f32)
    sin = pointer(s.sin + 4 * position * s.head_dim, _f32)
    rotate(x, cos, sin, scale, pointer(to, _f32), s.head_dim)


@numba.njit
def _rotate_and_store(floats, s, layer, thread, threads):  # type: ignore[no-untyped-def]
    """Queries to s.queries, [kv_heads, group, tokens, head_dim]; keys and values to the cache."""
    numba.literally(floats)
    d, tokens, heads = s.head_dim, s.num_tokens, s.heads + s.kv_heads
    total = tokens * heads
    for item in range(total * thread // threads, total * (thread + 1) // threads):
        token, head = item // heads, item % heads
        position = s.start + token
        if head < s.heads:
            source = layer.q.at + 4 * (token * layer.q.stride + head * d)
            to = s.queries + 4 * (head * tokens + token) * d
            _rotate_head(s, source, layer.q_norm, position, s.attention_scale, to)
        else:
            head -= s.heads
            at = format_number(floats, "weight_bytes") * (head * s.capacity + position) * d
            key = layer.k.at + 4 * (token * layer.k.stride + head * d)
            value = layer.v.at + 4 * (token * layer.v.stride + head * d)
            _rotate_head(s, key, layer.k_norm, position, np.float32(1), key)
            store_numbers(floats, pointer(key, _f32), layer.keys + at, d)
            store_numbers(floats, pointer(value, _f32), layer.values + at, d)


@numba.njit
def _attend(floats, s, layer, thread, threads):  # type: ignore[no-untyped-def]
    """This thread's share of all query rows, a few of one KV head at a time, to s.h."""
    numba.literally(floats)
    d, tokens, most = s.head_dim, s.num_tokens, format_number(floats, "max_rows")
    total, group = s.heads * tokens, s.heads // s.kv_heads * tokens
    scores = s.scores + thread * most * s.score_bytes
    mixed = s.mixed + thread * most * 4 * d
    row, last = total * thread // threads, total * (thread + 1) // threads
    while row < last:
        head = row // group
        left = min(last, (head + 1) * group) - row
        rows = even_part(left, most)
        cache = format_number(floats, "weight_bytes") * head * s.capacity * d
        queries = s.queries + 4 * row * d
        attend(floats, queries, rows, row, tokens, s.start, layer.window, layer.keys + cache,
               layer.values + cache, d, scores, s.score_bytes, mixed)  # fmt: skip
        for r in range(rows):
            query_head, token = (row + r) // tokens, (row + r) % tokens
            source = pointer(mixed + 4 * r * d, _f32)
            to = pointer(s.h + token * s.h_bytes + 4 * query_head * d, _f32)
            for i in range(d):
                to[i] = source[i]
        row += rows


@functools.cache
def compiled_step(floats: str, int8: str) -> int:
    """The address of `void step(int64 *address_of_a_STEP)`.

    floats, int8: names of tiles.linear_tile.FORMATS, `floats` for embedding, KV cache and the
    matrices that are not INT8. The first compilation takes seconds; the result stays in numba's
    disk cache.
    """
    openmp.bind_symbols()
    barrier.bind_symbols()
    revision = source_revision()

    @numba.cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def step(arguments):  # type: ignore[no-untyped-def]
        revision  # noqa: B018  part of the cache's key
        s = numba.carray(_void(arguments[0]), 1, STEP)[0]
        layers = numba.carray(_void(s.layers), s.num_layers, LAYER)
        thread, threads = np.int64(thread_index()), np.int64(thread_count())
        tokens = s.num_tokens
        for row in range(thread, tokens, threads):
            _start(floats, s, row)
        for index in range(s.num_layers):
            layer = layers[index]
            for row in range(thread, tokens, threads):
                _add_and_normalise(int8, s, row, row, layer.input_norm, layer.qkv)
            barrier.wait_for_all(s.barrier, threads)
            _project(floats, int8, s, layer.qkv, tokens, thread, threads)
            barrier.wait_for_all(s.barrier, threads)
            _rotate_and_store(floats, s, layer, thread, threads)
            barrier.wait_for_all(s.barrier, threads)
            _attend(floats, s, layer, thread, threads)
            barrier.wait_for_all(s.barrier, threads)
            if layer.o.quantized:
                for row in range(thread, tokens, threads):
                    _quantise(int8, s, layer.o, row)
                barrier.wait_for_all(s.barrier, threads)
            _project(floats, int8, s, layer.o, tokens, thread, threads)
            barrier.wait_for_all(s.barrier, threads)
            for row in range(thread, tokens, threads):
                _add_and_normalise(int8, s, row, row, layer.post_norm, layer.gate_up)
            barrier.wait_for_all(s.barrier, threads)
            _project(floats, int8, s, layer.gate_up, tokens, thread, threads)
            barrier.wait_for_all(s.barrier, threads)
            for row in range(thread, tokens, threads):
                _swiglu(int8, s, layer, row)
            barrier.wait_for_all(s.barrier, threads)
            _project(floats, int8, s, layer.down, tokens, thread, threads)
            barrier.wait_for_all(s.barrier, threads)
        unread = tokens - s.num_logits
        for row in range(unread + thread, tokens, threads):
            _add_and_normalise(int8, s, row, row - unread, s.norm, s.head)
        barrier.wait_for_all(s.barrier, threads)
        _project(floats, int8, s, s.head, s.num_logits, thread, threads)

    return step.address  # type: ignore[return-value]
