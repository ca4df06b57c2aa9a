"""Look at the Triton kernels without a GPU: their source, and their results in the interpreter.

    python -m quasar_lab.int8_gemm.triton_reading FILE

is the process that `run_interpreted` starts: Triton decides when it is imported whether kernels
are compiled or interpreted, so the interpreter needs a process of its own.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from jaxtyping import Float, Float32, Int8
from safetensors.torch import load_file, save_file
from torch import Tensor

from quasar_lab.errors import UserError

_KERNELS = "quasar_lab.int8_gemm.triton_kernels"


def has_triton() -> bool:
    """Whether triton is installed (a GPU is not needed to read, compile and interpret)."""
    return importlib.util.find_spec("triton") is not None


def kernel_source(name: str) -> str:
    """The source text of a function of triton_kernels.py; works without triton.

    Raises UserError for a name that is not there.
    """
    spec = importlib.util.find_spec(_KERNELS)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text()
    functions = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    if name not in functions:
        raise UserError(f"there is no kernel {name!r}: choose from {', '.join(functions)}")
    node = functions[name]
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def run_interpreted(
    x: Float[Tensor, "M K"], qweight: Int8[Tensor, "N K"], weight_scale: Float32[Tensor, "N"]
) -> Float[Tensor, "M N"]:
    """`w8a8_linear` by the Triton kernels in Triton's interpreter on the CPU: slow, and the same.

    Raises UserError when triton is not installed.
    """
    if not has_triton():
        raise UserError("triton is not installed: pip install 'quasar-lab[triton-ci]' (Linux)")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "tensors")
        tensors = {"x": x, "qweight": qweight, "weight_scale": weight_scale}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        subprocess.run(
            [sys.executable, "-m", __name__, file],
            check=True,
            env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        return load_file(file)["out"]


def main() -> None:
    from quasar_lab.int8_gemm import triton_backend

    torch.set_num_threads(1)
    tensors = load_file(sys.argv[1])
    save_file({"out": triton_backend.w8a8_linear(**tensors)}, sys.argv[1])


if __name__ == "__main__":
    main()
