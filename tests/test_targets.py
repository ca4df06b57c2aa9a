"""Targets: the cache after any history of forwards and rollbacks equals a fresh prefill."""

import copy

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, VOCAB, tiny_model

from quasar_lab.decoding import generate
from quasar_lab.drafting import LayerSkipDrafter, NGramDrafter
from quasar_lab.errors import UserError
from quasar_lab.targets import HuggingFaceTarget, Target, as_target

# transformers computes norms, rotary angles and the softmax in float32 whatever the model's dtype.
# Its rounding, 1e-7, grows a little over three layers; a wrong cache is off by whole units.
CLOSE = dict(rtol=1e-4, atol=1e-4)

MODELS = {family: tiny_model(family) for family in FAMILIES}


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def cached(target: HuggingFaceTarget) -> list[torch.Tensor]:
    return [t for layer in target.cache.layers for t in (layer.keys, layer.values)]


def assert_equals_fresh_prefill(target: HuggingFaceTarget, ids: torch.Tensor) -> None:
    """Same keys, values and next logits as a target that has only ever seen these tokens."""
    fresh = HuggingFaceTarget(target.model)
    fresh.forward(ids)
    assert target.length == len(ids)
    for ours, expected in zip(cached(target), cached(fresh), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)
    probe = torch.tensor([3])
    torch.testing.assert_close(target.forward(probe), fresh.forward(probe), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_in_pieces_equals_the_model_without_a_cache(family):
    """Positions, masks and sliding windows with a cache, against the model run in one go."""
    model = MODELS[family]
    ids = random_ids(40)
    expected = model(ids[None], use_cache=False).logits[0]
    target = HuggingFaceTarget(model)
    assert isinstance(target, Target)
    pieces = [target.forward(piece) for piece in ids.split([1, 12, 1, 5, 1, 1, 19])]
    torch.testing.assert_close(torch.cat(pieces), expected, **CLOSE)
    assert target.length == 40
    assert target.vocab_size == VOCAB and target.max_length == 512
    assert target.eos_token_ids == (2,)


@given(
    family=st.sampled_from(["llama", "mistral_sliding", "gpt2"]),
    history=st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_any_history_equals_a_fresh_prefill(family, history, seed):
    """Feed, forget some, feed again: a cache off by one, or a window that lost tokens, shows."""
    target = HuggingFaceTarget(MODELS[family])
    kept = torch.zeros(0, dtype=torch.long)
    for index, (count, share) in enumerate(history):
        new = random_ids(count, seed + index)
        target.forward(new)
        kept = torch.cat([kept, new])
        forget = min(int(share * 1.5 * count), len(kept) - 1)
        target.rollback(forget)
        kept = kept[: len(kept) - forget]
    assert_equals_fresh_prefill(target, kept)


def test_case_3_rollback_keeps_the_storage():
    """Case 3: forgetting changes a number: no copy, the same data_ptr, length = accepted."""
    target = HuggingFaceTarget(MODELS["llama"])
    target.forward(random_ids(10))
    pointers = [tensor.data_ptr() for tensor in cached(target)]
    for _ in range(20):
        target.forward(random_ids(6))
        target.rollback(4)
    assert target.length == 10 + 20 * 2
    assert [tensor.data_ptr() for tensor in cached(target)] == pointers
    assert all(tensor.shape == (1, 2, 50, 8) for tensor in cached(target))


def test_growing_past_the_capacity_keeps_the_contents():
    """The cache is allocated in blocks; crossing one must not lose what was there."""
    target = HuggingFaceTarget(MODELS["llama"])
    ids = random_ids(400)
    for piece in ids.split(37):
        target.forward(piece)
    assert_equals_fresh_prefill(target, ids)


def test_reserve_makes_room_ahead():
    """With room reserved no step moves the cache, whichever comes first: reserve or forward."""
    for reserve_first in (True, False):
        target = HuggingFaceTarget(MODELS["llama"])
        if reserve_first:
            target.reserve(500)
        target.forward(random_ids(5))
        target.reserve(500)
        pointers = [tensor.data_ptr() for tensor in cached(target)]
        for seed in range(4):
            target.forward(random_ids(120, seed))
        assert [tensor.data_ptr() for tensor in cached(target)] == pointers


def test_num_logits_gives_the_last_rows():
    """A prefill that computes every position's logits wastes vocabulary x prompt floats."""
    model = MODELS["qwen2"]
    ids = random_ids(12)
    full = HuggingFaceTarget(model).forward(ids)
    for count in (1, 3, 12):
        part = HuggingFaceTarget(model).forward(ids, num_logits=count)
        torch.testing.assert_close(part, full[-count:], **CLOSE)
    calls = []
    handle = model.lm_head.register_forward_hook(lambda _, args, __: calls.append(args[0].shape))
    try:
        HuggingFaceTarget(model).forward(ids, num_logits=1)
    finally:
        handle.remove()
    assert calls[0][1] == 1, "the head ran over the whole prompt"


def test_an_interrupted_forward_leaves_the_cache_as_it_was():
    """Ctrl-C between two layers must not leave some layers a token ahead of the others."""
    model = MODELS["llama"]
    target = HuggingFaceTarget(model)
    ids = random_ids(8)
    target.forward(ids)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            target.forward(random_ids(3))
    finally:
        handle.remove()
    assert_equals_fresh_prefill(target, ids)


@pytest.mark.parametrize("n", [-1, 6])
def test_rolling_back_more_than_there_is_is_refused(n):
    """A negative rollback would lengthen the cache by whatever is in its storage."""
    target = HuggingFaceTarget(MODELS["llama"])
    target.forward(random_ids(5))
    with pytest.raises(UserError, match=f"roll back {n} tokens.*5"):
        target.rollback(n)


def test_the_context_limit_is_told_before_anything_runs():
    """gpt2's position table would raise an IndexError, rotary models would go on silently."""
    for family in ("gpt2", "llama"):
        target = HuggingFaceTarget(MODELS[family], max_length=10)
        target.forward(random_ids(8))
        with pytest.raises(UserError, match=r"11 tokens do not fit.*10"):
            target.forward(random_ids(3))
        assert target.length == 8
        target.forward(random_ids(2))


LENGTH_DEPENDENT = {
    "dynamic": ("llama", dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)),
    "longrope": (
        "phi3",
        dict(
            rope_type="longrope", rope_theta=1e4, factor=4.0, original_max_position_embeddings=24,
            short_factor=[1.0] * 4, long_factor=[4.0] * 4,
        ),
    ),
}  # fmt: skip


def growing_rope_model(kind: str):
    family, rope = LENGTH_DEPENDENT[kind]
    limits = dict(max_position_embeddings=24)
    if kind == "longrope":
        limits = dict(max_position_embeddings=512, original_max_position_embeddings=24)
    return tiny_model(family, rope_parameters=rope, **limits)


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_a_rotary_scaling_that_changes_with_the_text_bounds_the_context(kind):
    """Past the trained length the cached keys are wrong, and plain and speculative text part."""
    model = growing_rope_model(kind)
    prompt = [5, 6, 7, 5, 6]
    target = HuggingFaceTarget(model)
    assert target.max_length == 24 and HuggingFaceTarget(model, max_length=20).max_length == 20
    plain = generate(target, prompt, max_new_tokens=45, eos_token_id=[])
    assert plain.finish_reason == "context_length" and len(plain.tokens) == 19
    for drafter in (NGramDrafter(), LayerSkipDrafter(model, [0, 2], 4)):
        result = generate(target, prompt, drafter=drafter, max_new_tokens=45, eos_token_id=[])
        assert (result.tokens, result.finish_reason) == (plain.tokens, "context_length")
    with pytest.raises(UserError, match=r"max_length is 25.*changes after 24 tokens"):
        HuggingFaceTarget(model, max_length=25)
    with pytest.raises(UserError, match=r"prompt has 24 tokens.*holds 24"):
        generate(model, [5] * 24)


@pytest.mark.parametrize("max_length", [0, -5, "a", 2.5, True])
def test_an_impossible_max_length_is_told(max_length):
    """Zero was read as "the model's own", and a negative one refused every prompt."""
    with pytest.raises(UserError, match=f"max_length is {max_length!r}"):
        HuggingFaceTarget(MODELS["llama"], max_length=max_length)


def test_a_table_of_positions_is_not_left():
    """Past GPT-2's or OPT's table the embedding raises an IndexError; rotary models go on."""
    for family in ("gpt2", "opt"):
        with pytest.raises(UserError, match=r"max_length is 600.*512 learned positions"):
            HuggingFaceTarget(MODELS[family], max_length=600)
    assert HuggingFaceTarget(MODELS["llama"], max_length=600).max_length == 600


def test_the_model_is_left_as_it_was():
    """Analysis code reuses one model: no cache, mode or config may stick to it."""
    model = tiny_model("mistral_sliding")
    config, weights = copy.deepcopy(model.config), copy.deepcopy(model.state_dict())
    target = HuggingFaceTarget(model)
    target.forward(random_ids(20))
    target.rollback(7)
    assert model.config.to_dict() == config.to_dict()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not target.forward(random_ids(1)).requires_grad


def test_eos_tokens_come_from_the_generation_config_first():
    """Chat models list several end tokens there, and only one in the model's config."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [5, 9]
    assert HuggingFaceTarget(model).eos_token_ids == (5, 9)
    model.generation_config.eos_token_id = None
    assert HuggingFaceTarget(model).eos_token_ids == (2,)
    model.config.eos_token_id = None
    assert HuggingFaceTarget(model).eos_token_ids == ()


def test_as_target_wraps_models_and_passes_targets_on():
    """generate takes any of them."""
    target = HuggingFaceTarget(MODELS["llama"])
    assert as_target(target) is target
    assert as_target(MODELS["llama"]).model is MODELS["llama"]

    class Loaded:
        model = MODELS["llama"]

    assert as_target(Loaded()).model is MODELS["llama"]
    for wrong in ("smollm2-135m", None, torch.nn.Linear(2, 2)):
        with pytest.raises(UserError, match=type(wrong).__name__):
            as_target(wrong)


def test_unsupported_models_are_refused_in_one_line():
    """An encoder-decoder, a recurrent model or one without a head would fail in mid-generation."""
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, state_size=4)
    )
    headless = MODELS["llama"].model
    for model, message in ((t5, "encoder-decoder"), (mamba, "rolled back"), (headless, "head")):
        with pytest.raises(UserError, match=message) as error:
            HuggingFaceTarget(model.eval())
        assert "\n" not in str(error.value) and type(model).__name__ in str(error.value)


def test_training_mode_with_dropout_is_refused():
    """Dropout makes verification random: drafts of the model itself would be rejected."""
    model = tiny_model("gpt2", resid_pdrop=0.1).train()
    with pytest.raises(UserError, match=r"model.eval\(\)"):
        HuggingFaceTarget(model)
    HuggingFaceTarget(tiny_model("llama").train())  # no dropout in it


def test_bfloat16_and_half_caches_keep_their_dtype():
    """A cache of the wrong dtype would silently double the memory or lose precision."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    target = HuggingFaceTarget(model)
    target.forward(random_ids(4))
    assert all(tensor.dtype == torch.bfloat16 for tensor in cached(target))
