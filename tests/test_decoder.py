"""The fast decoder against transformers: every family, float64, after every kind of step."""

import copy

import pytest
import torch
from tiny_models import VOCAB, tiny_model

from quasar_lab.decoder import PREFILL_CHUNK, FastDecoder
from quasar_lab.decoding import generate
from quasar_lab.drafting import NGramDrafter
from quasar_lab.errors import UserError
from quasar_lab.targets import HuggingFaceTarget

ROPE = {
    "linear": dict(rope_type="linear", rope_theta=10_000.0, factor=4.0),
    "llama3": dict(
        rope_type="llama3",
        rope_theta=10_000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "yarn": dict(
        rope_type="yarn",
        rope_theta=10_000.0,
        factor=4.0,
        original_max_position_embeddings=128,
    ),
    "yarn attention factor": dict(
        rope_type="yarn",
        rope_theta=10_000.0,
        factor=4.0,
        original_max_position_embeddings=128,
        attention_factor=1.7,
    ),
    "dynamic": dict(rope_type="dynamic", rope_theta=10_000.0, factor=4.0),
}

VARIANTS = {
    "llama": ("llama", {}),
    "untied head": ("llama_untied", {}),
    "biases on attention (openPangu)": ("pangu", {}),
    "biases everywhere": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "one KV head": ("llama", dict(num_key_value_heads=1)),
    "no grouping": ("llama", dict(num_key_value_heads=4)),
    "head_dim is not hidden / heads": ("llama", dict(head_dim=12)),
    "mistral": ("mistral", {}),
    "mistral, sliding window": ("mistral_sliding", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, one sliding layer": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=2),
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, layer_types": (
        "qwen3",
        dict(
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    **{f"rope {name}": ("llama", dict(rope_parameters=rope)) for name, rope in ROPE.items()},
}


def reference(model, ids):
    """The logits of transformers after each token of ids, computed from nothing."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def random_ids(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def build(family, overrides, attention="sdpa"):
    model = tiny_model(family, **overrides)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_through_prefill_steps_and_rollbacks(name):
    """A wrong bias, norm, rotation, mask or cache position in any family shows here."""
    model = build(*VARIANTS[name])
    decoder = FastDecoder.from_model(model, max_length=64)
    context, fresh = [], iter(random_ids(200))
    # (tokens appended, tokens rolled back afterwards): a prefill, single steps, drafts
    for count, back in [(11, 0), (1, 0), (1, 1), (6, 4), (3, 3), (6, 0), (9, 8), (1, 0), (2, 0)]:
        new = [next(fresh) for _ in range(count)]
        context += new
        logits = decoder.forward(torch.tensor(new))
        difference = (logits - reference(model, context)[-count:]).abs().max()
        assert difference < 1e-9
        decoder.rollback(back)
        context = context[: len(context) - back]
        assert decoder.length == len(context)


def test_eager_attention_takes_its_softmax_in_float32():
    """A float64 model with eager attention rounds its softmax: a float64 one is 1e-6 away."""
    model = build("llama", {}, attention="eager")
    ids = random_ids(20)
    logits = FastDecoder.from_model(model).forward(torch.tensor(ids))
    assert (logits - reference(model, ids)).abs().max() < 1e-9


def test_a_long_prompt_in_pieces_equals_one_piece(monkeypatch):
    """A piece that forgets its start position or its mask gives other logits."""
    model = build("mistral_sliding", {})
    ids = random_ids(50)
    monkeypatch.setattr("quasar_lab.decoder.PREFILL_CHUNK", 16)
    logits = FastDecoder.from_model(model).forward(torch.tensor(ids))
    assert PREFILL_CHUNK > 50
    assert (logits - reference(model, ids)).abs().max() < 1e-9


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_num_logits_gives_the_last_rows(count, tiny_llama):
    """Verification pays for the logits that it reads, and reads the right ones."""
    ids = torch.tensor(random_ids(5))
    every = FastDecoder.from_model(tiny_llama).forward(ids)
    some = FastDecoder.from_model(tiny_llama).forward(ids, num_logits=count)
    assert some.shape == (count, VOCAB)
    assert torch.allclose(some, every[5 - count :], rtol=0, atol=1e-12)


def test_rollback_is_a_number(tiny_llama):
    """Case 3: the cache keeps its storage and what stays in it is untouched."""
    decoder = FastDecoder.from_model(tiny_llama, max_length=32)
    decoder.forward(torch.tensor(random_ids(10)))
    place, kept = decoder.keys.data_ptr(), decoder.keys[:, :, :6].clone()
    decoder.rollback(4)
    assert decoder.length == 6
    decoder.forward(torch.tensor(random_ids(5, seed=1)))
    assert decoder.keys.data_ptr() == place
    assert torch.equal(decoder.keys[:, :, :6], kept)
    decoder.rollback(decoder.length)
    assert decoder.length == 0


def test_the_context_can_be_filled_to_its_last_token():
    """An off-by-one in the limit would refuse the last token or write past the cache."""
    model, ids = build("llama", {}), random_ids(16)
    decoder = FastDecoder.from_model(model, max_length=16)
    decoder.forward(torch.tensor(ids[:15]))
    last = decoder.forward(torch.tensor(ids[15:]))
    assert (last - reference(model, ids)[-1:]).abs().max() < 1e-9
    with pytest.raises(UserError, match="max_length=16"):
        decoder.forward(torch.tensor([1]))


@pytest.mark.parametrize(
    "ids, words",
    [
        ([[1, 2], [3, 4]], "batch of 2"),
        ([], r"shape \[0\]"),
        ([1.5], "float32"),
        ([True, False], "bool"),
        ("text", "a str"),
        ([[[1]]], r"shape \[1, 1, 1\]"),
        ([3, VOCAB], f"token id {VOCAB}: the vocabulary is 0 to {VOCAB - 1}"),
        ([-1, 3], "token id -1"),
        (list(range(40)), "max_length=32"),
    ],
)
def test_wrong_ids_are_told_in_one_line_and_change_nothing(ids, words, tiny_llama):
    """Case 6 and its kind: no index error from inside, no half-written step."""
    decoder = FastDecoder.from_model(tiny_llama, max_length=32)
    decoder.forward(torch.tensor([5, 6]))
    with pytest.raises(UserError, match=words) as error:
        decoder.forward(ids)
    assert "\n" not in str(error.value)
    assert decoder.length == 2


@pytest.mark.parametrize("n", [-1, 3])
def test_rollback_stays_inside_the_cache(n, tiny_llama):
    """Case 4: a negative rollback would silently make the cache longer."""
    decoder = FastDecoder.from_model(tiny_llama)
    decoder.forward(torch.tensor([5, 6]))
    with pytest.raises(UserError, match="holds 2 tokens"):
        decoder.rollback(n)
    assert decoder.length == 2


@pytest.mark.parametrize("num_logits", [-1, 3])
def test_num_logits_out_of_range(num_logits, tiny_llama):
    """A negative count would slice from the wrong end."""
    decoder = FastDecoder.from_model(tiny_llama)
    with pytest.raises(UserError, match="from 0 to the 2 tokens"):
        decoder.forward(torch.tensor([5, 6]), num_logits=num_logits)
    assert decoder.length == 0


@pytest.mark.parametrize("max_length", [0, -4, 2.5, True])
def test_max_length_is_checked(max_length, tiny_llama):
    """torch.empty would fail later, with a message about sizes."""
    with pytest.raises(UserError, match="max_length"):
        FastDecoder.from_model(tiny_llama, max_length=max_length)


@pytest.mark.parametrize("family", ["gemma", "opt", "gpt2"])
def test_another_architecture_is_sent_to_the_generic_target(family):
    """Gemma has the same module names and other mathematics: it must not run as a Llama."""
    with pytest.raises(UserError, match="HuggingFaceTarget"):
        FastDecoder.from_model(tiny_model(family))


def test_another_activation_is_sent_to_the_generic_target():
    """hidden_act is a setting of the supported families as well."""
    with pytest.raises(UserError, match="'gelu'"):
        FastDecoder.from_model(tiny_model("llama", hidden_act="gelu"))


def test_dynamic_rope_is_refused_beyond_the_trained_length():
    """There its frequencies depend on the length: the cached keys would be wrong."""
    model = build("llama", dict(rope_parameters=ROPE["dynamic"], max_position_embeddings=40))
    assert FastDecoder.from_model(model).max_length == 40
    with pytest.raises(UserError, match="after 40 tokens"):
        FastDecoder.from_model(model, max_length=41)


def test_weights_are_not_kept_twice():
    """Two copies of a 7B model do not fit where one does."""
    model = tiny_model("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = FastDecoder.from_model(model).weights
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for fused, parts in [
        (weights.layers[1].qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (weights.layers[1].gate_up, (mlp.gate_proj, mlp.up_proj)),
    ]:
        (matrix,) = fused.matrices
        storage = matrix.weight.untyped_storage().data_ptr()
        for part in parts:
            assert part.weight.untyped_storage().data_ptr() == storage
        assert torch.equal(matrix.weight, torch.cat([part.weight for part in parts]))
    assert weights.head.matrices[0].weight.data_ptr() == weights.embed.data_ptr()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_two_decoders_of_one_model_share_their_weights():
    """The second one must not leave the first with a private copy."""
    model = tiny_model("llama")
    first, second = (FastDecoder.from_model(model) for _ in range(2))
    for a, b in zip(first.weights.layers, second.weights.layers, strict=True):
        assert a.qkv.matrices[0].weight.data_ptr() == b.qkv.matrices[0].weight.data_ptr()
        assert a.gate_up.matrices[0].weight.data_ptr() == b.gate_up.matrices[0].weight.data_ptr()
    first.forward(torch.tensor([5, 6]))
    assert second.length == 0


def test_a_model_that_a_decoder_took_over_can_still_be_saved_and_copied(tmp_path):
    """Weights that are views of one storage trip naive serialisers."""
    model = tiny_model("qwen2")
    FastDecoder.from_model(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(t, before[name]) for name, t in reloaded.state_dict().items())
    twin = copy.deepcopy(model)
    twin.model.layers[0].self_attn.k_proj.weight.mul_(2)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_end_of_sequence_ids_come_from_the_generation_settings():
    """Chat models end with another token than their base configuration says."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [7, 9]
    assert FastDecoder.from_model(model).eos_token_ids == (7, 9)
    model.generation_config.eos_token_id = None
    assert FastDecoder.from_model(model).eos_token_ids == (2,)
    model.config.eos_token_id = None
    assert FastDecoder.from_model(model).eos_token_ids == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", ["qwen3", "mistral_sliding"])
def test_speculative_text_is_plain_text(family, dtype):
    """Case 7: for the decoder's own rollbacks, chunked steps and limited logits."""
    model = tiny_model(family, dtype=dtype)
    prompt = random_ids(5) * 4
    plain = generate(HuggingFaceTarget(model), prompt, max_new_tokens=60).tokens
    decoder = FastDecoder.from_model(model, max_length=100)
    for drafter in (None, NGramDrafter(num_draft_tokens=3), NGramDrafter(num_draft_tokens=9)):
        assert generate(decoder, prompt, drafter=drafter, max_new_tokens=60).tokens == plain


@pytest.mark.real_model
def test_the_default_model_equals_transformers(real_model):
    """The real weights in float64: what is left is the order of the sums."""
    model = copy.deepcopy(real_model.model).double()
    model.set_attn_implementation("sdpa")
    ids = real_model.encode_chat("Why is the sky blue?").tolist()
    decoder = FastDecoder.from_model(model, max_length=len(ids) + 8)
    decoder.forward(torch.tensor(ids), num_logits=1)
    context = list(ids)
    for draft, back in [([100, 200, 300], 2), ([5], 0), ([17, 18, 19, 20, 21, 22], 0)]:
        context += draft
        logits = decoder.forward(torch.tensor(draft))
        assert (logits - reference(model, context)[-len(draft) :]).abs().max() < 1e-9
        decoder.rollback(back)
        context = context[: len(context) - back]
