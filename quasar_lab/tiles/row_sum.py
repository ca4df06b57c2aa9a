"""The sum of a row of float32 numbers, in an order that is written down.

A compiler that may reorder a sum takes the fastest order for the processor and the surroundings;
numba's first compilation and a function loaded from its cache then differ in their last bits, which
the INT8 rounding behind them can turn into another token.
"""

from llvmlite import ir
from numba import types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from quasar_lab.tiles.emitter import F32, I32, I64, Emitter, constant

_LANES = 16
_VECTOR = ir.VectorType(F32, _LANES)


@intrinsic(prefer_literal=True)
def row_sum(typingctx, x, first, last, squared):  # type: ignore[no-untyped-def]
    """The float32 sum of x[first:last], or of its squares; x: a pointer to float32.

    squared is a constant. 16 partial sums, number i going to sum i mod 16, are halved until one is
    left; to it the rest, shorter than 16, is added one by one.
    """
    is_squared = squared.literal_value
    signature = types.float32(x, types.int64, types.int64, squared)

    def codegen(context, builder: ir.IRBuilder, signature: Signature, args):  # type: ignore[no-untyped-def]
        x, first, last, _ = args
        to, begin = Emitter(builder), builder.ptrtoint(x, I64)

        def add(kind: ir.Type, total: ir.Value, place: ir.Value) -> ir.Value:
            number = to.load(kind, to.at(begin, (place, 4)))
            return builder.fadd(total, builder.fmul(number, number) if is_squared else number)

        def vector(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            return [add(_VECTOR, totals[0], to.at(first, (index, _LANES)))]

        vectors = builder.sdiv(builder.sub(last, first), constant(_LANES))
        (sums,) = to.loop(vectors, [ir.Constant(_VECTOR, None)], vector)
        half = _LANES // 2
        while half:
            low, high = list(range(half)), list(range(half, 2 * half))
            sums = builder.fadd(to.shuffle(sums, sums, low), to.shuffle(sums, sums, high))
            half //= 2
        total = builder.extract_element(sums, ir.Constant(I32, 0))
        done = to.at(first, (vectors, _LANES))

        def rest(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            return [add(F32, totals[0], builder.add(done, index))]

        return to.loop(builder.sub(last, done), [total], rest)[0]

    return signature, codegen
