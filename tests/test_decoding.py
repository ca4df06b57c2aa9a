"""`generate`: the target's own text and distribution, whoever drafts, wherever it ends."""

import bisect
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny_models import VOCAB, tiny_model
from transformers import BatchEncoding

from quasar_lab.decoder import FastDecoder
from quasar_lab.decoding import GenerationRun, generate
from quasar_lab.divergence import first_divergence
from quasar_lab.draft import Draft
from quasar_lab.drafting import (
    AdaptiveDrafter,
    LayerSkipDrafter,
    ModelDrafter,
    NGramDrafter,
    SuffixDrafter,
)
from quasar_lab.errors import UserError
from quasar_lab.sampling import SamplingConfig, probabilities
from quasar_lab.targets import HuggingFaceTarget

PROMPT = [5, 6, 7, 5, 6]


class TableTarget:
    """An outsider's target with nothing but the protocol: logits depend on the last two tokens."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table  # [V, V, V]
        self.ids: list[int] = []
        self.fed: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert ids.ndim == 1 and ids.dtype == torch.long and len(ids) > 0
        self.fed.append(len(ids))
        history = torch.tensor([0, *self.ids[-1:], *ids.tolist()])
        self.ids += ids.tolist()
        return self.table[history[-len(ids) - 1 : -1], history[-len(ids) :]]

    def rollback(self, n: int) -> None:
        assert 0 < n <= self.length, "rollback(0) or a negative one would be a sign of confusion"
        del self.ids[-n:]


class Scripted:
    """An outsider's drafter with nothing but the protocol: it knows a text and errs on purpose.

    text: the continuation it believes in; wrong: indices in it where it guesses one too many.
    """

    def __init__(
        self, text, num_draft_tokens, wrong=(), as_list=False, obey=True, vocab_size=VOCAB
    ):
        self.vocab_size = vocab_size
        self.text, self.num_draft_tokens = list(text), num_draft_tokens
        self.wrong, self.as_list, self.obey = set(wrong), as_list, obey

    def reset(self, prompt_ids):
        assert isinstance(prompt_ids, list)
        self.position = 0

    def propose(self, max_tokens):
        assert max_tokens > 0
        count = min(self.num_draft_tokens, max_tokens) if self.obey else self.num_draft_tokens
        tokens = [
            (token + (self.position + i in self.wrong)) % self.vocab_size
            for i, token in enumerate(self.text[self.position : self.position + count])
        ]

        class Bare:
            pass

        draft = Bare()
        draft.tokens = tokens if self.as_list else torch.tensor(tokens, dtype=torch.long)
        draft.probs = None
        return draft

    def extend(self, tokens):
        self.position += len(tokens)


def random_table(vocab_size: int = 5, seed: int = 0, scale: float = 1.5) -> torch.Tensor:
    shape = (vocab_size,) * 3
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chain(vocab_size: int, following: dict[int, int]) -> torch.Tensor:
    """A table under which token a is always followed by following[a], else by a + 1."""
    table = torch.zeros(vocab_size, vocab_size, vocab_size)
    for last in range(vocab_size):
        table[:, last, following.get(last, (last + 1) % vocab_size)] = 9.0
    return table


def assert_cache_is_a_fresh_prefill(target: HuggingFaceTarget, text: list[int]) -> None:
    """The cache holds all but the last token, as if they had been prefilled in one go."""
    assert target.length == len(text) - 1
    if target.length == 0:
        return
    fresh = HuggingFaceTarget(target.model)
    fresh.forward(torch.tensor(text[:-1]))
    for ours, expected in zip(target.cache.layers, fresh.cache.layers, strict=True):
        # float32 rounding inside transformers' norms and rotary angles, over three layers
        torch.testing.assert_close(ours.keys, expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, expected.values, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def greedy_text(tiny_llama):
    return generate(tiny_llama, PROMPT, max_new_tokens=32, eos_token_id=[]).tokens


# ---------------------------------------------------------------- greedy text


def test_plain_greedy_is_the_argmax_of_the_model(tiny_llama, greedy_text):
    """Against the model run once over everything, without a cache."""
    logits = tiny_llama(torch.tensor([PROMPT + greedy_text]), use_cache=False).logits[0]
    assert logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist() == greedy_text


DRAFTERS = {
    "ngram": lambda model, k: NGramDrafter(num_draft_tokens=k),
    "ngram first": lambda model, k: NGramDrafter(4, 2, k, match="first"),
    "suffix": lambda model, k: SuffixDrafter(num_draft_tokens=k, length_factor=9),
    "first layers": lambda model, k: LayerSkipDrafter(model, 2, k),
    "any layers": lambda model, k: LayerSkipDrafter(model, [0, 2], k),
    "model": lambda model, k: ModelDrafter(tiny_model("llama", seed=1), k),
    "itself": lambda model, k: ModelDrafter(model, k),
    "two levels": lambda model, k: ModelDrafter(model, k, drafter=NGramDrafter()),
    "adaptive": lambda model, k: AdaptiveDrafter(SuffixDrafter(num_draft_tokens=k), k),
}


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_case_7_greedy_speculative_is_greedy_plain(
    tiny_llama, greedy_text, drafter, num_draft_tokens
):
    """Case 7: token for token, for every drafter and draft length."""
    built = DRAFTERS[drafter](tiny_llama, num_draft_tokens)
    target = HuggingFaceTarget(tiny_llama)
    result = generate(target, PROMPT, drafter=built, max_new_tokens=32, eos_token_id=[])
    assert result.tokens == greedy_text
    assert first_divergence(tiny_llama, PROMPT, result.tokens, greedy_text) is None
    assert_cache_is_a_fresh_prefill(target, PROMPT + result.tokens)


@pytest.mark.parametrize("family", ["mistral_sliding", "qwen3", "gpt2"])
def test_other_architectures_too(family):
    """A sliding window that forgets what a rollback needs shows after 8 tokens."""
    model = tiny_model(family)
    plain = generate(model, PROMPT, max_new_tokens=40, eos_token_id=[])
    for drafter in (NGramDrafter(), LayerSkipDrafter(model, [0, 2], 4), ModelDrafter(model, 6)):
        result = generate(model, PROMPT, drafter=drafter, max_new_tokens=40, eos_token_id=[])
        assert result.tokens == plain.tokens


def test_case_5_a_drafter_that_is_the_target_is_always_right(tiny_llama):
    """Case 5: every draft accepted, greedy and sampled: a cache off by one shows at once."""
    for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0, top_p=0.9, seed=1)):
        drafter = ModelDrafter(tiny_llama, num_draft_tokens=4)
        result = generate(
            tiny_llama,
            PROMPT,
            drafter=drafter,
            sampling=sampling,
            max_new_tokens=50,
            eos_token_id=[],
        )
        assert result.acceptance_counts == [4] * 10
        assert result.mean_acceptance_length == 5.0


def test_a_divergence_is_reported_with_its_margin(tiny_llama, greedy_text):
    """In float32 two nearly equal logits can swap: the margin tells that from a bug."""
    index = 7
    other = [*greedy_text[:index], (greedy_text[index] + 1) % VOCAB]
    found = first_divergence(tiny_llama, PROMPT, greedy_text, other)
    logits = tiny_llama(torch.tensor([PROMPT + greedy_text[:index]])).logits[0, -1]
    best = logits.topk(2).values
    assert (found.index, found.token, found.other) == (index, greedy_text[index], other[-1])
    assert found.margin == pytest.approx(float(best[0] - best[1]), rel=1e-4)
    shorter = first_divergence(tiny_llama, PROMPT, greedy_text[:3], greedy_text)
    assert (shorter.index, shorter.token) == (3, None)


# ---------------------------------------------------------------- where it ends


def test_case_1_an_end_token_inside_a_draft():
    """Case 1: draft [5, EOS, 6], all matching: the output ends at EOS, nothing after it counts."""
    eos = 8
    table = chain(10, {5: eos, eos: 6})
    target = TableTarget(table)
    drafter = Scripted([5, eos, 6], 3)
    result = generate(target, [3, 4], drafter=drafter, eos_token_id=eos, max_new_tokens=9)
    assert result.tokens == [5, eos] and result.finish_reason == "eos"
    assert result.acceptance_counts == [2] and result.mean_acceptance_length == 2.0
    assert target.ids == [3, 4, 5], "the cache holds what was emitted but the last token"
    assert [row["kind"] for row in result.steps[0].rows()] == ["accepted", "accepted", "cut"]
    # without an end token the same draft goes on
    result = generate(target, [3, 4], drafter=drafter, eos_token_id=[], max_new_tokens=4)
    assert result.tokens == [5, eos, 6, 7] and result.finish_reason == "length"


def test_end_tokens_as_int_list_tensor_and_the_models_own(tiny_llama, greedy_text):
    """Chat models have several; [] means none; None asks the model."""
    third = greedy_text[2]
    numpys = (np.int64(third), np.array([third]))
    for eos in (third, [96, third], (third,), torch.tensor([third]), {third}, *numpys):
        result = generate(tiny_llama, PROMPT, eos_token_id=eos, max_new_tokens=60)
        assert result.tokens == greedy_text[: greedy_text.index(third) + 1]
        assert result.finish_reason == "eos"
    target = HuggingFaceTarget(tiny_llama)
    target.eos_token_ids = (third,)
    assert generate(target, PROMPT, max_new_tokens=60).finish_reason == "eos"
    assert generate(target, PROMPT, max_new_tokens=9, eos_token_id=[]).finish_reason == "length"
    for wrong in ("</s>", 1.5, [1.5], True, -1, 10**6, [5, VOCAB], 10**20, [None]):
        with pytest.raises(UserError, match="eos_token_id") as error:
            generate(target, PROMPT, eos_token_id=wrong)
        assert "\n" not in str(error.value)
    target.eos_token_ids = (10**6,)  # a model's own may lie beyond a vocabulary that was cut
    assert generate(target, PROMPT, max_new_tokens=9).finish_reason == "length"


@pytest.mark.parametrize("obey", [True, False])
def test_case_4_the_budget_ends_inside_a_draft(tiny_llama, greedy_text, obey):
    """Case 4: three right drafts and one token left: one is emitted, no negative rollback."""
    for budget in range(1, 9):
        target = HuggingFaceTarget(tiny_llama)
        drafter = Scripted(greedy_text, 3, obey=obey)
        result = generate(target, PROMPT, drafter=drafter, max_new_tokens=budget, eos_token_id=[])
        assert result.tokens == greedy_text[:budget] and result.finish_reason == "length"
        assert target.length == len(PROMPT) + budget - 1
        assert sum(len(step.tokens) for step in result.steps) == budget


def test_no_budget_no_tokens(tiny_llama):
    """Zero is a budget: nothing is emitted and nothing divides by zero."""
    result = generate(tiny_llama, PROMPT, max_new_tokens=0)
    assert result.tokens == [] and result.finish_reason == "length" and result.steps == []
    assert math.isnan(result.mean_acceptance_length) and math.isnan(result.tokens_per_second)
    for wrong in (-1, 2.5, "10", True):
        with pytest.raises(UserError, match="max_new_tokens"):
            generate(tiny_llama, PROMPT, max_new_tokens=wrong)


def test_a_full_context_ends_gracefully(tiny_llama, greedy_text):
    """At the model's limit the text ends with a reason; a prompt that does not fit is refused."""
    for drafter in (None, Scripted(greedy_text, 5), ModelDrafter(tiny_llama)):
        target = HuggingFaceTarget(tiny_llama, max_length=12)
        result = generate(target, PROMPT, drafter=drafter, max_new_tokens=50, eos_token_id=[])
        assert result.tokens == greedy_text[:7] and result.finish_reason == "context_length"
    with pytest.raises(UserError, match=r"prompt has 12 tokens.*holds 12"):
        generate(target, [5] * 12)
    assert generate(target, [5] * 11, max_new_tokens=1, eos_token_id=[]).finish_reason == "length"


