"""The compiled step against the torch operators that it replaces."""

import copy

import numba
import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model

from quasar_lab.decoder import FastDecoder
from quasar_lab.errors import UserError
from quasar_lab.fused.rows import dots, exponential, exponentials, mix, store_numbers
from quasar_lab.fused_cpu import MAX_TOKENS, FusedStep
from quasar_lab.int8_gemm import quantize_weight, w8a8_linear
from quasar_lab.quantization import QuantizationConfig, W8A8Linear, quantize
from quasar_lab.tiles.instruction_sets import INSTRUCTION_SETS
from quasar_lab.tiles.linear import int8_linear, integer_row, pointer, row_bytes
from quasar_lab.tiles.linear_tile import FORMATS
from quasar_lab.tiles.row_sum import row_sum

VARIANTS = {
    "llama": ("llama", {}),
    "untied head": ("llama_untied", {}),
    "biases everywhere": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "one KV head": ("llama", dict(num_key_value_heads=1)),
    "head_dim is no multiple of a vector": ("llama", dict(head_dim=12)),
    "head_dim of several vectors": ("llama", dict(head_dim=72)),
    "ffn is no multiple of a vector": ("llama", dict(intermediate_size=37)),
    "mistral, sliding window": ("mistral_sliding", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, layer_types": (
        "qwen3",
        dict(
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "yarn": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10_000.0,
                factor=4.0,
                original_max_position_embeddings=128,
            )
        ),
    ),
}

# prompts of more and of less than one piece, drafts, rollbacks: (tokens, rolled back)
STEPS = [(MAX_TOKENS + 5, 0), (1, 0), (6, 4), (3, 3), (13, 9), (8, 0), (1, 1), (2, 0)]


def random_ids(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator)


def run_steps(decoder, steps=STEPS):
    """All logits of the same sequence of forwards and rollbacks."""
    fresh, logits = random_ids(200), []
    for count, back in steps:
        logits.append(decoder.forward(fresh[:count]))
        decoder.rollback(back)
        fresh = fresh[count:]
    return torch.cat(logits).double()


@pytest.mark.parametrize("name", VARIANTS)
def test_full_precision_rounds_no_worse_than_torch(name):
    """A wrong head, mask, bias or cache row shows as an error far above float32 rounding.

    The float64 model says how far torch's own float32 is off; the same sums in another order are
    allowed four times that.
    """
    family, overrides = VARIANTS[name]
    model = tiny_model(family, dtype=torch.float32, **overrides)
    model.set_attn_implementation("sdpa")
    exact = run_steps(FastDecoder.from_model(copy.deepcopy(model).double()))
    torch_error = (run_steps(FastDecoder.from_model(model, engine="torch")) - exact).abs().max()
    fused = FastDecoder.from_model(model)
    assert fused.engine == "fused"
    assert (run_steps(fused) - exact).abs().max() < 4 * torch_error


MIXED = ("layers.1.self_attn.k_proj", "layers.0.mlp.up_proj", "layers.2.self_attn.o_proj")


@pytest.mark.parametrize(
    "name", ["llama", "qwen3, layer_types", "head_dim is no multiple of a vector"]
)
def test_bfloat16_weights_are_multiplied_as_float32(name):
    """Reading a wrong half, or rounding a stored key wrongly, is far off the exact model.

    Between the matrices the step keeps float32 where torch rounds to bfloat16: it must be nearer
    to the float64 model with the same weights.
    """
    family, overrides = VARIANTS[name]
    model = tiny_model(family, dtype=torch.bfloat16, **overrides)
    model.set_attn_implementation("sdpa")
    exact = run_steps(FastDecoder.from_model(copy.deepcopy(model).double()))
    torch_error = (run_steps(FastDecoder.from_model(model, engine="torch")) - exact).abs()
    fused = FastDecoder.from_model(model)
    assert fused.engine == "fused"
    error = (run_steps(fused) - exact).abs()
    assert error.mean() < torch_error.mean()


def test_keys_and_values_are_rounded_as_torch_rounds():
    """Cutting bfloat16 off instead of rounding shifts all keys towards zero."""
    numbers = torch.cat([torch.randn(1000), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38])])
    numbers = torch.cat([numbers, -numbers, torch.tensor([0.0, -0.0, float("inf"), float("nan")])])
    stored = torch.zeros(len(numbers), dtype=torch.bfloat16)

    @numba.njit
    def store(x, to, n):
        store_numbers("bfloat16x4", pointer(x, numba.float32), to, n)

    store(numbers.data_ptr(), stored.data_ptr(), len(numbers))
    assert torch.equal(stored[:-1], numbers.bfloat16()[:-1])
    assert stored[-1].isnan()


