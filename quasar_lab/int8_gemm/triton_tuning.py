"""How the Triton products are cut into tiles: the candidates for a shape, and the fastest of them.

The best cut depends on the chip and the shape, and no formula knows it: so the first call with a
shape times a dozen candidates and remembers the winner for the process. `QUASAR_LAB_AUTOTUNE=0`
turns the measurement off; a CUDA graph that is being captured cannot be measured either. Then the
first candidate serves, which keeps every multiprocessor busy too.
"""

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

# M up to which the weights' bytes, not the arithmetic, set the time: the small-M kernel's reach.
SMALL_M = 64

# More rows than this are timed as this many.
_MOST_ROWS = 4096

# Milliseconds that each candidate is warmed up and measured.
_WARM_UP, _MEASURE = 5, 20


@dataclass(frozen=True, slots=True)
class Chip:
    """What the choice needs to know of a GPU: multiprocessors, shared memory (bytes) a block, and
    whether its tensor cores are Hopper's, which read their operands from shared memory.

    Shared memory limits: CUDA C++ programming guide, technical specifications per compute
    capability.
    """

    multiprocessors: int
    shared_memory: int
    hopper: bool = False


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to cut the product: block sizes, parts of K, warps a program, pipeline stages.

    swap: the tensor cores' first operand is the weights' block (see `_dot_tile`).
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    swap: bool = False

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that the pipeline's INT8 blocks take at most."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k


# (block_n, block_k, num_warps, num_stages). Each program has 40 to 80 KB of weights on their way:
# memory answers after about 600 ns, in which 4.8 TB/s deliver 22 KB to each of 132 multiprocessors.
_SMALL = (
    (64, 256, 4, 4),
    (128, 128, 8, 5),
    (64, 128, 4, 6),
    (32, 512, 4, 4),
    (32, 512, 4, 6),
    (128, 256, 8, 3),
)
_SMALL_SWAPPED = ((64, 256, 4, 4), (128, 128, 4, 5), (128, 256, 4, 3))

# (block_m, block_n, block_k, num_warps, num_stages)
_LARGE = (
    (128, 128, 128, 8, 3),
    (64, 128, 128, 4, 4),
    (64, 256, 128, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 64, 128, 4, 3),
)
# Where the operands pass through registers this one would spill.
_LARGE_HOPPER = ((128, 256, 128, 8, 4),)


def _parts_of_k(programs: int, K: int, block_k: int, multiprocessors: int) -> list[int]:
    """Powers of two, from 3/4 of the chip busy to one and a half programs on each multiprocessor.

    A part keeps at least two blocks of K: with fewer there is no pipeline to fill.
    """
    parts, candidates = 1, []
    while True:
        last = 2 * programs * parts >= 3 * multiprocessors or 4 * block_k * parts > K
        if last or 4 * programs * parts >= 3 * multiprocessors:
            candidates.append(parts)
        if last:
            return candidates
        parts *= 2


def small_m_tilings(M: int, N: int, K: int, chip: Chip) -> list[Tiling]:
    """Candidates for M <= SMALL_M; one block of rows holds all of M."""
    block_m = 16 if M <= 16 else 32 if M <= 32 else 64
    blocks = [(block, False) for block in _SMALL]
    # With 64 rows the plain order fills Hopper's tensor cores too.
    if chip.hopper and block_m < 64:
        blocks += [(block, True) for block in _SMALL_SWAPPED]
    tilings = [
        Tiling(block_m, block_n, block_k, parts, num_warps, num_stages, swap)
        for (block_n, block_k, num_warps, num_stages), swap in blocks
        for parts in _parts_of_k(-(-N // block_n), K, block_k, chip.multiprocessors)
    ]
    return [tiling for tiling in tilings if tiling.shared_memory <= chip.shared_memory]


def large_m_tilings(chip: Chip) -> list[Tiling]:
    """Candidates for M > SMALL_M."""
    blocks = _LARGE + (_LARGE_HOPPER if chip.hopper else ())
    tilings = [Tiling(m, n, k, 1, num_warps, stages) for m, n, k, num_warps, stages in blocks]
    return [tiling for tiling in tilings if tiling.shared_memory <= chip.shared_memory]


@functools.cache
def this_chip(device: torch.device) -> Chip:
    """The chip of a CUDA device; for the interpreter's "cpu" an H200's numbers."""
    if device.type == "cpu":
        return Chip(multiprocessors=132, shared_memory=227 * 1024, hopper=True)
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)
    return Chip(
        properties["multiprocessor_count"],
        properties["max_shared_mem"],
        hopper=torch.cuda.get_device_capability(device)[0] == 9,
    )


_fastest: dict[tuple[object, ...], Tiling] = {}


def fastest_tiling(
    M: int, N: int, K: int, device: torch.device, launch: Callable[[Tiling], object]
) -> Tiling:
    """The fastest candidate for this shape (M up to the next power of two) on this device.

    launch(tiling) runs the product once; running it again must be harmless.
    """
    rows = min(1 << (M - 1).bit_length(), _MOST_ROWS)
    key = (device, rows, N, K)
    if key in _fastest:
        return _fastest[key]
    chip = this_chip(device)
    tilings = small_m_tilings(M, N, K, chip) if M <= SMALL_M else large_m_tilings(chip)
    if (
        device.type == "cpu"
        or os.environ.get("QUASAR_LAB_AUTOTUNE", "1") == "0"
        or torch.cuda.is_current_stream_capturing()
    ):
        return tilings[0]
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    # do_bench empties the L2 cache between runs, as the other layers' weights would.
    def milliseconds(tiling: Tiling) -> float:
        try:
            return do_bench(
                lambda: launch(tiling), warmup=_WARM_UP, rep=_MEASURE, return_mode="median"
            )
        except OutOfResources:  # a compiler that needs more than the estimate: not on this chip
            return math.inf

    _fastest[key] = min(tilings, key=milliseconds)
    return _fastest[key]
