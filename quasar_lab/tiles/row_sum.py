"""The sum of a row of float32 numbers, in an order that is written down.

A compiler that may reorder a sum takes the fastest order for the processor and the surroundings;
numba's first compilation and a function loaded from its cache then differ in their last bits, which
the INT8 rounding behind them can turn into another token.
"""

from llvmlite import ir
from numba import types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from quasar_lab.tiles.emitter import F32, I64, Emitter, constant

_LANES = 16
_VECTOR = ir.VectorType(F32, _LANES)


def _row_sum(squared: bool):  # type: ignore[no-untyped-def]
    def row_sum(typingctx, x, first, last):  # type: ignore[no-untyped-def]
        signature = types.float32(x, types.int64, types.int64)

        def codegen(context, builder: ir.IRBuilder, signature: Signature, args):  # type: ignore[no-untyped-def]
            x, first, last = args
            to, begin = Emitter(builder), builder.ptrtoint(x, I64)

            def add(kind: ir.Type, total: ir.Value, place: ir.Value) -> ir.Value:
                number = to.load(kind, to.at(begin, (place, 4)))
                number = builder.fmul(number, number) if squared else number
                return builder.fadd(total, number)

            def vector(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                place = to.at(first, (index, _LANES))
                return [add(_VECTOR, totals[0], place)]

            count = builder.sub(last, first)
            vectors = builder.sdiv(count, constant(_LANES))
            (sums,) = to.loop(vectors, [ir.Constant(_VECTOR, None)], vector)
            half = _LANES // 2
            while half:
                low, high = (list(range(start, start + half)) for start in (0, half))
                sums = builder.fadd(to.shuffle(sums, sums, low), to.shuffle(sums, sums, high))
                half //= 2
            total = builder.extract_element(sums, ir.Constant(ir.IntType(32), 0))
            done = to.at(first, (vectors, _LANES))

            def rest(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                return [add(F32, totals[0], builder.add(done, index))]

            remaining = builder.sub(last, done)
            return to.loop(remaining, [total], rest)[0]

        return signature, codegen

    row_sum.__doc__ = (
        f"The sum of {'the squares of ' if squared else ''}x[first:last], x a pointer to float32: "
        f"{_LANES} partial sums, halved until one is left, then the rest one by one."
    )
    return intrinsic(row_sum)


row_sum = _row_sum(squared=False)
row_sum_of_squares = _row_sum(squared=True)
