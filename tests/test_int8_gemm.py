"""INT8 GEMM: every backend equals the int64 product, and the scales follow the formula."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar_lab import UserError, available_backends, int8_gemm, int8_matmul, w8a8_linear
from quasar_lab.int8_gemm import choice, cpu, openmp, reference
from quasar_lab.int8_gemm.reference import MAX_K, quantize_activation, quantize_weight
from quasar_lab.tiles.instruction_sets import INSTRUCTION_SETS

BACKENDS = [
    name
    for name, state in available_backends().items()
    if state == "ok" and (name != "triton" or torch.cuda.is_available())
]
ISAS = [name for name, isa in INSTRUCTION_SETS.items() if isa.available]


def random_int8(*shape: int, seed: int = 0, low: int = -128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, 128, shape, dtype=torch.int8, generator=generator)


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.long() @ b.long().T).to(torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(20, 12), (64, 64), (130, 7), (576, 33)])
def test_every_row_count_is_exact(backend: str, shape: tuple[int, int]) -> None:
    """Case 30: M = 1..33, K and N that are no multiples of 8."""
    k, n = shape
    b = random_int8(n, k, seed=1)
    for m in range(1, 34):
        a = random_int8(m, k, seed=m)
        assert torch.equal(int8_matmul(a, b, backend=backend), exact(a, b)), m


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
def test_extreme_values_do_not_saturate(isa: str, signs: tuple[int, int]) -> None:
    """Case 31: all entries +-127 (and -128), K = 4096, on each instruction set of this CPU."""
    for magnitude in (127, 128):
        a = torch.full((3, 4096), max(-128, min(127, signs[0] * magnitude)), dtype=torch.int8)
        b = torch.full((5, 4096), max(-128, min(127, signs[1] * magnitude)), dtype=torch.int8)
        assert torch.equal(cpu.int8_matmul(a, b, instruction_set=isa), exact(a, b))


@pytest.mark.parametrize("isa", ISAS)
def test_long_rows_are_exact_block_by_block(isa: str) -> None:
    """Rows cut into blocks, with a rest behind the last row, in one tile, several, two panels."""
    for m, k in ((1, 4101), (1, 8229), (2, 4101), (7, 4101), (65, 4101)):
        a, b = random_int8(m, k), random_int8(9, k, seed=1)
        assert torch.equal(cpu.int8_matmul(a, b, instruction_set=isa), exact(a, b)), (m, k)


@given(
    m=st.integers(1, 80),
    n=st.integers(1, 40),
    k=st.integers(1, 300),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 1000),
)
def test_every_instruction_set_equals_the_reference(m: int, n: int, k: int, isa: str, seed: int):
    """Tile edges: any mix of whole and partial tiles, panels and vectors."""
    a, b = random_int8(m, k, seed=seed), random_int8(n, k, seed=seed + 1)
    assert torch.equal(cpu.int8_matmul(a, b, instruction_set=isa), exact(a, b))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_bit_identical_to_the_reference(isa: str, with_bias: bool) -> None:
    """The fused kernel rounds, scales and adds in the reference's order."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 100, generator=generator) * 10
    weight, scale = quantize_weight(torch.randn(19, 100, generator=generator))
    bias = torch.randn(19, generator=generator) if with_bias else None
    expected = reference.w8a8_linear(x, weight, scale, bias)
    assert torch.equal(cpu.w8a8_linear(x, weight, scale, bias, instruction_set=isa), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_has_the_dtype_and_shape_of_the_input(dtype: torch.dtype) -> None:
    weight, scale = quantize_weight(torch.randn(5, 24))
    x = torch.randn(2, 3, 24).to(dtype)
    y = w8a8_linear(x, weight, scale)
    assert y.shape == (2, 3, 5) and y.dtype == dtype
    # error of one linear: half a step of each operand, summed over K, plus the output's rounding
    step = x.float().abs().amax(-1, keepdim=True) / 127 * 0.5
    bound = step * (weight.float() * scale[:, None]).abs().sum(1)
    exact_product = x.double() @ (weight.double() * scale.double()[:, None]).T
    slack = torch.finfo(dtype).eps * exact_product.abs() + 1e-5
    assert ((y.double() - exact_product).abs() <= bound + slack).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_stays_float64(backend: str) -> None:
    """A float64 model is the yardstick of others: nothing in it may be rounded to float32."""
    generator = torch.Generator().manual_seed(0)
    weight, scale = quantize_weight(torch.randn(7, 40, generator=generator))
    x = torch.randn(3, 40, dtype=torch.float64, generator=generator)
    x[1] = 0
    bias = torch.randn(7, dtype=torch.float64, generator=generator)
    step = x.abs().amax(-1, keepdim=True) / 127
    integers = torch.round(x / torch.where(step > 0, step, 1.0))
    expected = integers @ weight.double().T * step * scale.double() + bias
    # a few roundings of sums of numbers up to 10, far below float32's 1e-6
    torch.testing.assert_close(
        w8a8_linear(x, weight, scale, bias, backend=backend), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_influence_each_other(backend: str) -> None:
    """Case 32: a zero row gives zeros, a row beside an outlier row equals the row alone."""
    generator = torch.Generator().manual_seed(0)
    weight, scale = quantize_weight(torch.randn(33, 64, generator=generator))
    x = torch.randn(3, 64, generator=generator)
    x[1] = 0
    x[2] *= 1e6
    together = w8a8_linear(x, weight, scale, backend=backend)
    assert (together[1] == 0).all()
    assert torch.equal(together[:1], w8a8_linear(x[:1], weight, scale, backend=backend))


def test_quantization_matches_the_worked_example() -> None:
    """Reference values: scales of the folded matrices in SmoothQuant's small example."""
    x = torch.tensor([[2.0, -0.1666667, 0.0], [-1.0, 1.5, 0.0]])
    w = torch.tensor([[2.0, -1.5, 0.0], [1.0, 0.24, 2.0]])
    _, x_scale = quantize_activation(x)
    _, w_scale = quantize_weight(w)
    torch.testing.assert_close(
        x_scale.ravel(), torch.tensor([0.0157480, 0.0118110]), atol=5e-8, rtol=0
    )
    torch.testing.assert_close(w_scale, torch.tensor([0.0157480, 0.0157480]), atol=5e-8, rtol=0)


def test_halves_round_to_even_and_zero_rows_stay_zero() -> None:
    quantized, scale = quantize_activation(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5], [0.0] * 5]))
    assert quantized.tolist() == [[127, 0, 2, 2, 0], [0] * 5]
    assert scale.ravel().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("isa", ISAS)
