"""The Triton kernels: their results in the interpreter, their machine code for three GPUs."""

import dataclasses
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_interpreter import Interpreter

from quasar_lab.int8_gemm import reference
from quasar_lab.int8_gemm.triton_tuning import Tiling, large_m_tilings, small_m_tilings

pytest.importorskip(
    "triton", reason="triton is not installed: pip install 'quasar-lab[triton-ci]' (Linux)"
)

from quasar_lab.int8_gemm import triton_backend, triton_compile, triton_tuning

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture(scope="module")
def interpreter():
    worker = Interpreter()
    yield worker
    worker.close()


def random_int8(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def random_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- results, against the reference ----


@settings(max_examples=30)
@given(
    rows=st.integers(1, 6),
    K=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-44, 30),
    seed=st.integers(0, 2**16),
)
@example(rows=2, K=1, dtype=torch.float32, exponent=0, seed=0)
@example(rows=2, K=40, dtype=torch.float32, exponent=-44, seed=0)  # scales that are subnormal
def test_quantisation_is_the_references_bit_for_bit(interpreter, rows, K, dtype, exponent, seed):
    """Guards against multiplying by 127 / absmax, or rounding half away from zero."""
    largest = torch.finfo(dtype).max
    x = (random_rows(rows, K, seed=seed).double() * 10.0**exponent).clamp(-largest, largest)
    x = x.to(dtype)
    if rows > 1:
        x[1] = 0
    for ours, theirs in zip(
        interpreter.quantize_activation(x), reference.quantize_activation(x), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_halves_round_to_even(interpreter):
    """Guards against the rounding that `floor(x + 0.5)` does."""
    halves = torch.arange(-126.5, 127.0)
    x = torch.cat([torch.tensor([127.0]), halves])[None]
    quantized, scale = interpreter.quantize_activation(x)
    assert scale.item() == 1.0
    assert torch.equal(quantized[0, 1:].float(), halves.round())


def test_a_nan_is_not_lost(interpreter):
    """Case 17: guards against a maximum that skips NaN and a row that then looks healthy."""
    x = random_rows(3, 50)
    x[1, 7] = float("nan")
    weight, weight_scale = reference.quantize_weight(random_rows(8, 50, seed=1))
    y = interpreter.w8a8_linear(x, weight, weight_scale)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], reference.w8a8_linear(x[[0, 2]], weight, weight_scale))


@pytest.mark.parametrize("M", range(1, 34))
def test_every_small_m(interpreter, M):
    """Case 30: K = 20 and N = 12 are no multiples of 8, M is none of the block."""
    a, b = random_int8(M, 20, seed=M), random_int8(12, 20, seed=1)
    assert torch.equal(interpreter.int8_matmul(a, b), reference.int8_matmul(a, b))


tilings = st.builds(
    Tiling,
    block_m=st.just(64),
    block_n=st.sampled_from((16, 32, 64)),
    block_k=st.sampled_from((32, 64, 128)),
    split_k=st.sampled_from((1, 2, 4, 8)),
    num_warps=st.just(4),
    num_stages=st.just(3),
    swap=st.booleans(),
)


@settings(max_examples=30)
@given(
    M=st.integers(1, 64),
    N=st.integers(1, 130),
    K=st.integers(1, 400),
    tiling=tilings,
    seed=st.integers(0, 2**16),
)
@example(M=5, N=48, K=256, tiling=Tiling(16, 16, 32, 8, 4, 3), seed=0)  # no mask along K
@example(M=5, N=48, K=33, tiling=Tiling(16, 16, 32, 8, 4, 3), seed=0)  # parts of K with no K left
def test_split_k_sums_are_exact(interpreter, M, N, K, tiling, seed):
    """Guards against a part that is lost or counted twice, and against reading past an edge."""
    a, b = random_int8(M, K, seed=seed), random_int8(N, K, seed=seed + 1)
    ours = interpreter.int8_matmul(a, b, tiling=tiling)
    assert ours.dtype == torch.int32
    assert torch.equal(ours, reference.int8_matmul(a, b))


