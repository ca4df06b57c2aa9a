"""backend="auto": the fastest backend for a shape, measured once and remembered per machine.

The first call with a new shape times each usable backend on random data of that shape (rows
rounded up to a power of two) and keeps the answer in the user cache. `QUASAR_LAB_AUTOTUNE=0`
turns the measurement off: then the first backend in the order of preference serves.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

_REPEATS = 3
_LARGEST_BUCKET = 512

# This process's choices, by all that they depend on.
chosen: dict[tuple[object, ...], ModuleType] = {}


def _machine() -> str:
    """What the answers depend on: processor, threads, versions."""
    from quasar_lab import __version__
    from quasar_lab.tiles.instruction_sets import best_instruction_set

    facts = [
        platform.machine(),
        platform.processor(),
        best_instruction_set(),
        os.cpu_count(),
        torch.get_num_threads(),
        torch.__version__,
        __version__,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _file() -> Path:
    from quasar_lab.loading import cache_directory

    return cache_directory() / f"backends-{_machine()}.json"


@functools.cache
def _known() -> dict[str, str]:
    try:
        known = json.loads(_file().read_text())
        return {key: name for key, name in known.items() if isinstance(name, str)}
    except (OSError, ValueError, AttributeError):
        return {}


def _remember(key: str, name: str) -> None:
    """Keep an answer; a cache that cannot be written only costs the next process a measurement."""
    _known()[key] = name
    with contextlib.suppress(OSError):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "w") as stream:
            json.dump(_known(), stream, indent=1, sort_keys=True)
        os.replace(temporary, file)


def forget() -> None:
    """Drop what this process remembers (the file stays)."""
    _known.cache_clear()
    chosen.clear()


def _measure(module: ModuleType, x: Tensor, weight: Tensor, scale: Tensor) -> float:
    """The shortest of a few runs, in seconds; the first one compiles and does not count.

    On a GPU what it is busy for, with its cache emptied before: Python's launches, which take
    longer than a small product, are not repeated when a CUDA graph is.
    """
    if x.is_cuda and importlib.util.find_spec("triton") is not None:
        from triton.testing import do_bench

        with torch.cuda.device(x.device):  # whose clock it reads
            milliseconds = do_bench(
                lambda: module.w8a8_linear(x, weight, scale, None), return_mode="min"
            )
        return milliseconds / 1e3
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        module.w8a8_linear(x, weight, scale, None)
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def fastest(usable: Mapping[str, ModuleType], rows: int, weight: Tensor) -> str:
    """The name of the usable backend that is fastest for `rows` rows and this weight's shape."""
    names = list(usable)
    if len(names) == 1 or os.environ.get("QUASAR_LAB_AUTOTUNE", "1") == "0":
        return names[0]
    bucket = min(1 << max(rows - 1, 0).bit_length(), _LARGEST_BUCKET)
    place = torch.cuda.get_device_name(weight.device) if weight.is_cuda else weight.device.type
    key = f"{place} {torch.get_num_threads()} {bucket}x{list(weight.shape)}"
    known = _known().get(key)
    if known is not None and known in usable:
        return known
    generator = torch.Generator(device=weight.device).manual_seed(0)
    x = torch.randn(bucket, weight.shape[1], device=weight.device, generator=generator)
    scale = torch.ones(weight.shape[0], device=weight.device)
    seconds = {name: _measure(usable[name], x, weight, scale) for name in names}
    best = min(seconds, key=seconds.__getitem__)
    _remember(key, best)
    return best
