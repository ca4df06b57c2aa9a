"""Drafters: the right guess, at a cost that does not depend on the length of the text."""

import math
import statistics
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCAB, tiny_model

from quasar_lab.decoder import FastDecoder
from quasar_lab.decoding import generate
from quasar_lab.draft import Draft, Drafter, checked_draft
from quasar_lab.drafting import (
    AdaptiveDrafter,
    LayerSkipDrafter,
    ModelDrafter,
    NGramDrafter,
    SuffixDrafter,
)
from quasar_lab.drafting.adaptive import line_through
from quasar_lab.drafting.layer_skip import chosen_layers, with_layers
from quasar_lab.drafting.model import check_same_tokenizer
from quasar_lab.drafting.suffix import SuffixAutomaton
from quasar_lab.errors import UserError
from quasar_lab.sampling import SamplingConfig, probabilities
from quasar_lab.targets import HuggingFaceTarget
from quasar_lab.trace import Step
from quasar_lab.verification import Verification

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def proposal(drafter, prompt, max_tokens=5):
    drafter.reset(prompt)
    return drafter.propose(max_tokens).tokens.tolist()


def naive_ngram(text, max_ngram, min_ngram, num_tokens, match):
    """Prompt lookup as it is usually written: compare every window."""
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        places = [i for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
        if places:
            start = (places[0] if match == "first" else places[-1]) + n
            return text[start : start + num_tokens]
    return []


def naive_suffix_match(text):
    """(length, end of the latest earlier occurrence) of the longest suffix that occurs earlier."""
    for length in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[-length:]:
                return length, end
    return 0, None


# ---------------------------------------------------------------- n-gram


def test_case_2_lookup_without_an_end_token():
    """Case 2: lookup is about the text alone: [..., 7, 8] was followed by 9."""
    assert proposal(NGramDrafter(), [5, 6, 7, 8, 9, 10, 11, 7, 8])[0] == 9


def test_case_8_lookup_right_after_an_append():
    """Case 8: the index must know the newest token: [1, 2, 3, 1] + 2 -> 3."""
    drafter = NGramDrafter()
    drafter.reset([1, 2, 3, 1])
    drafter.extend([2])
    assert drafter.propose(5).tokens.tolist()[0] == 3


def test_case_9_first_or_latest_match():
    """Case 9: of two occurrences, the one that was asked for."""
    text = [1, 2, 9, 1, 2, 7, 1, 2]
    assert proposal(NGramDrafter(match="latest"), text)[0] == 7
    assert proposal(NGramDrafter(match="first"), text)[0] == 9


@given(
    text=TEXTS,
    cut=st.integers(0, 60),
    max_ngram=st.integers(1, 4),
    min_ngram=st.integers(1, 4),
    match=st.sampled_from(["first", "latest"]),
)
def test_the_index_equals_a_naive_search(text, cut, max_ngram, min_ngram, match):
    """However the text arrived, prompt or tokens, the answer is that of a search through it all."""
    min_ngram = min(min_ngram, max_ngram)
    drafter = NGramDrafter(max_ngram, min_ngram, 5, match)
    drafter.reset(text[:cut])
    for token in text[cut:]:
        drafter.extend([token])
    expected = naive_ngram(text, max_ngram, min_ngram, 5, match)
    assert drafter.propose(9).tokens.tolist() == expected


def lines_run(function, *arguments):
    """How many lines of Python a call executes: the same on every machine, unlike its time."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count


def step_lines(drafter, tokens):
    """Of one step: the tokens arrive, are taken back, arrive again; a draft."""

    def step():
        drafter.extend(tokens)
        drafter.rollback(len(tokens))
        drafter.extend(tokens)
        drafter.propose(5)

    return lines_run(step)


def test_case_10_a_long_context_gives_the_same_answer_at_the_same_cost():
    """Case 10: 100,000 tokens: the naive search's answer, for as much work as after 1,000."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(300, (100_000,), generator=generator).tolist()
    for drafter in (NGramDrafter(), SuffixDrafter()):
        worst = []
        for length in (1_000, 100_000):
            drafter.reset(text[:length])
            worst.append(max(step_lines(drafter, [token]) for token in text[:100]))
        assert worst[1] <= 1.2 * worst[0], drafter
    drafter = NGramDrafter()
    for end in (50_000, 50_007, 99_999):
        assert proposal(drafter, text[:end]) == naive_ngram(text[:end], 3, 1, 5, "latest")


def fibonacci_word(length):
    """The text with the most overlapping repetitions that are not all of one period."""
    before, word = [1], [0]
    while len(word) < length:
        before, word = word, word + before
    return word[:length]


@pytest.mark.parametrize(
    "text",
    [[5] * 50_000, [1, 2] * 25_000, list(range(40)) * 1_250, fibonacci_word(50_000)],
    ids=["one token", "two in turns", "a loop", "Fibonacci"],
)
def test_no_text_makes_a_step_dear(text):
    """A new token after a text that repeats itself: every repeated suffix would learn of it."""
    drafter = SuffixDrafter()
    drafter.reset(text)
    # 64 suffixes that depend on one another, a few lines each, three times over
    for tokens in ([99], [1, 99], [98]):
        assert step_lines(drafter, tokens) < 2_500 * len(tokens)
    drafter.extend([7, *text[:9]])
    assert drafter.propose(4).tokens.tolist() == text[9:13]


@pytest.mark.parametrize("drafter", [NGramDrafter(), SuffixDrafter()])
@given(text=TEXTS, more=TEXTS)
def test_rollback_leaves_no_trace(drafter, text, more):
    """Lossless mode takes tokens back: afterwards the drafter must not remember them."""
    drafter.reset(text)
    drafter.extend(more)
    drafter.rollback(len(more))
    drafter.extend(more[::-1])
    again = type(drafter)()
    again.reset([*text, *more[::-1]])
    assert drafter.propose(9).tokens.tolist() == again.propose(9).tokens.tolist()


@pytest.mark.parametrize("drafter", [NGramDrafter(), SuffixDrafter()])
def test_nothing_of_the_prompt_can_be_taken_back(drafter):
    """The undo log covers what was generated: asking for more is an error, not a wrong index."""
    drafter.reset([1, 2, 1])
    drafter.extend([2])
    with pytest.raises(UserError, match="prompt"):
        drafter.rollback(2)


@pytest.mark.parametrize("drafter", [NGramDrafter(), SuffixDrafter()])
def test_lookup_drafters_obey_their_limits(drafter):
    """max_tokens, num_draft_tokens, tensors as input, empty texts; a reset forgets the past."""
    assert isinstance(drafter, Drafter)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    assert proposal(drafter, torch.tensor([text]), 2) == [1, 2]
    assert len(proposal(drafter, text, 100)) == drafter.num_draft_tokens
    assert proposal(drafter, text, 0) == []
    assert proposal(drafter, []) == [] and proposal(drafter, [4]) == []
    assert proposal(drafter, [1, 2, 3]) == []
    drafter.extend(torch.tensor([1]))
    assert drafter.propose(1).tokens.tolist() == [2]
    assert drafter.propose(1).probs is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(max_ngram=0), "max_ngram is 0"),
        (dict(max_ngram=2, min_ngram=3), "min_ngram is 3.*max_ngram, 2"),
        (dict(min_ngram="1"), "min_ngram is '1'"),
        (dict(num_draft_tokens=0), "num_draft_tokens is 0"),
        (dict(num_draft_tokens=2.5), "num_draft_tokens is 2.5"),
        (dict(match="last"), "match is 'last'"),
    ],
)
def test_wrong_ngram_settings_are_told(arguments, message):
    """A min above the max would propose nothing, for ever and without a word."""
    with pytest.raises(UserError, match=message):
        NGramDrafter(**arguments)


