"""A small tile of a linear, held in vector registers: rows of inputs times 4 rows of weights.

Weights are float32, bfloat16 (multiplied as float32) or INT8. Three things make it as fast as
memory:

- a weight vector meets all input rows of the tile while it is in a register or, on AVX2, in the
  first-level cache;
- the four sums of a row are added across their lanes together, and scaled and stored as one vector;
- what will be needed next, in 16 KB or in the next four rows, is fetched into the second-level
  cache in the order in which it lies in memory: the processor's own prefetcher sees no stream in
  four interleaved rows.

A row's result is computed the same way whatever the other rows are.
"""

import functools
from dataclasses import dataclass

import torch
from llvmlite import ir
from numba import njit, types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from quasar_lab.tiles.emitter import F32, I8, I16, I32, Emitter, constant
from quasar_lab.tiles.instruction_sets import (
    INSTRUCTION_SETS,
    InstructionSet,
    dot_accumulate,
    processor_features,
)

COLUMNS = 4
PREFETCH_BYTES = 16 << 10
_LINE = 64
_FOUR_SUMS, _FOUR_FLOATS = ir.VectorType(I32, 4), ir.VectorType(F32, 4)


@dataclass(frozen=True, slots=True)
class TileFormat:
    """How numbers are multiplied on one kind of processor.

    step: weights in a vector; lanes: sums in a vector; max_rows: the tallest tile whose sums and
    operands fit the registers (32 of them with AVX-512 and NEON, 16 with AVX2);
    weight_bytes, input_bytes: of one number (2 for bfloat16 weights, and for inputs that are
    widened or come with their signs); int8: None for floats;
    scaled: INT8 sums come out as float32, times their scales (else as they are, int32).
    """

    name: str
    step: int
    lanes: int
    max_rows: int
    weight_bytes: int = 4
    input_bytes: int = 4
    int8: InstructionSet | None = None
    scaled: bool = True

    @property
    def signs(self) -> bool:
        """Inputs are magnitudes and sign masks (signs.py)."""
        return self.int8 is not None and self.int8.signs

    @property
    def widens(self) -> bool:
        """Inputs are int16."""
        return self.int8 is not None and self.int8.widens


# Appended to an INT8 format's name: int32 sums instead of scaled ones.
SUMS = " sums"

FORMATS = {
    each.name: each
    for each in (
        *(
            TileFormat(f"{kind}x{lanes}", lanes, lanes, rows, weight_bytes)
            for kind, weight_bytes in (("float32", 4), ("bfloat16", 2))
            for lanes, rows in ((16, 6), (8, 2), (4, 6))
        ),
        *(
            TileFormat(
                *(name + kind, isa.step, isa.lanes, isa.max_rows, 1, 1 + (isa.widens or isa.signs)),
                int8=isa,
                scaled=not kind,
            )
            for kind in ("", SUMS)
            for name, isa in INSTRUCTION_SETS.items()
        ),
    )
}


@functools.cache
def best_float_format(weights: torch.dtype) -> str:
    """The format of float32 or bfloat16 weights for this processor's widest vectors."""
    features = processor_features()
    lanes = 16 if "avx512f" in features else 8 if "avx" in features else 4
    return f"{str(weights).removeprefix('torch.')}x{lanes}"


@intrinsic(prefer_literal=True)
def format_number(typingctx, name, field):  # type: ignore[no-untyped-def]
    """A number of a format, as a constant for the compiler."""
    value = int(getattr(FORMATS[name.literal_value], field.literal_value))

    def codegen(context, builder, signature: Signature, args):  # type: ignore[no-untyped-def]
        return constant(value)

    return types.int64(name, field), codegen


