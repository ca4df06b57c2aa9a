"""One script for one CUDA GPU: are the INT8 kernels right, and do they run at memory speed?

    python benchmarks/gpu_check.py --json gpu_check.json

takes under four minutes and needs torch, triton, transformers and this folder, no installation.
Exit code 0: all checks passed; 1: one failed; 2: no GPU here. `--interpret` sends tiny shapes
through the same code on the CPU, in Triton's interpreter: the results count, the times do not.

A section is a function from `Lab` to (data for the JSON, lines of its table); add it to SECTIONS.
It may raise `CheckError`, and stops early when `lab.seconds_left()` runs out.
"""

import argparse
import contextlib
import functools
import importlib.machinery
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Qwen3-8B as (N, K), its q, k, v and gate, up fused as the fast decoder fuses them.
LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TINY_LAYERS = {"qkv": (96, 64), "o": (64, 80)}

# The most telling first: what the time does not allow is left out from the end.
ROWS = (6, 1, 16, 8, 64, 4, 2, 512)
TINY_ROWS = (6, 1, 66)

# In one timed graph at least: starting a graph takes microseconds, which they share.
LAUNCHES = 32

# Whole verify steps of 6 tokens: W8A8 over bf16, and over bytes / bandwidth.
TARGET_STEP, TARGET_FLOOR = 1.6, 1.35

TARGET_BANDWIDTH, TARGET_SPEEDUP, TARGET_ROWS = 0.75, 1.7, range(1, 17)


class CheckError(Exception):
    """A kernel's result is wrong; the message says which and by how much."""


# ---- the machine and the clock ----


