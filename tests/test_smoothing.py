"""Scales: the reference values, and the m2 rule against an independent NumPy version."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar_lab import ActivationStats, UserError, m2_scale, smoothquant_scale
from quasar_lab.alpha_search import search_alpha, w8a8_error
from quasar_lab.smoothing import fake_quantize_per_tensor, weight_absmax

X = torch.tensor([[4.0, -1.0, 0.0], [-2.0, 9.0, 0.0]])
W = torch.tensor([[1.0, -0.25, 0.0], [0.5, 0.04, 2.0]])


def test_reference_values():
    """Guards the formulas: a worked example with a dead channel, by SmoothQuant and by m2."""
    stats = ActivationStats.from_batches([X])
    assert stats.absmax.tolist() == [4, 9, 0]
    assert stats.center_absmax.tolist() == [3, 5, 0]
    assert float(stats.threshold) == 5
    assert float(stats.sigma) == pytest.approx(math.sqrt(13.6), abs=1e-6)
    scale = smoothquant_scale(stats.absmax, W.abs().amax(0))
    torch.testing.assert_close(scale, torch.tensor([2.0, 6.0, 1.0]))
    torch.testing.assert_close(m2_scale(stats, [W]), scale)
    torch.testing.assert_close((X / scale) @ (W * scale).T, X @ W.T)


# --- SmoothQuant -------------------------------------------------------------------------------


ALPHAS = st.sampled_from([0.0, 0.3, 0.5, 0.85, 1.0])


@given(a=st.floats(1e-4, 1e4), w=st.floats(1e-4, 1e4), alpha=ALPHAS)
def test_smoothquant_balances(a, w, alpha):
    """Guards the exponents: scaling leaves ranges of (a w)^(1 - alpha) and (a w)^alpha."""
    s = float(smoothquant_scale(torch.tensor([a]), torch.tensor([w]), alpha))
    if s > 1.1e-5:
        assert a / s == pytest.approx((a * w) ** (1 - alpha), rel=1e-4)
        assert w * s == pytest.approx((a * w) ** alpha, rel=1e-4)


@pytest.mark.parametrize("dead_input", [True, False])
@pytest.mark.parametrize("dead_weight", [True, False])
@pytest.mark.parametrize("method", ["smoothquant", "m2"])
def test_dead_channels(dead_input, dead_weight, method):
    """Case 23: x[:, 3] = 0, W[:, 2] = 0 and both at once give finite scales, 1 where x is 0."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(99, 20, generator=generator), torch.randn(4, 20, generator=generator)
    x[0, 0] = 900  # a lone outlier, so that m2 searches
    if dead_input:
        x[:, 3] = 0
    if dead_weight:
        w[:, 2] = 0
        w[:, 3] = 0
    stats = ActivationStats.from_batches([x])
    if method == "m2":
        assert 3 * stats.sigma < stats.threshold
        scale = m2_scale(stats, [w])
    else:
        scale = smoothquant_scale(stats.absmax, w.abs().amax(0))
    assert torch.isfinite(scale).all() and (scale > 0).all()
    if dead_input:
        assert scale[3] == 1


@pytest.mark.parametrize(
    ("a", "w", "alpha", "message"),
    [
        ([1.0], [1.0, 2.0], 0.5, "same length"),
        ([1.0], [1.0], 1.2, "alpha is 1.2: choose it between 0 and 1"),
        ([1.0], [1.0], math.nan, "alpha is nan"),
        ([math.nan], [1.0], 0.5, "finite"),
        ([-1.0], [1.0], 0.5, "not negative"),
    ],
)
def test_bad_smoothquant_input(a, w, alpha, message):
    """Guards against scales of NaN."""
    with pytest.raises(UserError, match=message):
        smoothquant_scale(torch.tensor(a), torch.tensor(w), alpha)