def only_roundings_differ(found, expected, full):
    """Whether two W8A8 forwards differ by no more than a few activations' rounding.

    Sums in another order turn an activation on the edge of two integers to the other side. Turning
    every one would change the logits about as much as all rounding does, which is expected - full;
    a few, with what follows from them, half of it at most.
    """
    return (found - expected).abs().mean() < 0.5 * (expected - full).abs().mean()


@pytest.mark.parametrize(
    "skip",
    [("lm_head",), (), ("lm_head", *MIXED)],
    ids=["head in full precision", "all INT8", "mixed groups"],
)
@pytest.mark.parametrize("family", ["llama_untied", "pangu", "qwen3"])
def test_w8a8_agrees_with_torch(family, skip):
    """A matrix with another's scale, input or output shows as an error as large as the logits."""
    model = tiny_model(family, dtype=torch.float32)
    quantized = quantize(model, config=QuantizationConfig(smoothing="none", skip=skip))
    full = run_steps(FastDecoder.from_model(model, engine="torch"))
    reference = run_steps(FastDecoder.from_model(quantized, engine="torch"))
    fused = FastDecoder.from_model(quantized)
    assert fused.engine == "fused"
    assert only_roundings_differ(run_steps(fused), reference, full)


def test_the_int8_product_has_the_bits_of_w8a8_linear():
    """Rounding, sums and scales are those of the INT8 backend, for every number of tokens.

    The blocks add nothing here, and the norm divides rows of +-1 by exactly 1: so both sides give
    the head the same numbers.
    """
    model = tiny_model("llama_untied", dtype=torch.float32, rms_norm_eps=0.0)
    generator = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, model.model.embed_tokens.weight.shape, generator=generator)
    model.model.embed_tokens.weight.copy_(2.0 * signs - 1)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    qweight, scale = quantize_weight(model.lm_head.weight)
    bias = torch.randn(VOCAB, generator=generator)
    model.lm_head = W8A8Linear(qweight, scale, bias)
    decoder = FastDecoder.from_model(model)
    for tokens in (1, 2, 5, MAX_TOKENS):
        ids = random_ids(tokens)
        x = model.model.embed_tokens.weight[ids] * model.model.norm.weight
        assert torch.equal(decoder.forward(ids), w8a8_linear(x, qweight, scale, bias))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("family", ["mistral_sliding", "qwen3"])
def test_a_token_gives_the_same_bits_alone_and_among_others(family, int8):
    """Case 7: greedy speculative text could otherwise part from plain text at a near tie."""
    model = tiny_model(family, dtype=torch.float32)
    if int8:
        model = quantize(model, config=QuantizationConfig(smoothing="none"))
    ids = random_ids(40)
    one_by_one = FastDecoder.from_model(model)
    single = torch.cat([one_by_one.forward(ids[i : i + 1]) for i in range(40)])
    for size in (3, 6, 9, 40):
        grouped = FastDecoder.from_model(model)
        logits = torch.cat([grouped.forward(part) for part in ids.split(size)])
        assert torch.equal(logits, single)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads):
    """A share that is cut wrong loses or doubles work; three threads on odd sizes cut unevenly."""
    model = tiny_model("qwen3", dtype=torch.float32)
    decoder = FastDecoder.from_model(model)
    expected = run_steps(decoder)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        decoder.rollback(decoder.length)
        assert torch.equal(run_steps(decoder), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [6, 2 * MAX_TOKENS + 5])
def test_num_logits_gives_the_last_rows(tokens):
    """The compiled step normalises only the rows that are read: the right ones, in every piece."""
    model = tiny_model("llama", dtype=torch.float32)
    every = FastDecoder.from_model(model).forward(random_ids(tokens))
    for count in (0, 1, 5, 6, tokens - 1):
        some = FastDecoder.from_model(model).forward(random_ids(tokens), num_logits=count)
        assert torch.equal(some, every[tokens - count :])


def test_nan_reaches_the_logits():
    """Case 17: a NaN that a maximum or an integer conversion swallows becomes a token."""
    for int8 in (False, True):
        model = tiny_model("llama_untied", dtype=torch.float32)
        if int8:
            model = quantize(model, config=QuantizationConfig(smoothing="none", skip=()))
        model.model.embed_tokens.weight[7, 3] = float("nan")
        logits = FastDecoder.from_model(model).forward(torch.tensor([5, 7, 6]))
        assert logits[1:].isnan().all()