class CudaClock:
    """Times calls as a CUDA graph, so that the time between launches is the GPU's, not Python's."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()  # compiles, tunes and makes handles, which a capture must not do
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def seconds(self, run: Callable[[], None]) -> float:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # cycles, in which the graph's start has reached the GPU
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class WallClock:
    """For the interpreter: goes through the same steps; its times mean nothing."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
        def run() -> None:
            for call in calls:
                call()

        return run

    def seconds(self, run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


@dataclass
class Lab:
    """What every section gets."""

    device: Any
    interpret: bool
    deadline: float
    clock: CudaClock | WallClock
    backend: types.ModuleType  # quasar_lab.int8_gemm.triton_backend
    results: dict[str, Any] = field(default_factory=dict)  # of the sections before

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def random(self, *shape: int, dtype: Any = None, seed: int = 0) -> Any:
        import torch

        generator = torch.Generator(device=self.device).manual_seed(seed)
        if dtype == torch.int8:
            return torch.randint(
                -128, 128, shape, dtype=dtype, device=self.device, generator=generator
            )
        return torch.randn(shape, device=self.device, generator=generator).to(dtype)

    def medians(
        self, methods: Mapping[str, Sequence[Callable[[], object]]], repeats: int = 15
    ) -> dict[str, float]:
        """Seconds a call of each method, measured in turns so that a slow spell hits all alike."""
        at_least = 1 if self.interpret else LAUNCHES
        rounds = {name: -(-at_least // len(calls)) for name, calls in methods.items()}
        runs = {name: self.clock.prepare([*c] * rounds[name]) for name, c in methods.items()}
        samples: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(1 if self.interpret else repeats):
            for name, run in runs.items():
                launches = rounds[name] * len(methods[name])
                samples[name].append(self.clock.seconds(run) / launches)
        return {name: statistics.median(values) for name, values in samples.items()}


def import_backend() -> types.ModuleType:
    """The Triton backend out of this folder. Where jaxtyping is missing, nothing checks shapes."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if importlib.util.find_spec("jaxtyping") is None:

        class Unchecked:
            def __class_getitem__(cls, shape: object) -> object:
                return object

        def shape_type(name: str) -> type[Unchecked]:
            if name.startswith("__"):  # `inspect` asks every module for its file
                raise AttributeError(name)
            return Unchecked

        stand_in = types.ModuleType("jaxtyping")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("jaxtyping", None)
        stand_in.__getattr__ = shape_type  # type: ignore[method-assign]
        sys.modules["jaxtyping"] = stand_in
    from quasar_lab.int8_gemm import triton_backend

    return triton_backend


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch.empty returns garbage: an element that a kernel leaves unwritten shows."""
    import torch

    empty = torch.empty

    def garbage(*shape: Any, **options: Any) -> Any:
        tensor = empty(*shape, **options)
        return tensor.fill_(math.nan if tensor.is_floating_point() else 85)

    torch.empty = garbage
    try:
        yield
    finally:
        torch.empty = empty


# ---- section: what is measured on ----


def environment(lab: Lab) -> tuple[dict[str, Any], list[str]]:
    import torch
    import triton

    facts: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "card": "Triton's interpreter: the times mean nothing",
    }
    if not lab.interpret:
        properties = torch.cuda.get_device_properties(lab.device)
        facts |= {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
        }
    return facts, [", ".join(f"{name} {value}" for name, value in facts.items())]


# ---- section: correctness ----


def check_product(lab: Lab, M: int, N: int, K: int, tiling: Any) -> None:
    """Exact against float64, whose sums are exact too; twenty times, since a race may hide once."""
    import torch

    a = lab.random(M, K, dtype=torch.int8, seed=M)
    b = lab.random(N, K, dtype=torch.int8, seed=N)
    exact = a.double() @ b.double().T
    repeats = 20 if tiling.split_k > 1 and not lab.interpret else 2
    for _ in range(repeats):
        with poisoned_memory():
            found = lab.backend.int8_matmul(a, b, tiling=tiling)
        wrong = int((found.double() != exact).sum())
        if wrong:
            raise CheckError(f"{wrong} of {M * N} sums are wrong at M={M} N={N} K={K}, {tiling}")


def relative_error(found: Any, exact: Any) -> float:
    """|found - exact| / |exact|; NaN where found has one."""
    return float((found.double() - exact).norm() / exact.norm())


def check_close(what: str, error: float, limit: float) -> dict[str, Any]:
    if not error <= limit:  # so that NaN fails
        raise CheckError(f"{what}: relative error {error:.2e}, allowed {limit:.0e}")
    return {"what": what, "relative_error": error, "limit": limit}


def check_linear(lab: Lab, M: int, N: int, K: int, dtype: Any) -> list[dict[str, Any]]:
    """The whole W8A8 linear against float64 on the same integers, and its row quantiser."""
    import torch

    from quasar_lab.int8_gemm import reference

    x = lab.random(M, K, dtype=dtype, seed=M)
    weight = lab.random(N, K, dtype=torch.int8, seed=N)
    weight_scale = lab.random(N, dtype=torch.float32, seed=1).abs() + 0.1
    bias = lab.random(N, dtype=dtype, seed=2)
    lab.backend.w8a8_linear(x, weight, weight_scale, bias)  # tunes
    with poisoned_memory():
        quantized, scale = lab.backend.quantize_activation(x)
        y = lab.backend.w8a8_linear(x, weight, weight_scale, bias)
    on_cpu = reference.quantize_activation(x.cpu())
    if not (torch.equal(quantized.cpu(), on_cpu[0]) and torch.equal(scale.cpu(), on_cpu[1])):
        raise CheckError(f"the quantiser differs from the CPU reference at M={M} K={K} {dtype}")
    sums = quantized.double() @ weight.double().T
    exact = sums * scale.double() * weight_scale.double() + bias.double()
    where = f"M={M} N={N} K={K} {str(dtype).removeprefix('torch.')}"
    # Four fp32 roundings and the output's. An int8 value is half a step from what it stands for.
    rounding = torch.finfo(dtype).eps + 4 * 2**-24
    step = (quantized.double() * scale.double() - x.double()).abs() / scale.double()
    half_step = check_close(f"quantiser {where}", float(step.max()), 0.5 + 127 * 2**-22)
    return [half_step, check_close(f"linear {where}", relative_error(y, exact), rounding)]


def check_fused(lab: Lab, M: int, K: int, dtype: Any) -> list[dict[str, Any]]:
    """RMSNorm and SwiGLU with quantisation against float64: within half a step and roundings."""
    import torch

    x, weight = (lab.random(*shape, dtype=dtype, seed=3) for shape in ((M, K), (K,)))
    gate_up = lab.random(M, 2 * K, dtype=dtype, seed=4)
    with poisoned_memory():
        fused = {
            "rmsnorm": lab.backend.rmsnorm_quantize(x, weight, 1e-6),
            "swiglu": lab.backend.swiglu_quantize(gate_up),
        }
    gate, up = gate_up.double().chunk(2, dim=-1)
    normalised = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = {"rmsnorm": normalised * weight.double(), "swiglu": gate * gate.sigmoid() * up}
    limit = 0.5 + 3 * 127 * max(torch.finfo(dtype).eps, 1e-6)
    checks = []
    for name, (quantized, scale) in fused.items():
        step = (quantized.double() * scale.double() - exact[name]).abs() / scale.double()
        checks.append(check_close(f"{name} M={M} K={K} (steps)", float(step.max()), limit))
    return checks


def check_attention(lab: Lab, M: int, start: int, window: int | None) -> dict[str, Any]:
    """Attention's two kernels against float64, behind `start` tokens; the cache's rest is NaN."""
    import torch

    from quasar_lab import gpu_attention
    from quasar_lab.decoder import attend, rotate, visibility

    dtype = torch.float16 if lab.interpret else torch.bfloat16
    kv_heads, group, head_dim = (2, 3, 32) if lab.interpret else (8, 4, 128)
    end, capacity, heads = start + M, start + M + 200, kv_heads * group
    qkv = lab.random(M, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=5)
    keys, values = (lab.random(kv_heads, capacity, head_dim, dtype=dtype, seed=s) for s in (6, 7))
    keys[:, start:] = values[:, start:] = math.nan
    angle = lab.random(capacity, head_dim // 2, dtype=torch.float32, seed=8).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    positions = torch.arange(start, end, device=lab.device)
    layer: Any = types.SimpleNamespace(q_norm=None, k_norm=None, window=window)
    weights: Any = types.SimpleNamespace(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, eps=1e-6,
        attention_scale=head_dim**-0.5, softmax_dtype=torch.float32,
    )  # fmt: skip
    if not gpu_attention.fits(qkv, weights):
        raise CheckError(f"attention's kernels do not take {M} tokens of {dtype}")
    with poisoned_memory():
        found = gpu_attention.cached_attention(
            qkv, layer, weights, cos, sin, positions, keys, values, min(capacity, end + 100)
        )
    q, k, v = qkv.view(M, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    turned = rotate(k, cos[positions], sin[positions]).transpose(0, 1)
    where = f"attention M={M} start={start} window={window}"
    eps = torch.finfo(dtype).eps
    check_close(f"{where}, keys", relative_error(keys[:, start:end], turned.double()), eps)
    if not torch.equal(values[:, start:end], v.transpose(0, 1)):
        raise CheckError(f"{where}: the values in the cache are not those of the step")
    exact = attend(
        rotate(q, cos[positions], sin[positions]).double(), keys[:, :end].double(),
        values[:, :end].double(), visibility(positions, end, window), head_dim**-0.5, torch.float64,
    )  # fmt: skip
    return check_close(where, relative_error(found, exact), 4 * eps)


def correctness(lab: Lab) -> tuple[dict[str, Any], list[str]]:
    import torch

    from quasar_lab.int8_gemm import triton_tuning as tuning

    chip = tuning.this_chip(lab.device)
    layers = TINY_LAYERS if lab.interpret else LAYERS
    rows = (5, 33) if lab.interpret else (1, 5, 16, 17, 33, 64)
    products, left_out = 0, []
    for N, K in ((12, 20), *layers.values()):
        for M in rows:
            if lab.seconds_left() < 90:
                left_out.append(f"N={N} K={K} M={M}")
                continue
            for tiling in tuning.small_m_tilings(M, N, K, chip):
                check_product(lab, M, N, K, tiling)
                products += 1
        for tiling in tuning.large_m_tilings(chip)[: 1 if lab.interpret else None]:
            check_product(lab, 65 if lab.interpret else 300, N, K, tiling)
            products += 1
    split = tuning.Tiling(16, 32, 32, 4, 4, 3)
    check_product(lab, 7, 100, 300, split)
    checks = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for M in (1, 6, 16, 70):
            N, K = (48, 80) if lab.interpret else (4096, 4096)
            checks += check_linear(lab, M, N, K, dtype)
        for M, K in ((1, 20), (6, 96)) if lab.interpret else ((1, 4096), (16, 12288), (300, 4096)):
            checks += check_fused(lab, M, K, dtype)
    for M, start, window in ((1, 0, None), (6, 300, None), (6, 300, 5), (16, 2000, None)):
        checks.append(check_attention(lab, M, start // 5 if lab.interpret else start, window))
    summary = [
        f"exact int32 sums: {products + 1} products, each repeated on poisoned memory",
        f"within rounding of float64: {len(checks)} results of the linear, the fused kernels and "
        "attention",
    ]
    if left_out:
        summary.append(f"no time left for: {', '.join(left_out)}")
    return {"exact_products": products + 1, "checks": checks, "skipped": left_out}, summary


# ---- section: bandwidth ----


def copy_bandwidth(lab: Lab) -> float:
    """Bytes a second of a device-to-device copy, read plus written."""
    import torch

    size = 2**16 if lab.interpret else 2**31
    source = lab.random(size, dtype=torch.int8)
    target = torch.empty_like(source)
    seconds = lab.medians({"copy": [lambda: target.copy_(source)]})["copy"]
    return 2 * size / seconds


def time_layer(lab: Lab, M: int, N: int, K: int) -> dict[str, float]:
    """Seconds of one linear by each method, its weights rotated through more than the L2 cache."""
    import torch

    from quasar_lab.int8_gemm import int_mm

    cache = 2**12 if lab.interpret else torch.cuda.get_device_properties(lab.device).L2_cache_size
    int8_copies = max(2, -(-4 * cache // (N * K)))
    bf16_copies = max(2, -(-4 * cache // (2 * N * K)))
    x = lab.random(M, K, dtype=torch.bfloat16)
    scale = lab.random(N, dtype=torch.float32).abs() / 1000
    int8 = [lab.random(N, K, dtype=torch.int8, seed=i) for i in range(int8_copies)]
    full = [lab.random(N, K, dtype=torch.bfloat16, seed=i) for i in range(bf16_copies)]
    quantized, x_scale = lab.backend.quantize_activation(x)

    bind = functools.partial
    product = bind(lab.backend.scaled_matmul, quantized, x_scale, dtype=torch.bfloat16)
    methods: dict[str, list[Callable[[], object]]] = {
        "int8": [bind(product, weight, scale) for weight in int8],
        "w8a8": [bind(lab.backend.w8a8_linear, x, weight, scale) for weight in int8],
        "bf16": [bind(torch.nn.functional.linear, x, weight) for weight in full],
        "int_mm": [bind(int_mm.int8_matmul, quantized, weight) for weight in int8],
    }
    return lab.medians(methods)


def time_row_kernels(lab: Lab, M: int, copy: float) -> list[dict[str, Any]]:
    """The kernels that quantise rows; bytes: bf16 in, int8 and a scale out."""
    import torch

    K, wide = (64, 96) if lab.interpret else (4096, 12288)
    x, weight = lab.random(M, K, dtype=torch.bfloat16), lab.random(K, dtype=torch.bfloat16)
    gate_up = lab.random(M, 2 * wide, dtype=torch.bfloat16)
    seconds = lab.medians(
        {
            "quantize": [lambda: lab.backend.quantize_activation(x)],
            "rmsnorm_quantize": [lambda: lab.backend.rmsnorm_quantize(x, weight, 1e-6)],
            "swiglu_quantize": [lambda: lab.backend.swiglu_quantize(gate_up)],
        }
    )
    width = {"quantize": K, "rmsnorm_quantize": K, "swiglu_quantize": wide}
    read = {"quantize": 2 * K, "rmsnorm_quantize": 2 * K, "swiglu_quantize": 4 * wide}
    return [
        {
            "kernel": name,
            "rows": M,
            "microseconds": 1e6 * value,
            "of_copy": M * (read[name] + width[name] + 4) / value / copy,
        }
        for name, value in seconds.items()
    ]


def bandwidth(lab: Lab) -> tuple[dict[str, Any], list[str]]:
    copy = copy_bandwidth(lab)
    layers = TINY_LAYERS if lab.interpret else LAYERS
    products, skipped = [], []
    for M in TINY_ROWS if lab.interpret else ROWS:
        for layer, (N, K) in layers.items():
            if lab.seconds_left() < 20:
                skipped.append(f"{layer} M={M}")
                continue
            seconds = time_layer(lab, M, N, K)
            activations = 2 * M * N + 4 * (M + N)
            products.append(
                {
                    "layer": layer,
                    "rows": M,
                    "N": N,
                    "K": K,
                    "microseconds": {name: 1e6 * value for name, value in seconds.items()},
                    "int8_of_copy": (N * K + M * K + activations) / seconds["int8"] / copy,
                    "bf16_of_copy": 2 * (N * K + M * K + M * N) / seconds["bf16"] / copy,
                    "int8_speedup": seconds["bf16"] / seconds["int8"],
                    "w8a8_speedup": seconds["bf16"] / seconds["w8a8"],
                }
            )
    data: dict[str, Any] = {"copy_bytes_per_second": copy, "products": products, "skipped": skipped}
    data["tilings"] = chosen_tilings()
    data["row_kernels"] = []
    for M in (2, 5) if lab.interpret else (1, 16, 32768):
        data["row_kernels"] += time_row_kernels(lab, M, copy)
    return data, bandwidth_table(data)


def chosen_tilings() -> dict[str, Any]:
    """What the tuning chose, by rows (up to a power of two), N and K."""
    from quasar_lab.int8_gemm import triton_tuning

    return {
        f"{rows} x {N} x {K}": asdict(tiling)
        for (_, rows, N, K), tiling in triton_tuning._fastest.items()
    }


def bandwidth_table(data: Mapping[str, Any]) -> list[str]:
    lines = [
        f"copy {data['copy_bytes_per_second'] / 1e12:.2f} TB/s (read + written)",
        "layer     rows |  int8   w8a8  int_mm   bf16 us | int8  bf16 of copy | int8  w8a8 x bf16",
    ]
    for row in sorted(data["products"], key=lambda row: row["rows"]):
        us = row["microseconds"]
        lines.append(
            f"{row['layer']:9} {row['rows']:4} |{us['int8']:6.1f} {us['w8a8']:6.1f} "
            f"{us['int_mm']:7.1f} {us['bf16']:6.1f}    |{row['int8_of_copy']:5.0%} "
            f"{row['bf16_of_copy']:5.0%}         |{row['int8_speedup']:5.2f} "
            f"{row['w8a8_speedup']:5.2f}"
        )
    for row in data["row_kernels"]:
        lines.append(
            f"{row['kernel']:17} {row['rows']:5} rows {row['microseconds']:7.1f} us "
            f"{row['of_copy']:5.0%} of copy"
        )
    small = [row for row in data["products"] if row["rows"] in TARGET_ROWS]
    fast = sum(row["int8_of_copy"] >= TARGET_BANDWIDTH for row in small)
    faster = sum(row["int8_speedup"] >= TARGET_SPEEDUP for row in small)
    lines.append(
        f"targets for up to {TARGET_ROWS[-1]} rows: {TARGET_BANDWIDTH:.0%} of copy in {fast} of "
        f"{len(small)}, {TARGET_SPEEDUP}x bf16 in {faster} of {len(small)}"
    )
    if data["skipped"]:
        lines.append(f"no time left for: {', '.join(data['skipped'])}")
    return lines


# ---- section: whole steps ----


def step_seconds(lab: Lab, decoders: Mapping[str, Any], M: int) -> dict[str, float]:
    """Median seconds of a step of M tokens and its rollback, as `generate` sees it, in turns."""
    import torch

    ids = torch.arange(M)
    samples: dict[str, list[float]] = {name: [] for name in decoders}
    for turn in range(3 if lab.interpret else 25):
        for name, decoder in decoders.items():
            start = time.perf_counter()
            decoder.forward(ids)[:, 0].tolist()  # waits for the result, as reading tokens does
            decoder.rollback(M)
            if turn >= 2:
                samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


def check_graph(name: str, decoder: Any, M: int) -> float | None:
    """Two steps through one graph against the same kernels one by one; their relative error.

    The second step has other tokens at another place: what was recorded must not come back.
    """
    import torch

    graphs, error = decoder._graphs, 0.0
    if graphs is None:
        return None
    for first in (0, 1):
        ids = torch.arange(first, first + M)
        found = decoder.forward(ids).double()
        decoder.rollback(M)
        if graphs.reason:
            raise CheckError(f"the {name} steps were not captured: {graphs.reason}")
        exact = graphs.run_without_graph(ids, decoder.length, M).double()
        error = max(error, relative_error(found, exact))
        decoder.forward(ids[:1])
    decoder.rollback(2)
    # the same kernels on the same numbers; bf16's rounding where a library picks another one
    check_close(f"graph of {M} tokens, {name}", error, 0.01)
    return error


def steps(lab: Lab) -> tuple[dict[str, Any], list[str]]:
    """Whole decoder steps of a model with the shape of Qwen3-8B, bf16 against W8A8."""
    import torch

    from quasar_lab.model_shapes import SHAPES, ModelShape
    from quasar_lab.random_decoder import random_decoder

    shape = ModelShape(2, 64, 2, 1, 32, 96, 128) if lab.interpret else SHAPES["qwen3-8b"]
    build = functools.partial(
        random_decoder, shape, device=lab.device, backend="triton", head_norms=True,
        # on the CPU "auto" would want the compiler, which this script does without
        engine="torch" if lab.interpret else "auto",
    )  # fmt: skip
    decoders = {"bf16": build("bf16"), "w8a8": build("INT8")}
    prompt = torch.arange(20 if lab.interpret else 512) % shape.vocab
    for name, decoder in decoders.items():
        if not bool(decoder.forward(prompt, num_logits=1).isfinite().all()):
            raise CheckError(f"the {name} decoder gives logits that are not finite")
    errors = {
        f"{name} M={M}": check_graph(name, decoder, M)
        for name, decoder in decoders.items()
        for M in (6, 1)
    }
    cache = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * len(prompt)
    other = 2 * shape.head_weights + cache
    read = {
        "bf16": 2 * shape.layer_weights + other,
        "w8a8": shape.layer_weights + 4 * shape.layer_rows + other,
    }
    copy = lab.results.get("bandwidth", {}).get("copy_bytes_per_second") or copy_bandwidth(lab)
    floors = {name: size / copy for name, size in read.items()}
    rows = []
    for M in (6, 1) if lab.interpret else (6, 1, 4, 8, 16):
        if lab.seconds_left() < 10:
            break
        rows.append({"tokens": M, "seconds": step_seconds(lab, decoders, M)})
    if not rows:
        raise CheckError("no time was left to measure a step: give it more with --seconds")
    data: dict[str, Any] = {"floor_seconds": floors, "rows": rows, "graph_errors": errors}
    data["engines"] = {name: decoder.engine for name, decoder in decoders.items()}
    data["reasons"] = {
        name: decoder._graphs.reason for name, decoder in decoders.items() if decoder._graphs
    }
    return data, steps_table(data)


def steps_table(data: Mapping[str, Any]) -> list[str]:
    floors = data["floor_seconds"]
    lines = ["tokens |  bf16   w8a8 ms a step | bf16 / w8a8 | bf16  w8a8 over their floors"]
    for row in sorted(data["rows"], key=lambda row: row["tokens"]):
        ms = {name: 1e3 * value for name, value in row["seconds"].items()}
        over = {name: row["seconds"][name] / floors[name] for name in floors}
        lines.append(
            f"{row['tokens']:6} |{ms['bf16']:6.2f} {ms['w8a8']:6.2f}           |"
            f"{ms['bf16'] / ms['w8a8']:8.2f}     |{over['bf16']:5.2f} {over['w8a8']:5.2f}"
        )
    lines.append(
        f"floors (bytes / copy bandwidth): bf16 {1e3 * floors['bf16']:.2f} ms, w8a8 "
        f"{1e3 * floors['w8a8']:.2f} ms; targets at 6 tokens: bf16 / w8a8 of {TARGET_STEP}, w8a8 "
        f"within {TARGET_FLOOR} of its floor"
    )
    lines.append("steps by " + ", ".join(f"{n}: {engine}" for n, engine in data["engines"].items()))
    lines += [f"no graphs for {n}: {why}" for n, why in data["reasons"].items() if why]
    return lines


SECTIONS: dict[str, Callable[[Lab], tuple[dict[str, Any], list[str]]]] = {
    "environment": environment,
    "steps": steps,
    "correctness": correctness,
    "bandwidth": bandwidth,
}


# ---- the run ----


def why_not(backend: types.ModuleType) -> str | None:
    """One line on why this machine cannot run the check, or None."""
    reason = backend.availability()
    return None if reason == "ok" else f"gpu_check needs an NVIDIA GPU and triton: {reason}"


def run_sections(lab: Lab, names: Sequence[str]) -> tuple[dict[str, Any], list[str], bool]:
    """Run the sections in order; one that fails does not keep the others from running."""
    tables, passed = [], True
    for name in names:
        start = time.monotonic()
        try:
            data, lines = SECTIONS[name](lab)
        except Exception as problem:
            passed = False
            data, lines = {"failed": repr(problem)}, [f"FAILED: {problem!r}"]
        seconds = time.monotonic() - start
        lab.results[name] = {**data, "seconds": round(seconds, 1)}
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        tables += ["", f"== {name} ==", *lines]
    return lab.results, tables, passed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Check the INT8 kernels on one CUDA GPU: results, bandwidth, against cuBLAS."
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures here")
    parser.add_argument("--seconds", type=float, default=225, help="time to finish in")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME"
    )
    parser.add_argument(
        "--interpret", action="store_true", help="tiny shapes on the CPU, to try this script out"
    )
    options = parser.parse_args(arguments)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import torch
    except ImportError as missing:
        print(f"gpu_check: {missing}", file=sys.stderr)
        return 2
    backend = import_backend()
    if reason := why_not(backend):
        print(reason, file=sys.stderr)
        return 2
    lab = Lab(
        device=torch.device("cpu") if options.interpret else torch.device("cuda", 0),
        interpret=options.interpret,
        deadline=time.monotonic() + options.seconds,
        clock=WallClock() if options.interpret else CudaClock(),
        backend=backend,
    )
    results, tables, passed = run_sections(lab, options.sections)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print("\n".join(tables[1:]))
    print("\nall checks passed" if passed else "\nsome checks FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
