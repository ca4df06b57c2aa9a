"""Shorthand for writing vector code in LLVM's language, which numba compiles with the rest.

numba has no type for a vector register. An `@intrinsic` may emit LLVM instructions itself, and
LLVM has vectors of any length and makes the best of them on every processor.
"""

from collections.abc import Callable

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()


def constant(value: int) -> ir.Constant:
    """An int64."""
    return ir.Constant(I64, value)


class Emitter:
    """Writes at the end of a builder's current block. Addresses are int64 values, in bytes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def function(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        """Declare a function of LLVM's by name, once a module."""
        module = self.builder.module
        known = module.globals.get(name)
        return known or ir.Function(module, ir.FunctionType(result, arguments), name)

    def at(self, base: ir.Value, *terms: tuple[ir.Value, int]) -> ir.Value:
        """base + the sum of value * number."""
        for value, number in terms:
            base = self.builder.add(base, self.builder.mul(value, constant(number)))
        return base

    def opaque(self, value: ir.Value) -> ir.Value:
        """An int64 of which LLVM knows only that it is in a register.

        Otherwise it splits the few addresses of a tile's loop into many and steps each of them in
        every turn.
        """
        return self.builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], False)

    def load(self, kind: ir.Type, address: ir.Value) -> ir.Value:
        """A value of any type from memory that need not be aligned."""
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        """A value of any type to memory that need not be aligned."""
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=1)

    def shuffle(self, first: ir.Value, second: ir.Value, order: list[int]) -> ir.Value:
        """Elements of two vectors, counted through both, in this order."""
        mask = ir.Constant(ir.VectorType(I32, len(order)), order)
        return self.builder.shuffle_vector(first, second, mask)

    def splat(self, value: ir.Value, count: int) -> ir.Value:
        """A vector of one number, `count` times."""
        empty = ir.Constant(ir.VectorType(value.type, count), None)
        one = self.builder.insert_element(empty, value, ir.Constant(I32, 0))
        return self.shuffle(one, one, [0] * count)

    def multiply_add(self, first: ir.Value, second: ir.Value, total: ir.Value) -> ir.Value:
        """total + first * second of float32 vectors, in one rounding where the processor can."""
        kind = total.type
        function = self.function(f"llvm.fmuladd.v{kind.count}f32", kind, [kind] * 3)
        return self.builder.call(function, [first, second, total])

    def prefetch(self, address: ir.Value) -> None:
        """Ask for a cache line to be brought into the second-level cache."""
        pointer = self.builder.inttoptr(address, I8.as_pointer())
        kinds = [I8.as_pointer(), I32, I32, I32]
        reading, second_level, data = (ir.Constant(I32, value) for value in (0, 2, 1))
        function = self.function("llvm.prefetch.p0", ir.VoidType(), kinds)
        self.builder.call(function, [pointer, reading, second_level, data])

    def loop(
        self,
        count: ir.Value,
        zeros: list[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
    ) -> list[ir.Value]:
        """totals = body(i, totals) for i in range(count), starting from zeros."""
        builder, entry = self.builder, self.builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "in", "out"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        totals = [builder.phi(zero.type) for zero in zeros]
        builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
        builder.position_at_end(inside)
        following = body(index, totals)
        index.add_incoming(constant(0), entry)
        index.add_incoming(builder.add(index, constant(1)), inside)
        for total, zero, value in zip(totals, zeros, following, strict=True):
            total.add_incoming(zero, entry)
            total.add_incoming(value, inside)
        builder.branch(head)
        builder.position_at_end(after)
        return totals

    def switch(self, value: ir.Value, most: int, emit: Callable[[int], None]) -> None:
        """Branch to code that was made for exactly this value, 1 to `most`."""
        builder = self.builder
        end = builder.append_basic_block("end")
        switch = builder.switch(value, end)
        for count in range(1, most + 1):
            block = builder.append_basic_block(f"case{count}")
            switch.add_case(constant(count), block)
            builder.position_at_end(block)
            emit(count)
            builder.branch(end)
        builder.position_at_end(end)
