"""The innermost loop of the CPU kernel: a small tile of dot products held in registers.

One tile multiplies `rows` activation rows with `columns` weight rows. Each weight vector is read
from memory once and meets all activation rows while it is in a register: that is why 6 tokens
cost hardly more than 1. How a vector of products is summed depends on the processor:

- "vnni512", "vnni256": `vpdpbusd` adds four u8 x s8 products into an int32 lane. The weight is
  shifted into u8 (w + 128); 128 * sum(a) is subtracted at the end. It wraps, never saturates.
- "avx512", "avx2": both operands are widened to int16 and `vpmaddwd` adds two exact products
  into an int32 lane.
- "portable": the same loop left to the compiler, for every other processor.

All are exact for every int8 input as long as the final sum fits an int32.
"""

import functools
from dataclasses import dataclass

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """How one processor family multiplies.

    features: what the CPU must report; step: weights per vector; lanes: int32 sums per vector;
    max_rows: the tallest tile whose sums and operands fit the vector registers; widens: the
    activations are passed as int16 (else as int8, and the sums come out shifted, see dot_tile).
    """

    name: str
    features: tuple[str, ...]
    step: int
    lanes: int
    max_rows: int
    widens: bool

    @property
    def available(self) -> bool:
        host = llvmlite.binding.get_host_cpu_features()
        return all(host.get(feature, False) for feature in self.features)


# Weight rows in a tile: two independent streams, and each activation vector is used twice.
COLUMNS = 2

INSTRUCTION_SETS = {
    each.name: each
    for each in (
        InstructionSet("vnni512", ("avx512vnni", "avx512bw"), 64, 16, 8, False),
        InstructionSet("vnni256", ("avx512vnni", "avx512vl"), 32, 8, 4, False),
        InstructionSet("avx512", ("avx512bw",), 32, 16, 8, True),
        InstructionSet("avx2", ("avx2",), 16, 8, 4, True),
        InstructionSet("portable", (), 16, 16, 2, True),
    )
}


@functools.cache
def best_instruction_set() -> str:
    """The first instruction set of the table that this processor has."""
    return next(name for name, each in INSTRUCTION_SETS.items() if each.available)


def _dot_accumulate(
    builder: ir.IRBuilder, isa: InstructionSet, total: ir.Value, a: ir.Value, w: ir.Value
) -> ir.Value:
    """total + the products of one vector of activations with one prepared vector of weights."""
    module = builder.module
    lanes = ir.VectorType(_I32, isa.lanes)
    if isa.name.startswith("vnni"):
        name = f"llvm.x86.avx512.vpdpbusd.{isa.step * 8}"
        # LLVM 22 declares the byte operands as bytes, earlier ones as int32 lanes
        operand = a.type if llvmlite.binding.llvm_version_info[0] >= 22 else lanes
        function = cgutils.get_or_insert_function(
            module, ir.FunctionType(lanes, [lanes, operand, operand]), name
        )
        cast = [builder.bitcast(each, operand) for each in (w, a)]
        return builder.call(function, [total, *cast])
    if isa.name in ("avx2", "avx512"):
        name = "llvm.x86.avx2.pmadd.wd" if isa.name == "avx2" else "llvm.x86.avx512.pmaddw.d.512"
        function = cgutils.get_or_insert_function(
            module, ir.FunctionType(lanes, [a.type, a.type]), name
        )
        return builder.add(total, builder.call(function, [a, w]))
    return builder.add(total, builder.mul(builder.sext(a, lanes), builder.sext(w, lanes)))


def _load(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, count: int) -> ir.Value:
    pointer = builder.inttoptr(address, ir.VectorType(element, count).as_pointer())
    return builder.load(pointer, align=1)


def _horizontal_sums(builder: ir.IRBuilder, totals: list[ir.Value], lanes: int) -> list[ir.Value]:
    """Sum each vector's lanes, all together: adding even and odd lanes of two vectors at a time
    leaves the sums side by side in one vector (or a few) after log2(lanes) rounds.
    """
    zero = ir.Constant(totals[0].type, None)
    totals = totals + [zero] * (2 ** (len(totals) - 1).bit_length() - len(totals))
    per_total = lanes
    while per_total > 1:
        pairs = list(zip(totals[0::2], totals[1::2], strict=False)) or [(totals[0], zero)]
        sums = []
        for first, second in pairs:
            halves = [
                builder.shuffle_vector(
                    first,
                    second,
                    ir.Constant(ir.VectorType(_I32, lanes), list(range(parity, 2 * lanes, 2))),
                )
                for parity in (0, 1)
            ]
            sums.append(builder.add(*halves))
        totals = sums
        per_total //= 2
    return totals


