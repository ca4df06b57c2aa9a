"""Launches the kernels of a decoder step's attention (kernels.py) where Triton works."""

import functools

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from quasar_lab.decoder_weights import DecoderWeights, LayerWeights
from quasar_lab.int8_gemm import triton_backend

# Queries of one KV head, of all tokens: more do not fit a program's registers.
MAX_ROWS = 64
_MAX_HEAD_DIM = 128
# Exact float32 has no tensor cores and too many registers; the interpreter cannot multiply bf16.
_DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.float16, torch.float32)}
_BLOCK_CONTEXT = 64
# A part of the cache is worth a program from this length on; more parts take longer to add up.
_SHORTEST_PART, _MOST_PARTS = 128, 16


def fits(qkv: Float[Tensor, "tokens channels"], weights: DecoderWeights) -> bool:
    """Whether `cached_attention` runs these tokens: a verify step on a GPU (or interpreted)."""
    group = weights.num_heads // weights.num_kv_heads
    return (
        triton_backend.availability() == "ok"
        and triton_backend.supports(qkv.device)
        and _compiles(qkv.device)
        and weights.softmax_dtype == torch.float32
        and qkv.dtype in _DTYPES[qkv.device.type]
        and len(qkv) * group <= MAX_ROWS
        and weights.head_dim <= _MAX_HEAD_DIM
    )


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Whether Triton can build kernels here, which needs a C compiler; found out once, by one."""
    try:
        triton_backend.quantize_activation(torch.zeros(1, 16, device=device))
    except Exception:  # whatever the compiler, the linker or the driver raise
        return False
    return True


def parts_of(context: int) -> tuple[int, int]:
    """How a cache of so many tokens is cut: (tokens of a part, parts)."""
    blocks = -(-context // (_MOST_PARTS * _BLOCK_CONTEXT))
    part = max(_SHORTEST_PART, blocks * _BLOCK_CONTEXT)
    return part, -(-context // part)


def launch_options(rows: int, head_dim: int) -> dict[str, int]:
    """Block sizes and warps of `attention_kernel` for so many queries a KV head."""
    block = max(16, 1 << (rows - 1).bit_length())  # the tensor cores take 16 rows
    return {
        "BLOCK_ROWS": block,
        "BLOCK_D": max(16, 1 << (head_dim - 1).bit_length()),
        "BLOCK_C": _BLOCK_CONTEXT,
        "num_warps": 4 if block == 16 else 8,
        "num_stages": 2,
    }


def cached_attention(
    qkv: Float[Tensor, "tokens channels"],
    layer: LayerWeights,
    weights: DecoderWeights,
    cos: Float[Tensor, "max_length head_dim"],
    sin: Float[Tensor, "max_length head_dim"],
    positions: Int64[Tensor, "tokens"],
    keys: Float[Tensor, "kv_heads max_length head_dim"],
    values: Float[Tensor, "kv_heads max_length head_dim"],
    context: int,
) -> Float[Tensor, "tokens out_channels"]:
    """Norm and turn q and k, write k and v into the cache, attend to its first `context` tokens.

    positions: of the new tokens, ascending; positions below `context`. keys, values: contiguous;
    they are changed. Scores and sums are float32, and the weights are rounded to the cache's dtype
    for the product with the values, as the unfused attention does.
    """
    from quasar_lab.gpu_attention.kernels import attention_kernel, rotate_store_kernel

    tokens, device = len(qkv), qkv.device
    heads, kv_heads, head_dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    group, capacity = heads // kv_heads, keys.shape[1]
    options = launch_options(tokens * group, head_dim)
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=device)
    out = torch.empty(tokens, heads * head_dim, dtype=qkv.dtype, device=device)
    part, parts = parts_of(context)
    partial = sums = counters = None
    if parts > 1:
        rows, block_d = options["BLOCK_ROWS"], options["BLOCK_D"]
        partial = torch.empty(kv_heads, parts, rows, block_d, device=device)
        sums = torch.empty(kv_heads, parts, 2, rows, device=device)
        counters = triton_backend.arrivals(kv_heads, device)
    with triton_backend.on_device_of(qkv):
        rotate_store_kernel[(tokens, heads + 2 * kv_heads)](
            qkv.contiguous(), layer.q_norm, layer.k_norm, cos, sin, positions, q, keys, values,
            weights.eps, capacity, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
            BLOCK_D=options["BLOCK_D"], num_warps=1, **triton_backend.EXACT,
        )  # fmt: skip
        attention_kernel[(kv_heads, parts)](
            q, keys, values, positions, out, partial, sums, counters,
            tokens, capacity, weights.attention_scale, part, parts,
            KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, WINDOW=layer.window or 0,
            **options, **triton_backend.EXACT,
        )  # fmt: skip
    return out
