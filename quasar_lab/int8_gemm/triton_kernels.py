"""The GPU kernels: quantise a row, multiply it with INT8 weights, scale the sums - in Triton.

A Triton kernel is written for one *program*: a block of threads that owns one tile of the output
and handles it with whole-block operations. `tl.load` with a mask reads nothing where the mask is
false, so every kernel takes any shape. A pointer argument that is `None` is known when the kernel
is compiled: the code that would use it is left out.

Verification multiplies few rows: each weight byte is used M times and then never again, so the
time is that of reading the weights once. `small_m_matmul_kernel` therefore cuts K as well as N
(split-K), until every multiprocessor has weights on their way. `large_m_matmul_kernel` is the usual
tiled product for prompts, where arithmetic is the limit.

Sources: the tiling of Triton's matrix multiplication tutorial; split-K with the last arrival
reducing as in the CUDA programming guide's threadFenceReduction sample; W8A8 scaling as in
SmoothQuant (arXiv 2211.10438), equation 1.
"""

import triton
import triton.language as tl


@triton.jit
def _quantize_row(values, quantized_ptr, scale_ptr, row, columns, K):
    """Store one row (fp32) as INT8 and its scale: bit for bit `reference.quantize_activation`."""
    # As integers, the magnitudes of floats keep their order and NaN comes out on top: so the
    # maximum does not lose a NaN, as a float maximum would.
    magnitude_bits = tl.abs(values).to(tl.int32, bitcast=True)
    absmax = tl.max(magnitude_bits, axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(absmax, 127.0)
    ratio = tl.div_rn(values, tl.where(scale > 0, scale, 1.0))
    # Floats from 2^23 to 2^24 are whole numbers: adding 1.5 * 2^23 rounds half to even.
    rounded = (ratio + 12582912.0) - 12582912.0
    clamped = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
    offsets = row.to(tl.int64) * K + columns
    tl.store(quantized_ptr + offsets, clamped.to(tl.int8), mask=columns < K)
    tl.store(scale_ptr + row, scale)


@triton.jit
def quantize_kernel(x_ptr, quantized_ptr, scale_ptr, K, BLOCK_K: tl.constexpr):
    """One program a row: int8[M, K] and fp32 scale[M] of x[M, K]. BLOCK_K >= K."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row.to(tl.int64) * K + columns, mask=columns < K, other=0.0)
    _quantize_row(x.to(tl.float32), quantized_ptr, scale_ptr, row, columns, K)


@triton.jit
def rmsnorm_quantize_kernel(
    x_ptr, norm_weight_ptr, quantized_ptr, scale_ptr, K, eps, BLOCK_K: tl.constexpr
):
    """RMSNorm and quantisation of one row: the normalised row never goes to memory.

    Rounds to the model's dtype where the unfused layer does: after the division and after the
    multiplication with the norm's weight.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_K)
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row.to(tl.int64) * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    mean_square = tl.div_rn(tl.sum(x * x, axis=0), K * 1.0)
    normalised = x * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    weight = tl.load(norm_weight_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
    y = weight * normalised.to(dtype).to(tl.float32)
    _quantize_row(y.to(dtype).to(tl.float32), quantized_ptr, scale_ptr, row, columns, K)


@triton.jit
def swiglu_quantize_kernel(gate_up_ptr, quantized_ptr, scale_ptr, K, BLOCK_K: tl.constexpr):
    """silu(gate) * up and quantisation of one row of gate_up[M, 2 K] = [gate | up].

    Rounds to the model's dtype where the unfused layer does: after silu and after the product.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_K)
    dtype = gate_up_ptr.dtype.element_ty
    gate_row = gate_up_ptr + row.to(tl.int64) * (2 * K)
    gate = tl.load(gate_row + columns, mask=columns < K, other=0.0).to(tl.float32)
    up = tl.load(gate_row + K + columns, mask=columns < K, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    y = silu.to(dtype).to(tl.float32) * up
    _quantize_row(y.to(dtype).to(tl.float32), quantized_ptr, scale_ptr, row, columns, K)


@triton.jit
def _dot_tile(
    x_ptr, w_ptr, rows, columns, M, N, K, first_k, num_steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """int32[BLOCK_M, BLOCK_N] = x[rows] @ w[columns].T over num_steps blocks of K from first_k.

    SWAP multiplies the transposes, w @ x.T: Hopper's tensor cores take 64 rows of their first
    operand at a time, straight from shared memory, and the weights have 64 rows when x has not.
    """
    k = first_k + tl.arange(0, BLOCK_K)
    row_mask = (rows < M)[:, None]
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
    # A column beyond N repeats the last one, which is never stored: cheaper than a mask.
    w_columns = w_ptr + tl.minimum(columns, N - 1).to(tl.int64)[None, :] * K
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    # Triton turns this loop into a pipeline: num_stages blocks are on their way to shared memory
    # while the tensor cores multiply an earlier one.
    for _ in range(num_steps):
        if EVEN_K:
            x = tl.load(x_rows + k[None, :], mask=row_mask, other=0)
            w = tl.load(w_columns + k[:, None])
        else:
            x = tl.load(x_rows + k[None, :], mask=row_mask & (k < K)[None, :], other=0)
            w = tl.load(w_columns + k[:, None], mask=(k < K)[:, None], other=0)
        if SWAP:
            total = tl.dot(tl.trans(w), tl.trans(x), total, out_dtype=tl.int32)
        else:
            total = tl.dot(x, w, total, out_dtype=tl.int32)
        k += BLOCK_K
    if SWAP:
        total = tl.trans(total)
    return total


@triton.jit
def _store_tile(total, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, columns, M, N):
    """Store the int32 sums of a tile: as they are, or scaled, plus bias, in the output's dtype."""
    if x_scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)
        w_scale = tl.load(w_scale_ptr + columns, mask=columns < N, other=0.0)
        total = total.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
            total += bias.to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def small_m_matmul_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ w[N, K].T for M <= BLOCK_M; program (i, j): columns i, part j of K.

    partial_ptr: int32[SPLIT_K, M, N], any content. arrivals_ptr: int32[number of column tiles],
    zeros before and after. Both are None when SPLIT_K is 1.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K * SPLIT_K)
    total = _dot_tile(
        x_ptr, w_ptr, rows, columns, M, N, K, part * steps * BLOCK_K, steps,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP,
    )  # fmt: skip
    if SPLIT_K == 1:
        _store_tile(total, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, columns, M, N)
    else:
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        partial = partial_ptr + rows[:, None] * N + columns[None, :]
        tl.store(partial + part * M * N, total, mask=mask)
        # All threads have stored before one of them counts this program as arrived; acquire and
        # release make the stores of the earlier arrivals visible to the last one.
        tl.debug_barrier()
        arrived_before = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
        # The scales need the complete sum: the last program of a tile adds the parts. int32 sums
        # are exact, so the order of arrival cannot change the result.
        if arrived_before == SPLIT_K - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
            # unrolled: several parts are on their way at once
            for i in tl.range(0, SPLIT_K, num_stages=1, loop_unroll_factor=4):
                total += tl.load(partial + i * M * N, mask=mask, other=0, cache_modifier=".cg")
            _store_tile(total, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, columns, M, N)
            tl.store(arrivals_ptr + tile, 0)


@triton.jit(do_not_specialize=["M"])
def large_m_matmul_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ w[N, K].T, one program a tile, for any M."""
    # Programs that run at the same time share GROUP_M row tiles and few column tiles, so that
    # what one of them read is still in the L2 cache when its neighbours want it.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(M, BLOCK_M)
    programs_a_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    group = program // programs_a_group
    group_rows = tl.minimum(row_tiles - group * GROUP_M, GROUP_M)
    within = program % programs_a_group
    rows = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (within // group_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _dot_tile(
        x_ptr, w_ptr, rows, columns, M, N, K, 0, tl.cdiv(K, BLOCK_K),
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, False,
    )  # fmt: skip
    _store_tile(total, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, columns, M, N)
