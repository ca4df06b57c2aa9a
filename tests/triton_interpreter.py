"""A process that runs the Triton kernels in Triton's interpreter, for the tests to call.

Triton decides when it is imported whether `@triton.jit` compiles or interprets. The tests need
both: they compile in their own process and interpret in this one.
"""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def _become_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    _round_bfloat16()
    _multiply_bfloat16()


def _round_bfloat16() -> None:
    """GPUs round fp32 to the nearest bf16; the interpreter of triton 3.9 cuts the lower bits off.

    With torch's rounding in its place the results can be compared bit for bit.
    """
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            exact = torch.from_numpy(data.copy().reshape(-1)).bfloat16()
            return exact.view(torch.uint16).numpy().reshape(data.shape)
        return convert(data, source, target, mode)

    interpreter._convert_float = rounding


def _multiply_bfloat16() -> None:
    """The interpreter keeps bf16 as its bits, and multiplies those as if they were numbers."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    product = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = torch.from_numpy(handle.data.copy()).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return product(builder, widened(a), widened(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _call(packed: bytes) -> bytes:
    from quasar_lab.int8_gemm import triton_backend

    name, arguments, options = pickle.loads(packed)
    return pickle.dumps(getattr(triton_backend, name)(*arguments, **options))


def _run(packed: bytes) -> bytes:
    function, arguments = pickle.loads(packed)
    return pickle.dumps(function(*arguments))


class Interpreter:
    """`Interpreter().int8_matmul(a, b)` is `triton_backend.int8_matmul(a, b)`, interpreted."""

    def __init__(self) -> None:
        self._worker = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_become_interpreter
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # hypothesis asks how to print it
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            # plain pickle: torch's own would pass tensors through shared memory
            packed = pickle.dumps((name, arguments, options))
            return pickle.loads(self._worker.submit(_call, packed).result())

        return call

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of a module returns there."""
        packed = pickle.dumps((function, arguments))
        return pickle.loads(self._worker.submit(_run, packed).result())

    def close(self) -> None:
        self._worker.shutdown()
