#!/usr/bin/env python
"""INT8 GEMM against full precision over the layer shapes of four models, with the roofline here.

    python benchmarks/gemm.py                       all shapes, M = 1..64 and 512
    python benchmarks/gemm.py --models smollm2-135m --rows 1,6,8 --threads 1

Every backend and every full-precision path of one shape take turns in one run, two calls a turn of
which the second counts; each call gets the next of enough copies of the weight that none is found
in the cache. Bandwidth counts the bytes of the INT8 weight, as a share of what a plain read of
memory reached in the same turns; the ratio is to the fastest full-precision path found for that
shape and M.
Writes reports/gemm.json and reports/gemm.png.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from quasar_lab.int8_gemm import available_backends, quantize_weight, w8a8_linear
from quasar_lab.machine import describe_machine
from quasar_lab.placement import reserve
from quasar_lab.plots import plot_gemm
from quasar_lab.progress import ProgressBar
from quasar_lab.results import write_atomically
from quasar_lab.timing import copies_out_of_cache, time_interleaved

# (N, K) of each distinct linear: q, k/v, o, gate/up, down, lm_head
SHAPES = {
    "smollm2-135m": [(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)],
    "qwen3-0.6b": [(2048, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (1024, 3072)],
    "qwen3-8b": [(4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288)],
    "openpangu-7b": [(4096, 4096), (1024, 4096), (12800, 4096), (4096, 12800)],
}
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 512)
# A product of this many operations is timed once or twice only.
SLOW = 2e9
# A shared machine's bandwidth changes from minute to minute: so many bytes are read in every turn.
READ_BYTES = 64 << 20


def placed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in large pages, where the decoder keeps its weights: both sides read them faster."""
    places = reserve(*((tuple(tensor.shape), tensor.dtype) for tensor in tensors))
    return [place.copy_(tensor) for place, tensor in zip(places, tensors, strict=True)]


def full_precision_paths(
    weights: list[torch.Tensor],
) -> dict[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    """The ways to multiply in full precision that this torch offers; the fastest one counts."""
    linear = torch.nn.functional.linear
    count = len(weights)
    bf16 = placed([weight.bfloat16() for weight in weights])
    transposed = placed([weight.T.contiguous() for weight in weights])
    return {
        "fp32 linear": lambda x, i: linear(x, weights[i % count]),
        "fp32 transposed": lambda x, i: x @ transposed[i % count],
        "bf16 linear": lambda x, i: linear(x.bfloat16(), bf16[i % count]),
    }


def measure_shape(
    n: int, k: int, rows: list[int], backends: list[str], memory: list[torch.Tensor]
) -> list[dict]:
    """One row for each M and path. memory: large arrays, whose sums take their turn as well."""
    count = copies_out_of_cache(n * k)
    base = placed([torch.randn(n, k) / k**0.5 for _ in range(max(1, -(-count // 4)))])
    pairs = [quantize_weight(weight) for weight in base]
    # separate storage: copies that shared their bytes would be found in the cache
    qweights = placed([pairs[i % len(pairs)][0] for i in range(count)])
    quantized = [(weight, pairs[i % len(pairs)][1]) for i, weight in enumerate(qweights)]
    full = full_precision_paths(base)
    found = []
    for m in rows:
        x = torch.randn(m, k)
        functions: dict[str, Callable[[int], object]] = {
            name: (lambda i, path=path, x=x: path(x, i)) for name, path in full.items()
        }
        for backend in backends:
            if backend != "cpu" and m * n * k > SLOW:
                continue
            functions[backend] = lambda i, backend=backend, x=x: w8a8_linear(
                x, *quantized[i % count], backend=backend
            )
        functions["read"] = lambda i: memory[i % len(memory)].sum()
        repeats = int(min(30, max(5, SLOW / (m * n * k) * 10)))
        times = time_interleaved(functions, repeats=repeats, lead_in=1)
        fastest = times.loc[list(full), "median"].min()
        bandwidth = memory[0].nbytes / times.loc["read", "median"]
        for name, row in times.drop("read").iterrows():
            found.append(
                {
                    "N": n, "K": k, "M": m, "path": name, "int8": name in backends,
                    "microseconds": row["median"] * 1e6, "low": row["low"] * 1e6,
                    "high": row["high"] * 1e6,
                    "gigabytes_per_second": n * k / row["median"] / 1e9,
                    "share_of_bandwidth": n * k / row["median"] / bandwidth,
                    "times_fastest_full_precision": fastest / row["median"],
                }
            )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--all-backends", action="store_true", help="the slow ones too")
    parser.add_argument("--output", type=Path, default=Path("reports"))
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}: choose from {', '.join(SHAPES)}")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    backends = [name for name, state in available_backends().items() if state == "ok"]
    if not arguments.all_backends:
        backends = [name for name in backends if name != "reference"]
    rows = [int(m) for m in arguments.rows.split(",")]
    shapes = list(dict.fromkeys(shape for name in names for shape in SHAPES[name]))

    memory = reserve(*[((READ_BYTES // 4,), torch.float32)] * 4)
    for array in memory:
        array.fill_(1)
    found: list[dict] = []
    with ProgressBar(len(shapes), "multiplying", unit="shape") as bar:
        for n, k in shapes:
            found += measure_shape(n, k, rows, backends, memory)
            bar.step(f"{n} x {k}")
    table = pd.DataFrame(found)
    bandwidth = 1e9 * (table["gigabytes_per_second"] / table["share_of_bandwidth"]).median()
    result = {
        "machine": describe_machine(),
        "read_bandwidth": bandwidth,
        "rows": json.loads(table.to_json(orient="records")),
    }
    write_atomically(arguments.output / "gemm.json", json.dumps(result, indent=1))
    plot_gemm(table).savefig(arguments.output / "gemm.png", dpi=140)

    print(f"memory is read at {bandwidth / 1e9:.1f} GB/s ({arguments.threads} threads)")
    shown = table[table["path"] == "cpu"]
    for value in ("microseconds", "share_of_bandwidth", "times_fastest_full_precision"):
        print(f"\ncpu backend: {value.replace('_', ' ')}")
        print(shown.pivot(index=["N", "K"], columns="M", values=value).round(2).to_string())


if __name__ == "__main__":
    main()
