"""The `torch._int_mm` backend: the padding that CUDA needs, tried on the CPU."""

import pytest
import torch

from quasar_lab.int8_gemm import int_mm, reference


def random_int8(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


@pytest.mark.parametrize("M", [1, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("N, K", [(12, 20), (16, 24), (1, 1), (64, 4096)])
def test_padded_product_is_exact(M, N, K):
    """Case 30: guards against shapes that CUDA refuses (16 rows or fewer, K or N no multiple of
    8), and against padding that ends up in the result."""
    rows, columns, inner = int_mm.padded_shape(M, N, K)
    assert rows > 16 and columns % 8 == 0 and inner % 8 == 0
    assert rows >= M and columns >= N and inner >= K
    a, b = random_int8(M, K, seed=M), random_int8(N, K, seed=N)
    assert torch.equal(int_mm.padded_int_mm(a, b), reference.int8_matmul(a, b))


def test_second_operand_is_column_major(monkeypatch):
    """Guards against a row-major second operand, which cuBLASLt's int8 product does not take."""
    strides = []
    int_mm_here = torch._int_mm
    monkeypatch.setattr(
        torch, "_int_mm", lambda a, b: (strides.append(b.stride()), int_mm_here(a, b))[1]
    )
    int_mm.padded_int_mm(random_int8(40, 6, seed=0).T, random_int8(24, 80, seed=1)[:, ::2])
    assert strides == [(1, 40)]


def test_a_saturating_processor_is_reported(monkeypatch):
    """Case 31: guards against offering a product that saturates on processors without VNNI."""
    monkeypatch.setattr(
        torch, "_int_mm", lambda a, b: (a.int() @ b.int()).clamp(-(2**15), 2**15 - 1).int()
    )
    int_mm._exact_here.cache_clear()
    try:
        assert "saturates" in int_mm.availability()
    finally:
        int_mm._exact_here.cache_clear()
