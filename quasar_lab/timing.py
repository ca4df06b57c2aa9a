"""Timing that can be trusted on a small machine: warm-up, taking turns, medians, real memory.

What is compared takes turns within one run, so that a machine that slows down does so for all. A
weight that fits the cache is measured in a rotation of copies that does not, since in a model the
other layers come between two uses of the same one.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import torch

from quasar_lab.placement import reserve

# Larger than the caches of any processor this is likely to run on, in bytes.
OUT_OF_CACHE = 256 * 2**20


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_interleaved(
    functions: Mapping[str, Callable[[int], object]],
    *,
    repeats: int = 20,
    warm_up: int = 2,
    lead_in: int = 0,
) -> pd.DataFrame:
    """Call each function with the number of the call, in turns, and time it.

    lead_in: calls before the timed one in each turn. In a model a product follows others of its
    kind; the first one after another library's finds its code and its threads' data gone from the
    caches. Returns one row a function: median, low (10 %) and high (90 %) in seconds, and repeats.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm_up + repeats):
        for name, function in functions.items():
            number = turn * (lead_in + 1)
            for _ in range(lead_in):
                function(number)
                number += 1
            synchronize()
            start = time.perf_counter()
            function(number)
            synchronize()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    rows = {
        name: {
            "median": float(np.median(values)),
            "low": float(np.quantile(values, 0.1)),
            "high": float(np.quantile(values, 0.9)),
            "repeats": len(values),
        }
        for name, values in seconds.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def read_bandwidth(*, repeats: int = 9, num_bytes: int = OUT_OF_CACHE) -> float:
    """Bytes a second that torch's threads read from memory: a sum over a large array (in large
    pages), the best of a few runs, since everything else on the machine can only slow it down."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        [array] = reserve(((num_bytes // 4,), torch.float32))
    else:
        array = torch.empty(num_bytes // 4, device=device)
    # written once: untouched pages are all the same page of zeros, which stays in the cache
    array.fill_(1)
    best = float("inf")
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        array.sum()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def copies_out_of_cache(num_bytes: int) -> int:
    """How many copies of an array of this size leave the cache between two uses of the same."""
    return max(1, -(-OUT_OF_CACHE // num_bytes))