def test_engine_is_checked_and_told():
    """Which engine runs decides what a measurement means."""
    double, single = tiny_model("llama"), tiny_model("llama", dtype=torch.float32)
    assert FastDecoder.from_model(double).engine == "torch"
    assert FastDecoder.from_model(single, engine="torch").engine == "torch"
    with pytest.raises(UserError, match="not float64"):
        FastDecoder.from_model(double, engine="fused")
    with pytest.raises(UserError, match="'numba'"):
        FastDecoder.from_model(single, engine="numba")


def test_a_chosen_int8_backend_is_respected():
    """Someone who compares backends must not get the CPU kernel under another's name."""
    config = QuantizationConfig(smoothing="none")
    model = quantize(tiny_model("llama", dtype=torch.float32), config=config)
    model.model.layers[0].mlp.down_proj.backend = "reference"
    assert FastDecoder.from_model(model).engine == "torch"
    with pytest.raises(UserError, match="'reference'"):
        FastDecoder.from_model(model, engine="fused")


def test_simulated_linears_are_simulated():
    """In the decoder as in the model, or the two could not be compared with transformers."""
    config = QuantizationConfig(smoothing="none", simulated=True)
    model = quantize(tiny_model("llama", dtype=torch.float32), config=config)
    decoder = FastDecoder.from_model(model)
    assert decoder.engine == "torch"
    with pytest.raises(UserError, match="simulate"):
        FastDecoder.from_model(model, engine="fused")
    ids = torch.arange(3, 12)
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0]
    # float32 sums in another order, and two layers: no value lies close enough to a boundary
    torch.testing.assert_close(decoder.forward(ids, num_logits=len(ids)), expected)
    for module in model.modules():
        if isinstance(module, W8A8Linear):
            module.simulated = False
    with torch.no_grad():
        other = model(input_ids=ids[None]).logits[0]
    assert (other - expected).abs().max() > 1e-4  # and it says something


def test_exponential_is_accurate():
    """Compiled for a caller with fast maths, its two-part ln 2 collapses: four times the error."""
    scores = np.zeros(4, np.float32)

    @numba.njit
    def softmax(scores):
        return exponentials(pointer(scores.ctypes.data, numba.float32), 0, 4)

    assert softmax(scores) == 4
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    computed = np.array([exponential(each) for each in x], dtype=np.float64)
    exact = np.exp(x.astype(np.float64))
    # one unit in the last place of float32
    assert np.abs(computed / exact - 1).max() < 2.0**-23


