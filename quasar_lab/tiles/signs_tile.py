"""A tile of an INT8 linear for AVX2: up to 8 rows of inputs times one row of weights.

AVX2 multiplies bytes only if one of them is unsigned (`vpmaddubsw`: 32 products, added in pairs
into int16). So the sign of a weight is handed to its inputs: |w| is the unsigned operand, and where
w < 0 all bits of a are flipped, which makes it -a - 1. A true -a would not fit for a = -128, and
`vpsignb`, which makes it, competes with the multiplications on some processors; an exclusive or
with -1 does not. Then

    sum |w| (w < 0 ? ~a : a) = sum w a - sum of |w| over w < 0,

and the last sum, the same for all inputs, is counted along with them. Two products are at most
2 * 128 * 127 and at least -2 * 128 * 128 = -32768: no int8 weight or input overflows an int16.
"""

from llvmlite import ir
from numba import njit, types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from quasar_lab.tiles.emitter import F32, I16, I32, I64, constant
from quasar_lab.tiles.linear_tile import FORMATS, Tile, format_number

# A block of this many numbers of 8 rows of inputs (16 KB) stays in the first-level cache while as
# many rows of weights pass by. The sum of a block's |w|, w < 0, fits int16 up to blocks of 4,096.
BLOCK = 2048
COLUMNS_TOGETHER = 16
_LINE = 64
_FOUR_SUMS, _FOUR_FLOATS = ir.VectorType(I32, 4), ir.VectorType(F32, 4)


