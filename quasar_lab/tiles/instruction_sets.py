"""How processors multiply INT8 vectors exactly, and which of these ways this one has.

- "vnni512", "vnni256": `vpdpbusd` adds four u8 x s8 products into an int32 lane. The weight is
  shifted into u8 (w + 128); 128 * sum(a) is subtracted at the end. It wraps, never saturates.
- "avx512": both operands are widened to int16 and `vpmaddwd` adds two exact products into an
  int32 lane.
- "avx2": `vpmaddubsw` adds two products of |a| and a weight that has taken over the input's sign
  into an int16, `vpmaddwd` by ones two of these into an int32 lane. It counts each negative input
  once too often, which is subtracted at the end (signs.py).
- "portable": the same loop left to the compiler, for every other processor.

All are exact for every int8 input as long as the final sum fits an int32.
"""

import functools
from dataclasses import dataclass

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, config

_I16, _I32 = ir.IntType(16), ir.IntType(32)


@functools.cache
def processor_features() -> frozenset[str]:
    """What numba compiles for: this processor, unless NUMBA_CPU_FEATURES says otherwise."""
    told: str | None = getattr(config, "CPU_FEATURES", None)
    if told is None:
        found = llvmlite.binding.get_host_cpu_features()
        return frozenset(name for name, has in found.items() if has)
    return frozenset(part[1:] for part in told.split(",") if part.startswith("+"))


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """How one processor family multiplies.

    features: what the CPU must have; step: weights per vector; lanes: int32 sums per vector;
    max_rows: the tallest tile whose sums and operands fit the vector registers; widens: the
    activations are passed as int16; signs: as vectors of magnitudes and of sign masks in turn;
    else as int8.
    """

    name: str
    features: tuple[str, ...]
    step: int
    lanes: int
    max_rows: int
    widens: bool
    signs: bool = False

    @property
    def available(self) -> bool:
        return processor_features().issuperset(self.features)


INSTRUCTION_SETS = {
    each.name: each
    for each in (
        InstructionSet("vnni512", ("avx512vnni", "avx512bw"), 64, 16, 6, False),
        InstructionSet("vnni256", ("avx512vnni", "avx512vl"), 32, 8, 6, False),
        InstructionSet("avx512", ("avx512bw",), 32, 16, 6, True),
        InstructionSet("avx2", ("avx2",), 32, 8, 2, False, signs=True),
        InstructionSet("portable", (), 16, 16, 2, True),
    )
}


@functools.cache
def best_instruction_set() -> str:
    """The first instruction set of the table that this processor has."""
    return next(name for name, each in INSTRUCTION_SETS.items() if each.available)


def dot_accumulate(
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
    if isa.name == "avx512":
        name = "llvm.x86.avx512.pmaddw.d.512"
        function = cgutils.get_or_insert_function(
            module, ir.FunctionType(lanes, [a.type, a.type]), name
        )
        return builder.add(total, builder.call(function, [a, w]))
    if isa.signs:
        halves, ones = ir.VectorType(_I16, isa.step // 2), [1] * (isa.step // 2)
        numbers = range(isa.step), range(isa.step, 2 * isa.step)
        order = [ir.Constant(ir.VectorType(_I32, isa.step), list(each)) for each in numbers]
        size, mask = (builder.shuffle_vector(a, a, each) for each in order)
        multiply_bytes = cgutils.get_or_insert_function(
            module, ir.FunctionType(halves, [w.type, w.type]), "llvm.x86.avx2.pmadd.ub.sw"
        )
        add_pairs = cgutils.get_or_insert_function(
            module, ir.FunctionType(lanes, [halves, halves]), "llvm.x86.avx2.pmadd.wd"
        )
        pairs = builder.call(multiply_bytes, [size, builder.xor(w, mask)])
        sums = builder.call(add_pairs, [pairs, ir.Constant(halves, ones)])
        return builder.add(total, sums)
    return builder.add(total, builder.mul(builder.sext(a, lanes), builder.sext(w, lanes)))
