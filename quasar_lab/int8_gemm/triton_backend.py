"""The Triton backend: what launches the kernels of triton_kernels.py.

A W8A8 linear is two launches: quantise the rows, then multiply, scale, add the bias and round to
the output's dtype in one kernel. Where a norm or an activation function comes before the linear,
`rmsnorm_quantize` and `swiglu_quantize` take its place in the first launch, and `scaled_matmul` is
the second. Triton is imported on first use; TRITON_INTERPRET=1 (set before that) runs the same
kernels on the CPU.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Float32, Int8, Int32
from torch import Tensor

from quasar_lab.int8_gemm import reference
from quasar_lab.int8_gemm.triton_tuning import SMALL_M, Tiling, fastest_tiling

# Longer rows do not fit one program's registers; torch quantises them.
MAX_FUSED_K = 16384

# bf16 and fp32 results must not depend on whether the compiler fuses a product with a sum.
EXACT = {"enable_fp_fusion": False}

# of the rows, of the weight's channels, and the bias; all None for the plain int32 product
_Scales = tuple[Tensor | None, Tensor | None, Tensor | None]

Quantized = tuple[Int8[Tensor, "*rows K"], Float32[Tensor, "*rows 1"]]


@functools.cache
def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def availability() -> str:
    """ "ok", or one line on why this machine cannot run the Triton kernels."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if _interpreted():
        return "ok"
    if not torch.cuda.is_available():
        return "no CUDA GPU (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    if torch.version.hip is not None:
        return "tested on NVIDIA GPUs only"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"needs compute capability 8.0 or newer, this GPU has {major}.{minor}"
    return "ok"


def supports(device: torch.device) -> bool:
    return device.type == ("cpu" if _interpreted() else "cuda")


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else contextlib.nullcontext()