def _emit_tile(
    builder: ir.IRBuilder, isa: InstructionSet, rows: int, columns: int, addresses: list[ir.Value]
) -> None:
    """Write the code of one tile: the loop over K, its rest, the horizontal sums, the store."""
    a, a_stride, w, w_stride, k, tail, out = addresses
    a_element = _I16 if isa.widens else _I8
    a_bytes = isa.step * (2 if isa.widens else 1)
    lanes = ir.VectorType(_I32, isa.lanes)
    flip = ir.Constant(ir.VectorType(_I8, isa.step), [-128] * isa.step)
    widened = ir.VectorType(_I16, isa.step)

    def constant(value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    def offset(base: ir.Value, stride: ir.Value, count: int, more: ir.Value) -> ir.Value:
        return builder.add(builder.add(base, builder.mul(stride, constant(count))), more)

    def accumulate(
        totals: list[ir.Value], a_offset: ir.Value, weights: list[ir.Value]
    ) -> list[ir.Value]:
        if isa.widens:
            prepared = [builder.sext(each, widened) for each in weights]
        else:
            prepared = [builder.xor(each, flip) for each in weights]
        result = []
        for r in range(rows):
            activation = _load(builder, offset(a, a_stride, r, a_offset), a_element, isa.step)
            for c in range(columns):
                total = totals[r * columns + c]
                result.append(_dot_accumulate(builder, isa, total, activation, prepared[c]))
        return result

    zero = ir.Constant(lanes, None)
    whole = builder.udiv(k, constant(isa.step))
    entry = builder.block
    loop, body, after, rest, store = (
        builder.append_basic_block(f"tile.{name}")
        for name in ("loop", "body", "after", "rest", "store")
    )
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(_I64)
    totals = [builder.phi(lanes) for _ in range(rows * columns)]
    builder.cbranch(builder.icmp_unsigned("<", index, whole), body, after)

    builder.position_at_end(body)
    position = builder.mul(index, constant(isa.step))
    weights = [
        _load(builder, offset(w, w_stride, c, position), _I8, isa.step) for c in range(columns)
    ]
    summed = accumulate(totals, builder.mul(index, constant(a_bytes)), weights)
    index.add_incoming(constant(0), entry)
    index.add_incoming(builder.add(index, constant(1)), body)
    for phi, step in zip(totals, summed, strict=True):
        phi.add_incoming(zero, entry)
        phi.add_incoming(step, body)
    builder.branch(loop)

    builder.position_at_end(after)
    remainder = builder.urem(k, constant(isa.step))
    builder.cbranch(builder.icmp_unsigned("!=", remainder, constant(0)), rest, store)

    builder.position_at_end(rest)
    weights = [
        _load(builder, builder.add(tail, constant(c * isa.step)), _I8, isa.step)
        for c in range(columns)
    ]
    with_rest = accumulate(totals, builder.mul(whole, constant(a_bytes)), weights)
    builder.branch(store)

    builder.position_at_end(store)
    final = []
    for total, more in zip(totals, with_rest, strict=True):
        final.append(builder.phi(lanes))
        final[-1].add_incoming(total, after)
        final[-1].add_incoming(more, rest)
    vectors = _horizontal_sums(builder, final, isa.lanes)
    for position in range(rows * columns):
        lane = ir.Constant(_I32, position % isa.lanes)
        value = builder.extract_element(vectors[position // isa.lanes], lane)
        address = builder.add(out, constant(4 * position))
        builder.store(value, builder.inttoptr(address, _I32.as_pointer()))


@intrinsic(prefer_literal=True)
def dot_tile(typingctx, isa_name, columns, rows, a, a_stride, w, w_stride, k, tail, out):  # type: ignore[no-untyped-def]
    """out[r, c] = sum_k a[r, k] * w[c, k] as int32, plus 128 * sum_k a[r, k] with VNNI.

    isa_name and columns are constants, rows is 1 to the instruction set's max_rows. a, w, tail
    and out are addresses, strides are in bytes. a holds int8 (VNNI) or int16 values, zero-padded
    to a whole number of vectors; w holds int8; `tail` points to `columns` vectors that hold what
    is left of each weight row after its last whole vector, zero-padded.
    """
    isa = INSTRUCTION_SETS[isa_name.literal_value]
    num_columns = columns.literal_value
    signature = types.void(isa_name, columns, *[types.int64] * 8)

    def codegen(context, builder: ir.IRBuilder, signature: Signature, args):  # type: ignore[no-untyped-def]
        rows, addresses = args[2], args[3:]
        end = builder.append_basic_block("tile.end")
        switch = builder.switch(rows, end)
        for num_rows in range(1, isa.max_rows + 1):
            case = builder.append_basic_block(f"tile.rows{num_rows}")
            switch.add_case(ir.Constant(_I64, num_rows), case)
            builder.position_at_end(case)
            _emit_tile(builder, isa, num_rows, num_columns, addresses)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, codegen
