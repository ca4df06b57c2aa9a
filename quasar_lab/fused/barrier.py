"""A barrier for threads of a compiled function that gives way when another program wants the core.

OpenMP's barrier spins for milliseconds. That is right while every thread has a core of its own;
but once a second program runs, two threads may share one core, and each barrier then lasts until
the waiting thread has spun away its time slice: a step with 300 barriers takes a second. This one
spins for some tens of microseconds, longer than equal shares of work ever differ, and then offers
its core at every look. On a quiet machine nothing is lost: there the offer returns at once.
"""

import ctypes
import functools
import os

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# One cache line for the count of arrivals, one for the number of the round: two int64.
BARRIER_BYTES = 128
_ROUND = 64

# Looks before the first offer. An offer made too early costs a time slice (3 ms) itself, when the
# second program takes it while the other threads are about to arrive.
_LOOKS = 200_000

# Compiled code calls it by this name; `bind_symbols` says what that is.
_give_way = types.ExternalFunction("quasar_lab_give_way", types.int32())


@ctypes.CFUNCTYPE(ctypes.c_int)
def _stay() -> int:
    return 0


@functools.cache
def bind_symbols() -> None:
    """Make the name known to the compiler; call before compiling or loading a kernel."""
    # where there is no sched_yield (Windows) kernels run on one thread, which never waits
    function = ctypes.CDLL(None).sched_yield if os.name == "posix" else _stay
    address = ctypes.cast(function, ctypes.c_void_p).value
    llvmlite.binding.add_symbol("quasar_lab_give_way", address)


@intrinsic
def _add(typingctx, address, amount):  # type: ignore[no-untyped-def]
    """Atomically add to an int64 in memory; what was there before."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _read(typingctx, address):  # type: ignore[no-untyped-def]
    """An int64 from memory, and with it all that was written before it."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), codegen


@njit
def wait_for_all(address, threads):  # type: ignore[no-untyped-def]
    """Return once `threads` threads have called this with the same address.

    address: of BARRIER_BYTES zeroed bytes, aligned to a cache line; they serve many rounds.
    """
    if threads == 1:
        return
    current = _read(address + _ROUND)
    if _add(address, 1) == threads - 1:
        _add(address, -threads)
        _add(address + _ROUND, 1)
        return
    looks = 0
    while _read(address + _ROUND) == current:
        looks += 1
        if looks > _LOOKS:
            _give_way()