# ---------------------------------------------------------------- suffix automaton


@given(text=TEXTS)
def test_the_longest_match_is_found(text):
    """Against a search through all suffixes: its length, and its latest earlier occurrence."""
    drafter = SuffixDrafter(num_draft_tokens=50, length_factor=50)
    drafter.reset(text)
    length, end = naive_suffix_match(text)
    assert drafter.automaton.match_length == length
    if length:
        assert drafter.automaton.match_end == end
        drafted = drafter.propose(8).tokens.tolist()
        following = text[end + 1 : end + 9]
        assert drafted[: len(following)] == following


def test_a_longer_match_proposes_more():
    """The draft's length adapts: one matched token proposes 2, four propose 8."""
    text = list(range(20))
    drafter = SuffixDrafter(length_factor=2.0)
    assert proposal(drafter, [*text, 3], 50) == [4, 5]
    assert proposal(drafter, [*text, 3, 4, 5, 6], 50) == list(range(7, 15))
    assert len(proposal(drafter, [*text, *text[:15]], 50)) == 16
    assert proposal(SuffixDrafter(min_match=2), [*text, 3], 50) == []


def test_a_loop_is_continued_round_its_period():
    """A match that overlaps the end ends where the text ends: the draft must go on."""
    assert proposal(SuffixDrafter(), [9, 1, 2, 1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]
    assert proposal(SuffixDrafter(), [7] * 10, 4) == [7] * 4


def test_one_repeated_token_changes_no_more_than_any_text():
    """aaaa... has as many matched suffixes as tokens: updating all of them would be quadratic."""
    automaton = SuffixAutomaton()
    for _ in range(3000):
        automaton.append(5)
    assert automaton.match_length >= 64 and automaton.match_end == 2998
    assert max(len(changes) for _, changes in automaton._changes) < 40
    assert len(automaton._length) < 100


@given(text=st.lists(st.integers(0, 1), max_size=80), cut=st.integers(0, 80))
def test_a_bounded_match_is_a_match_and_long_enough(text, cut, monkeypatch_depth):
    """With room for 4 suffixes: what is found is there, and a match of up to 4 is never missed."""
    automaton = SuffixAutomaton()
    for token in text[:cut]:
        automaton.append(token)
    for token in text[cut:]:  # taken back and given again: the index must be the same
        automaton.append(1 - token)
        automaton.undo()
        automaton.append(token)
    length, end = automaton.match_length, automaton.match_end
    longest, _ = naive_suffix_match(text)
    assert min(longest, 4) <= length <= longest
    if length:
        assert end < len(text) - 1
        assert text[end - length + 1 : end + 1] == text[-length:]


@pytest.fixture(scope="module")
def monkeypatch_depth():
    """As if a text could hold 4 suffixes that depend on one another, not 64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quasar_lab.drafting.suffix._MAX_DEPTH", 4)
        yield


@pytest.mark.parametrize(
    "arguments", [dict(length_factor=0), dict(length_factor="2"), dict(min_match=0)]
)
def test_wrong_suffix_settings_are_told(arguments):
    """One line that names the setting."""
    with pytest.raises(UserError, match=next(iter(arguments))):
        SuffixDrafter(**arguments)


# ---------------------------------------------------------------- models


def test_a_model_drafts_its_own_greedy_text(tiny_llama):
    """Greedy: the model's own continuation, without q, also after its drafts were turned down."""
    drafter = ModelDrafter(tiny_llama, num_draft_tokens=4)
    text = [3, 1, 4, 1, 5]
    drafter.reset(torch.tensor(text))
    for turned_down in (False, True, False, True):
        draft = drafter.propose(10)
        assert draft.probs is None
        for token in draft.tokens.tolist():
            logits = tiny_llama(torch.tensor([text])).logits[0, -1]
            assert token == int(logits.argmax())
            text.append(token)
        if turned_down:
            del text[-2:]
        emitted = [*draft.tokens.tolist()[: 4 - 2 * turned_down], 11]
        drafter.extend(emitted)
        text.append(11)


def test_proposing_twice_proposes_the_same(tiny_llama):
    """A draft that nobody took is not part of the text."""
    drafter = ModelDrafter(tiny_llama, num_draft_tokens=4)
    first = proposal(drafter, [3, 1, 4])
    assert drafter.propose(4).tokens.tolist() == first
    drafter.extend(first[:1])
    assert drafter.propose(4).tokens.tolist()[:3] == first[1:]


def test_sampled_drafts_come_with_the_q_they_were_drawn_from(tiny_llama):
    """q must be the drafter's distribution under the same SamplingConfig, penalty included."""
    config = SamplingConfig(temperature=0.8, top_k=10, repetition_penalty=1.3, seed=0)
    drafter = ModelDrafter(tiny_llama, num_draft_tokens=3)
    drafter.prepare(config, config.generator(), VOCAB, ())
    text = [3, 1, 4]
    drafter.reset(text)
    for emitted in ([9], [8, 9], [7]):  # drafts that were turned down leave no trace in q
        draft = drafter.propose(3)
        tokens = draft.tokens.tolist()
        logits = tiny_llama(torch.tensor([text + tokens])).logits[0, len(text) - 1 : -1]
        expected = probabilities(logits, config, text, draft_tokens=tokens[:2])
        torch.testing.assert_close(draft.probs, expected, rtol=1e-4, atol=1e-6)
        assert (draft.probs.gather(1, draft.tokens[:, None]) > 0).all()
        drafter.extend(emitted)
        text += emitted


def test_drafts_end_at_the_end_token(tiny_llama):
    """What a model would write after its end token is noise, and costs a forward each."""
    drafter = ModelDrafter(tiny_llama, num_draft_tokens=8)
    tokens = proposal(drafter, [3, 1, 4], 8)
    end = tokens[2]
    config = SamplingConfig()
    drafter.prepare(config, config.generator(), VOCAB, (end,))
    assert proposal(drafter, [3, 1, 4], 8) == tokens[: tokens.index(end) + 1]


def test_a_drafter_with_a_short_context_stops_drafting(tiny_llama):
    """The small model's context may be shorter than the target's: no drafts, no crash."""
    drafter = ModelDrafter(HuggingFaceTarget(tiny_llama, max_length=8), num_draft_tokens=5)
    assert len(proposal(drafter, [3, 1, 4, 1])) == 4
    drafter.extend([5, 5])
    assert len(drafter.propose(5)) == 2
    drafter.extend([5, 5, 5])
    assert len(drafter.propose(5)) == 0
    drafter.extend([5])
    assert proposal(drafter, list(range(20))) == []
    assert len(proposal(drafter, [3, 1, 4])) == 5


class FakeTokenizer:
    def __init__(self, *tokens):
        self.tokens = tokens

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.tokens)}