class LetterTokenizer:
    """Token n is the n-th letter; 26 is "ab", 27 is " x"."""

    pieces = (*"abcdefghijklmnopqrstuvwxyz", "ab", " x")

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(self.pieces[token] for token in tokens)


@pytest.mark.parametrize("draft", [0, 1, 2, 5])
def test_stop_strings(draft):
    """Wherever a stop string begins or ends: across steps, inside a token, inside a draft."""
    tokenizer = LetterTokenizer()
    table = chain(28, {25: 26, 26: 2})  # ... y z ab c d e ...
    text = [*range(20, 26), 26, 2, 3, 4, 5]
    drafter = Scripted(text, draft) if draft else None

    def run(stop, **arguments):
        result = generate(
            TableTarget(table),
            [19],
            drafter=drafter,
            stop_strings=stop,
            tokenizer=tokenizer,
            max_new_tokens=11,
            eos_token_id=[],
            **arguments,
        )
        return result.text(tokenizer), result.finish_reason

    assert run("wx") == ("uvwx", "stop_string")
    assert run(["zabc", "wxyz"]) == ("uvwxyz", "stop_string")
    assert run(["zabc"]) == ("uvwxyzabc", "stop_string")
    assert run(["za"]) == ("uvwxyzab", "stop_string"), "the token that completes it is kept"
    assert run(["t"]) == ("uvwxyzabcdef", "length"), "the prompt's own text does not count"
    assert run([]) == ("uvwxyzabcdef", "length")