@njit
def even_part(total, most):  # type: ignore[no-untyped-def]
    """The size, 1 to `most`, of the parts of a total: as few as can be, the largest small."""
    parts = max((total + most - 1) // most, 1)
    return max((total + parts - 1) // parts, 1)


@njit
def tile_height(rows, most):  # type: ignore[no-untyped-def]
    """How many of a linear's rows a tile takes: two tiles at least share the same weights.

    The first waits for them, and asks for the next ones faster than memory answers; requests that
    find the queue full are dropped. The second has its weights in the cache, and asks again.
    """
    return min(even_part(rows, most), max((rows + 1) // 2, 1))


class Tile(Emitter):
    """Writes the code of one tile in one format."""

    def __init__(self, builder: ir.IRBuilder, kind: TileFormat) -> None:
        super().__init__(builder)
        self.kind = kind
        if kind.int8 is None:
            self.sums = self.inputs = ir.VectorType(F32, kind.lanes)
            self.weights = ir.VectorType(I16 if kind.weight_bytes == 2 else F32, kind.lanes)
        else:
            self.sums = ir.VectorType(I32, kind.lanes)
            self.weights = ir.VectorType(I8, kind.step)
            self.inputs = ir.VectorType(I16 if kind.widens else I8, kind.step * (1 + kind.signs))

    def prepare(self, weights: ir.Value) -> ir.Value:
        """Weights as `accumulate` takes them: widened, or shifted into unsigned bytes."""
        isa = self.kind.int8
        if isa is None and self.kind.weight_bytes == 2:  # the upper half of a float32
            wide = ir.VectorType(I32, self.kind.lanes)
            half = ir.Constant(wide, [16] * self.kind.lanes)
            bits = self.builder.shl(self.builder.zext(weights, wide), half)
            return self.builder.bitcast(bits, self.sums)
        if isa is None:
            return weights
        if isa.widens:
            return self.builder.sext(weights, ir.VectorType(I16, self.kind.step))
        if isa.signs:
            return weights
        return self.builder.xor(weights, ir.Constant(self.weights, [-128] * self.kind.step))

    def accumulate(self, total: ir.Value, inputs: ir.Value, weights: ir.Value) -> ir.Value:
        if self.kind.int8 is None:
            return self.multiply_add(inputs, weights, total)
        return dot_accumulate(self.builder, self.kind.int8, total, inputs, weights)

    def add(self, first: ir.Value, second: ir.Value) -> ir.Value:
        return (self.builder.fadd if self.kind.int8 is None else self.builder.add)(first, second)

    def products(
        self, rows: int, columns: int, a: ir.Value, a_stride: ir.Value, w: ir.Value,
        w_stride: ir.Value, steps: ir.Value, ahead: ir.Value,
    ) -> list[ir.Value]:  # fmt: skip
        """The loop along K: a vector of sums for each row and column."""
        builder, kind = self.builder, self.kind
        vector_bytes = kind.step * kind.weight_bytes
        input_vector_bytes = kind.step * kind.input_bytes
        row_places = [self.opaque(self.at(a, (a_stride, row))) for row in range(rows)]
        column_places = [self.opaque(self.at(w, (w_stride, column))) for column in range(columns)]
        ahead = self.opaque(ahead)

        def vectors_of_weights(offset: ir.Value) -> list[ir.Value]:
            places = (builder.add(place, offset) for place in column_places)
            return [self.prepare(self.load(self.weights, place)) for place in places]

        def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            offset = self.opaque(builder.mul(index, constant(vector_bytes)))
            for line in range(0, columns * vector_bytes, _LINE):
                self.prefetch(self.at(ahead, (offset, columns), (constant(line), 1)))
            weights = vectors_of_weights(offset)
            following = []
            for row, place in enumerate(row_places):
                if row and kind.signs:
                    # Read again from the cache: four vectors kept would leave one register for
                    # all that is between weights and sums, which is 5 % slower.
                    offset = self.opaque(offset)
                    weights = vectors_of_weights(offset)
                begin = self.at(place, (offset, input_vector_bytes // vector_bytes))
                inputs = self.load(self.inputs, begin)
                for column in range(columns):
                    total = totals[row * columns + column]
                    following.append(self.accumulate(total, inputs, weights[column]))
            return following

        return self.loop(steps, [ir.Constant(self.sums, None)] * (rows * columns), body)

    def across_lanes(self, totals: list[ir.Value]) -> ir.Value:
        """Four vectors -> one of four numbers: the sum of each one's lanes.

        Shuffles inside groups of four lanes are cheap: so first every group of four comes to hold
        the sums of the four vectors over that group, then the groups are added.
        """

        def pair(first: ir.Value, second: ir.Value) -> ir.Value:
            halves: tuple[list[int], list[int]] = ([], [])
            for group in range(0, self.kind.lanes, 4):
                for odd in (0, 1):
                    for vector in (0, self.kind.lanes):
                        halves[odd].extend(vector + group + lane + odd for lane in (0, 2))
            return self.add(*(self.shuffle(first, second, half) for half in halves))

        total = pair(pair(totals[0], totals[1]), pair(totals[2], totals[3]))
        width = self.kind.lanes
        while width > 4:
            width //= 2
            halves = (list(range(width)), list(range(width, 2 * width)))
            total = self.add(*(self.shuffle(total, total, half) for half in halves))
        return total

    def finish(
        self, sums: ir.Value, shift: ir.Value, scale: ir.Value, weight_scales: ir.Value | None
    ) -> ir.Value:
        """float(sums - shift) * scale * weight_scales, in the order of the INT8 reference.

        As the bits of an int32 vector; without weight_scales the exact sums.
        """
        sums = self.builder.sub(sums, self.splat(self.load(I32, shift), 4))
        if weight_scales is None:
            return sums
        number = self.builder.sitofp(sums, _FOUR_FLOATS)
        number = self.builder.fmul(number, self.splat(self.load(F32, scale), 4))
        return self.builder.bitcast(self.builder.fmul(number, weight_scales), _FOUR_SUMS)


@intrinsic(prefer_literal=True)
def linear_tile(  # type: ignore[no-untyped-def]
    typingctx, name, columns, rows, a, a_stride, w, w_stride, steps, ahead, out, out_stride,
    scales, shifts, weight_scales, continued, finished,
):  # fmt: skip
    """out[r, c] = sum over `steps` vectors of a[r] * w[c], as float32 (int32 in a SUMS format).

    name (of FORMATS) and columns (COLUMNS or 1) are constants, rows is 1 to the format's max_rows;
    all others are int64: addresses, strides in bytes, flags. ahead: as many weights, to be fetched.

    INT8: out[r, c] = float(sum - shifts[r]) * scales[r] * weight_scales[c]. a is zero-padded to
    whole vectors; w is read to the end of its last vector, whatever stands there. shifts[r]: what
    the sums are too large by. VNNI shifts the weights into unsigned bytes: 128 * sum(a[r]); with
    signs apart it is the sum of the negative a[r], else 0. In a SUMS format only shifts is read.
    continued: add to the int32 sums that stand in out. Not finished: leave such sums there.

    In float32 nothing behind out_stride is read.
    """
    kind, num_columns = FORMATS[name.literal_value], columns.literal_value
    signature = types.void(name, columns, *[types.int64] * 14)

    def codegen(context, builder: ir.IRBuilder, signature: Signature, args):  # type: ignore[no-untyped-def]
        rows, a, a_stride, w, w_stride, steps, ahead, out, out_stride = args[2:11]
        scales, shifts, weight_scales, *flags = args[11:]
        to = Tile(builder, kind)
        missing = [ir.Constant(to.sums, None)] * (COLUMNS - num_columns)
        nothing = ir.Constant(_FOUR_SUMS, None)
        continued, finished = (builder.icmp_signed("!=", flag, constant(0)) for flag in flags)

        def kept(place: ir.Value) -> ir.Value:
            if num_columns == COLUMNS:
                return to.load(_FOUR_SUMS, place)
            return builder.insert_element(nothing, to.load(I32, place), ir.Constant(I32, 0))

        def emit(num_rows: int) -> None:
            totals = to.products(num_rows, num_columns, a, a_stride, w, w_stride, steps, ahead)
            column_scales = None
            if kind.int8 is not None and kind.scaled and num_columns == 1:
                column_scales = to.splat(to.load(F32, weight_scales), 4)
            elif kind.int8 is not None and kind.scaled:
                column_scales = to.load(_FOUR_FLOATS, weight_scales)
            for row in range(num_rows):
                own = totals[row * num_columns : (row + 1) * num_columns]
                place = to.at(out, (out_stride, row))
                result = to.across_lanes(own + missing)
                if kind.int8 is not None:
                    sums = builder.add(result, builder.select(continued, kept(place), nothing))
                    shift, scale = (to.at(base, (constant(4), row)) for base in (shifts, scales))
                    end = to.finish(sums, shift, scale, column_scales)
                    result = builder.select(finished, end, sums)
                if num_columns == 1:
                    result = builder.extract_element(result, ir.Constant(I32, 0))
                to.store(result, place)

        to.switch(rows, kind.max_rows, emit)
        return context.get_dummy_value()

    return signature, codegen