def warps_for_row(block: int) -> int:
    """How many warps share one row of `block` values: up to 64 values a thread."""
    return min(max(block // 512, 4), 16)


def _launch_rows(kernel: Any, *inputs: Tensor, width: int, extra: tuple[float, ...] = ()) -> Any:
    """Run a kernel that quantises one row a program; the first input has the rows."""
    rows = inputs[0].shape[:-1]
    quantized = torch.empty(*rows, width, dtype=torch.int8, device=inputs[0].device)
    scale = torch.empty(*rows, 1, dtype=torch.float32, device=inputs[0].device)
    block = 1 << (width - 1).bit_length()
    contiguous = [tensor.contiguous() for tensor in inputs]
    if scale.numel():
        with on_device_of(quantized):
            kernel[(scale.numel(),)](
                *contiguous,
                quantized,
                scale,
                width,
                *extra,
                BLOCK_K=block,
                num_warps=warps_for_row(block),
                **EXACT,
            )
    return quantized, scale


def quantize_activation(x: Float[Tensor, "*rows K"]) -> Quantized:
    """`reference.quantize_activation`, bit for bit, in one kernel."""
    if x.shape[-1] > MAX_FUSED_K:
        return reference.quantize_activation(x)
    from quasar_lab.int8_gemm.triton_kernels import quantize_kernel

    return _launch_rows(quantize_kernel, x, width=x.shape[-1])


def rmsnorm_quantize(
    x: Float[Tensor, "*rows K"], weight: Float[Tensor, "K"], eps: float
) -> Quantized:
    """`quantize_activation(rms_norm(x) * weight)` without the normalised rows in memory.

    Source: RMSNorm, arXiv 1910.07467, equation 4. The mean is summed in another order than
    torch's: a value that lies half-way between two integers may round to the other one.
    """
    if x.shape[-1] > MAX_FUSED_K:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
        return quantize_activation(weight * exact.to(x.dtype))
    from quasar_lab.int8_gemm.triton_kernels import rmsnorm_quantize_kernel

    return _launch_rows(rmsnorm_quantize_kernel, x, weight, width=x.shape[-1], extra=(eps,))


def swiglu_quantize(gate_up: Float[Tensor, "*rows twoK"]) -> Quantized:
    """`quantize_activation(silu(gate) * up)` without the product in memory.

    gate_up[..., 2 K] holds the gate's K columns, then the up projection's; the result has K.
    Source: SwiGLU, arXiv 2002.05202, equation 6.
    """
    width = gate_up.shape[-1] // 2
    if width > MAX_FUSED_K:
        gate, up = gate_up.chunk(2, dim=-1)
        return quantize_activation(torch.nn.functional.silu(gate) * up)
    from quasar_lab.int8_gemm.triton_kernels import swiglu_quantize_kernel

    return _launch_rows(swiglu_quantize_kernel, gate_up, width=width)


_arrival_counters: dict[tuple[torch.device, int], Tensor] = {}
_counters_of_graph: ContextVar[Tensor | None] = ContextVar("_counters_of_graph", default=None)


@contextlib.contextmanager
def counters_of_graph(device: torch.device) -> Iterator[Tensor]:
    """Inside, all launches share these counters: for what becomes one CUDA graph, which must keep
    them. Its launches run one after another, but it may be replayed on any stream.
    """
    own = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    token = _counters_of_graph.set(own)
    try:
        yield own
    finally:
        _counters_of_graph.reset(token)


def arrivals(count: int, device: torch.device) -> Tensor:
    """Zeros to count arriving programs with. A kernel leaves them zero: one buffer a stream.

    A stream runs one launch after another, so they can share. In a CUDA graph without
    `counters_of_graph` each launch gets its own, zeroed by the graph.
    """
    own = _counters_of_graph.get()
    if own is not None and count <= own.numel():
        return own
    if device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = (device, torch.cuda.current_stream(device).cuda_stream)
    counters = _arrival_counters.get(stream)
    if counters is None or counters.numel() < count:
        counters = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        _arrival_counters[stream] = counters
    return counters


def _launch(x: Tensor, weight: Tensor, scales: _Scales, out: Tensor, tiling: Tiling) -> None:
    """Run the product once, cut as the tiling says."""
    from quasar_lab.int8_gemm.triton_kernels import large_m_matmul_kernel, small_m_matmul_kernel

    (M, K), N = x.shape, weight.shape[0]
    column_tiles, parts = -(-N // tiling.block_n), tiling.split_k
    options = dict(
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        EVEN_K=K % (tiling.block_k * parts) == 0,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **EXACT,
    )
    if M <= SMALL_M:
        partial = counters = None
        if parts > 1:
            partial = torch.empty(parts, M, N, dtype=torch.int32, device=x.device)
            counters = arrivals(column_tiles, x.device)
        small_m_matmul_kernel[(column_tiles, parts)](
            x, weight, *scales, out, partial, counters, M, N, K,
            SPLIT_K=parts, SWAP=tiling.swap, **options,
        )  # fmt: skip
    else:
        row_tiles = -(-M // tiling.block_m)
        large_m_matmul_kernel[(row_tiles * column_tiles,)](
            x, weight, *scales, out, M, N, K, GROUP_M=8, **options
        )


def _matmul(
    x: Tensor, weight: Tensor, scales: _Scales, dtype: torch.dtype, tiling: Tiling | None
) -> Tensor:
    (M, K), N = x.shape, weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty(M, N, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    with on_device_of(x):
        if tiling is None:
            launch = functools.partial(_launch, x, weight, scales, out)
            tiling = fastest_tiling(M, N, K, x.device, launch)
        _launch(x, weight, scales, out, tiling)
    return out


def int8_matmul(
    a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"], *, tiling: Tiling | None = None
) -> Int32[Tensor, "M N"]:
    """a @ b.T with exact int32 accumulation. tiling: None picks the fastest for the shape."""
    return _matmul(a, b, (None, None, None), torch.int32, tiling)


def scaled_matmul(
    x: Int8[Tensor, "*rows K"],
    x_scale: Float32[Tensor, "*rows 1"],
    qweight: Int8[Tensor, "N K"],
    weight_scale: Float32[Tensor, "N"],
    bias: Float[Tensor, "N"] | None = None,
    *,
    dtype: torch.dtype,
    tiling: Tiling | None = None,
) -> Float[Tensor, "*rows N"]:
    """float(x @ qweight.T) * x_scale * weight_scale + bias, rounded from fp32 to dtype.

    x and x_scale come from `quantize_activation`, `rmsnorm_quantize` or `swiglu_quantize`.
    """
    scales = (
        x_scale.contiguous(),
        weight_scale.contiguous(),
        None if bias is None else bias.contiguous(),
    )
    out = _matmul(x.reshape(-1, x.shape[-1]), qweight, scales, dtype, tiling)
    return out.view(*x.shape[:-1], -1) if x.ndim != 2 else out


def w8a8_linear(
    x: Float[Tensor, "M K"],
    qweight: Int8[Tensor, "N K"],
    weight_scale: Float32[Tensor, "N"],
    bias: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "M N"]:
    """`reference.w8a8_linear`, bit for bit, in two kernels; x's dtype."""
    if x.dtype == torch.float64:  # the kernels round in float32
        return reference.around_product(int8_matmul, x, qweight, weight_scale, bias)
    return scaled_matmul(*quantize_activation(x), qweight, weight_scale, bias, dtype=x.dtype)
