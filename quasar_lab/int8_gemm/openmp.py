"""Run compiled kernels on torch's own OpenMP threads.

A second thread pool beside torch's costs milliseconds: after each parallel region the idle
threads of one pool spin on the cores that the other needs. So the kernels of this package borrow
torch's pool: `GOMP_parallel` of the OpenMP library that torch has already loaded calls a compiled
function once on each of `torch.get_num_threads()` threads. Where that library cannot be found
(no OpenMP build, macOS, Windows) the same function runs on one thread.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import llvmlite.binding
import torch
from numba import types

# Compiled code calls these by name; `_runtime` binds the names to addresses before any is loaded.
thread_index = types.ExternalFunction("quasar_lab_omp_thread_index", types.int32())
thread_count = types.ExternalFunction("quasar_lab_omp_thread_count", types.int32())
barrier = types.ExternalFunction("quasar_lab_omp_barrier", types.void())

_SYMBOLS = {
    "quasar_lab_omp_thread_index": "omp_get_thread_num",
    "quasar_lab_omp_thread_count": "omp_get_num_threads",
    "quasar_lab_omp_barrier": "GOMP_barrier",
}


def _loaded_openmp() -> ctypes.CDLL | None:
    """The OpenMP library that this process has loaded with torch, or None."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps if "omp" in line}
    # torch's own copy first, should another library have brought a second one
    for path in sorted(paths, key=lambda path: "torch" not in path):
        try:
            library = ctypes.CDLL(path)
            if all(hasattr(library, name) for name in (*_SYMBOLS.values(), "GOMP_parallel")):
                return library
        except OSError:
            continue
    return None


@ctypes.CFUNCTYPE(ctypes.c_int)
def _zero() -> int:
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int)
def _one() -> int:
    return 1


@ctypes.CFUNCTYPE(None)
def _nothing() -> None:
    return None


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    library = _loaded_openmp()
    alone = {"omp_get_thread_num": _zero, "omp_get_num_threads": _one, "GOMP_barrier": _nothing}
    for symbol, name in _SYMBOLS.items():
        function = alone[name] if library is None else getattr(library, name)
        address = ctypes.cast(function, ctypes.c_void_p).value
        llvmlite.binding.add_symbol(symbol, address)
    if library is not None:
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_uint] * 2
        library.GOMP_parallel.restype = None
    return library


def bind_symbols() -> None:
    """Make the OpenMP names known to the compiler; call before compiling or loading a kernel."""
    _runtime()


def shares_torch_threads() -> bool:
    """Whether kernels run on torch's threads here (otherwise on one thread)."""
    return _runtime() is not None


def run(kernel_address: int, arguments: Sequence[int]) -> None:
    """Call a compiled `void kernel(int64 *arguments)` once on each thread, and wait.

    The kernel asks `thread_index()` and `thread_count()` for its share. The GIL is released.
    """
    block = (ctypes.c_int64 * len(arguments))(*arguments)
    library = _runtime()
    if library is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel_address)(ctypes.addressof(block))
        return
    library.GOMP_parallel(kernel_address, block, torch.get_num_threads(), 0)