class JoiningTokenizer:
    """As SentencePiece's clean-up does: a space before a full stop goes, once the stop is there."""

    def decode(self, tokens, skip_special_tokens=True):
        return "".join("a .b"[token] for token in tokens).replace(" .", ".")


@pytest.mark.parametrize("draft", [0, 1, 2, 3, 6])
def test_a_stop_string_that_a_later_token_takes_back(draft):
    """Plain decoding saw "a " and ended there; the block's whole text never holds it."""
    table = chain(4, {})
    drafter = Scripted([0, 1, 2, 3] * 3, draft, vocab_size=4) if draft else None
    result = generate(
        TableTarget(table),
        [3],
        drafter=drafter,
        stop_strings=["a "],
        tokenizer=JoiningTokenizer(),
        max_new_tokens=9,
        eos_token_id=[],
    )
    assert (result.tokens, result.finish_reason) == ([0, 1], "stop_string")


def test_stop_strings_need_a_tokenizer_and_text():
    """One line, before anything runs."""
    target = TableTarget(random_table())
    with pytest.raises(UserError, match="tokenizer="):
        generate(target, [1], stop_strings=["x"])
    for wrong in ([""], [1], 5):
        with pytest.raises(UserError, match="stop_strings"):
            generate(target, [1], stop_strings=wrong, tokenizer=LetterTokenizer())


def test_an_end_token_before_the_stop_string_wins():
    """The first end in the text counts, whichever kind it is."""
    table = chain(28, {})
    arguments = dict(
        stop_strings=["d"],
        tokenizer=LetterTokenizer(),
        drafter=Scripted([1, 2, 3, 4], 4),
        max_new_tokens=9,
    )
    first = generate(TableTarget(table), [0], eos_token_id=2, **arguments)
    assert (first.tokens, first.finish_reason) == ([1, 2], "eos")
    other = generate(TableTarget(table), [0], eos_token_id=4, **arguments)
    assert (other.tokens, other.finish_reason) == ([1, 2, 3], "stop_string")


def test_on_step_streams_what_is_final_and_should_stop_ends_it(tiny_llama, greedy_text):
    """A Stop button ends a run within one step, and the pieces add up to the text."""
    pieces: list[int] = []
    result = generate(
        tiny_llama,
        PROMPT,
        drafter=Scripted(greedy_text, 3),
        max_new_tokens=60,
        eos_token_id=[],
        on_step=lambda step: pieces.extend(step.tokens),
        should_stop=lambda: len(pieces) >= 8,
    )
    assert result.finish_reason == "stopped"
    assert pieces == result.tokens == greedy_text[:8]
    at_once = generate(tiny_llama, PROMPT, should_stop=lambda: True)
    assert at_once.tokens == [] and at_once.finish_reason == "stopped"


# ---------------------------------------------------------------- the KV cache