def test_nan_is_not_hidden(isa: str) -> None:
    """A NaN in a row makes that row NaN, and no other."""
    weight, scale = quantize_weight(torch.randn(4, 16))
    x = torch.randn(2, 16)
    x[0, 3] = torch.nan
    y = cpu.w8a8_linear(x, weight, scale, instruction_set=isa)
    assert y[0].isnan().all() and y[1].isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: int8_matmul(a.float(), b), "a is torch.float32"),
        (lambda a, b: int8_matmul(a[0], b), "a has shape"),
        (lambda a, b: int8_matmul(a, b[:, :3]), "must be equal"),
        (lambda a, b: int8_matmul(a, b, backend="cutlass"), "unknown INT8 backend 'cutlass'"),
        (lambda a, b: w8a8_linear(a, b, torch.ones(4)), "x is torch.int8"),
        (lambda a, b: w8a8_linear(a.float(), b, torch.ones(3)), "weight_scale has shape"),
        (lambda a, b: w8a8_linear(a.float(), b, torch.ones(4), torch.ones(2)), "bias has shape"),
        (lambda a, b: int8_gemm._check("x", [1.0], (torch.float32,), None), "x is list"),
        (
            lambda a, b: int8_matmul(*[torch.zeros(1, MAX_K + 1, dtype=torch.int8)] * 2),
            "overflow",
        ),
        (lambda a, b: w8a8_linear(a[:, :0].float(), b[:, :0], torch.ones(4)), "K = 0"),
    ],
)
def test_wrong_inputs_get_one_clear_line(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=message) as error:
        call(random_int8(2, 8), random_int8(4, 8))
    assert "\n" not in str(error.value)


def test_one_thread_and_all_threads_agree() -> None:
    a, b = random_int8(9, 200), random_int8(50, 200, seed=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpu.int8_matmul(a, b)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, cpu.int8_matmul(a, b))


def test_kernel_runs_on_torchs_threads_on_linux() -> None:
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        pytest.skip("torch's OpenMP pool is shared on Linux with an OpenMP build of torch only")
    assert openmp.shares_torch_threads()


