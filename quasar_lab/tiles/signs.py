"""Rows of INT8 inputs as AVX2 multiplies them: as magnitudes and signs.

AVX2 multiplies bytes only if one of them is unsigned (`vpmaddubsw`: 32 products, added in pairs
into int16). So |a| is the unsigned operand, and the sign of a is handed to the weights: where
a < 0 all bits of w are flipped, which makes it -w - 1. A true -w would not fit for w = -128, and
`vpsignb`, which makes it, competes with the multiplications on some processors; an exclusive or
with -1 does not. Then

    sum |a| (a < 0 ? ~w : w) = sum a w + sum of a over a < 0,

where the last sum is one number a row, the same for all weights: the row's shift. Two products are
at most 2 * 128 * 127 and at least -2 * 128 * 128 = -32768: no input or weight overflows an int16.

The other way round, with |w| and the signs of the weights, all of this would have to be made for
each weight that is read, instead of once a row.
"""

from llvmlite import ir
from numba import types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from quasar_lab.tiles.emitter import I8, I32, Emitter, constant
from quasar_lab.tiles.instruction_sets import INSTRUCTION_SETS

STEP = INSTRUCTION_SETS["avx2"].step
_BYTES, _SUMS = ir.VectorType(I8, STEP), ir.VectorType(I32, STEP)


@intrinsic
def split_signs(typingctx, row, vectors):  # type: ignore[no-untyped-def]
    """Turn int8 numbers into magnitudes and masks (-1 where negative); the sum of the negatives.

    row: an address, int64. The numbers, so many vectors, lie in the second half of the row; in
    their place and before it come a vector of magnitudes, one of masks, and so on in turn.
    """
    signature = types.int32(types.int64, types.int64)

    def codegen(context, builder: ir.IRBuilder, signature: Signature, args):  # type: ignore[no-untyped-def]
        row, vectors = args
        to = Emitter(builder)
        zeros = ir.Constant(_BYTES, None)

        def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            # what is written ends where the next vector to be read begins, or before
            numbers = to.load(_BYTES, to.at(row, (vectors, STEP), (index, STEP)))
            mask = builder.sext(builder.icmp_signed("<", numbers, zeros), _BYTES)
            wraps = ir.Constant(ir.IntType(1), 0)  # |-128| is 128, unsigned
            size = to.function(f"llvm.abs.v{STEP}i8", _BYTES, [_BYTES, wraps.type])
            to.store(builder.call(size, [numbers, wraps]), to.at(row, (index, 2 * STEP)))
            to.store(mask, to.at(row, (index, 2 * STEP), (constant(STEP), 1)))
            return [builder.add(totals[0], builder.sext(builder.and_(numbers, mask), _SUMS))]

        (sums,) = to.loop(vectors, [ir.Constant(_SUMS, None)], body)
        add = to.function(f"llvm.vector.reduce.add.v{STEP}i32", I32, [_SUMS])
        return builder.call(add, [sums])

    return signature, codegen
