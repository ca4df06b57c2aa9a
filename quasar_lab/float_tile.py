"""Small tiles of float32 products held in vector registers: the fused decoder's two GEMM loops.

Both meet every weight (or cached key, or value) vector with all rows while it is in a register, so
that memory is read once however many tokens there are:

- `dot_tile`: rows times rows, out[r, c] = sum_k a[r, k] w[c, k]. A linear; q kᵀ.
- `mix_tile`: rows times a matrix, out[r, :] = sum_s p[r, s] v[s, :]. The values of attention.

A row's sum is built in the same order whatever the other rows are: one token alone gives the same
bits as the same token among six. Vectors are as wide as the processor's; the code is portable.
"""

import functools
from collections.abc import Callable

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

# Weight rows of a dot tile, vectors of values of a mix tile.
COLUMNS = 2

# float32 lanes of a vector -> rows of the tallest tile whose sums fit the registers: 32 of them
# with AVX-512 and with NEON, 16 with AVX2.
MAX_ROWS = {16: 8, 8: 4, 4: 8}


@functools.cache
def float_lanes() -> int:
    """float32 numbers in a vector register of this processor."""
    features = llvmlite.binding.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx") else 4


class _Emitter:
    """Shorthand for address arithmetic and vector loads in an LLVM builder."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes
        self.vector = ir.VectorType(_F32, lanes)
        self.zero = ir.Constant(self.vector, None)
        name = f"llvm.fmuladd.v{lanes}f32"
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        known = builder.module.globals.get(name)
        self.fmuladd = known or ir.Function(builder.module, kind, name)

    def at(self, base: ir.Value, *terms: tuple[ir.Value, int]) -> ir.Value:
        """base + sum of value * constant."""
        for value, factor in terms:
            scaled = self.builder.mul(value, ir.Constant(_I64, factor))
            base = self.builder.add(base, scaled)
        return base

    def load(self, address: ir.Value) -> ir.Value:
        pointer = self.builder.inttoptr(address, self.vector.as_pointer())
        return self.builder.load(pointer, align=4)

    def splat(self, address: ir.Value) -> ir.Value:
        scalar = self.builder.load(self.builder.inttoptr(address, _F32.as_pointer()), align=4)
        one = self.builder.insert_element(self.zero, scalar, ir.Constant(_I32, 0))
        mask = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, self.zero, mask)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=4)

    def loop(
        self,
        count: ir.Value,
        num_totals: int,
        body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
    ) -> list[ir.Value]:
        """totals = body(i, totals) for i in range(count), starting from zero vectors."""
        builder, entry = self.builder, self.builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "in", "out"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(_I64)
        totals = [builder.phi(self.vector) for _ in range(num_totals)]
        builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
        builder.position_at_end(inside)
        following = body(index, totals)
        index.add_incoming(ir.Constant(_I64, 0), entry)
        index.add_incoming(builder.add(index, ir.Constant(_I64, 1)), inside)
        for total, value in zip(totals, following, strict=True):
            total.add_incoming(self.zero, entry)
            total.add_incoming(value, inside)
        builder.branch(head)
        builder.position_at_end(after)
        return totals

    def horizontal_sums(self, totals: list[ir.Value]) -> list[ir.Value]:
        """The sum of each vector's lanes, as scalars.

        A round adds neighbouring lanes of two vectors at a time, so that log2(lanes) rounds leave
        one sum a lane. Each sum is built the same way whatever it shares a vector with.
        """
        count, width = len(totals), self.lanes
        while width > 1:
            if len(totals) % 2:
                totals = [*totals, self.zero]
            pairs = zip(totals[::2], totals[1::2], strict=True)
            totals = [self._add_neighbours(*pair) for pair in pairs]
            width //= 2
        return [
            self.builder.extract_element(totals[i // self.lanes], ir.Constant(_I32, i % self.lanes))
            for i in range(count)
        ]

    def _add_neighbours(self, first: ir.Value, second: ir.Value) -> ir.Value:
        kind = ir.VectorType(_I32, self.lanes)
        even, odd = (
            self.builder.shuffle_vector(
                first, second, ir.Constant(kind, list(range(parity, 2 * self.lanes, 2)))
            )
            for parity in (0, 1)
        )
        return self.builder.fadd(even, odd)


def _switch_on_rows(
    builder: ir.IRBuilder, rows: ir.Value, most: int, emit: Callable[[int], None]
) -> None:
    """Branch to code that was made for exactly this many rows, 1 to `most`."""
    end = builder.append_basic_block("tile.end")
    switch = builder.switch(rows, end)
    for count in range(1, most + 1):
        block = builder.append_basic_block(f"tile.rows{count}")
        switch.add_case(ir.Constant(_I64, count), block)
        builder.position_at_end(block)
        emit(count)
        builder.branch(end)
    builder.position_at_end(end)


@intrinsic(prefer_literal=True)
def dot_tile(typingctx, lanes, columns, rows, a, a_stride, w, w_stride, steps, out, out_stride):  # type: ignore[no-untyped-def]
    """out[r, c] = sum of a[r, :] * w[c, :] over `steps` whole vectors.

    lanes and columns are constants, rows is 1 to MAX_ROWS[lanes]; a, w, out are addresses of
    float32 numbers, strides are in bytes.
    """
    width, num_columns = lanes.literal_value, columns.literal_value
    signature = types.void(lanes, columns, *[types.int64] * 8)

    def codegen(context, builder: ir.IRBuilder, signature: Signature, args):  # type: ignore[no-untyped-def]
        rows, a, a_stride, w, w_stride, steps, out, out_stride = args[2:]
        to = _Emitter(builder, width)

        def emit(num_rows: int) -> None:
            def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                at = (index, 4 * width)
                weights = [to.load(to.at(w, (w_stride, c), at)) for c in range(num_columns)]
                following = []
                for r in range(num_rows):
                    row = to.load(to.at(a, (a_stride, r), at))
                    for c, weight in enumerate(weights):
                        total = totals[r * num_columns + c]
                        following.append(builder.call(to.fmuladd, [row, weight, total]))
                return following

            totals = to.loop(steps, num_rows * num_columns, body)
            for i, total in enumerate(to.horizontal_sums(totals)):
                r, c = divmod(i, num_columns)
                place = to.at(out, (out_stride, r))
                to.store(total, builder.add(place, ir.Constant(_I64, 4 * c)))

        _switch_on_rows(builder, rows, MAX_ROWS[width], emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def mix_tile(typingctx, lanes, vectors, rows, p, p_stride, v, v_stride, steps, out, out_stride):  # type: ignore[no-untyped-def]
    """out[r, :] = sum_s p[r, s] * v[s, :] over s < steps; a row of out is `vectors` vectors.

    lanes and vectors are constants, rows is 1 to MAX_ROWS[lanes]; p, v, out are addresses of
    float32 numbers, strides are in bytes.
    """
    width, num_vectors = lanes.literal_value, vectors.literal_value
    signature = types.void(lanes, vectors, *[types.int64] * 8)

    def codegen(context, builder: ir.IRBuilder, signature: Signature, args):  # type: ignore[no-untyped-def]
        rows, p, p_stride, v, v_stride, steps, out, out_stride = args[2:]
        to = _Emitter(builder, width)

        def emit(num_rows: int) -> None:
            def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                row = builder.add(v, builder.mul(index, v_stride))
                values = [to.load(builder.add(row, at)) for at in places]
                following = []
                for r in range(num_rows):
                    weight = to.splat(to.at(p, (p_stride, r), (index, 4)))
                    for j, value in enumerate(values):
                        total = totals[r * num_vectors + j]
                        following.append(builder.call(to.fmuladd, [weight, value, total]))
                return following

            places = [ir.Constant(_I64, 4 * width * j) for j in range(num_vectors)]
            totals = to.loop(steps, num_rows * num_vectors, body)
            for i, total in enumerate(totals):
                r, j = divmod(i, num_vectors)
                to.store(total, builder.add(to.at(out, (out_stride, r)), places[j]))

        _switch_on_rows(builder, rows, MAX_ROWS[width], emit)
        return context.get_dummy_value()

    return signature, codegen
