"""The roofline of this machine: what a linear costs at M rows, and why.

A linear of M rows reads its weights once and does 2 M operations with each of them. Below some M
the time is that of reading (the step is *memory-bound*), above it that of the arithmetic
(*compute-bound*). Everything here runs on the GPU where there is one, else on torch's threads.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for
multicore architectures", Communications of the ACM 52(4), 2009.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import pandas as pd
import torch
from torch import Tensor

from quasar_lab.errors import UserError
from quasar_lab.int8_gemm import quantize_weight, w8a8_linear
from quasar_lab.timing import copies_out_of_cache, time_interleaved

INT8_PATH = "INT8, one pass"
ROW_BY_ROW_PATH = "INT8, row by row"

# path -> the format in which it reads the weights
FORMATS = {
    INT8_PATH: "INT8",
    ROW_BY_ROW_PATH: "INT8",
    "fp32 linear": "fp32",
    "fp32 transposed": "fp32",
    "bf16 linear": "bf16",
}
BYTES_PER_WEIGHT = {"INT8": 1, "bf16": 2, "fp32": 4}

# (rows, N = K) of products that arithmetic limits: their operands stay in the cache of a processor.
_PEAK_SHAPES = {"cpu": ((256, 1024), (512, 1024)), "cuda": ((4096, 4096), (8192, 8192))}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _backend() -> str:
    """The backend with a kernel of our own on this device: what the lesson is about."""
    return "cpu" if _device() == "cpu" else "auto"


def time_linears(
    N: int,
    K: int,
    rows: Sequence[int],
    *,
    row_by_row_up_to: int = 0,
    repeats: int = 7,
    generator: torch.Generator | None = None,
) -> pd.DataFrame:
    """Time one linear of an N x K weight for each number of rows, INT8 and full precision in turns.

    Each product reads the next copy of the weight, so that none is found in the cache.
    row_by_row_up_to: up to this M also time M products of one row each: tokens that pass through
    the model one after the other, so that each reads the weights from memory again.

    Returns one row for each M and path with columns M, path, format, seconds (the fast runs: a
    tenth of them is faster), median (seconds), operations_per_second (a multiply-add is two) and
    intensity (operations for each byte of weights). The fast runs, since everything else on the
    machine can only slow a product down, and the bandwidth to compare with is the best run's.
    """
    if min(N, K, *rows, repeats) < 1:
        raise UserError(f"N={N}, K={K}, rows={list(rows)}, repeats={repeats}: all must be positive")
    device, backend = _device(), _backend()
    base = torch.randn(N, K, generator=generator).to(device) / K**0.5
    quantized, scale = quantize_weight(base)

    def rotation(weight: Tensor) -> Iterator[Tensor]:
        count = copies_out_of_cache(weight.numel() * weight.element_size())
        return itertools.cycle([weight.clone() for _ in range(count)])

    # paths of one format share a rotation: none may find what another has just read
    int8, fp32, bf16 = rotation(quantized), rotation(base), rotation(base.bfloat16())
    linear = torch.nn.functional.linear

    def int8_linear(x: Tensor) -> Tensor:
        return w8a8_linear(x, next(int8), scale, backend=backend)

    def paths(x: Tensor) -> dict[str, Callable[[int], object]]:
        half, one_row = x.bfloat16(), x.split(1)
        found: dict[str, Callable[[int], object]] = {INT8_PATH: lambda _: int8_linear(x)}
        if len(x) <= row_by_row_up_to:
            found[ROW_BY_ROW_PATH] = lambda _: [int8_linear(row) for row in one_row]
        return found | {
            "fp32 linear": lambda _: linear(x, next(fp32)),
            # the same memory read as a [K, N] matrix: the layout matters to the time, not the value
            "fp32 transposed": lambda _: x @ next(fp32).view(K, N),
            "bf16 linear": lambda _: linear(half, next(bf16)),
        }

    records = []
    for M in rows:
        x = torch.randn(M, K, generator=generator).to(device)
        for path, time in time_interleaved(paths(x), repeats=repeats).iterrows():
            records.append(
                {
                    "M": M,
                    "path": path,
                    "format": FORMATS[str(path)],
                    "seconds": time["low"],
                    "median": time["median"],
                    "operations_per_second": 2 * M * N * K / time["low"],
                    "intensity": 2 * M / BYTES_PER_WEIGHT[FORMATS[str(path)]],
                }
            )
    return pd.DataFrame(records)


def fastest_full_precision(times: pd.DataFrame) -> pd.DataFrame:
    """For each M the fastest row of `time_linears` that is not INT8, indexed by M."""
    full = times[times["format"] != "INT8"]
    return full.loc[full.groupby("M")["seconds"].idxmin()].set_index("M")


def fastest_of_each_format(times: pd.DataFrame) -> pd.DataFrame:
    """For each format and M the fastest row of `time_linears`: the points of a roofline."""
    return times.loc[times.groupby(["format", "M"])["seconds"].idxmin()]


def _peak_paths(x: Tensor) -> dict[str, Callable[[int], object]]:
    """Products of x[M, K] with one K x K weight, by format."""
    weight = x[0].repeat(x.shape[1], 1)
    quantized, scale = quantize_weight(weight)
    half, half_weight = x.bfloat16(), weight.bfloat16()
    linear = torch.nn.functional.linear
    return {
        "INT8": lambda i: w8a8_linear(x, quantized, scale, backend=_backend()),
        "fp32": lambda i: linear(x, weight),
        "bf16": lambda i: linear(half, half_weight),
    }


def peak_rates(*, repeats: int = 7) -> dict[str, float]:
    """Operations a second of large products here: format (INT8, bf16, fp32) -> rate.

    Measured where arithmetic alone limits (many rows, operands in the cache), the best of a few
    runs and shapes: what these kernels reach, not what the data sheet promises.
    """
    device = _device()
    best = dict.fromkeys(BYTES_PER_WEIGHT, 0.0)
    for M, size in _PEAK_SHAPES[device]:
        x = torch.randn(M, size, generator=torch.Generator().manual_seed(0)).to(device)
        seconds = time_interleaved(_peak_paths(x), repeats=repeats)["low"]
        best = {name: max(best[name], 2 * M * size**2 / seconds[name]) for name in best}
    return best


def break_even_rows(
    operations_per_second: float, bandwidth: float, bytes_per_weight: float
) -> float:
    """The M at which the arithmetic of a linear takes as long as reading its weights.

    2 M operations a weight at `operations_per_second` against `bytes_per_weight` at `bandwidth`
    bytes a second; the activations, M / N of the weights, are left out.
    """
    if min(operations_per_second, bandwidth, bytes_per_weight) <= 0:
        raise UserError(
            f"rate {operations_per_second}, bandwidth {bandwidth} and bytes {bytes_per_weight} "
            "must be positive"
        )
    return operations_per_second * bytes_per_weight / (2 * bandwidth)
