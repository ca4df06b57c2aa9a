"""Attention of a decoder step in two Triton kernels; torch's operators are 22, with head norms 38.

A step has few tokens, so what it costs beside its products is the number of kernels it starts.
`rotate_store_kernel` takes q, k and v as the projection leaves them: norms the heads (Qwen3), turns
them by their positions and writes keys and values into the cache. `attention_kernel` reads the
cache once, in parts that run side by side; the part that arrives last adds them up.

Sources: rotary positions, arXiv 2104.09864; the running softmax, arXiv 1805.02867; the cut along
the context, Flash-Decoding (Dao et al. 2023, pytorch.org/blog/flash-decoding).
"""

import triton
import triton.language as tl


@triton.jit
def _normed(x, norm_ptr, channels, mask, mean_square, eps, dtype: tl.constexpr):
    """Rounded where the unfused norm rounds: after the division and after the weight."""
    weight = tl.load(norm_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    normalised = x * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    return (weight * normalised.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rotated(
    head_ptr, norm_ptr, cos_ptr, sin_ptr, eps,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One head, normed if there is a norm, and turned: pairs (x_i, x_{i + d/2})."""
    dtype = head_ptr.dtype.element_ty
    channels = tl.arange(0, BLOCK_D)
    mask = channels < HEAD_DIM
    partners = (channels + HEAD_DIM // 2) % HEAD_DIM
    x = tl.load(head_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(head_ptr + partners, mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        mean_square = tl.div_rn(tl.sum(x * x, axis=0), HEAD_DIM * 1.0)
        x = _normed(x, norm_ptr, channels, mask, mean_square, eps, dtype)
        partner = _normed(partner, norm_ptr, partners, mask, mean_square, eps, dtype)
    cos = tl.load(cos_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    partner = tl.where(channels < HEAD_DIM // 2, -partner, partner)
    # the products are rounded before they are added, as two operators would
    return (x * cos).to(dtype).to(tl.float32) + (partner * sin).to(dtype).to(tl.float32)


@triton.jit
def rotate_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, q_ptr, keys_ptr, values_ptr,
    eps, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, head) of qkv[M, HEADS + 2 KV_HEADS, HEAD_DIM].

    Queries go to q[M, HEADS, HEAD_DIM], keys and values to the cache [KV_HEADS, capacity, HEAD_DIM]
    at the token's position. cos, sin: [positions, HEAD_DIM].
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    channels = tl.arange(0, BLOCK_D)
    mask = channels < HEAD_DIM
    position = tl.load(positions_ptr + token)
    source = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head).to(tl.int64) * HEAD_DIM
    cos, sin = cos_ptr + position * HEAD_DIM, sin_ptr + position * HEAD_DIM
    if head < HEADS:
        turned = _rotated(source, q_norm_ptr, cos, sin, eps, HEAD_DIM, BLOCK_D)
        to = q_ptr + (token * HEADS + head).to(tl.int64) * HEAD_DIM
        tl.store(to + channels, turned.to(q_ptr.dtype.element_ty), mask=mask)
    elif head < HEADS + KV_HEADS:
        turned = _rotated(source, k_norm_ptr, cos, sin, eps, HEAD_DIM, BLOCK_D)
        to = keys_ptr + ((head - HEADS).to(tl.int64) * capacity + position) * HEAD_DIM
        tl.store(to + channels, turned.to(keys_ptr.dtype.element_ty), mask=mask)
    else:
        value = tl.load(source + channels, mask=mask, other=0.0)
        to = values_ptr + ((head - HEADS - KV_HEADS).to(tl.int64) * capacity + position) * HEAD_DIM
        tl.store(to + channels, value, mask=mask)


@triton.jit
def _add_part(largest, total, mixed, part_largest, part_total, part_mixed):
    """Two parts of a softmax-weighted sum as one, each relative to its own largest score."""
    both = tl.maximum(largest, part_largest)
    # a part in which a row sees nothing has no largest score: -inf - -inf would be NaN
    base = tl.where(both == -float("inf"), 0.0, both)
    ours, theirs = tl.exp(largest - base), tl.exp(part_largest - base)
    total = total * ours + part_total * theirs
    mixed = mixed * ours[:, None] + part_mixed * theirs[:, None]
    return both, total, mixed


# The context grows with the text: what follows from it must not make another kernel.
@triton.jit(do_not_specialize=["M", "part_length", "num_parts"])
def attention_kernel(
    q_ptr, keys_ptr, values_ptr, positions_ptr, out_ptr, partial_ptr, sums_ptr, arrivals_ptr,
    M, capacity, scale, part_length, num_parts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """softmax(q kᵀ scale) v; program (KV head i, part j): part_length tokens from j * part_length.

    q, out: [M, KV_HEADS * GROUP, HEAD_DIM]. A token sees the cache up to its own position, and no
    further back than WINDOW tokens, itself included (0: all). Rows of a program are the queries
    of M tokens and GROUP heads that share a KV head: at most BLOCK_ROWS.
    partial_ptr: fp32[KV_HEADS, num_parts, BLOCK_ROWS, BLOCK_D], sums_ptr: fp32[KV_HEADS, num_parts,
    2, BLOCK_ROWS], any content; arrivals_ptr: int32[KV_HEADS], zeros before and after. All three
    are None when num_parts is 1.
    """
    kv_head, part = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, BLOCK_ROWS)
    channels = tl.arange(0, BLOCK_D)
    tokens, row_mask = rows // GROUP, rows < M * GROUP
    position = tl.load(positions_ptr + tokens, mask=row_mask, other=-1)
    query_heads = tokens * (KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
    places = query_heads.to(tl.int64)[:, None] * HEAD_DIM + channels[None, :]
    place_mask = row_mask[:, None] & (channels < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + places, mask=place_mask, other=0.0)
    cache = kv_head.to(tl.int64) * capacity * HEAD_DIM

    largest = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    end = tl.minimum((part + 1) * part_length, tl.load(positions_ptr + M - 1) + 1)
    start = part * part_length
    if WINDOW > 0:  # whole blocks that even the first token does not see
        earliest = tl.load(positions_ptr).to(tl.int32) - WINDOW + 1
        start = tl.maximum(start, earliest // BLOCK_C * BLOCK_C)
    for first in range(start, end, BLOCK_C):
        seen = first + tl.arange(0, BLOCK_C)
        block = cache + seen.to(tl.int64)[:, None] * HEAD_DIM + channels[None, :]
        block_mask = (seen < end)[:, None] & (channels < HEAD_DIM)[None, :]
        keys = tl.load(keys_ptr + block, mask=block_mask, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        visible = seen[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (seen[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, -float("inf"))
        block_largest = tl.max(scores, axis=1)
        base = tl.where(block_largest == -float("inf"), 0.0, block_largest)
        weights = tl.exp(scores - base[:, None])
        values = tl.load(values_ptr + block, mask=block_mask, other=0.0)
        block_mixed = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        largest, total, mixed = _add_part(
            largest, total, mixed, block_largest, tl.sum(weights, axis=1), block_mixed
        )

    if partial_ptr is not None:
        own = kv_head * num_parts * BLOCK_ROWS  # the first of this head's rows in partial and sums
        partial = partial_ptr + (own + rows)[:, None] * BLOCK_D + channels[None, :]
        sums = sums_ptr + 2 * own + rows
        tl.store(partial + part * BLOCK_ROWS * BLOCK_D, mixed)
        tl.store(sums + 2 * part * BLOCK_ROWS, largest)
        tl.store(sums + (2 * part + 1) * BLOCK_ROWS, total)
        # as in split-K: all threads have stored before one of them counts the part as arrived
        tl.debug_barrier()
        arrived_before = tl.atomic_add(arrivals_ptr + kv_head, 1, sem="acq_rel")
        if arrived_before == num_parts - 1:
            largest = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
            total = tl.zeros((BLOCK_ROWS,), tl.float32)
            mixed = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
            for i in tl.range(0, num_parts, num_stages=1):  # in this order, whoever came last
                largest, total, mixed = _add_part(
                    largest, total, mixed,
                    tl.load(sums + 2 * i * BLOCK_ROWS, cache_modifier=".cg"),
                    tl.load(sums + (2 * i + 1) * BLOCK_ROWS, cache_modifier=".cg"),
                    tl.load(partial + i * BLOCK_ROWS * BLOCK_D, cache_modifier=".cg"),
                )  # fmt: skip
            result = mixed / tl.where(total == 0, 1.0, total)[:, None]  # rows beyond M see nothing
            tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=place_mask)
            tl.store(arrivals_ptr + kv_head, 0)
    else:
        result = mixed / tl.where(total == 0, 1.0, total)[:, None]  # rows beyond M see nothing
        tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=place_mask)
