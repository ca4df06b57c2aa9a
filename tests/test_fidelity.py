"""Fidelity: the divergences against hand and SciPy values, the runs over texts, the intervals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import entropy
from tiny_models import VOCAB, tiny_model

from quasar_lab import UserError, calibrate, compare_logits, quantize
from quasar_lab.fidelity import CHUNK_ROWS, COLUMNS, acceptance_rates
from quasar_lab.fidelity_runs import (
    Text,
    bootstrap_interval,
    compare_models,
    greedy_continuations,
    summarize_fidelity,
)


def random_logits(rows: int, vocab: int = 50, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def test_two_outcomes_by_hand():
    """Guards each formula: p = (.5, .5) against q = (.9, .1)."""
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    row = compare_logits(p, q).iloc[0]
    assert row.kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert row.reverse_kl == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))
    mixture = (0.7, 0.3)
    js = 0.5 * sum(0.5 * math.log(0.5 / m) for m in mixture)
    js += 0.5 * (0.9 * math.log(0.9 / 0.7) + 0.1 * math.log(0.1 / 0.3))
    assert row.js == pytest.approx(js, rel=1e-6)
    assert row.tv == pytest.approx(0.4)
    assert row.reference_margin == 0
    assert compare_logits(q, p).iloc[0].reference_margin == pytest.approx(math.log(9))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_against_scipy(temperature):
    """Guards chunking and temperature: every row of two and a half chunks equals SciPy's value."""
    rows = 2 * CHUNK_ROWS + 5
    a, b = random_logits(rows), random_logits(rows, seed=1)
    b = a + 0.3 * b
    frame = compare_logits(a, b, temperature)
    assert tuple(frame.columns) == COLUMNS and len(frame) == rows
    p, q = (softmax(x.double().numpy() / temperature, axis=1) for x in (a, b))
    np.testing.assert_allclose(frame.kl, entropy(p, q, axis=1), rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(frame.reverse_kl, entropy(q, p, axis=1), rtol=1e-9, atol=1e-13)
    m = (p + q) / 2
    js = (entropy(p, m, axis=1) + entropy(q, m, axis=1)) / 2
    np.testing.assert_allclose(frame.js, js, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(frame.tv, np.abs(p - q).sum(1) / 2, rtol=1e-9, atol=1e-13)
    assert (frame.top1_match == (p.argmax(1) == q.argmax(1))).all()
    top = np.sort(p, axis=1)
    np.testing.assert_allclose(frame.reference_margin, np.log(top[:, -1] / top[:, -2]), rtol=1e-9)


@given(seed=st.integers(0, 10_000), spread=st.floats(0.1, 40), noise=st.floats(0, 20))
def test_inequalities(seed, spread, noise):
    """Guards impossible values: KL >= 0, JS <= ln 2, TV in [0, 1], Pinsker's inequality."""
    a = random_logits(3, 20, seed, spread)
    frame = compare_logits(a, a + random_logits(3, 20, seed + 1, noise))
    assert (frame[["kl", "reverse_kl", "js", "tv"]] >= 0).all().all()
    assert (frame.js <= math.log(2) + 1e-12).all() and (frame.tv <= 1 + 1e-12).all()
    assert (frame.tv <= (frame.kl / 2).pow(0.5) + 1e-9).all()
    same = compare_logits(a, a)
    assert (same[["kl", "reverse_kl", "tv"]] == 0).all().all() and same.top1_match.all()


def test_masked_tokens():
    """Guards 0 log 0: tokens that both rule out count nothing; one that q alone rules out, all."""
    inf = math.inf
    p, q = torch.tensor([[0.0, -inf, 1.0]]), torch.tensor([[0.5, -inf, 1.0]])
    assert np.isfinite(compare_logits(p, q)[["kl", "reverse_kl", "js", "tv"]]).all().all()
    q[0, 0] = -inf
    row = compare_logits(p, q).iloc[0]
    assert row.kl == inf and np.isfinite(row.reverse_kl) and np.isfinite(row.js)


def test_inputs_are_not_changed():
    """Guards the callers' tensors, and bf16 logits: they are compared in float64."""
    a, b = random_logits(3).bfloat16(), random_logits(3, seed=1).bfloat16()
    before = a.clone()
    frame = compare_logits(a, b)
    assert torch.equal(a, before) and frame.kl.dtype == np.float64


@pytest.mark.parametrize(
    ("a", "b", "temperature", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), 1.0, "same shape"),
        (torch.zeros(3), torch.zeros(3), 1.0, "same shape"),
        (torch.zeros(0, 3), torch.zeros(0, 3), 1.0, "same shape"),
        (torch.zeros(2, 3), torch.zeros(2, 3), 0.0, "temperature is 0.0: choose it above 0"),
        (torch.zeros(2, 3), torch.zeros(2, 3), math.nan, "temperature is nan"),
        (torch.zeros(2, 3), torch.full((2, 3), math.nan), 1.0, "other logits: NaN or Inf in row 0"),
        (torch.full((2, 3), math.inf), torch.zeros(2, 3), 1.0, "reference logits: NaN or Inf"),
    ],
)
def test_bad_logits(a, b, temperature, message):
    """Guards against a mean of NaN: one line that names side and row."""
    with pytest.raises(UserError, match=message):
        compare_logits(a, b, temperature)