def disturbed_model(noise: float):
    """The tiny Llama with noise on its weights: a stand-in for a quantised copy."""
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.add_(
                noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return model


DISTURBED = disturbed_model(0.02)
MODELS = {family: tiny_model(family) for family in ("llama", "mistral_sliding")}
PLAIN_TEXTS = {
    (family, length): generate(model, PROMPT[:length], max_new_tokens=30, eos_token_id=[]).tokens
    for family, model in MODELS.items()
    for length in range(1, 6)
}


@given(
    num_draft_tokens=st.integers(1, 7),
    wrong=st.sets(st.integers(0, 40), max_size=25),
    budget=st.integers(1, 30),
    prompt_length=st.integers(1, 5),
    end=st.none() | st.integers(0, 29),
    family=st.sampled_from(["llama", "mistral_sliding"]),
)
@settings(max_examples=40)
def test_the_cache_always_equals_a_fresh_prefill(
    num_draft_tokens, wrong, budget, prompt_length, end, family
):
    """Any pattern of right and wrong drafts, any end: the cache is that of the emitted text."""
    model = MODELS[family]
    prompt = PROMPT[:prompt_length]
    text = PLAIN_TEXTS[family, prompt_length]
    eos = [] if end is None else [text[end]]
    target = HuggingFaceTarget(model)
    drafter = Scripted(text, num_draft_tokens, wrong)
    result = generate(target, prompt, drafter=drafter, max_new_tokens=budget, eos_token_id=eos)
    expected = text[:budget]
    if eos and eos[0] in expected:
        expected = expected[: expected.index(eos[0]) + 1]
    assert result.tokens == expected
    assert_cache_is_a_fresh_prefill(target, prompt + result.tokens)
    assert [step.kv_length for step in result.steps][-1] == target.length


def test_case_3_generation_never_moves_the_cache(tiny_llama):
    """Case 3: room is reserved for prompt and budget: every step finds every layer where it was."""
    target = HuggingFaceTarget(tiny_llama)

    def places(_):
        layers = target.cache.layers
        pointers.add(tuple(t.data_ptr() for layer in layers for t in (layer.keys, layer.values)))

    pointers = set()
    generate(
        target,
        PROMPT,
        drafter=NGramDrafter(),
        max_new_tokens=300,
        eos_token_id=[],
        on_step=places,
    )
    assert len(pointers) == 1 and target.length > 290
    assert len(set(*pointers)) == 6, "three layers, keys and values"


@given(
    kind=st.sampled_from(["huggingface", "fast", "lossless"]),
    num_draft_tokens=st.integers(1, 6),
    wrong=st.sets(st.integers(0, 30), max_size=20),
    budget=st.integers(1, 20),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    penalty=st.sampled_from([1.0, 1.4]),
    confirm_every=st.integers(1, 6),
)
@settings(max_examples=40)
def test_the_caches_of_all_engines_and_tiers_equal_fresh_prefills(
    kind, num_draft_tokens, wrong, budget, seed, temperature, penalty, confirm_every
):
    """Sampled text too, in the fast engine, and in both caches of lossless mode."""
    model = MODELS["llama"]
    target = (FastDecoder.from_model if kind == "fast" else HuggingFaceTarget)(model)
    first = HuggingFaceTarget(DISTURBED)
    lossless = kind == "lossless"
    config = SamplingConfig(temperature, top_k=20, repetition_penalty=penalty, seed=seed)
    result = generate(
        first if lossless else target,
        PROMPT,
        drafter=Scripted(PLAIN_TEXTS["llama", 5], num_draft_tokens, wrong),
        sampling=config,
        max_new_tokens=budget,
        eos_token_id=[],
        **(dict(confirm_with=target, confirm_every=confirm_every) if lossless else {}),
    )
    text = PROMPT + result.tokens
    assert len(result.tokens) == budget
    if kind == "fast":
        assert target.length == len(text) - 1
        fresh = FastDecoder.from_model(model)
        fresh.forward(torch.tensor(text[:-1]))
        for ours, expected in ((target.keys, fresh.keys), (target.values, fresh.values)):
            used = slice(0, target.length)
            torch.testing.assert_close(ours[:, :, used], expected[:, :, used], rtol=1e-4, atol=1e-4)
    else:
        assert_cache_is_a_fresh_prefill(target, text)
    if lossless and first.length > 0:
        # it is told of the last block only when it drafts the next one
        assert_cache_is_a_fresh_prefill(first, text[: first.length + 1])


def test_a_target_that_was_used_before_starts_empty(tiny_llama, greedy_text):
    """Whatever the cache holds from another text is forgotten, not continued."""
    target = HuggingFaceTarget(tiny_llama)
    generate(target, [9, 9, 9], max_new_tokens=5, drafter=NGramDrafter())
    result = generate(target, PROMPT, max_new_tokens=10, eos_token_id=[])
    assert result.tokens == greedy_text[:10]
    outsider = TableTarget(random_table())
    outsider.forward(torch.tensor([1, 2, 3]))
    generate(outsider, [4], max_new_tokens=2)
    assert outsider.ids[0] == 4


def test_only_the_last_logits_of_the_prompt_are_computed(tiny_llama):
    """A prefill with logits for every position costs prompt x vocabulary."""
    rows = []
    target = HuggingFaceTarget(tiny_llama)
    forward = target.forward

    def recording(ids, num_logits=None):
        logits = forward(ids, num_logits=num_logits)
        rows.append((len(ids), len(logits)))
        return logits

    target.forward = recording
    generate(target, PROMPT, drafter=Scripted([1] * 9, 3), max_new_tokens=4, eos_token_id=[])
    assert rows[0] == (len(PROMPT) - 1, 1)
    assert all(fed == returned for fed, returned in rows[1:]) and rows[1] == (4, 4)


def test_one_object_cannot_draft_and_verify(tiny_llama):
    """Two texts in one cache: told, instead of nonsense. The model itself can be shared."""
    target = HuggingFaceTarget(tiny_llama)
    for drafter in (ModelDrafter(target), AdaptiveDrafter(ModelDrafter(target))):
        with pytest.raises(UserError, match="same HuggingFaceTarget"):
            generate(target, PROMPT, drafter=drafter)
    with pytest.raises(UserError, match="same HuggingFaceTarget"):
        generate(target, PROMPT, confirm_with=target)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(sampling=None), "sampling is None.*SamplingConfig"),
        (dict(sampling={"temperature": 1}), "sampling is .*SamplingConfig"),
        (dict(on_step=3), "on_step is 3.*function"),
        (dict(should_stop=True), "should_stop is True.*function"),
        (dict(confirm_every=-3), "confirm_every is -3"),
    ],
)
def test_likely_slips_are_told(tiny_llama, arguments, message):
    """Each was a traceback from inside, or was taken without a word."""
    with pytest.raises(UserError, match=message) as error:
        generate(tiny_llama, PROMPT, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("drafter", [NGramDrafter, "ngram", object(), [1, 2]])
def test_what_is_no_drafter_is_told(tiny_llama, drafter):
    """A class instead of an object is the likeliest slip."""
    with pytest.raises(UserError, match=r"drafter is .*NGramDrafter\(\)"):
        generate(tiny_llama, PROMPT, drafter=drafter)


def test_tokenizers_that_are_known_are_compared(tiny_llama):
    """Models out of load() bring theirs along: nobody has to remember to compare them."""

    class Tokenizer:
        def __init__(self, *tokens):
            self.vocab = {token: index for index, token in enumerate(tokens)}

        def get_vocab(self):
            return self.vocab

    class Loaded:
        model = tiny_llama

        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

    target = Loaded(Tokenizer("a", "b"))
    for wrap in (lambda drafter: drafter, AdaptiveDrafter):
        same = wrap(ModelDrafter(Loaded(Tokenizer("a", "b"))))
        assert len(generate(target, PROMPT, drafter=same, max_new_tokens=3).tokens) == 3
        other = wrap(ModelDrafter(Loaded(Tokenizer("b", "a"))))
        with pytest.raises(UserError, match="tokenizer differs"):
            generate(target, PROMPT, drafter=other, max_new_tokens=3)
    assert len(generate(target, PROMPT, confirm_with=target, max_new_tokens=3).tokens) == 3
    confirming = Loaded(Tokenizer("b", "a"))
    with pytest.raises(UserError, match="tokenizer differs"):
        generate(target, PROMPT, confirm_with=confirming, max_new_tokens=3)


# ---------------------------------------------------------------- prompts


def test_a_prompt_of_one_token(tiny_llama):
    """Nothing to prefill: the first step feeds the whole prompt."""
    expected = int(tiny_llama(torch.tensor([[7]])).logits[0, -1].argmax())
    for prompt in ([7], torch.tensor([7]), torch.tensor([[7]]), [[7]], (7,)):
        for drafter in (None, NGramDrafter(), ModelDrafter(tiny_llama, 2)):
            assert (
                generate(tiny_llama, prompt, drafter=drafter, max_new_tokens=3).tokens[0]
                == expected
            )


def test_case_6_a_batch_is_refused_by_size(tiny_llama):
    """Case 6: the error names the size; decoding only the first row would look like success."""
    for batch in (torch.ones(3, 4, dtype=torch.long), [[1, 2], [3, 4], [5, 6]], [[1], [2, 3], [4]]):
        with pytest.raises(UserError, match="batch of 3"):
            generate(tiny_llama, batch)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "empty"),
        (torch.zeros(0, dtype=torch.long), "empty"),
        ([[]], "empty"),
        ([1, 97], "token 97.*between 0 and 96"),
        ([-1], "token -1"),
        (torch.tensor([1.0]), "whole numbers"),
        (torch.ones(1, 1, 2, dtype=torch.long), "shape"),
        ("Hello", "encode it first"),
        (["Hello"], "encode it first"),
        (["a", "b"], "encode it first"),
        (None, "prompt is None"),
        ([1, None], "whole numbers"),
        ({1, 2}, "whole numbers"),
        ([10**20], "whole numbers"),
        ([1, 2.5], "whole numbers"),
        (torch.tensor([True]), "whole numbers"),
        ([[[1]]], "shape"),
        ({"ids": [1]}, "no input_ids, only ids"),
    ],
)
def test_wrong_prompts_are_told(tiny_llama, prompt, message):
    """Each would be an IndexError or a shape error from inside the model."""
    with pytest.raises(UserError, match=message) as error:
        generate(tiny_llama, prompt)
    assert "\n" not in str(error.value)


