"""Compile the Triton kernels for a GPU that is not there: what CI checks and the notebook shows.

    python -m quasar_lab.int8_gemm.triton_compile --capability 90 --m 6 --n 4096 --k 4096

prints the PTX of the product of 6 rows with a 4096x4096 weight. It needs triton and no GPU. A
process with TRITON_INTERPRET=1 cannot compile: run it in another one, as `matmul_ptx` does.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quasar_lab.int8_gemm.triton_tuning import (
    SMALL_M,
    Chip,
    Tiling,
    large_m_tilings,
    small_m_tilings,
)

# One chip of each compute capability: A100, RTX 4090, H100 / H200.
CHIPS = {
    80: Chip(multiprocessors=108, shared_memory=163 * 1024),
    89: Chip(multiprocessors=128, shared_memory=99 * 1024),
    90: Chip(multiprocessors=132, shared_memory=227 * 1024, hopper=True),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's machine code in numbers. Bytes; stack_bytes is 0 when no register was spilled."""

    ptx: str
    shared_memory: int
    registers: int
    stack_bytes: int


def compile_for(
    kernel: Any,
    capability: int,
    pointers: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    aligned: bool = True,
    **options: object,
) -> Compiled:
    """Compile a kernel for a compute capability (80, 89, 90).

    pointers: argument -> element type ("i8", "fp32", "bf16", ...); constants: the constexpr
    arguments and those that are None; all others are int32, `eps` and `scale` fp32. aligned:
    pointers and sizes are multiples of 16, as Triton would find at the launch. options: num_warps
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: "fp32" if n in ("eps", "scale") else "i32" for n in kernel.arg_names}
    signature |= {name: f"*{element}" for name, element in pointers.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    multiples_of_16 = [
        (i,)
        for i, name in enumerate(kernel.arg_names)
        if name in pointers or (aligned and name in ("N", "K") and name not in constants)
    ]
    attributes = {position: [["tt.divisibility", 16]] for position in multiples_of_16}
    source = ASTSource(kernel, signature, dict(constants), attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False, **options},
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "kernel.cubin")
        with open(cubin, "wb") as file:
            file.write(compiled.asm["cubin"])
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(
        ptx=compiled.asm["ptx"],
        shared_memory=compiled.metadata.shared,
        registers=found["REG"],
        stack_bytes=found["STACK"] + found["LOCAL"],
    )


def compile_matmul(
    capability: int,
    tiling: Tiling,
    *,
    large: bool = False,
    out: str = "bf16",
    even_k: bool = True,
    aligned: bool = True,
) -> Compiled:
    """Compile one of the two products with a tiling; out "i32" leaves the scales out."""
    from quasar_lab.int8_gemm import triton_kernels

    pointers = {"x_ptr": "i8", "w_ptr": "i8", "out_ptr": out}
    constants: dict[str, object] = {
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "EVEN_K": even_k,
    }
    if out == "i32":
        constants |= dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "bias_ptr"))
    else:
        pointers |= {"x_scale_ptr": "fp32", "w_scale_ptr": "fp32", "bias_ptr": out}
    if large:
        constants["GROUP_M"] = 8
    else:
        constants |= {"SPLIT_K": tiling.split_k, "SWAP": tiling.swap}
        if tiling.split_k == 1:
            constants |= dict.fromkeys(("partial_ptr", "arrivals_ptr"))
        else:
            pointers |= dict.fromkeys(("partial_ptr", "arrivals_ptr"), "i32")
    return compile_for(
        triton_kernels.large_m_matmul_kernel if large else triton_kernels.small_m_matmul_kernel,
        capability,
        pointers,
        constants,
        aligned=aligned,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def matmul_ptx(capability: int = 90, M: int = 6, N: int = 4096, K: int = 4096) -> str:
    """The PTX of the product's first candidate for a shape, compiled in a process of its own."""
    arguments = (("--capability", capability), ("--m", M), ("--n", N), ("--k", K))
    return subprocess.run(
        [sys.executable, "-m", __name__, *(str(part) for pair in arguments for part in pair)],
        check=True,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the PTX of the INT8 product.")
    parser.add_argument("--capability", type=int, choices=CHIPS, default=90)
    for name, size in (("m", 6), ("n", 4096), ("k", 4096)):
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args()
    chip = CHIPS[arguments.capability]
    large = arguments.m > SMALL_M
    tiling = (
        large_m_tilings(chip)
        if large
        else small_m_tilings(arguments.m, arguments.n, arguments.k, chip)
    )[0]
    even_k = arguments.k % (tiling.block_k * tiling.split_k) == 0
    aligned = arguments.n % 16 == 0 and arguments.k % 16 == 0
    print(
        compile_matmul(
            arguments.capability, tiling, large=large, even_k=even_k, aligned=aligned
        ).ptx
    )


if __name__ == "__main__":
    main()