def test_alpha_search_beats_one_half():
    """Case 25: outlier channels and a few large tokens, whose maxima say little of the rest: the
    best alpha is not .5, and the search finds one that is a fifth better."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 32, generator=generator), torch.randn(48, 32, generator=generator)
    x *= torch.exp(2 * torch.randn(64, 32, generator=generator))
    x[:, 5:8] *= 20
    stats = ActivationStats.from_batches([x])
    largest = weight_absmax([w])
    alpha, scale = search_alpha(stats, largest, [w])
    half = smoothquant_scale(stats.absmax, largest, 0.5)
    assert alpha is not None and alpha != 0.5
    assert w8a8_error(x, [w], scale) < 0.8 * w8a8_error(x, [w], half)
    assert w8a8_error(x, [w], scale) < 0.5 * w8a8_error(x, [w], torch.ones(32))


# --- m2 ----------------------------------------------------------------------------------------


def numpy_m2(x0, weights, biases, num_candidates):
    """The rule once more, channel by channel and candidate by candidate: (s, whether it searched).

    The inputs of the rounding are float32 here too: the centred range is symmetric, so its zero
    point is a tie (127.5) that the last bit decides. The rest is float64.
    """
    f32, channels = np.float32, x0.shape[1]
    m = np.array([(x0[:, j].max() + x0[:, j].min()) / f32(2) for j in range(channels)])
    c = [(x0[:, j].max() - x0[:, j].min()) / f32(2) for j in range(channels)]
    a = [abs(x0[:, j]).max() for j in range(channels)]
    w = [f32(max(1e-5, *(abs(wt[:, j]).max() for wt in weights))) for j in range(channels)]
    centred = x0 - m
    spread = centred.astype(float)
    sigma = math.sqrt(((spread - spread.mean()) ** 2).sum() / (spread.size - 1))
    threshold = max(c)
    if 3 * sigma >= threshold:
        s = [max(1e-5, math.sqrt(a[j] / w[j])) if a[j] else 1.0 for j in range(channels)]
        return np.array(s), False
    x0, weights = x0.astype(float), [weight.astype(float) for weight in weights]

    def f(outputs):
        if len(outputs) < 3:
            return outputs[0]
        q, k, v = outputs
        heads = []
        for start in range(0, q.shape[1], k.shape[1]):
            score = q[:, start : start + k.shape[1]] @ k.T / math.sqrt(k.shape[1])
            score = np.exp(score - score.max(1, keepdims=True))
            heads.append(score / score.sum(1, keepdims=True) @ v)
        return np.concatenate(heads, 1)

    exact = f([x0 @ weight.T + bias for weight, bias in zip(weights, biases, strict=True)])

    def loss(s):
        x = centred / s
        low, high = min(f32(0), x.min()), max(f32(0), x.max())
        step = (high - low) / f32(255)
        zero = np.rint(-low / step)
        x = (np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step.astype(float)
        rounded = [
            x @ (weight * s).T + bias + weight @ m.astype(float)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return ((exact - f(rounded)) ** 2).mean()

    candidates = []
    for i in range(num_candidates):
        t = sigma + (threshold - sigma) * i / (num_candidates - 1)
        s = [max(f32(1e-5), np.sqrt(c[j] / w[j])) if c[j] > t else f32(1) for j in range(channels)]
        candidates.append((loss(np.array(s)), i, np.array(s)))
    return min(candidates, key=lambda candidate: candidate[:2])[2], True


def test_m2_against_numpy():
    """Guards the whole rule: 600 random cases of one linear, gate/up and q/k/v, with outliers."""
    rng = np.random.default_rng(7)
    searched = 0
    for case in range(600):
        tokens, channels = rng.integers(2, 24), rng.integers(2, 20)
        x = rng.normal(size=(tokens, channels)) * rng.lognormal(0, 1, size=channels)
        x += rng.normal(size=channels) * rng.integers(0, 3)
        if case % 4:
            x[:, rng.integers(channels)] *= rng.choice([5, 20, 100])
        if case % 7 == 0:
            x[:, rng.integers(channels)] = 0
        d_k = int(rng.integers(1, 6))
        widths = [[5], [7, 4], [3 * d_k, d_k, 4]][case % 3]
        weights = [rng.normal(size=(n, channels)).astype(np.float32) for n in widths]
        if case % 5 == 0:
            weights[-1][:, 0] = 0
        biases = [rng.normal(size=n).astype(np.float32) * (case % 2) for n in widths]
        x = x.astype(np.float32)
        count = int(rng.choice([2, 20, 100]))
        expected, did_search = numpy_m2(x, weights, biases, count)
        searched += did_search
        got = m2_scale(
            ActivationStats.from_batches([torch.from_numpy(x)]),
            [torch.from_numpy(w) for w in weights],
            [torch.from_numpy(b) for b in biases],
            count,
        )
        np.testing.assert_allclose(got, expected, rtol=1e-4, err_msg=f"case {case}")
    assert 200 < searched < 590


def test_m2_ties_go_to_the_smallest_threshold():
    """Guards the tie rule: with a zero weight no candidate loses anything; the first must win."""
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    x[0, :3] = torch.tensor([1000.0, 600.0, 10.0])
    stats = ActivationStats.from_batches([x])
    assert 3 * stats.sigma < stats.threshold
    scale = m2_scale(stats, torch.zeros(3, 20))
    smoothed = stats.center_absmax > stats.sigma
    assert smoothed.tolist() == [True] * 2 + [False] * 18
    expected = torch.where(smoothed, (stats.center_absmax / 1e-5).sqrt(), 1.0)
    torch.testing.assert_close(scale, expected)


def test_fake_quantisation_by_hand():
    """Guards the range: it includes zero, and zero itself is kept exactly."""
    x = torch.tensor([[1.0, 2.0, 256.0]])
    step = 256 / 255
    expected = torch.tensor([[1.0, 2.0, 255.0]]) * step
    torch.testing.assert_close(fake_quantize_per_tensor(x), expected)
    assert fake_quantize_per_tensor(torch.tensor([-3.0, 0.0, 1.7]))[1] == 0
    assert torch.equal(fake_quantize_per_tensor(torch.zeros(2, 2)), torch.zeros(2, 2))


def test_bad_m2_input():
    """Guards against wrong shapes that broadcasting would hide: one line each."""
    stats = ActivationStats.from_batches([X])
    one = torch.ones(2, 3)
    with pytest.raises(UserError, match="4 weights"):
        m2_scale(stats, [one] * 4)
    with pytest.raises(UserError, match="3 channels"):
        m2_scale(stats, [torch.ones(2, 4)])
    with pytest.raises(UserError, match="2 biases for 1 weights"):
        m2_scale(stats, [one], [None, None])
    with pytest.raises(UserError, match="num_candidates is 1"):
        m2_scale(stats, [one], None, 1)
    with pytest.raises(UserError, match="NaN or Inf in a weight"):
        m2_scale(stats, [one * torch.nan])
    with pytest.raises(UserError, match="q has 3 outputs: a multiple of k's 2"):
        m2_scale(stats, [torch.ones(3, 3), one, one])
