"""Attention's two Triton kernels: in the interpreter against torch, and compiled for three GPUs."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, tiny_model
from triton_interpreter import Interpreter

from quasar_lab import gpu_attention
from quasar_lab.decoder import FastDecoder, attend, rotate, visibility
from quasar_lab.layer_inputs import rms_norm

pytest.importorskip(
    "triton", reason="triton is not installed: pip install 'quasar-lab[triton-ci]' (Linux)"
)

from quasar_lab.int8_gemm import triton_backend, triton_compile

CAPACITY = 400


@pytest.fixture(scope="module")
def interpreter():
    worker = Interpreter()
    yield worker
    worker.close()


@dataclasses.dataclass
class Case:
    """A step of `tokens` tokens behind `start` others, of which the cache is full."""

    tokens: int
    start: int
    kv_heads: int
    group: int
    head_dim: int
    window: int | None
    norms: bool
    dtype: torch.dtype
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        channels = (self.group + 2) * self.kv_heads * self.head_dim
        self.qkv = random(self.tokens, channels)
        self.keys, self.values = (random(self.kv_heads, CAPACITY, self.head_dim) for _ in range(2))
        # what is not there yet may hold anything
        self.keys[:, self.start :] = self.values[:, self.start :] = torch.nan
        angle = torch.rand(CAPACITY, self.head_dim // 2, generator=generator).repeat(1, 2) * 6
        self.cos, self.sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        norms = [random(self.head_dim) if self.norms else None for _ in range(2)]
        self.layer = SimpleNamespace(q_norm=norms[0], k_norm=norms[1], window=self.window)
        self.weights = SimpleNamespace(
            num_heads=self.group * self.kv_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            eps=1e-5,
            attention_scale=self.head_dim**-0.5,
            softmax_dtype=torch.float32,
        )
        self.positions = torch.arange(self.start, self.start + self.tokens)

    @property
    def context(self) -> int:
        """As a CUDA graph reads it: whole blocks, more than there is."""
        return min(CAPACITY, -(-(self.start + self.tokens) // 96) * 96)

    def by_torch(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the decoder's operators make of it, rotation in the case's own dtype."""
        w, end = self.weights, self.start + self.tokens
        q, k, v = self.qkv.view(self.tokens, -1, w.head_dim).split(
            (w.num_heads, w.num_kv_heads, w.num_kv_heads), dim=1
        )
        if self.norms:
            q, k = rms_norm(q, self.layer.q_norm, w.eps), rms_norm(k, self.layer.k_norm, w.eps)
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        keys, values = self.keys.clone(), self.values.clone()
        keys[:, self.positions] = rotate(k, cos, sin).transpose(0, 1)
        values[:, self.positions] = v.transpose(0, 1)
        mixed = attend(
            rotate(q, cos, sin).to(dtype),
            keys[:, :end].to(dtype),
            values[:, :end].to(dtype),
            visibility(self.positions, end, self.window),
            w.attention_scale,
            dtype,
        )
        return mixed, keys, values


def by_triton(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    empty = torch.empty
    torch.empty = lambda *shape, **options: (  # an element that is not written shows
        (made := empty(*shape, **options)).fill_(torch.nan if made.is_floating_point() else 85)
    )
    try:
        with triton_backend.counters_of_graph(torch.device("cpu")) as counters:
            mixed = gpu_attention.cached_attention(
                case.qkv, case.layer, case.weights, case.cos, case.sin, case.positions,
                case.keys, case.values, case.context,
            )  # fmt: skip
    finally:
        torch.empty = empty
    assert not counters.any()  # the next kernel of the graph counts with them
    return mixed, case.keys, case.values


@settings(max_examples=40)
@given(
    case=st.builds(
        Case,
        tokens=st.integers(1, 8),
        start=st.integers(0, CAPACITY - 8),
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 4),
        head_dim=st.sampled_from([8, 24, 32, 64]),
        window=st.sampled_from([None, 1, 5, 200]),
        norms=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        seed=st.integers(0, 999),
    )
)
@example(Case(1, 0, 1, 1, 8, None, False, torch.float32))  # the first token of a text
@example(Case(6, 300, 2, 4, 64, None, True, torch.bfloat16))  # three parts
@example(Case(6, 300, 1, 3, 32, 5, False, torch.float32))  # parts in which nothing is seen
def test_the_kernels_agree_with_the_operators(interpreter, case):
    """Guards masks, windows, the sum over parts, heads that share a cache, and what is not there
    yet; keys and values are written as torch writes them."""
    mixed, keys, values = interpreter.run(by_triton, case)
    exact, torch_keys, torch_values = case.by_torch(torch.float64)
    eps = torch.finfo(case.dtype).eps
    # Rotated keys: torch may round a product or a mean otherwise by its last bit.
    torch.testing.assert_close(keys, torch_keys, rtol=4 * eps, atol=4 * eps, equal_nan=True)
    torch.testing.assert_close(values, torch_values, rtol=0, atol=0, equal_nan=True)
    # Queries and keys are off by a few roundings each, and so a score by sqrt(head_dim) times as
    # much at most; a mixture is off by its weights' relative error, rounded weights included.
    scores = 8 * eps * case.head_dim**0.5 * (1 + float(torch_keys.nan_to_num().abs().max()))
    bound = (scores + 4 * eps) * float(torch_values.nan_to_num().abs().max())
    assert float((mixed.double() - exact).abs().max()) <= bound