def test_another_tokenizer_is_refused(tiny_llama):
    """Token 17 of one vocabulary is not token 17 of another: every draft would be nonsense."""
    same, other = FakeTokenizer("a", "b", "c"), FakeTokenizer("a", "c", "b")
    check_same_tokenizer(same, FakeTokenizer("a", "b", "c"))
    with pytest.raises(UserError, match=r"from the verifying one's in 2 tokens, e.g. 'b' is 1"):
        ModelDrafter(tiny_llama, tokenizer=same, target_tokenizer=other)
    drafter = ModelDrafter(tiny_llama)
    config = SamplingConfig()
    with pytest.raises(UserError, match="97 tokens and the target's 50"):
        drafter.prepare(config, config.generator(), 50, ())


@pytest.mark.parametrize("vocab_size", [80, 120])
def test_vocabularies_padded_to_other_sizes_work_with_one_tokenizer(tiny_llama, vocab_size):
    """Qwen's sizes share a tokenizer and differ in padding: q gets the target's width."""
    tokenizer = FakeTokenizer("a", "b")
    drafter = ModelDrafter(tiny_llama, tokenizer=tokenizer, target_tokenizer=tokenizer)
    config = SamplingConfig(temperature=1.0, seed=0)
    drafter.prepare(config, config.generator(), vocab_size, ())
    drafter.reset([3, 1, 4])
    draft = drafter.propose(4)
    assert draft.probs.shape == (4, vocab_size)
    assert (draft.probs.sum(-1) - 1).abs().max() < 1e-12
    assert (draft.probs[:, VOCAB:] == 0).all() and (draft.tokens < vocab_size).all()