class SignsTile(Tile):
    """Writes the code of one tile; `totals` are a vector of int32 sums for each row of inputs,
    then one of int16, which counts -|w| where w < 0."""

    def call(self, name: str, result: ir.Type, *operands: ir.Value) -> ir.Value:
        function = self.function(name, result, [each.type for each in operands])
        return self.builder.call(function, operands)

    def products_in_pairs(self, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
        halves = ir.VectorType(I16, self.kind.step // 2)
        return self.call("llvm.x86.avx2.pmadd.ub.sw", halves, unsigned, signed)

    def add_pairs(self, pairs: ir.Value) -> ir.Value:
        ones = ir.Constant(pairs.type, [1] * pairs.type.count)
        return self.call("llvm.x86.avx2.pmadd.wd", self.sums, pairs, ones)

    def with_vector(
        self, rows: list[ir.Value], offset: ir.Value, w: ir.Value, totals: list[ir.Value]
    ) -> list[ir.Value]:
        """The totals and one vector more of each row; rows, w: where they begin."""
        builder = self.builder
        weights = self.load(self.weights, builder.add(w, offset))
        negative = builder.icmp_signed("<", weights, ir.Constant(self.weights, None))
        negative = builder.sext(negative, self.weights)
        wraps = ir.Constant(ir.IntType(1), 0)  # |-128| is 128, unsigned
        size = self.call(f"llvm.abs.v{self.kind.step}i8", self.weights, weights, wraps)
        following = []
        for row, total in zip(rows, totals, strict=False):
            inputs = self.load(self.inputs, builder.add(row, offset))
            pairs = self.products_in_pairs(size, builder.xor(inputs, negative))
            following.append(builder.add(total, self.add_pairs(pairs)))
        return [*following, builder.add(totals[-1], self.products_in_pairs(size, negative))]

    def sums_of_rows(
        self, rows: list[ir.Value], w: ir.Value, steps: ir.Value, ahead: ir.Value
    ) -> list[ir.Value]:
        """The loop along K, a cache line (two vectors) of weights at a time: sums of each row."""
        step = self.kind.step

        def line(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            begin = self.builder.mul(index, constant(_LINE))
            self.prefetch(self.builder.add(ahead, begin))
            for vector in range(0, _LINE, step):
                offset = self.builder.add(begin, constant(vector))
                totals = self.with_vector(rows, offset, w, totals)
            return totals

        def rest(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            last = self.builder.mul(self.builder.sub(steps, constant(1)), constant(step))
            return self.with_vector(rows, last, w, totals)

        totals = [ir.Constant(self.sums, None)] * len(rows)
        totals.append(ir.Constant(ir.VectorType(I16, step // 2), None))
        totals = self.loop(self.builder.ashr(steps, constant(1)), totals, line)
        totals = self.loop(self.builder.and_(steps, constant(1)), totals, rest)
        short = self.add_pairs(totals.pop())
        return [self.builder.sub(total, short) for total in totals]

    def beginnings(self, base: ir.Value, stride: ir.Value, count: int) -> list[ir.Value]:
        """The addresses of so many rows, each in a register of its own: LLVM would compute each
        from the one before, in every turn of the loop."""
        same = ir.FunctionType(I64, [I64])
        return [
            self.builder.asm(same, "", "=r,0", [self.at(base, (stride, row))], False)
            for row in range(count)
        ]

    def gather(self, kind: ir.Type, base: ir.Value, stride: ir.Value, rows: range) -> ir.Value:
        """A vector of four numbers, one a row; zeros where there are fewer rows."""
        vector = ir.Constant(ir.VectorType(kind, 4), None)
        for lane, row in enumerate(rows):
            number = self.load(kind, self.at(base, (stride, row)))
            vector = self.builder.insert_element(vector, number, ir.Constant(I32, lane))
        return vector


@intrinsic(prefer_literal=True)
def signs_tile(  # type: ignore[no-untyped-def]
    typingctx, name, rows, a, a_stride, w, steps, ahead, out, out_stride, scales, weight_scale,
    continued, finished,
):  # fmt: skip
    """out[r] = sum over `steps` vectors of a[r] * w, for 1 to max_rows rows and one weight row.

    name, of a format that `signs`, is a constant; all others are int64: addresses, strides in
    bytes. a is zero-padded to whole vectors; w is read to the end of its last one, whatever stands
    there. ahead: what will be read later, to be fetched.
    continued: add to the int32 sums that stand in out. finished: turn them into float32, times
    scales[r] * weight_scale, but in a SUMS format; else they stay int32, even in an out of float32.
    """
    kind = FORMATS[name.literal_value]
    signature = types.void(name, *[types.int64] * 12)

    def codegen(context, builder: ir.IRBuilder, signature: Signature, args):  # type: ignore[no-untyped-def]
        if not kind.signs:  # compiled with the rest, never called
            return context.get_dummy_value()
        rows, a, a_stride, w, steps, ahead, out, out_stride = args[1:9]
        scales, weight_scale, *flags = args[9:]
        to = SignsTile(builder, kind)
        continued, finished = (builder.icmp_signed("!=", flag, constant(0)) for flag in flags)

        def emit(num_rows: int) -> None:
            totals = to.sums_of_rows(to.beginnings(a, a_stride, num_rows), w, steps, ahead)
            for top in range(0, num_rows, 4):
                own = range(top, min(top + 4, num_rows))
                missing = [ir.Constant(to.sums, None)] * (4 - len(own))
                sums = to.across_lanes([*(totals[row] for row in own), *missing])
                before = to.gather(I32, out, out_stride, own)
                nothing = ir.Constant(_FOUR_SUMS, None)
                sums = builder.add(sums, builder.select(continued, before, nothing))
                if kind.scaled:
                    number = builder.sitofp(sums, _FOUR_FLOATS)
                    number = builder.fmul(number, to.gather(F32, scales, constant(4), own))
                    number = builder.fmul(number, to.splat(to.load(F32, weight_scale), 4))
                    sums = builder.select(finished, builder.bitcast(number, _FOUR_SUMS), sums)
                for lane, row in enumerate(own):
                    number = builder.extract_element(sums, ir.Constant(I32, lane))
                    to.store(number, to.at(out, (out_stride, row)))

        to.switch(rows, kind.max_rows, emit)
        return context.get_dummy_value()

    return signature, codegen


@njit
def signs_linear(name, a, a_stride, scales, rows, k, weight, last_weights, weight_scale, n, out,
                 first, last):  # type: ignore[no-untyped-def]  # fmt: skip
    """The columns first to last of `int8_linear` (linear.py), without a bias."""
    step, most = format_number(name, "step"), format_number(name, "max_rows")
    steps, block = (k + step - 1) // step, BLOCK // step
    tiles = (rows + most - 1) // most
    for group in range(first, last, COLUMNS_TOGETHER):
        for start in range(0, steps, block):
            count = min(block, steps - start)
            for tile in range(tiles):
                top = rows * tile // tiles
                height = rows * (tile + 1) // tiles - top
                for column in range(group, min(group + COLUMNS_TOGETHER, last)):
                    is_apart = last_weights and column == n - 1
                    source = (last_weights if is_apart else weight + column * k) + start * step
                    signs_tile(name, height, a + top * a_stride + start * step, a_stride, source,
                               count, source + COLUMNS_TOGETHER * k, out + 4 * (top * n + column),
                               4 * n, scales + 4 * top, weight_scale + 4 * column, start,
                               start + count == steps)  # fmt: skip
