"""Probabilities and the acceptance rule: proofs by enumeration, not by eye."""

import collections
import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quasar_lab.errors import UserError
from quasar_lab.sampling import (
    SamplingConfig,
    adjusted_logits,
    greedy_tokens,
    probabilities,
    verify,
)
from quasar_lab.verification import (
    acceptance_probability,
    count_accepted,
    draw,
    residual_distribution,
    verify_greedy,
    verify_in_detail,
)


def distribution(*weights: float) -> torch.Tensor:
    p = torch.tensor(weights, dtype=torch.float64)
    return p / p.sum()


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 0),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("seed", -1),
        ("seed", "one"),
        ("seed", 2**64),
    ],
)
def test_a_value_out_of_range_is_told_in_one_line(field, value):
    """A typo such as top_p=90 must not silently sample from everything."""
    with pytest.raises(UserError, match=field) as error:
        SamplingConfig(**{field: value})
    assert "\n" not in str(error.value)
    assert repr(value) in str(error.value)


def test_numbers_out_of_numpy_and_whole_numbers_are_welcome():
    """Values that come out of a slider or an array are numbers too."""
    import numpy as np

    config = SamplingConfig(temperature=np.float64(0.5), top_p=1, repetition_penalty=1)
    assert config.temperature == 0.5 and not config.greedy
    assert SamplingConfig().greedy


# ---------------------------------------------------------------- probabilities


def test_probabilities_equal_the_definition():
    """Each filter by itself, against a direct transcription."""
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, -3.0]])
    plain = torch.softmax(logits.double() / 0.7, -1)[0]
    assert torch.equal(probabilities(logits, SamplingConfig()), torch.eye(5).double()[:1])
    p = probabilities(logits, SamplingConfig(temperature=0.7))[0]
    torch.testing.assert_close(p, plain, rtol=1e-15, atol=1e-16)
    assert p.dtype == torch.float64

    p = probabilities(logits, SamplingConfig(temperature=0.7, top_k=2))[0]
    torch.testing.assert_close(p[:2], plain[:2] / plain[:2].sum(), rtol=1e-14, atol=0)
    assert (p[2:] == 0).all()

    # the first two hold 82 % and 20 % before scaling: .9 needs a third
    mass = plain.cumsum(0)
    assert mass[1] < 0.94 < mass[2]
    p = probabilities(logits, SamplingConfig(temperature=0.7, top_p=0.94))[0]
    assert (p > 0).tolist() == [True, True, True, False, False]

    p = probabilities(logits, SamplingConfig(temperature=0.7, min_p=0.2))[0]
    assert (p > 0).tolist() == (plain >= 0.2 * plain.max()).tolist()


def test_top_p_reaches_its_mass_in_spite_of_rounding():
    """.5 + .4 must count as .9: a softmax gives .8999999999999999."""
    logits = torch.tensor([[0.5, 0.4, 0.1]], dtype=torch.float64).log()
    p = probabilities(logits, SamplingConfig(temperature=1.0, top_p=0.9))[0]
    torch.testing.assert_close(p, distribution(5, 4, 0), rtol=1e-14, atol=0)


