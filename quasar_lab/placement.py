"""Memory in pages of 2 MB for what a step reads from end to end: weights and KV cache.

A decoder step is a walk through memory, and with pages of 4 KB the processor looks up a new address
every 64 cache lines; in a virtual machine each lookup is itself several reads. Large pages, asked
for before the memory is first written, read up to twice as fast. Linux gives them if it can; where
the wish is unknown this is ordinary memory.
"""

import contextlib
import math
import mmap
import weakref

import torch
from torch import Tensor

_LARGE_PAGE = 2 << 20
_LINE = 64
# The default is shared memory, which has rules of its own. Windows knows neither.
_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)

# The mappings in use, by address: how a tensor is recognised as placed. Those that no tensor
# refers to any more leave by themselves.
_mappings: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    # Tensors start on a cache line; the line after the last number may be read but is not used.
    return -(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE + _LINE


def reserve(*tensors: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """Uninitialised CPU tensors of these (shape, dtype), one behind the other in one mapping.

    At least 64 bytes after each tensor are readable memory.
    """
    if not tensors:
        return []
    sizes = [_num_bytes(shape, dtype) for shape, dtype in tensors]
    total = -(-sum(sizes) // _LARGE_PAGE) * _LARGE_PAGE
    # one page more, of addresses only, to begin at a multiple of the page size
    memory = mmap.mmap(-1, total + _LARGE_PAGE, **_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _LARGE_PAGE
    # no larger than its content, for it is copied and saved as a whole
    block = torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=sum(sizes))
    _mappings[block.untyped_storage().data_ptr()] = memory
    at = 0
    placed = []
    for (shape, dtype), size in zip(tensors, sizes, strict=True):
        numbers = block[at : at + math.prod(shape) * dtype.itemsize]
        placed.append(numbers.view(dtype).view(shape))
        at += size
    return placed


def is_placed(tensor: Tensor) -> bool:
    """Whether the tensor lies in memory of `reserve`."""
    return tensor.untyped_storage().data_ptr() in _mappings