@given(M=st.integers(65, 300), N=st.integers(1, 200), K=st.integers(1, 200))
@example(M=65, N=1, K=1)
@example(M=600, N=70, K=64)  # more row tiles than one group
def test_large_m_sums_are_exact(interpreter, M, N, K):
    """Guards against tiles that the grouped order visits twice or never."""
    a, b = random_int8(M, K), random_int8(N, K, seed=1)
    tiling = Tiling(64, 64, 64, 1, 4, 3)
    assert torch.equal(interpreter.int8_matmul(a, b, tiling=tiling), reference.int8_matmul(a, b))


@pytest.mark.parametrize("M", [1, 8, 70])
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_operands(interpreter, M, sign):
    """Case 31: all entries +-127 at K = 4096 stay exact."""
    a = torch.full((M, 4096), 127, dtype=torch.int8)
    b = torch.full((20, 4096), 127 * sign, dtype=torch.int8)
    assert interpreter.int8_matmul(a, b).eq(sign * 127 * 127 * 4096).all()


@settings(max_examples=30)
@given(
    M=st.sampled_from((1, 2, 6, 16, 17, 40, 66)),
    N=st.integers(1, 100),
    K=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_linear_is_the_references_bit_for_bit(interpreter, M, N, K, dtype, has_bias):
    """Guards against another order of the scales, and a bias that is added after the rounding."""
    x = random_rows(M, K, dtype=dtype)
    weight, weight_scale = reference.quantize_weight(random_rows(N, K, seed=1))
    bias = random_rows(N, dtype=dtype, seed=2) if has_bias else None
    ours = interpreter.w8a8_linear(x, weight, weight_scale, bias)
    assert ours.dtype == dtype
    assert torch.equal(ours, reference.w8a8_linear(x, weight, weight_scale, bias))


def test_rows_do_not_see_each_other(interpreter):
    """Case 32: a zero row gives a zero row; a row alone equals the row beside an outlier row."""
    x = random_rows(3, 100)
    x[1] = 0
    x[2] *= 1e4
    weight, weight_scale = reference.quantize_weight(random_rows(24, 100, seed=1))
    together = interpreter.w8a8_linear(x, weight, weight_scale)
    assert together[1].eq(0).all()
    for row in range(3):
        alone = interpreter.w8a8_linear(x[row : row + 1], weight, weight_scale)
        assert torch.equal(together[row], alone[0])


def test_scales_stay_fp32(interpreter):
    """Case 33: a bf16 model does not round its scales to bf16."""
    _, scale = interpreter.quantize_activation(random_rows(4, 64, dtype=torch.bfloat16))
    assert scale.dtype == torch.float32
    assert not torch.equal(scale, scale.bfloat16().float())


def test_any_number_of_leading_dimensions(interpreter):
    """Guards against a batch dimension that is lost on the way through the kernels."""
    x = random_rows(2, 3, 40)
    weight, weight_scale = reference.quantize_weight(random_rows(8, 40, seed=1))
    quantized = interpreter.quantize_activation(x)
    assert [list(part.shape) for part in quantized] == [[2, 3, 40], [2, 3, 1]]
    y = interpreter.scaled_matmul(*quantized, weight, weight_scale, dtype=torch.float32)
    assert torch.equal(y, reference.w8a8_linear(x.view(6, 40), weight, weight_scale).view(2, 3, 8))


def test_nothing_to_multiply(interpreter):
    """Guards against launching an empty grid, which CUDA refuses."""
    assert interpreter.int8_matmul(random_int8(0, 8), random_int8(5, 8)).shape == (0, 5)
    assert interpreter.quantize_activation(random_rows(0, 8))[0].shape == (0, 8)


def test_strided_operands(interpreter):
    """Guards against kernels that read a transposed or sliced tensor as if it were contiguous."""
    a, b = random_int8(40, 6).T, random_int8(12, 80, seed=1)[:, ::2]
    assert torch.equal(interpreter.int8_matmul(a, b), reference.int8_matmul(a, b))


def close_to_unfused(ours, y: torch.Tensor) -> None:
    """ours is `quantize_activation(y)` up to the last digits of y.

    The fused kernels sum or exponentiate with other last digits (fp32: a relative 1e-6), and the
    rounding to y's dtype can turn such a difference into one unit in y's last place. An integer
    of up to 127 then moves by at most 127 units in the last place, and half of one by rounding.
    """
    unit = max(torch.finfo(y.dtype).eps, 1e-6)
    quantized, scale = ours
    expected = y.float()
    torch.testing.assert_close(
        scale, expected.abs().amax(-1, keepdim=True) / 127, rtol=2 * unit, atol=0
    )
    error = (quantized.float() * scale - expected).abs()
    assert (error <= scale * (0.5 + 3 * 127 * unit)).all()


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("K", [1, 20, 576, 4096])
def test_rmsnorm_and_quantisation(interpreter, K, dtype):
    """Guards against a norm without eps, without its weight, or over the padded columns."""
    x, weight = random_rows(5, K, dtype=dtype), 1 + 0.2 * random_rows(K, dtype=dtype, seed=1)
    x[1] = 0
    x[2] *= 1e-3  # where eps matters
    eps = 1e-5
    normalised = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    close_to_unfused(
        interpreter.rmsnorm_quantize(x, weight.to(dtype), eps),
        weight.to(dtype) * normalised.to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("K", [1, 20, 1536])
def test_swiglu_and_quantisation(interpreter, K, dtype):
    """Guards against gate and up changing places, and against exp overflowing."""
    gate_up = random_rows(4, 2 * K, dtype=dtype) * 3
    gate_up[0, :K] = -100.0
    gate_up[1, :K] = 100.0
    gate, up = gate_up.chunk(2, dim=-1)
    close_to_unfused(interpreter.swiglu_quantize(gate_up), torch.nn.functional.silu(gate) * up)


def test_rows_too_long_for_one_program(interpreter):
    """Guards against refusing, or spilling, a row that does not fit one program's registers."""
    K = triton_backend.MAX_FUSED_K + 4
    x, weight = random_rows(2, K), 1 + 0.2 * random_rows(K, seed=1)
    ours, theirs = interpreter.quantize_activation(x), reference.quantize_activation(x)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    normalised = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    close_to_unfused(interpreter.rmsnorm_quantize(x, weight, 1e-5), weight * normalised)
    gate_up = random_rows(2, 2 * K, seed=2)
    gate, up = gate_up.chunk(2, dim=-1)
    close_to_unfused(interpreter.swiglu_quantize(gate_up), torch.nn.functional.silu(gate) * up)


# ---- how the products are cut ----


@settings(max_examples=30)
@given(
    M=st.integers(1, 64),
    N=st.integers(1, 200_000),
    K=st.integers(1, 20_000),
    chip=st.sampled_from(sorted(triton_compile.CHIPS)),
)
def test_there_is_always_a_tiling_that_fits(M, N, K, chip):
    """Guards against a shape with no candidate, and against rows that no block holds."""
    chip = triton_compile.CHIPS[chip]
    for tiling in small_m_tilings(M, N, K, chip) or pytest.fail("no candidate"):
        assert tiling.block_m >= M
        assert tiling.shared_memory <= chip.shared_memory
        assert tiling.split_k == 1 or 2 * tiling.block_k * tiling.split_k <= K
    assert large_m_tilings(chip)


@pytest.mark.parametrize("N, K", [(4096, 4096), (6144, 4096), (4096, 12288)])
def test_narrow_layers_keep_an_h200_busy(N, K):
    """Guards against 64 programs for 132 multiprocessors, which split-K is there for."""
    chip = triton_compile.CHIPS[90]
    for tiling in small_m_tilings(6, N, K, chip):
        assert -(-N // tiling.block_n) * tiling.split_k >= 0.75 * chip.multiprocessors


@pytest.fixture
def pretended_gpu(monkeypatch):
    """`fastest_tiling` as on an H200 whose clock is a function of the tiling that was launched."""
    triton_testing = pytest.importorskip("triton.testing")
    launched, state = [], SimpleNamespace(launched=[], capturing=False)

    def do_bench(run, **options):
        run()
        state.launched.append(launched[-1])
        return abs(launched[-1].split_k - 4) + launched[-1].block_n / 1000

    monkeypatch.setenv("QUASAR_LAB_AUTOTUNE", "1")
    monkeypatch.setattr(triton_testing, "do_bench", do_bench)
    monkeypatch.setattr(triton_tuning, "this_chip", lambda device: triton_compile.CHIPS[90])
    monkeypatch.setattr(triton_tuning, "_fastest", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    state.choose = lambda M: triton_tuning.fastest_tiling(
        M, 4096, 4096, torch.device("cuda", 0), launched.append
    )
    return state


def test_the_fastest_tiling_is_measured_once(pretended_gpu):
    """Guards against measuring again at every call, or in a graph capture, which CUDA refuses."""
    pretended_gpu.capturing = True
    first = pretended_gpu.choose(6)
    assert not pretended_gpu.launched
    pretended_gpu.capturing = False
    fastest = pretended_gpu.choose(6)
    candidates = small_m_tilings(6, 4096, 4096, triton_compile.CHIPS[90])
    assert pretended_gpu.launched == candidates
    assert (fastest.split_k, fastest.block_n) == (4, 64) and first == candidates[0]
    pretended_gpu.capturing = True
    assert pretended_gpu.choose(5) == fastest  # the same power of two
    assert len(pretended_gpu.launched) == len(candidates)


def test_the_measurement_can_be_turned_off(pretended_gpu, monkeypatch):
    """Guards against QUASAR_LAB_AUTOTUNE=0 being ignored on the GPU."""
    monkeypatch.setenv("QUASAR_LAB_AUTOTUNE", "0")
    assert pretended_gpu.choose(6).block_n == 64
    assert not pretended_gpu.launched


# ---- machine code, without a GPU ----

INT8_TENSOR_CORES = re.compile(
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.(satfinite\.)?s32\.s8\.s8\.s32"
    r"|wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8"
)


def matmuls(capability: int):
    """(tiling, large) that a GPU of this capability may be given for a 4096x4096 weight: each
    block shape of the smallest and of the largest block of rows, in the most parts of K."""
    chip = triton_compile.CHIPS[capability]
    small = {}
    for M in (16, 64):
        for tiling in small_m_tilings(M, 4096, 4096, chip):
            small[dataclasses.replace(tiling, split_k=0)] = tiling
    return [(tiling, False) for tiling in small.values()] + [
        (tiling, True) for tiling in large_m_tilings(chip)
    ]


@pytest.mark.parametrize(
    "capability, tiling, large",
    [
        (capability, *matmul)
        for capability in triton_compile.CHIPS
        for matmul in matmuls(capability)
    ],
    ids=str,
)
def test_products_compile_to_int8_tensor_cores(capability, tiling, large):
    """Guards against a slow path (no tensor cores, no wide asynchronous loads), against registers
    that spill to local memory, and against more shared memory than the chip has.

    Spills: stack and local bytes that cuobjdump reads from the machine code are zero.
    """
    compiled = triton_compile.compile_matmul(capability, tiling, large=large)
    assert INT8_TENSOR_CORES.search(compiled.ptx)
    assert re.search(r"cp\.async\.cg\.shared\.global[^\n]*0x10", compiled.ptx)
    assert ".local" not in compiled.ptx
    assert compiled.stack_bytes == 0
    assert compiled.shared_memory <= tiling.shared_memory
    assert compiled.shared_memory <= triton_compile.CHIPS[capability].shared_memory


@pytest.mark.parametrize("capability", triton_compile.CHIPS)
@pytest.mark.parametrize("out", ["i32", "fp32", "fp16"])
def test_products_compile_for_any_shape(capability, out):
    """Guards against a kernel that compiles only for aligned shapes, or only to bf16."""
    tiling = small_m_tilings(5, 12, 20, triton_compile.CHIPS[capability])[0]
    compiled = triton_compile.compile_matmul(
        capability, tiling, out=out, even_k=False, aligned=False
    )
    assert INT8_TENSOR_CORES.search(compiled.ptx)
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize("capability", triton_compile.CHIPS)
@pytest.mark.parametrize("width", [4096, 16384])
@pytest.mark.parametrize("name", ["quantize", "rmsnorm_quantize", "swiglu_quantize"])
def test_row_kernels_compile(capability, name, width):
    """Guards against a row that does not fit the registers, and against the approximate division
    (div.full) and flush-to-zero that would round differently from the reference."""
    from quasar_lab.int8_gemm import triton_kernels

    kernel = getattr(triton_kernels, f"{name}_kernel")
    floats = {"x_ptr", "gate_up_ptr", "norm_weight_ptr"} & set(kernel.arg_names)
    pointers = dict.fromkeys(floats, "bf16") | {"quantized_ptr": "i8", "scale_ptr": "fp32"}
    compiled = triton_compile.compile_for(
        kernel,
        capability,
        pointers,
        {"BLOCK_K": width},
        num_warps=triton_backend.warps_for_row(width),
    )
    assert "div.rn.f32" in compiled.ptx
    assert "div.full" not in compiled.ptx
    assert ".ftz" not in compiled.ptx
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize("name", ["quantize", "rmsnorm_quantize", "swiglu_quantize"])
def test_a_row_of_one_compiles(name):
    """Guards against K = 1, which Triton makes a constant that has no tensor methods."""
    from quasar_lab.int8_gemm import triton_kernels

    kernel = getattr(triton_kernels, f"{name}_kernel")
    floats = {"x_ptr", "gate_up_ptr", "norm_weight_ptr"} & set(kernel.arg_names)
    pointers = dict.fromkeys(floats, "fp32") | {"quantized_ptr": "i8", "scale_ptr": "fp32"}
    triton_compile.compile_for(kernel, 90, pointers, {"K": 1, "BLOCK_K": 1}, num_warps=4)


def test_split_k_publishes_its_part_before_it_arrives():
    """Guards against the race of a last program that reads parts not yet written: the parts'
    stores, a barrier of the whole program, then one atomic with acquire and release."""
    tiling = Tiling(16, 64, 256, 4, 4, 4)
    ptx = triton_compile.compile_matmul(90, tiling).ptx
    atomic = ptx.index("atom.global.gpu.acq_rel.add")
    assert ptx.rindex("st.global", 0, atomic) < ptx.rindex("bar.sync", 0, atomic)
    # the parts are read around the first-level cache, which other multiprocessors do not update
    assert "ld.global.cg" in ptx[atomic:]


def test_ptx_from_an_interpreting_process(monkeypatch):
    """Guards against a notebook that interprets a kernel and cannot show its machine code."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert INT8_TENSOR_CORES.search(triton_compile.matmul_ptx(90, M=6, N=64, K=128))


def test_the_package_imports_without_triton():
    """Guards against an import of triton that breaks Windows, macOS and CPU-only machines."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import quasar_lab\n"
        "from quasar_lab.int8_gemm import triton_backend\n"
        "print(triton_backend.availability())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "triton is not installed", done.stderr