# --- over texts --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    model = tiny_model("llama", dtype=torch.float32)
    ids = torch.randint(3, VOCAB, (4, 20), generator=torch.Generator().manual_seed(0))
    return model, quantize(model, calibrate(model, [ids]))


def test_greedy_texts_and_their_positions(pair):
    """Guards an off-by-one: row i is the prediction of token i, so greedy text is always top-1."""
    model, quantized = pair
    prompts = [torch.tensor([5, 6, 7]), [8, 9]]
    texts = greedy_continuations(
        model, prompts, max_new_tokens=6, labels=["code", "chat"], eos_token_id=[]
    )
    assert [len(text.tokens) for text in texts] == [6, 6] and texts[1].prompt == (8, 9)
    frame = compare_models(model, {"same": model, "int8": quantized}, texts)
    assert list(frame.columns[:5]) == ["variant", "text", "label", "position", "token"]
    assert len(frame) == 2 * 12
    same = frame[frame.variant == "same"]
    assert (same.kl == 0).all()
    assert same.token.tolist() == [*texts[0].tokens, *texts[1].tokens]
    assert same.position.tolist() == [3, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6, 7]
    # the row of the fourth new token, from scratch
    prefix = torch.tensor([*texts[0].prompt, *texts[0].tokens[:3]])[None]
    p, q = (m(prefix).logits[0, -1:] for m in (model, quantized))
    int8 = frame[(frame.variant == "int8") & (frame.text == 0)].iloc[3]
    assert p.argmax() == texts[0].tokens[3]
    assert int8.kl == pytest.approx(compare_logits(p, q).kl[0], rel=1e-3)


def test_text_by_somebody_else(pair):
    """Guards plain token ids: all but the first token are compared; an empty list is an error."""
    model, quantized = pair
    frame = compare_models(model, quantized, [torch.tensor([5, 6, 7, 8]), torch.tensor([9])])
    assert frame.position.tolist() == [1, 2, 3] and set(frame.variant) == {"other"}
    with pytest.raises(UserError, match="nothing to compare"):
        compare_models(model, quantized, [Text((1, 2), ())])


def test_the_summary(pair):
    """Guards the table: means per variant and label, inside their intervals."""
    model, quantized = pair
    texts = [Text((3,), tuple(range(4 + i, 14 + i)), "ab"[i % 2]) for i in range(6)]
    frame = compare_models(model, {"one": quantized, "two": quantized}, texts)
    table = summarize_fidelity(frame)
    assert list(table.index) == ["one", "two"] and (table.tokens == 60).all()
    assert table.kl["one"] == pytest.approx(frame.kl[frame.variant == "one"].mean())
    for name in ("kl", "tv", "top1"):
        assert (table[f"{name}_low"] <= table[name]).all()
        assert (table[name] <= table[f"{name}_high"]).all()
    nested = summarize_fidelity(frame, ["variant", "label"])
    assert nested.index.tolist() == [("one", "a"), ("one", "b"), ("two", "a"), ("two", "b")]


def test_bootstrap_draws_whole_texts():
    """Guards honesty: 400 copies of 10 values are 10 observations, not 4,000."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=10)
    values, clusters = np.repeat(means, 400), np.repeat(np.arange(10), 400)
    narrow = np.diff(bootstrap_interval(values))[0]
    wide = np.diff(bootstrap_interval(values, clusters))[0]
    # the standard error of 10 observations is sqrt(400) = 20 times that of 4,000
    assert wide / narrow == pytest.approx(20, rel=0.25)
    assert wide == pytest.approx(2 * 1.96 * means.std() / math.sqrt(10), rel=0.2)
    assert bootstrap_interval(values, clusters) == bootstrap_interval(values, clusters)
    assert bootstrap_interval([2.0, 2.0]) == (2.0, 2.0)


def test_bad_bootstrap_input():
    """Guards against silent broadcasting: one line each."""
    with pytest.raises(UserError, match="at least one number"):
        bootstrap_interval([])
    with pytest.raises(UserError, match="1 clusters for 2 values"):
        bootstrap_interval([1.0, 2.0], [1])
    with pytest.raises(UserError, match="level is 95"):
        bootstrap_interval([1.0, 2.0], level=95)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_predicted_and_measured_acceptance(temperature):
    """Guards the claim that 1 - TV is the acceptance rate: 800 draws within 5 sigma of it."""
    a = random_logits(4, 12, spread=1.0)
    b = a + random_logits(4, 12, seed=3, spread=1.0)
    draws = 200
    frame = acceptance_rates(a, b, temperature, num_draws=draws)
    assert frame.predicted.tolist() == (1 - compare_logits(a, b, temperature).tv).tolist()
    sigma = (frame.predicted * (1 - frame.predicted) / draws).pow(0.5)
    assert ((frame.measured - frame.predicted).abs() < 5 * sigma).all()
    assert frame.predicted.between(0.3, 0.95).all()  # neither certain nor hopeless