def test_a_tokenizers_output_is_a_prompt(tiny_llama):
    """tokenizer(text) passed as it is: its input_ids are meant."""
    expected = generate(tiny_llama, PROMPT, max_new_tokens=4).tokens
    encodings = (
        {"input_ids": PROMPT, "attention_mask": [1] * 5},
        BatchEncoding({"input_ids": torch.tensor([PROMPT])}),
        np.array(PROMPT),
    )
    for prompt in encodings:
        assert generate(tiny_llama, prompt, max_new_tokens=4).tokens == expected
    with pytest.raises(UserError, match="batch of 2"):
        generate(tiny_llama, BatchEncoding({"input_ids": [[1, 2], [3]]}))


def test_a_run_taken_step_by_step(tiny_llama, greedy_text):
    """What was handed out must not grow afterwards, and nothing follows the end."""
    run = GenerationRun(
        tiny_llama, PROMPT, drafter=Scripted(greedy_text, 3), max_new_tokens=9, eos_token_id=[]
    )
    assert run.prefill_seconds > 0 and run.tokens == [] and run.generation().tokens == []
    first = run.step()
    early, tokens = run.generation(), run.tokens
    assert list(first.tokens) == early.tokens == tokens == greedy_text[:4]
    assert early.finish_reason == run.finish_reason == ""
    while not run.finish_reason:
        run.step()
    assert early.tokens == tokens == greedy_text[:4] == early.trace.tokens
    assert run.tokens == run.generation().tokens == greedy_text[:9]
    assert run.finish_reason == "length" and len(run.steps) == 3
    with pytest.raises(UserError, match=r"has ended \(length\)"):
        run.step()
    assert run.tokens == greedy_text[:9] and len(run.steps) == 3

    stopped = GenerationRun(tiny_llama, PROMPT, max_new_tokens=9)
    stopped.stop()
    with pytest.raises(UserError, match=r"has ended \(stopped\)"):
        stopped.step()
    assert stopped.generation().finish_reason == "stopped"