def test_without_openmp_one_thread_gives_the_same(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The path of macOS and Windows, in a process of its own since symbols are bound once."""
    script = (
        "import torch\n"
        "from quasar_lab.int8_gemm import openmp, cpu\n"
        "openmp._loaded_openmp = lambda: None\n"
        "assert not openmp.shares_torch_threads()\n"
        "a = torch.randint(-128, 128, (5, 70), dtype=torch.int8)\n"
        "b = torch.randint(-128, 128, (9, 70), dtype=torch.int8)\n"
        "assert torch.equal(cpu.int8_matmul(a, b), (a.long() @ b.long().T).int())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


def test_two_processes_at_once_give_right_results(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Both compile into one empty cache at the same time."""
    script = (
        "import torch\n"
        "from quasar_lab.int8_gemm import cpu\n"
        "a = torch.randint(-128, 128, (6, 576), dtype=torch.int8)\n"
        "b = torch.randint(-128, 128, (64, 576), dtype=torch.int8)\n"
        "for _ in range(50):\n"
        "    assert torch.equal(cpu.int8_matmul(a, b), (a.long() @ b.long().T).int())\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(2)]
    assert [process.wait(timeout=240) for process in both] == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="protects a page of memory as Linux does")
def test_nothing_is_read_far_behind_the_weights() -> None:
    """Rows shorter than half a vector: the last of several would be read from the next page, which
    need not exist (a file mapped into memory)."""
    script = (
        "import ctypes, mmap, sys, torch\n"
        "from quasar_lab.int8_gemm import cpu\n"
        "memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)\n"
        "start = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "page = mmap.PAGESIZE\n"
        "protect = ctypes.CDLL(None).mprotect\n"
        "assert protect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0\n"
        "bytes = torch.frombuffer(memory, dtype=torch.int8, count=page)\n"
        "bytes.random_(-128, 128)\n"
        "for isa in sys.argv[1:]:\n"
        "    for k in (1, 5, 8, 15, 16, 17, 31, 33, 63, 65):\n"
        "        w = bytes[-5 * k :].view(5, k)\n"
        "        a = torch.randint(-128, 128, (3, k), dtype=torch.int8)\n"
        "        found = cpu.int8_matmul(a, w, instruction_set=isa)\n"
        "        assert torch.equal(found, (a.long() @ w.long().T).int()), (isa, k)\n"
    )
    subprocess.run([sys.executable, "-c", script, *ISAS], check=True, timeout=240)


@pytest.mark.skipif("avx2" not in ISAS, reason="this processor has no AVX2")
def test_numba_may_be_told_of_an_older_processor() -> None:
    """NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, set to share a cache or to see what a machine without
    VNNI would do: instructions that numba does not compile for ended the process."""
    script = (
        "import torch\n"
        "from quasar_lab.int8_gemm import cpu\n"
        "from quasar_lab.tiles.instruction_sets import best_instruction_set\n"
        "from quasar_lab.tiles.linear_tile import best_float_format\n"
        "assert best_instruction_set() == 'avx2'\n"
        "assert best_float_format(torch.float32) == 'float32x8'\n"
        "a = torch.randint(-128, 128, (5, 70), dtype=torch.int8)\n"
        "b = torch.randint(-128, 128, (9, 70), dtype=torch.int8)\n"
        "assert torch.equal(cpu.int8_matmul(a, b), (a.long() @ b.long().T).int())\n"
    )
    older = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}
    environment = {**os.environ, **older}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=240)


def test_auto_measures_once_and_remembers(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("QUASAR_LAB_CACHE", str(tmp_path))
    monkeypatch.setenv("QUASAR_LAB_AUTOTUNE", "1")
    measured = []
    monkeypatch.setattr(
        choice, "_measure", lambda module, *_: measured.append(module) or float(module is not cpu)
    )
    choice.forget()
    usable = {"reference": reference, "cpu": cpu}
    weight = random_int8(16, 32)
    assert choice.fastest(usable, 5, weight) == "cpu" and len(measured) == 2
    assert choice.fastest(usable, 7, weight) == "cpu" and len(measured) == 2  # the same bucket
    choice.forget()  # a new process reads the file
    assert choice.fastest(usable, 8, weight) == "cpu" and len(measured) == 2
    [file] = tmp_path.glob("backends-*.json")
    file.write_text("not json")
    choice.forget()
    assert choice.fastest(usable, 8, weight) == "cpu" and len(measured) == 4
    assert list(json.loads(file.read_text()).values()) == ["cpu"]
    monkeypatch.setenv("QUASAR_LAB_AUTOTUNE", "0")
    assert choice.fastest(usable, 8, weight) == "reference"
    choice.forget()


def test_compiled_code_is_read_back_from_disk(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A second process must not compile again (seconds at every start)."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    script = (
        "import torch; from quasar_lab.int8_gemm import cpu; "
        "cpu.int8_matmul(torch.ones(1, 64, dtype=torch.int8), torch.ones(2, 64, dtype=torch.int8))"
    )
    counts = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=240)
        counts.append(len(list(tmp_path.rglob("*.nbc"))))
    assert counts[0] == counts[1] > 0


def test_scales_are_float32() -> None:
    """Case 33, the function's half: the scales of bfloat16 inputs are float32."""
    assert quantize_weight(torch.randn(3, 8).bfloat16())[1].dtype == torch.float32
    assert quantize_activation(torch.randn(3, 8).bfloat16())[1].dtype == torch.float32


def test_block_sums_of_the_reference_are_exact() -> None:
    """fp32 holds the sums of 1,024 products of 128 * 128 and no more: K over a block boundary."""
    a = torch.full((1, 1025), -128, dtype=torch.int8)
    assert reference.int8_matmul(a, a).item() == 1025 * 128 * 128
    assert np.float32(2**24 + 1) == np.float32(2**24)