def decode(family: str) -> tuple[int, torch.Tensor]:
    """(layers that ran through the kernels, logits of a few steps and what they leave behind)"""
    calls, kernels = 0, gpu_attention.cached_attention

    def counting(*arguments):
        nonlocal calls
        calls += 1
        return kernels(*arguments)

    gpu_attention.cached_attention = counting
    decoder = FastDecoder.from_model(tiny_model(family, dtype=torch.float32), 200, engine="torch")
    ids = torch.arange(3, 150) % VOCAB
    steps = [decoder.forward(ids, num_logits=2)]  # a prompt, which has too many rows
    for count, forgotten in ((6, 4), (1, 0), (5, 5), (3, 0)):
        steps.append(decoder.forward(ids[count : 2 * count]))
        decoder.rollback(forgotten)
    gpu_attention.cached_attention = kernels
    return calls, torch.cat(steps)


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "qwen3"])
def test_the_decoder_runs_them(interpreter, family):
    """Guards the wiring: which norms, window and cache, and positions after a rollback."""
    calls, found = interpreter.run(decode, family)
    assert calls == 4 * 3  # steps, layers
    none, expected = decode(family)
    assert none == 0
    # float32 sums in another order, through two layers
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_which_steps_it_takes(monkeypatch):
    """A prompt, float64 and a CPU go through torch's operators."""
    case = Case(6, 10, 2, 4, 64, None, False, torch.float16)
    assert not gpu_attention.fits(case.qkv, case.weights)  # no GPU here
    monkeypatch.setattr(triton_backend, "availability", lambda: "ok")
    monkeypatch.setattr(triton_backend, "supports", lambda device: True)
    monkeypatch.setattr(gpu_attention, "_compiles", lambda device: False)  # no C compiler
    assert not gpu_attention.fits(case.qkv, case.weights)
    monkeypatch.setattr(gpu_attention, "_compiles", lambda device: True)
    assert gpu_attention.fits(case.qkv, case.weights)
    assert not gpu_attention.fits(case.qkv.repeat(6, 1), case.weights)  # 144 queries a KV head
    assert not gpu_attention.fits(case.qkv.double(), case.weights)
    case.weights.head_dim = 256
    assert not gpu_attention.fits(case.qkv, case.weights)


@pytest.mark.parametrize("context", [1, 128, 129, 512, 4096, 32768, 131072])
def test_parts_cover_the_context(context):
    part, parts = gpu_attention.parts_of(context)
    assert parts * part >= context > (parts - 1) * part and parts <= 16


@pytest.mark.parametrize("capability", triton_compile.CHIPS)
@pytest.mark.parametrize("rows", [1, 24, 64])
@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("dtype", ["bf16"])
@pytest.mark.parametrize("window", [0, 4096])
def test_attention_compiles(capability, rows, parts, dtype, window):
    """Guards against spilled registers, products without tensor cores and a race of the parts."""
    from quasar_lab.gpu_attention.kernels import attention_kernel

    options = gpu_attention.launch_options(rows, 128)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    pointers = dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), dtype)
    constants = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "WINDOW": window, **options}
    if parts == 1:
        constants |= dict.fromkeys(("partial_ptr", "sums_ptr", "arrivals_ptr"))
    else:
        pointers |= {"partial_ptr": "fp32", "sums_ptr": "fp32", "arrivals_ptr": "i32"}
    compiled = triton_compile.compile_for(
        attention_kernel, capability, pointers | {"positions_ptr": "i64"}, constants,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    kind = dtype.replace("fp", "f")
    assert re.search(rf"mma\.sync.*{kind}|wgmma.*{kind}", compiled.ptx)
    assert compiled.stack_bytes == 0
    assert compiled.shared_memory <= triton_compile.CHIPS[capability].shared_memory
    if parts > 1:
        atomic = compiled.ptx.index("atom.global.gpu.acq_rel.add")
        stored = compiled.ptx.rindex("st.global", 0, atomic)
        assert stored < compiled.ptx.rindex("bar.sync", 0, atomic)
        assert "ld.global.cg" in compiled.ptx[atomic:]


@pytest.mark.parametrize("capability", triton_compile.CHIPS)
@pytest.mark.parametrize("norms", [True, False])
def test_rotation_compiles(capability, norms):
    from quasar_lab.gpu_attention.kernels import rotate_store_kernel

    names = ("qkv_ptr", "cos_ptr", "sin_ptr", "q_ptr", "keys_ptr", "values_ptr")
    pointers = dict.fromkeys(names, "bf16") | {"positions_ptr": "i64"}
    constants = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_D": 128}
    norm_names = ("q_norm_ptr", "k_norm_ptr")
    if norms:
        pointers |= dict.fromkeys(norm_names, "bf16")
    else:
        constants |= dict.fromkeys(norm_names)
    compiled = triton_compile.compile_for(
        rotate_store_kernel, capability, pointers, constants, num_warps=1
    )
    assert compiled.stack_bytes == 0