def test_a_token_beyond_the_smaller_vocabulary_silences_the_drafter(tiny_llama):
    """Padded sizes differ: a token that the small model has no row for would be an IndexError."""
    tokenizer = FakeTokenizer("a", "b")
    big = tiny_model("llama", vocab_size=120)

    def drafter():
        return ModelDrafter(tiny_llama, 4, tokenizer=tokenizer, target_tokenizer=tokenizer)

    for prompt in ([3, 110], [3, 4, 5]):
        plain = generate(big, prompt, max_new_tokens=24, eos_token_id=[])
        result = generate(big, prompt, drafter=drafter(), max_new_tokens=24, eos_token_id=[])
        assert result.tokens == plain.tokens
        assert max(prompt + plain.tokens) >= VOCAB, "the test needs such a token"
    one = drafter()
    one.reset([3, 4, 5])
    first = one.propose(4).tokens.tolist()
    one.extend([first[0], 110, 7])
    assert len(one.propose(4)) == 0
    one.rollback(2)  # lossless mode takes tokens back: it can go on
    assert one.propose(4).tokens.tolist()[:3] == first[1:]


# ---------------------------------------------------------------- skipped layers


def test_case_11_keeping_every_layer_is_the_full_model():
    """Case 11: 100 % of the layers = the full model, bit for bit."""
    for family in ("llama", "qwen3", "mistral_sliding", "opt", "gpt2"):
        model = tiny_model(family)
        ids = torch.arange(20)[None]
        view = with_layers(model, (0, 1, 2))
        assert torch.equal(view(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_sliding", "gemma", "opt", "gpt2"])
@pytest.mark.parametrize("layers", [(0,), (0, 2), (1, 2)])
def test_a_view_with_fewer_layers(family, layers):
    """Any subset, with a cache of its own, equals the same layers without; weights are shared."""
    model = tiny_model(family)
    view = with_layers(model, layers)
    assert {id(p) for p in view.parameters()} <= {id(p) for p in model.parameters()}
    ids = torch.arange(20)
    expected = view(ids[None], use_cache=False).logits[0]
    assert not torch.allclose(expected, model(ids[None]).logits[0])
    target = HuggingFaceTarget(view)
    ours = torch.cat([target.forward(piece) for piece in ids.split([1, 9, 10])])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    target.rollback(10)
    torch.testing.assert_close(target.forward(ids[10:]), expected[10:], rtol=1e-4, atol=1e-4)


def test_each_layer_keeps_its_kind_of_attention():
    """Where only some layers have a sliding window, the layers kept must keep theirs."""
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert model.config.layer_types == ["full_attention"] + ["sliding_attention"] * 2
    view = with_layers(model, (0, 2))
    assert view.config.layer_types == ["full_attention", "sliding_attention"]
    assert view.model.config is view.config
    ids = torch.arange(30)
    for each in (model, view):
        target = HuggingFaceTarget(each)
        ours = torch.cat([target.forward(piece) for piece in ids.split([1, 14, 15])])
        expected = each(ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_view_has_rotary_frequencies_of_its_own():
    """A scaling that grows with the text keeps state: what the model read must not reach a view."""
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=24)
    view = with_layers(model, (0, 2))
    before = view.model.rotary_emb.inv_freq.clone()
    model(torch.arange(40)[None])
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    assert torch.equal(view.model.rotary_emb.inv_freq, before)


def test_the_model_keeps_its_layers(tiny_llama):
    """The view is made of shallow copies: the target must not lose a layer by it."""
    ids = torch.arange(9)[None]
    before = tiny_llama(ids).logits
    config = tiny_llama.config.to_dict()
    with_layers(tiny_llama, (1,))(ids, use_cache=False)
    assert torch.equal(tiny_llama(ids).logits, before)
    assert len(tiny_llama.model.layers) == 3 and tiny_llama.config.to_dict() == config


@pytest.mark.parametrize(
    "layers, chosen",
    [
        (2, (0, 1)),
        (0.5, (0, 1)),
        (0.1, (0,)),
        (1.0, (0, 1, 2, 3)),
        ([0, 3], (0, 3)),
        (np.int64(2), (0, 1)),
        (np.float32(0.5), (0, 1)),
        (np.array([0, 3]), (0, 3)),
    ],
)
def test_ways_to_choose_layers(layers, chosen):
    """A count, a share or indices; numpy's too."""
    found = chosen_layers(layers, 4)
    assert found == chosen and all(type(index) is int for index in found)


@pytest.mark.parametrize("layers", [0, 5, 0.0, 1.1, [], [4], [-1], [1, 0], [1, 1], "half", None])
def test_impossible_layers_are_refused(layers):
    """Each of them would draft with another model than the one that was meant."""
    with pytest.raises(UserError, match="layers is"):
        chosen_layers(layers, 4)


def test_the_fast_decoder_runs_fewer_layers_too():
    """The lean engine on the same shared weights drafts the same tokens."""
    model = tiny_model("llama")
    before = model(torch.arange(9)[None]).logits
    fast = LayerSkipDrafter(model, [0, 2], 4, engine=FastDecoder.from_model)
    assert proposal(fast, [3, 1, 4]) == proposal(LayerSkipDrafter(model, [0, 2], 4), [3, 1, 4])
    torch.testing.assert_close(model(torch.arange(9)[None]).logits, before, rtol=0, atol=1e-9)


def test_layer_skip_needs_a_model_with_layers():
    """A bare Target has no layers that could be left out."""
    with pytest.raises(UserError, match="Hugging Face model"):
        LayerSkipDrafter(object())


# ---------------------------------------------------------------- adaptive length


def step(num_drafted: int, num_accepted: int, seconds: float = 1.0) -> Step:
    verification = Verification(
        num_accepted, 0, 1.0, (1.0,) * num_drafted, (1.0,) * num_drafted, ()
    )
    return Step(
        draft_tokens=(0,) * num_drafted,
        verification=verification,
        tokens=(0,) * (num_accepted + 1),
        kv_length=0,
        num_fed=num_drafted + 1,
        draft_seconds=0.0,
        verify_seconds=seconds,
    )


class Always:
    """Proposes as many tokens as it may."""

    def reset(self, prompt_ids):
        pass

    def propose(self, max_tokens):
        return Draft([0] * max_tokens)

    def extend(self, tokens):
        pass


def simulate(drafter, rate, steps=400, seed=0):
    """Lengths chosen over many steps when each draft is accepted with the given chance."""
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    drafter.reset([])
    for _ in range(steps):
        drafted = len(drafter.propose(100))
        accepted = 0
        while accepted < drafted and float(torch.rand((), generator=generator)) < rate:
            accepted += 1
        drafter.observe(step(drafted, accepted))
        lengths.append(drafted)
    return lengths[steps // 2 :]


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("slope", [0.02, 0.2])
def test_the_length_maximises_expected_tokens_per_cost(rate, slope):
    """The median length chosen costs at most 5 % more per token than the best fixed one."""
    drafter = AdaptiveDrafter(Always(), 16, step_cost=lambda fed: 1 + slope * (fed - 1))

    def speed(length):
        return sum(rate**i for i in range(length + 1)) / (1 + slope * length)

    chosen = statistics.median_low(simulate(drafter, rate))
    assert speed(chosen) > 0.95 * max(speed(length) for length in range(17))


def test_drafting_that_does_not_pay_stops_and_is_tried_again():
    """A drafter that is always wrong costs a token every 16 steps, and may come back."""
    drafter = AdaptiveDrafter(Always(), 8, step_cost={m: 1.0 + 0.5 * m for m in range(1, 10)})
    lengths = simulate(drafter, 0.0)
    assert statistics.median(lengths) == 0 and 0 < sum(lengths) <= len(lengths) / 8
    for _ in range(200):
        drafted = len(drafter.propose(100))
        drafter.observe(step(drafted, drafted))
    assert drafter.best_length() > 2


def test_the_same_table_gives_the_same_lengths():
    """With given costs nothing depends on the clock."""
    runs = [
        simulate(AdaptiveDrafter(Always(), step_cost=lambda fed: 1 + fed / 9), 0.7)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_measured_costs_decide_without_a_table():
    """A target whose step time doubles with each token is given short drafts, a flat one long."""
    flat, steep = (AdaptiveDrafter(Always(), 8) for _ in range(2))
    for drafter, slope in ((flat, 0.0), (steep, 1.0)):
        drafter.reset([])
        for length in (1, 4, 8) * 6:
            drafter.observe(step(length, length // 2, 1 + slope * length))
    assert flat.best_length() > steep.best_length()
    assert steep.step_cost(4) == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize("cost", [0, -1.0, math.nan, math.inf, None, "1"])
def test_an_impossible_cost_is_told(cost):
    """NaN speeds compare as nothing: the shortest draft would win, for ever and without a word."""
    for step_cost in (lambda fed: cost, dict.fromkeys(range(1, 9), cost)):
        with pytest.raises(UserError, match=r"step_cost of 1 tokens.*above 0"):
            AdaptiveDrafter(Always(), 4, step_cost=step_cost).propose(4)
    with pytest.raises(UserError, match="step_cost is 5"):
        AdaptiveDrafter(Always(), step_cost=5)
    drafter = AdaptiveDrafter(Always())
    with pytest.raises(UserError, match=r"nan seconds.*step_cost"):
        drafter.observe(step(1, 1, math.nan))


@pytest.mark.parametrize("drafter", [None, "ngram", NGramDrafter, 3])
def test_drafters_around_others_need_one(tiny_llama, drafter):
    """A slip here would be an AttributeError in the middle of a text."""
    with pytest.raises(UserError, match=r"drafter is .*NGramDrafter\(\)"):
        AdaptiveDrafter(drafter)
    if drafter is not None:
        with pytest.raises(UserError, match=r"drafter is .*NGramDrafter\(\)"):
            ModelDrafter(tiny_llama, drafter=drafter)


def test_a_drafter_of_a_drafter_needs_a_cache_of_its_own(tiny_llama):
    """Two drafters on one target would overwrite each other's KV cache."""
    target = HuggingFaceTarget(tiny_llama)
    with pytest.raises(UserError, match="same HuggingFaceTarget"):
        ModelDrafter(target, drafter=AdaptiveDrafter(ModelDrafter(target, 2)))
    with pytest.raises(UserError, match="ModelDrafter cannot be decoded from"):
        ModelDrafter(ModelDrafter(target))


def test_a_gap_in_the_table_is_told():
    """A missing entry would be a KeyError in the middle of a text."""
    drafter = AdaptiveDrafter(Always(), 4, step_cost={1: 1.0, 2: 1.1})
    with pytest.raises(UserError, match="no entry for 3 tokens"):
        drafter.propose(4)


def test_optional_methods_are_those_of_the_inner_drafter():
    """generate asks with hasattr: a rollback that is not there must not seem to be."""
    assert hasattr(AdaptiveDrafter(NGramDrafter()), "rollback")
    assert not hasattr(AdaptiveDrafter(Always()), "rollback")


def test_line_through_points():
    """Exact on a line; constant through one point; never negative."""
    assert line_through({}, 3) == 1.0
    assert line_through({2: 5.0}, 9) == 5.0
    assert line_through({1: 3.0, 3: 7.0}, 5) == pytest.approx(11.0)
    assert line_through({1: 10.0, 2: 1.0}, 9) == 0.1


# ---------------------------------------------------------------- drafts from outside


@pytest.mark.parametrize(
    "tokens, probs, message",
    [
        ([1, 97], None, "token 97.*between 0 and 96"),
        ([-1], None, "token -1"),
        ([1.5], None, "whole numbers"),
        (["a"], None, "whole numbers"),
        ([None], None, "whole numbers"),
        ([[1]], None, r"shape \(1, 1\)"),
        ([1], torch.ones(2, 97) / 97, r"1 tokens with probs of shape \(2, 97\)"),
        ([1], torch.ones(97) / 97, "probs of shape"),
        ([1], torch.ones(1, 96) / 96, "cover 96 tokens and the target's 97"),
        ([1], torch.ones(1, 97), "sums to 97"),
        ([1], torch.zeros(1, 97), "sums to 0"),
        ([1], torch.eye(97)[:1], "no chance"),
        ([1], torch.cat([torch.tensor([[-0.5, 1.5]]), torch.zeros(1, 95)], 1), "distribution"),
    ],
)
def test_a_wrong_draft_is_told(tokens, probs, message):
    """Each of these would give text of another distribution, or an error from deep inside."""

    class Outside:
        pass

    draft = Outside()
    draft.tokens, draft.probs = tokens, probs
    with pytest.raises(UserError, match=message) as error:
        checked_draft(draft, 5, VOCAB)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("draft", [[1, 2], None, torch.tensor([1])])
def test_what_is_no_draft_is_told(draft):
    """A drafter that returns its tokens bare: the likeliest slip of a first one."""
    with pytest.raises(UserError, match="propose must return a Draft"):
        checked_draft(draft, 5, VOCAB)
    with pytest.raises(UserError, match="whole numbers"):
        Draft([1.7])


def test_a_draft_that_is_too_long_is_cut():
    """Tokens beyond the budget cannot be emitted; their rows go with them."""
    draft = checked_draft(Draft([1, 2, 3], torch.full((3, 5), 0.2)), 2, 5)
    assert draft.tokens.tolist() == [1, 2] and draft.probs.shape == (2, 5)
    assert len(checked_draft(Draft([1, 2]), 0, 5)) == 0

    class Bare:  # an outsider's draft without probs, tokens in a list
        tokens = (4, 4)

    assert checked_draft(Bare(), 5, None).tokens.tolist() == [4, 4]