# ---------------------------------------------------------------- outsiders


@pytest.mark.parametrize("as_list", [True, False])
def test_outsiders_with_only_the_protocol(as_list):
    """A target and a drafter that implement what is documented and nothing else."""
    table = random_table(VOCAB)
    plain = generate(TableTarget(table), [1, 2], max_new_tokens=30).tokens
    for wrong in ((), (2, 3, 11), range(0, 30, 2)):
        drafter = Scripted(plain, 4, wrong, as_list=as_list)
        result = generate(TableTarget(table), [1, 2], drafter=drafter, max_new_tokens=30)
        assert result.tokens == plain
    result = generate(
        TableTarget(table),
        [1, 2],
        drafter=ModelDrafter(TableTarget(table), 3, drafter=Scripted(plain, 2)),
        max_new_tokens=30,
    )
    assert result.tokens == plain


def test_a_target_that_returns_something_else_is_told():
    """A forgotten batch dimension would be read as one position."""

    class Batched(TableTarget):
        def forward(self, ids):
            return super().forward(ids)[None]

    with pytest.raises(UserError, match=r"shape \(1, 2, 5\) for 2 tokens.*\[2, vocabulary\]"):
        generate(Batched(random_table()), [1, 2, 3])


def test_a_wrong_draft_is_told_before_it_is_fed():
    """An index outside the embedding raises from deep inside, or reads another row on a GPU."""
    with pytest.raises(UserError, match="proposed token 9: it must lie between 0 and 4"):
        generate(TableTarget(random_table()), [1, 2], drafter=Scripted([9], 1))


def test_case_17_nan_from_the_model_stops_the_generation(tiny_llama):
    """Case 17: the position in the text is named; greedy and sampled; no token comes of it."""

    class Broken(TableTarget):
        def forward(self, ids):
            logits = super().forward(ids)
            for row, position in enumerate(range(self.length - len(ids), self.length)):
                if position == 6:
                    logits[row, 2] = math.nan
            return logits

    for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0, seed=0)):
        for drafter in (None, Scripted([1] * 20, 4)):
            emitted = []
            with pytest.raises(UserError, match=r"lm_head.*NaN for token 2 at position 7"):
                generate(
                    Broken(random_table()),
                    [1, 2],
                    drafter=drafter,
                    sampling=sampling,
                    on_step=lambda step: emitted.extend(step.tokens),  # noqa: B023
                )
            assert len(emitted) <= 5


# ---------------------------------------------------------------- sampling


class RandomDrafter:
    """Draws from a q that is not p, with its own generator; any length."""

    def __init__(self, table: torch.Tensor, num_draft_tokens: int, seed: int = 0) -> None:
        self.q = torch.softmax(table.double(), -1)
        self.cumulative = self.q.cumsum(-1).tolist()
        self.num_draft_tokens = num_draft_tokens
        self.random = random.Random(seed)

    def reset(self, prompt_ids):
        self.history = [0, *prompt_ids]

    def propose(self, max_tokens):
        history = self.history[-2:]
        for _ in range(min(max_tokens, self.num_draft_tokens)):
            cumulative = self.cumulative[history[-2]][history[-1]]
            history.append(bisect.bisect_right(cumulative[:-1], self.random.random()))
        tokens = torch.tensor(history)
        return Draft(tokens[2:], self.q[tokens[:-2], tokens[1:-1]])

    def extend(self, tokens):
        self.history += tokens


def chi_square_pvalue(text: list[int], table: torch.Tensor, config: SamplingConfig) -> float:
    """Of the hypothesis that each token follows the two before it with the table's p."""
    vocab_size = len(table)
    counts = torch.zeros(vocab_size, vocab_size, vocab_size, dtype=torch.float64)
    ids = torch.tensor(text)
    index = (ids[:-2] * vocab_size + ids[1:-1]) * vocab_size + ids[2:]
    counts.view(-1).index_add_(0, index, torch.ones(len(index), dtype=torch.float64))
    p = probabilities(table.view(-1, vocab_size), config).view_as(table)
    expected = counts.sum(-1, keepdim=True) * p
    assert (counts[p == 0] == 0).all(), "a token that cannot follow was emitted"
    used = expected > 5
    statistic = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    degrees = int(used.sum()) - int(used.any(-1).sum())
    return float(stats.chi2.sf(statistic, degrees))