@pytest.mark.parametrize("n", [0, 5, 16, 47, 576])
def test_sums_have_the_order_that_is_written_down(n):
    """Left to the compiler, the run that compiles and those that load its code differ in bits."""

    @numba.njit
    def sums(x, n):
        row = pointer(x.ctypes.data, numba.float32)
        return row_sum(row, 1, 1 + n, False), row_sum(row, 1, 1 + n, True)

    x = np.random.default_rng(n).standard_normal(1 + n, dtype=np.float32)
    for found, row in zip(sums(x, n), (x[1:], x[1:] * x[1:]), strict=True):
        vectors = row[: n // 16 * 16].reshape(-1, 16)
        partial = np.zeros(16, np.float32)
        for vector in vectors:
            partial += vector
        while len(partial) > 1:
            partial = partial[: len(partial) // 2] + partial[len(partial) // 2 :]
        total = partial[0]
        for number in row[vectors.size :]:
            total += number
        assert found == total


FLOAT_FORMATS = [name for name, kind in FORMATS.items() if kind.int8 is None]
INT8_FORMATS = [name for name, isa in INSTRUCTION_SETS.items() if isa.available]


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_float_tiles_of_every_vector_width(name):
    """The tiles of processors that this one is not, on shapes with every kind of rest."""
    most, step = FORMATS[name].max_rows, FORMATS[name].step

    @numba.njit
    def both(height, a, w, products, v, mixed):
        rows, k = a.shape
        n = w.shape[0]
        dots(name, a.ctypes.data, 4 * k, rows, height, k, w.ctypes.data, w.strides[0], 0, n,
             products.ctypes.data, 4 * n)  # fmt: skip
        mix(name, products.ctypes.data, 4 * n, rows, v.ctypes.data, n, mixed.ctypes.data,
            v.shape[1])  # fmt: skip

    generator = np.random.default_rng(0)
    for rows, height, n, k in [
        (1, 1, 1, 5),
        (most, most, 7, 5 * step),
        (most, (most + 1) // 2, 7, 5 * step),
        (most - 1, most - 1, 12, 2 * step + 3),
    ]:
        shapes = ((rows, k), (n, k), (n, k))
        a, w, v = (generator.standard_normal(shape, dtype=np.float32) for shape in shapes)
        stored = (w, v)
        if FORMATS[name].weight_bytes == 2:
            stored = [torch.tensor(each).bfloat16().view(torch.uint16).numpy() for each in (w, v)]
            w, v = (torch.tensor(each).bfloat16().float().numpy() for each in (w, v))
        products, mixed = (np.full((rows, size), np.nan, np.float32) for size in (n, k))
        both(height, a, stored[0], products, stored[1], mixed)
        # k products of numbers of size 1, each off by half a unit
        assert np.abs(products - a.astype(float) @ w.T).max() < k * 2.0**-22
        scale = np.abs(products).sum(1).max()
        assert np.abs(mixed - products.astype(float) @ v).max() < scale * n * 2.0**-22


@pytest.mark.parametrize("name", INT8_FORMATS)
def test_int8_tiles_of_every_instruction_set(name):
    """Case 30 and 31: exact for full-range inputs, odd K and N, and every number of rows.

    Behind the last weight row stands what would change the result if it counted.
    """

    @numba.njit
    def product(a, integers, ones, scales, shifts, k, weight, weight_scale, n, out):
        rows = a.shape[0]
        for row in range(rows):
            integer_row(name, False, a.ctypes.data + row * k, row, k, integers.ctypes.data,
                        ones.ctypes.data, shifts.ctypes.data)  # fmt: skip
        int8_linear(name, integers.ctypes.data, row_bytes(name, k), scales.ctypes.data,
                    shifts.ctypes.data, rows, k, weight.ctypes.data, 0,
                    weight_scale.ctypes.data, 0, n, out.ctypes.data, 0, 1)  # fmt: skip

    generator = np.random.default_rng(0)
    for rows, n, k in [(1, 3, 20), (7, 12, 576), (16, 9, 4096 + 5), (9, 18, 2 * 4096)]:
        a = generator.integers(-128, 128, (rows, k)).astype(np.int8)
        memory = generator.integers(-128, 128, n * k + 64).astype(np.int8)
        weight = memory[: n * k].reshape(n, k)
        a[0], weight[0], a[-1], weight[-1] = 127, -128, -128, 127
        weight[1] = -128
        exact = a.astype(np.int64) @ weight.T.astype(np.int64)
        scales, weight_scale = (generator.random(size, dtype=np.float32) for size in (rows, n))
        integers = np.full(rows * (2 * k + 128), -1, np.int8)
        shifts = np.full(rows, -1, np.int32)
        out = np.full((rows, n), np.nan, np.float32)
        ones = np.empty(rows, np.float32)
        product(a, integers, ones, scales, shifts, k, memory, weight_scale, n, out)
        assert (out == exact.astype(np.float32) * scales[:, None] * weight_scale).all()


@pytest.mark.parametrize("formats", [("float32x8", "avx2"), ("float32x4", "portable")], ids=str)
def test_the_step_of_another_processor(formats):
    """Tiles of other heights cut the work elsewhere; the text may not depend on it."""
    if formats[1] not in INT8_FORMATS:
        pytest.skip(f"this processor has no {formats[1]}")
    config = QuantizationConfig(smoothing="none", skip=("lm_head", *MIXED))
    model = quantize(tiny_model("qwen3", dtype=torch.float32), config=config)
    decoder, other = (FastDecoder.from_model(model) for _ in range(2))
    expected = run_steps(decoder)
    other._fused = FusedStep(
        other.weights, other.keys, other.values, other.cos, other.sin,
        floats=formats[0], int8=formats[1],
    )  # fmt: skip
    full = run_steps(FastDecoder.from_model(tiny_model("qwen3", dtype=torch.float32)))
    assert only_roundings_differ(run_steps(other), expected, full)


@pytest.mark.real_model
def test_the_default_model_agrees_with_torch(real_model):
    """The real sizes: 9 heads, 3 KV heads, 49,152 tokens in the vocabulary."""
    model = copy.deepcopy(real_model.model)
    ids = real_model.encode_chat("Why is the sky blue?")
    decoders = [FastDecoder.from_model(model, engine=engine) for engine in ("torch", "fused")]
    for decoder in decoders:
        decoder.forward(ids, num_logits=0)
    expected, found = (decoder.forward(torch.arange(100, 106)) for decoder in decoders)
    # logits of size 20 through 30 layers: torch and transformers differ by 1e-4 between themselves
    assert (expected - found).abs().max() < 1e-3
    assert torch.equal(expected.argmax(-1), found.argmax(-1))