def test_top_p_acts_on_what_top_k_left():
    """The order of the filters: top-p's mass is that of the renormalised top-k set."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]], dtype=torch.float64).log()
    # over all four .4 needs one token and .41 two; over the best two (4/7, 3/7) .57 needs one
    p = probabilities(logits, SamplingConfig(temperature=1.0, top_k=2, top_p=0.57))[0]
    assert (p > 0).tolist() == [True, False, False, False]


def test_ties_stay_together():
    """A set that depends on the order inside a sort differs between batch shapes."""
    logits = torch.zeros(1, 8)
    for config in (
        SamplingConfig(temperature=1.0, top_k=3),
        SamplingConfig(temperature=1.0, top_p=0.3),
    ):
        assert (probabilities(logits, config) == 0.125).all()


def test_a_wide_nucleus_is_found_too():
    """The nucleus search starts with a few tokens and must widen until it has enough."""
    logits = torch.linspace(0, 1, 5000, dtype=torch.float64)[None]
    p = probabilities(logits, SamplingConfig(temperature=1.0, top_p=0.75))[0]
    plain = torch.softmax(logits, -1)[0].flip(0)
    needed = int((plain.cumsum(0) < 0.75).sum()) + 1
    assert int((p > 0).sum()) == needed > 512
    assert abs(float(p.sum()) - 1) < 1e-12


@given(
    logits=st.lists(st.floats(-30, 30), min_size=2, max_size=12),
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.floats(0.01, 1),
    min_p=st.none() | st.floats(0, 1),
)
def test_every_configuration_gives_a_distribution(logits, temperature, top_k, top_p, min_p):
    """Any combination of filters: sums to one, keeps the best token, keeps the order."""
    row = torch.tensor([logits], dtype=torch.float64)
    config = SamplingConfig(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p = probabilities(row, config)[0]
    assert abs(float(p.sum()) - 1) < 1e-12
    assert (p >= 0).all() and p[row[0].argmax()] == p.max()
    kept = row[0][p > 0]
    dropped = row[0][p == 0]
    # exp underflows 745 below the maximum, without any filter
    assert dropped.numel() == 0 or kept.min() >= dropped.max() or temperature < 0.1


def test_case_17_nan_never_becomes_a_token():
    """Case 17: argmax takes NaN for the maximum; an error must name the position instead."""
    for value, name in ((math.nan, "NaN"), (math.inf, "inf")):
        logits = torch.zeros(3, 6)
        logits[1, 4] = value
        for config in (SamplingConfig(), SamplingConfig(temperature=1.0, top_k=2)):
            with pytest.raises(UserError, match=f"{name}.*token 4 at position 11.*row 1"):
                probabilities(logits, config, first_position=10)
    with pytest.raises(UserError, match=r"only -inf.*position 0"):
        probabilities(torch.full((1, 4), -math.inf), SamplingConfig())


@pytest.mark.parametrize(
    "penalty, logits, what",
    [(1e-300, [1.0, 2e10, 0.0], "inf for token 1"), (1.7e308, [-1.5, -2.0, -3.0], "only -inf")],
)
def test_a_penalty_that_overflows_is_told(penalty, logits, what):
    """inf - inf is NaN: the check must come after the penalty, and say that it was the penalty."""
    rows = torch.tensor([[0.0, 0.0, 0.0], logits])
    for temperature in (0.0, 1.0):
        config = SamplingConfig(temperature, repetition_penalty=penalty)
        message = f"penalty of {penalty:g}.*{what}.*position 8.*closer to 1"
        with pytest.raises(UserError, match=re.escape(message).replace(r"\.\*", ".*")):
            probabilities(rows, config, [0, 1, 2], first_position=7)


@pytest.mark.parametrize("config", [None, {"temperature": 1}, SamplingConfig])
def test_what_is_no_configuration_is_told(config):
    """A dict of the same fields is the likeliest slip."""
    with pytest.raises(UserError, match=r"config is .*SamplingConfig"):
        probabilities(torch.zeros(1, 4), config)


def test_minus_infinity_masks_a_token():
    """-inf is how a token is forbidden: legitimate, probability exactly 0."""
    logits = torch.tensor([[1.0, -math.inf, 0.0]])
    p = probabilities(logits, SamplingConfig(temperature=1.0, repetition_penalty=2.0), [1])[0]
    assert p[1] == 0 and abs(float(p.sum()) - 1) < 1e-15


@pytest.mark.parametrize("shape", [(5,), (1, 2, 5)])
def test_logits_of_another_shape_are_refused(shape):
    """A batch dimension left in place would be read as positions."""
    with pytest.raises(UserError, match="shape"):
        probabilities(torch.zeros(shape), SamplingConfig())


def test_case_19_the_penalty_sees_drafted_tokens():
    """Case 19: draft [7, 7]: the second 7 is penalised, the first is not; context always is."""
    config = SamplingConfig(temperature=1.0, repetition_penalty=2.0)
    logits = torch.full((3, 9), 1.0)
    logits[:, 8] = -1.0
    scores = adjusted_logits(logits, config, [8, 8, 3], draft_tokens=[7, 7])
    assert scores[:, 7].tolist() == [1.0, 0.5, 0.5]
    assert scores[:, 8].tolist() == [-2.0] * 3  # negative: multiplied; twice in it: once applied
    assert scores[:, 3].tolist() == [0.5] * 3
    assert (scores[:, :3] == 1.0).all()
    assert (logits[:, 7] == 1.0).all(), "the input was modified"
    p = probabilities(logits, config, [8, 8, 3], draft_tokens=[7, 7])
    torch.testing.assert_close(p, torch.softmax(scores, -1), rtol=1e-14, atol=0)


def test_a_context_token_outside_the_vocabulary_is_told():
    """A wrong index would wrap round and penalise an innocent token."""
    config = SamplingConfig(repetition_penalty=1.1)
    for token in (-1, 5):
        with pytest.raises(UserError, match=str(token)):
            probabilities(torch.zeros(1, 5), config, [token])


# ---------------------------------------------------------------- the acceptance rule


def emitted_distribution(p, q, draft_law=None):
    """The exact law of the tokens a step emits, as {tuple: probability}, over all its outcomes.

    p [K+1, V] depends on the position only; q None: every possible draft is deterministic and
    taken in turn with probability draft_law.
    """
    num_drafted, vocab_size = p.shape[0] - 1, p.shape[1]
    accept, replace = {}, {}
    for i, token in itertools.product(range(num_drafted), range(vocab_size)):
        q_i = None if q is None else q[i]
        q_token = 1.0 if q is None else float(q[i, token])
        accept[i, token] = acceptance_probability(float(p[i, token]), q_token)
        residual = residual_distribution(p[i], q_i, token)
        replace[i, token] = (residual / residual.sum()).tolist()
    drafted = (draft_law if q is None else q).tolist() if num_drafted else []
    bonus = p[-1].tolist()

    law = collections.Counter()
    for draft in itertools.product(range(vocab_size), repeat=num_drafted):
        reached = math.prod(drafted[i][token] for i, token in enumerate(draft))
        for i, token in enumerate(draft):
            for other in range(vocab_size):
                chance = reached * (1 - accept[i, token]) * replace[i, token][other]
                law[(*draft[:i], other)] += chance
            reached *= accept[i, token]
        for other in range(vocab_size):
            law[(*draft, other)] += reached * bonus[other]
    return law


def largest_error(law, p):
    """How far the first emitted token, and each later one given those before, is from p."""
    after = collections.defaultdict(collections.Counter)  # prefix -> its next token's law
    for outcome, weight in law.items():
        for i, token in enumerate(outcome):
            after[outcome[:i]][token] += weight
    error = abs(sum(law.values()) - 1)
    for prefix, following in after.items():
        total = sum(following.values())
        for token, probability in enumerate(p[len(prefix)].tolist()):
            error = max(error, abs(following[token] - total * probability))
    return error


def random_rows(rows, vocab_size, seed, config=None):
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    return probabilities(logits, config or SamplingConfig(temperature=1.0))


@pytest.mark.parametrize("num_drafted", [0, 1, 2, 3])
@pytest.mark.parametrize("top_k", [None, 2])
def test_case_15_every_outcome_enumerated(num_drafted, top_k):
    """Case 15: the emitted distribution is p to 1e-12, for full and one-hot q, with top-k too."""
    config = SamplingConfig(temperature=1.0, top_k=top_k)
    for seed in range(5):
        p = random_rows(num_drafted + 1, 4, seed, config)
        q = random_rows(num_drafted, 4, seed + 100, config) if num_drafted else p[:0]
        assert largest_error(emitted_distribution(p, q), p) < 1e-12
        # a deterministic drafter, whatever it proposes
        drafts = itertools.product(range(4), repeat=num_drafted)
        for draft in itertools.islice(drafts, seed, None, 5):
            one_hot = torch.eye(4, dtype=torch.float64)[list(draft)]
            assert largest_error(emitted_distribution(p, None, one_hot), p) < 1e-12
            # q = None and one-hot rows are the same drafter
            assert largest_error(emitted_distribution(p, one_hot), p) < 1e-12


def test_the_enumeration_notices_a_wrong_rule(monkeypatch):
    """The proof must be able to fail: replacing from p, not the residual, is off by percents."""
    p, q = random_rows(2, 4, 0), random_rows(1, 4, 1)
    monkeypatch.setitem(globals(), "residual_distribution", lambda p, q, token: p)
    assert largest_error(emitted_distribution(p, q), p) > 0.01


@given(seed=st.integers(0, 10_000), num_drafted=st.integers(0, 3), deterministic=st.booleans())
def test_verify_does_what_was_enumerated(seed, num_drafted, deterministic):
    """`verify` is the enumerated rule fed by the generator: replayed number by number."""
    p = random_rows(num_drafted + 1, 5, seed)
    q = random_rows(num_drafted, 5, seed + 1) if num_drafted and not deterministic else None
    draft = torch.randint(5, (num_drafted,), generator=torch.Generator().manual_seed(seed))
    result = verify(p, draft, q, torch.Generator().manual_seed(seed))

    numbers = iter(
        torch.rand((), dtype=torch.float64, generator=generator)
        for generator in itertools.repeat(torch.Generator().manual_seed(seed))
    )
    for i, token in enumerate(draft.tolist()):
        q_i = None if q is None else q[i]
        q_token = 1.0 if q is None else float(q[i, token])
        if next(numbers) >= acceptance_probability(float(p[i, token]), q_token):
            residual = residual_distribution(p[i], q_i, token)
            break
    else:
        i, residual = num_drafted, p[-1]
    cumulative = (residual / residual.sum()).cumsum(0)
    expected = int((cumulative <= next(numbers)).sum())
    assert result == (i, min(expected, 4))


def test_case_12_a_deterministic_draft_is_accepted_with_probability_p(generator):
    """Case 12: p(draft) = .2 is accepted in .2 of 1e5 draws, within 5 sigma."""
    p = distribution(2, 3, 5).expand(2, 3)
    num_draws = 100_000
    uniforms = torch.rand(num_draws, dtype=torch.float64, generator=generator)
    accept = acceptance_probability(float(p[0, 0]), 1.0)
    sigma = math.sqrt(0.2 * 0.8 / num_draws)
    assert abs(float((uniforms < accept).double().mean()) - 0.2) < 5 * sigma
    # and verify itself, fewer times as each call costs a tenth of a millisecond
    accepted = sum(verify(p, [0], None, generator)[0] for _ in range(2000))
    assert abs(accepted / 2000 - 0.2) < 5 * math.sqrt(0.2 * 0.8 / 2000)


def test_case_13_verify_leaves_its_inputs_alone(generator):
    """Case 13: a residual computed in place would corrupt p for the next use."""
    p, q = random_rows(4, 6, 0), random_rows(3, 6, 1)
    draft = torch.tensor([1, 2, 3])
    before = [tensor.clone() for tensor in (p, q, draft)]
    for _ in range(50):
        verify(p, draft, q, generator)
        verify(p, draft, None, generator)
    assert all(torch.equal(a, b) for a, b in zip(before, (p, q, draft), strict=True))


def test_case_14_an_impossible_draft_is_not_accepted(generator):
    """Case 14: p(draft) = 1e-6: 1,000 trials accept none (chance .1 %), and p = 0 never."""
    p = torch.tensor([[1e-6, 1 - 1e-6]] * 2, dtype=torch.float64)
    assert sum(verify(p, [0], None, generator)[0] for _ in range(1000)) == 0
    assert acceptance_probability(1e-6, 1.0) == 1e-6 and acceptance_probability(0.0, 0.5) == 0
    never = torch.tensor([[0.0, 1.0]] * 2, dtype=torch.float64)
    assert all(verify(never, [0], None, generator) == (0, 1) for _ in range(100))


def test_case_16_a_rejected_token_does_not_come_back(generator):
    """Case 16: where p <= q at the draft, its residual is 0 and it cannot be the replacement."""
    p = distribution(1, 4, 5).expand(2, 3)
    q = distribution(6, 2, 2)[None]
    rejected = [
        token
        for accepted, token in (verify(p, [0], q, generator) for _ in range(500))
        if accepted == 0
    ]
    assert len(rejected) > 300 and 0 not in rejected
    # deterministic drafts: the same
    assert all(
        token != 0
        for accepted, token in (verify(p, [0], None, generator) for _ in range(500))
        if accepted == 0
    )


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 1e-17, 0.3, 1.0]), min_size=2, max_size=9),
    u=st.floats(0, 1, exclude_max=True),
)
def test_draw_never_returns_an_impossible_token(weights, u):
    """Rounding of a cumulative sum must not land on a token with probability 0."""
    if not any(weights):
        return
    p = torch.tensor(weights, dtype=torch.float64)
    assert p[draw(p, u)] > 0
    assert p[draw(p, math.nextafter(1.0, 0.0))] > 0


def test_draw_is_the_inverse_of_the_cumulative_distribution():
    """u in [0, .2) is token 0, [.2, .5) token 1, [.5, 1) token 2; unnormalised rows too."""
    for scale in (1.0, 7.0):
        p = scale * torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
        assert [draw(p, u) for u in (0.0, 0.24, 0.25, 0.49, 0.5, 0.99)] == [0, 0, 1, 1, 2, 2]


def test_p_equal_to_q_accepts_everything(generator):
    """A drafter that is the target: rounding of the sums must not cause rejections."""
    p = random_rows(5, 1000, 3)
    draft = [int(row.argmax()) for row in p[:4]]
    assert all(verify(p, draft, p[:4], generator)[0] == 4 for _ in range(50))
    residual = residual_distribution(p[0], p[0].clone(), draft[0])
    assert torch.equal(residual, p[0]), "an all-zero residual cannot be drawn from"


def test_case_18_an_empty_draft_draws_what_plain_sampling_draws():
    """Case 18: one number per emitted token, from the generator that was passed and no other."""
    p = random_rows(1, 6, 2)
    passed, plain = (torch.Generator().manual_seed(9) for _ in range(2))
    global_state = torch.random.get_rng_state()
    accepted, token = verify(p, [], None, passed)
    u = float(torch.rand((), dtype=torch.float64, generator=plain))
    assert (accepted, token) == (0, draw(p[0], u))
    assert torch.equal(passed.get_state(), plain.get_state())
    verify(p, [])
    SamplingConfig().generator()
    assert torch.equal(torch.random.get_rng_state(), global_state), "the global generator moved"


def test_verify_without_a_generator_is_random():
    """A fixed seed inside would accept the same drafts for ever."""
    p = torch.full((1, 1000), 1e-3, dtype=torch.float64)
    assert len({verify(p, [])[1] for _ in range(10)}) > 1


def test_verify_takes_lists_and_other_dtypes(generator):
    """float32 rows are no reason for an error nor for a wrong sum; nor are plain lists."""
    assert verify([[0.0, 1.0], [1.0, 0.0]], [1], [[0.5, 0.5]], generator) == (1, 0)
    with pytest.raises(UserError, match="generator is 3"):
        verify([[1.0]], [], None, 3)
    p = random_rows(3, 6, 5).float()
    q = random_rows(2, 6, 6).half()
    accepted, token = verify(p, [1, 2], q, generator)
    assert 0 <= accepted <= 2 and 0 <= token < 6
    assert type(accepted) is int and type(token) is int


@pytest.mark.parametrize(
    "p, draft, q, message",
    [
        (torch.full((1, 4), 0.25), [1], None, r"\(1, 4\).*\[2, vocabulary\]"),
        (torch.full((2, 4), 0.25), [4], None, "token 4.*between 0 and 3"),
        (torch.full((2, 4), 0.25), [-1], None, "-1"),
        (torch.full((2, 4), 0.25), [1.5], None, "1.5"),
        (torch.full((2, 4), 0.25), [True], None, "draft is .*whole numbers"),
        (torch.full((2, 4), 0.25), ["a"], None, "draft is .*whole numbers"),
        (torch.full((1, 4), 0.25), None, None, "draft is None"),
        (torch.zeros(1, 0), [], None, r"p has shape \(1, 0\).*not empty"),
        (None, [], None, "p is None"),
        ([[0.5, 0.5], [1.0]], [1], None, "p is .*tensor"),
        (torch.full((2, 4), 0.25), [1], "q", "q is 'q'"),
        (torch.full((2, 4), 0.25), [1], torch.full((1, 5), 0.2), "q covers 5"),
        (torch.full((2, 4), 0.25), [1], torch.full((2, 4), 0.25), "q has shape"),
        (torch.zeros(2, 4), [1], None, "row 0 of p is no distribution"),
        (torch.tensor([[0.5, 0.5], [2.0, -1.0]]), [1], None, "row 1 of p"),
        (torch.tensor([[0.5, 0.5], [math.nan, 1.0]]), [1], None, "row 1 of p"),
        (torch.full((2, 4), 0.25), [1], torch.randn(1, 4), "q is no distribution"),
    ],
)
def test_verify_names_what_is_wrong(p, draft, q, message):
    """Logits passed as p, or rows off by one, would give text that looks plausible."""
    with pytest.raises(UserError, match=message) as error:
        verify(p, draft, q)
    assert "\n" not in str(error.value)


def test_the_details_add_up(generator):
    """What the trace shows is what was decided."""
    p, q = random_rows(4, 6, 0), random_rows(3, 6, 1)
    rejections = 0
    for _ in range(200):
        draft = [draw(row, float(torch.rand((), generator=generator))) for row in q]
        result = verify_in_detail(p, draft, q, generator)
        accepted = result.num_accepted
        assert result.p_draft == pytest.approx([float(p[i, d]) for i, d in enumerate(draft)])
        assert result.q_draft == pytest.approx([float(q[i, d]) for i, d in enumerate(draft)])
        assert len(result.uniforms) == min(accepted + 1, 3) + 1
        ratios = [a / b for a, b in zip(result.p_draft, result.q_draft, strict=True)]
        assert all(result.uniforms[i] < ratios[i] for i in range(accepted))
        if accepted < 3:
            rejections += 1
            assert result.uniforms[accepted] >= ratios[accepted]
            mass = float((p[accepted] - q[accepted]).clamp(min=0).sum())
            assert result.residual_mass == pytest.approx(mass, abs=1e-12)
            best = result.residual_top[0]
            assert int((p[accepted] - q[accepted]).argmax()) == best[0]
        else:
            assert result.residual_mass is None
    assert rejections > 20


def test_greedy_verification_is_the_rule_with_one_hot_rows(generator):
    """The short cut for temperature 0 must agree with the rule it stands for."""
    for seed in range(30):
        best = torch.randint(3, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        draft = torch.randint(3, (3,), generator=torch.Generator().manual_seed(99 + seed)).tolist()
        p = torch.eye(3, dtype=torch.float64)[best]
        short = verify_greedy(best, draft)
        assert (short.num_accepted, short.next_token) == verify(p, draft, None, generator)


def test_case_20_a_mask_counts_up_to_its_first_rejection():
    """Case 20: [1, 0, 1, 1] counts 1: a match after a rejection is worth nothing."""
    assert count_accepted([1, 0, 1, 1]) == 1
    assert count_accepted([]) == 0
    assert count_accepted([True, True]) == 2


def test_two_drafted_tokens_follow_their_joint_law(generator):
    """Through the real draws: two emitted tokens against p1 x p2, chi-square over 9 cells."""
    p = torch.stack([distribution(5, 3, 2), distribution(1, 6, 3), distribution(1, 1, 1)])
    q = torch.stack([distribution(1, 1, 1), distribution(7, 1, 2)])
    counts = torch.zeros(3, 3)
    first = torch.zeros(3)
    for _ in range(2500):
        draft = [
            draw(row, float(torch.rand((), dtype=torch.float64, generator=generator))) for row in q
        ]
        accepted, token = verify(p, draft, q, generator)
        emitted = [*draft[:accepted], token]
        first[emitted[0]] += 1
        if len(emitted) > 1:
            counts[emitted[0], emitted[1]] += 1
    assert stats.chisquare(first, 2500 * p[0].numpy()).pvalue > 1e-4
    expected = counts.sum(1, keepdim=True) * p[1]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, 3 * 2) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_first_of_equal_tokens_is_the_greedy_one(dtype) -> None:
    """Greedy text must not depend on how wide a block is, nor on which argmax looks at it."""
    scores = torch.randint(-3, 4, (7, 1000), generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[3] = -math.inf
    scores[3, 11] = -5
    scores[4:, 500] = scores[4:, 900] = 9
    scores.requires_grad_()
    expected = [row.index(max(row)) for row in scores.tolist()]
    assert greedy_tokens(scores) == expected and expected[3:5] == [11, 500]
    assert greedy_tokens(scores.detach()[:, ::2]) == [
        row.index(max(row)) for row in scores[:, ::2].tolist()
    ]