def sample_text(target, drafter, config, count, **arguments):
    result = generate(
        target,
        [1, 2],
        drafter=drafter,
        sampling=config,
        max_new_tokens=count,
        eos_token_id=[],
        **arguments,
    )
    assert len(result.tokens) == count
    return result


def test_speculative_sampling_follows_the_target():
    """1e5 tokens through generate with a sampling drafter, against p by chi-square."""
    table = random_table()
    config = SamplingConfig(temperature=0.9, seed=3)
    drafter = RandomDrafter(table + 0.2 * random_table(seed=8), num_draft_tokens=12)
    result = sample_text(TableTarget(table), drafter, config, 100_000)
    assert 4 < result.mean_acceptance_length < 12, "the test must accept and reject"
    assert chi_square_pvalue([1, 2, *result.tokens], table, config) > 1e-4
    # the test can fail: the drafter's own distribution is another one
    wrong = SamplingConfig(temperature=0.8)
    assert chi_square_pvalue([1, 2, *result.tokens], table, wrong) < 1e-9


@pytest.mark.parametrize("drafter", [None, NGramDrafter(num_draft_tokens=3), SuffixDrafter(4)])
def test_sampling_under_lookup_drafters_follows_the_target(drafter):
    """A deterministic drafter (one-hot q), with top-k in force."""
    table = random_table(seed=1)
    config = SamplingConfig(temperature=1.1, top_k=3, seed=4)
    result = sample_text(TableTarget(table), drafter, config, 2_500)
    assert chi_square_pvalue([1, 2, *result.tokens], table, config) > 1e-4
    if drafter is not None:
        assert 1.1 < result.mean_acceptance_length < 3


def test_case_18_seeds():
    """Case 18: same seed, same tokens; another seed, others; None, others every time."""
    table = random_table(40)
    for drafter in (None, NGramDrafter(), RandomDrafter(table, 3)):

        def run(seed, drafter=drafter):
            if isinstance(drafter, RandomDrafter):
                drafter.random.seed(1)
            config = SamplingConfig(temperature=1.0, seed=seed)
            return sample_text(TableTarget(table), drafter, config, 40).tokens

        assert run(1) == run(1) != run(2)
        assert run(None) != run(None)


def test_case_18_empty_drafts_draw_what_plain_sampling_draws(tiny_llama):
    """Case 18: with nothing drafted the same seed gives the same text as plain decoding."""
    config = SamplingConfig(temperature=1.0, top_p=0.95, seed=5)
    arguments = dict(sampling=config, max_new_tokens=20, eos_token_id=[])
    plain = generate(tiny_llama, PROMPT, **arguments)
    silent = generate(tiny_llama, PROMPT, drafter=Scripted([], 5), **arguments)
    assert silent.tokens == plain.tokens
    assert [len(step.verification.uniforms) for step in plain.steps] == [1] * 20


def test_the_global_generator_is_never_drawn_from(tiny_llama):
    """A library that draws from the global generator changes its caller's experiments."""
    state = torch.random.get_rng_state()
    for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0)):
        for drafter in (None, NGramDrafter(), ModelDrafter(tiny_llama, 2)):
            generate(tiny_llama, PROMPT, drafter=drafter, sampling=sampling, max_new_tokens=8)
    generate(tiny_llama, PROMPT, confirm_with=tiny_llama, max_new_tokens=8)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_case_19_repetition_penalty_inside_a_block():
    """Case 19: greedy with a penalty: speculative equals plain, whatever was drafted wrongly.

    A penalty that misses drafted tokens, or remembers rejected ones, changes the text.
    """
    table = random_table(30, seed=2, scale=0.5)
    for penalty in (1.3, 3.0, 0.7):
        sampling = SamplingConfig(repetition_penalty=penalty)
        plain = generate(TableTarget(table), [1, 2, 3], sampling=sampling, max_new_tokens=60)
        for wrong in ((), (1, 4, 5, 13), range(0, 60, 3)):
            drafter = Scripted(plain.tokens, 5, wrong, vocab_size=30)
            result = generate(
                TableTarget(table),
                [1, 2, 3],
                drafter=drafter,
                sampling=sampling,
                max_new_tokens=60,
            )
            assert result.tokens == plain.tokens
    without = generate(TableTarget(table), [1, 2, 3], max_new_tokens=60)
    assert without.tokens != plain.tokens, "the penalty must matter here"


class Even(TableTarget):
    """All tokens equally likely, whatever came before: only the penalty tells them apart."""

    def __init__(self):
        super().__init__(torch.ones(4, 4, 4))


@pytest.mark.parametrize("draft", [None, [2, 2]])
def test_case_19_sampling_with_a_penalty_inside_a_block(draft):
    """Case 19 at temperature 1: chi-square of two tokens in a row, over the block [2, 2].

    A penalty that misses the first 2 doubles the chance of the second; one that remembers a
    rejected 2 lowers it.
    """

    class Twos:
        def reset(self, prompt_ids):
            pass

        def propose(self, max_tokens):
            return Draft(draft[:max_tokens])

        def extend(self, tokens):
            pass

    counts = torch.zeros(4, 4, dtype=torch.float64)
    num_runs = 1500
    for seed in range(num_runs):
        first, second, _ = generate(
            Even(),
            [0],
            drafter=None if draft is None else Twos(),
            sampling=SamplingConfig(temperature=1.0, repetition_penalty=8.0, seed=seed),
            max_new_tokens=3,
            eos_token_id=[],
        ).tokens
        counts[first, second] += 1

    def law(*seen):
        scores = torch.ones(4, dtype=torch.float64)
        scores[list(seen)] = 1 / 8
        return scores.softmax(-1)

    expected = num_runs * torch.stack([law(0)[first] * law(0, first) for first in range(4)])
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, 15) > 1e-4


