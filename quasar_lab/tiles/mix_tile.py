"""A small tile of attention's second product: weights of a few queries times the cached values.

out[r, :] = sum_s p[r, s] * v[s, :]. The sums stay in registers while the values pass by once.
"""

from llvmlite import ir
from numba import types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from quasar_lab.tiles.emitter import F32, constant
from quasar_lab.tiles.linear_tile import FORMATS, Tile

# Of values: with max_rows they fill the registers as the 4 columns of a linear tile do.
VECTORS = 4


@intrinsic(prefer_literal=True)
def mix_tile(typingctx, name, vectors, rows, p, p_stride, v, v_stride, steps, out, out_stride):  # type: ignore[no-untyped-def]
    """out[r, :] = sum of p[r, s] * v[s, :] over s < steps, for a few vectors of each row.

    name (of a float format) and vectors (VECTORS or 1) are constants, rows is 1 to the format's
    max_rows; p, out: addresses of float32, v of the format's numbers; strides are in bytes.
    """
    kind, num_vectors = FORMATS[name.literal_value], vectors.literal_value
    signature = types.void(name, vectors, *[types.int64] * 8)

    def codegen(context, builder: ir.IRBuilder, signature: Signature, args):  # type: ignore[no-untyped-def]
        rows, p, p_stride, v, v_stride, steps, out, out_stride = args[2:]
        to = Tile(builder, kind)

        def place(base: ir.Value, j: int, num_bytes: int) -> ir.Value:
            return builder.add(base, constant(j * kind.lanes * num_bytes))

        def emit(num_rows: int) -> None:
            def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                row = builder.add(v, builder.mul(index, v_stride))
                values = [
                    to.prepare(to.load(to.weights, place(row, j, kind.weight_bytes)))
                    for j in range(num_vectors)
                ]
                following = []
                for r in range(num_rows):
                    weight = to.load(F32, to.at(p, (p_stride, r), (index, 4)))
                    spread = to.splat(weight, kind.lanes)
                    for value, total in zip(values, totals[r * num_vectors :], strict=False):
                        following.append(to.multiply_add(spread, value, total))
                return following

            zeros = [ir.Constant(to.sums, None)] * (num_rows * num_vectors)
            for i, total in enumerate(to.loop(steps, zeros, body)):
                r, j = divmod(i, num_vectors)
                to.store(total, place(to.at(out, (out_stride, r)), j, 4))

        to.switch(rows, kind.max_rows, emit)
        return context.get_dummy_value()

    return signature, codegen
