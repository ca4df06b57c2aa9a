"""Products held in vector registers, written in LLVM's language and compiled by numba.

`instruction_sets`: how processors multiply INT8; `emitter`: shorthand for vector code;
`linear_tile`, `mix_tile`: a few rows times a few columns; `signs`: how AVX2 multiplies bytes;
`row_sum`: a sum in a fixed order; `linear`: a whole W8A8 linear.
"""

import functools
import hashlib
from pathlib import Path


@functools.cache
def source_revision() -> str:
    """A hash of all files that kernels are compiled from.

    Numba's cache watches only the file of the function that it keeps: kernels name this as well.
    """
    package = Path(__file__).parents[1]
    files = sorted(
        file
        for folder in ("tiles", "fused", "int8_gemm")
        for file in (package / folder).glob("*.py")
    )
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