# ---------------------------------------------------------------- lossless mode


@pytest.mark.parametrize("confirm_every", [1, 8])
@pytest.mark.parametrize(
    "drafter", [None, NGramDrafter(), SuffixDrafter(), Scripted([5] * 99, 2), "layers"]
)
def test_lossless_greedy_is_the_full_precision_text(
    tiny_llama, greedy_text, confirm_every, drafter
):
    """The first tier is a disturbed model: its errors must all be found and replaced."""
    disturbed = disturbed_model(0.02)
    if drafter == "layers":
        drafter = LayerSkipDrafter(disturbed, 2, 3)
    target = HuggingFaceTarget(tiny_llama)
    result = generate(
        disturbed,
        PROMPT,
        drafter=drafter,
        confirm_with=target,
        confirm_every=confirm_every,
        max_new_tokens=32,
        eos_token_id=[],
    )
    assert result.tokens == greedy_text
    assert generate(disturbed, PROMPT, max_new_tokens=32, eos_token_id=[]).tokens != greedy_text
    assert result.overruled > 0 and 0 < result.overrule_rate < 1
    assert result.overruled == sum(step.outcome == "replacement" for step in result.steps)
    assert len(result.trace.first_tier_steps) > 0
    assert_cache_is_a_fresh_prefill(target, PROMPT + result.tokens)


def test_lossless_confirms_a_target_that_is_right():
    """Two equal tiers: never overruled, every block whole."""
    model = MODELS["llama"]
    result = generate(
        model,
        PROMPT,
        drafter=NGramDrafter(),
        confirm_with=model,
        confirm_every=5,
        max_new_tokens=60,
        eos_token_id=[],
    )
    assert result.overruled == 0 and result.overrule_rate == 0
    assert result.acceptance_counts == [5] * 10


@pytest.mark.parametrize(
    "drafter",
    [
        None,
        NGramDrafter(num_draft_tokens=3),
        RandomDrafter(random_table(seed=11), num_draft_tokens=3),
    ],
)
def test_lossless_sampling_follows_the_confirming_target(drafter):
    """Both tiers draw: the text follows the second one's p and not the first one's."""
    exact = random_table(seed=6)
    rough = exact + 0.5 * random_table(seed=7)
    config = SamplingConfig(temperature=1.0, seed=9)
    result = sample_text(
        TableTarget(rough), drafter, config, 3_000, confirm_with=TableTarget(exact), confirm_every=4
    )
    assert chi_square_pvalue([1, 2, *result.tokens], exact, config) > 1e-4
    assert chi_square_pvalue([1, 2, *result.tokens], rough, config) < 1e-9
    assert 0.02 < result.overrule_rate < 0.5


def test_lossless_ends_where_plain_decoding_ends(tiny_llama, greedy_text):
    """End tokens, stop strings and budgets inside a block of the first tier."""
    disturbed = disturbed_model(0.02)
    for eos in greedy_text[10:16]:
        plain = generate(tiny_llama, PROMPT, eos_token_id=eos, max_new_tokens=30)
        result = generate(
            disturbed, PROMPT, confirm_with=tiny_llama, eos_token_id=eos, max_new_tokens=30
        )
        assert (result.tokens, result.finish_reason) == (plain.tokens, plain.finish_reason)
    for wrong in (0, 1.5):
        with pytest.raises(UserError, match="confirm_every"):
            generate(disturbed, PROMPT, confirm_with=tiny_llama, confirm_every=wrong)


# ---------------------------------------------------------------- metrics


def test_case_20_mean_acceptance_length():
    """Case 20: steps that accept 0, 2 and 5 drafts: L = (1 + 3 + 6) / 3."""
    table = chain(30, {})
    # five drafts each: wrong at once; wrong at the third; all right
    drafter = Scripted([*range(1, 30)], 5, wrong={0, 3})
    result = generate(TableTarget(table), [0], drafter=drafter, max_new_tokens=10)
    assert result.acceptance_counts == [0, 2, 5]
    assert result.mean_acceptance_length == pytest.approx(10 / 3, abs=1e-15)


def test_times_are_kept_apart(monkeypatch):
    """First-token time has the prefill in it, tokens per second has not."""
    clock = [0.0]

    class Slow(TableTarget):
        def forward(self, ids):
            clock[0] += 100.0 if self.length == 0 else 1.0
            return super().forward(ids)

    monkeypatch.setattr("quasar_lab.sequence.time.perf_counter", lambda: clock[0])
    result = generate(Slow(random_table()), [1, 2, 3], max_new_tokens=10)
    assert result.trace.prefill_seconds == 100.0
    assert result.first_token_seconds == 101.0
    assert result.decode_seconds == 10.0 and result.tokens_per_second == 1.0


def test_the_text_is_decoded_without_special_tokens():
    """Generation.text takes any tokenizer with decode."""
    result = generate(TableTarget(chain(28, {})), [6], max_new_tokens=3)
    assert result.text(LetterTokenizer()) == "hij"
