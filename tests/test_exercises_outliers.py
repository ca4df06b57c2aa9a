"""The judges of notebooks 02 and 06: right answers pass, typical mistakes are told apart."""

import math

import pytest
import torch

from quasar_lab.exercises import check
from quasar_lab.exercises.outliers import ALPHAS, alpha_case, alpha_error
from quasar_lab.smoothing import smoothquant_scale


def best(x, weight):
    return min(ALPHAS, key=lambda alpha: alpha_error(x, weight, alpha))


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda a, w, alpha: a**alpha / w ** (1 - alpha), "right", "divided"),
        (smoothquant_scale, "right", ""),
        (lambda a, w, alpha: w ** (1 - alpha) / a**alpha, "wrong", "1 / s"),
        (lambda a, w, alpha: a ** (1 - alpha) / w**alpha, "wrong", "swapped"),
        (lambda a, w, alpha: a**alpha * w ** (1 - alpha), "wrong", "Divide by w^"),
        (lambda a, w, alpha: a**alpha / w**alpha, "wrong", "the same as alpha only at 0.5"),
        (lambda a, w, alpha: a**alpha, "wrong", "weights are missing"),
        (lambda a, w, alpha: (a / w).sqrt(), "wrong", "at alpha = 0.5 only"),
        (lambda a, w, alpha: (a / w).sqrt().max(), "wrong", "one scale for each channel"),
        (lambda a, w, alpha: a / 0.0, "wrong", "not finite"),
        (lambda a, w, alpha: a + 1, "wrong", "It should be"),
        (lambda a, w, alpha: ..., "open", ""),
    ],
)
def test_smoothing_scale(answer, state: str, message: str) -> None:
    feedback = check("smoothing_scale", answer)
    assert feedback.state == state and message in feedback.message, feedback


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        ((1.0, 50_000), "right", "left alone"),
        ((1.0, 5e-6), "wrong", "larger, not smaller"),
        ((1.0, 1e5), "wrong", "the factor"),
        ((1.0, 7), "wrong", "divided by s"),
        ((1e-5, 5e4), "wrong", "leaves the channel as it is"),
        ((0, 5e4), "wrong", "divided by 0"),
        ((2, 5e4), "wrong", "know nothing"),
        (1.0, "wrong", "two numbers"),
        ((..., ...), "open", ""),
    ],
)
def test_dead_channel(answer, state: str, message: str) -> None:
    feedback = check("dead_channel", answer)
    assert feedback.state == state and message in feedback.message, feedback


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (best, "right", "for each"),
        (lambda x, weight: 0.5, "wrong", "only a default"),
        (
            lambda x, weight: max(ALPHAS, key=lambda alpha: alpha_error(x, weight, alpha)),
            "wrong",
            "the largest of all",
        ),
        (lambda x, weight: 1.0 if x.abs().max() < 100 else 0.1, "wrong", "compare the *output*"),
        (lambda x, weight: 12.5, "wrong", "from 0 to 1"),
        (lambda x, weight: ALPHAS, "wrong", "one number"),
        (lambda x, weight: None, "open", ""),
    ],
)
def test_best_alpha(answer, state: str, message: str) -> None:
    feedback = check("best_alpha", answer)
    assert feedback.state == state and message in feedback.message, feedback


def test_no_alpha_serves_all_cases() -> None:
    """An exercise whose cases one constant solves would teach that constant."""
    for alpha in ALPHAS:
        assert check("best_alpha", lambda x, weight, alpha=alpha: alpha).state == "wrong"
    assert {best(*alpha_case(number)) for number in range(3)} != {0.5}


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (kl, "right", "weighted"),
        (lambda p, q: kl(q, p), "wrong", "KL(q||p)"),
        (lambda p, q: -kl(p, q), "wrong", "sign"),
        (lambda p, q: kl(p, q) / math.log(2), "wrong", "bits"),
        (lambda p, q: kl(p, q) / math.log(10), "wrong", "base 10"),
        (lambda p, q: kl(p, q) / 3, "wrong", "do not divide"),
        (lambda p, q: sum(math.log(a / b) for a, b in zip(p, q, strict=True)), "wrong", "weights"),
        (lambda p, q: -sum(a * math.log(b) for a, b in zip(p, q, strict=True)), "wrong", "cross"),
        (lambda p, q: kl(p, q) if all(p) else math.nan, "wrong", "adds nothing"),
        (lambda p, q: 0.2, "wrong", "sum of p * log"),
        (lambda p, q: sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), "wrong",
         "math domain"),
        (lambda p, q: ..., "open", ""),
    ],
)  # fmt: skip
def test_kl_by_hand(answer, state: str, message: str) -> None:
    feedback = check("kl_by_hand", answer)
    assert feedback.state == state and message in feedback.message, feedback


def tv(p, q):
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda p, q: 1 - tv(p, q), "right", "min(p, q)"),
        (lambda p, q: sum(map(min, p, q)), "right", ""),
        (tv, "wrong", "chance of a rejection"),
        (lambda p, q: 1 - 2 * tv(p, q), "wrong", "*half*"),
        (lambda p, q: sum(a * b for a, b in zip(p, q, strict=True)), "wrong", "independent"),
        (lambda p, q: sum(min(1, a / b) for a, b in zip(p, q, strict=True)) / 3, "wrong",
         "weighted by how often"),
        (lambda p, q: math.exp(-kl(p, q)), "wrong", "KL does not give"),
        (lambda p, q: 1 - tv(p, q) if p != q else 0.9, "wrong", "Equal distributions"),
        (lambda p, q: 0.123, "wrong", "min(1, p(x) / q(x))"),
        (lambda p, q: None, "open", ""),
    ],
)  # fmt: skip
def test_acceptance_from_tv(answer, state: str, message: str) -> None:
    feedback = check("acceptance_from_tv", answer)
    assert feedback.state == state and message in feedback.message, feedback


def test_judges_do_not_let_an_answer_change_their_numbers() -> None:
    def in_place(a, w, alpha):
        a.pow_(alpha).div_(w.pow_(1 - alpha))
        return a

    assert check("smoothing_scale", in_place).state == "right"
    assert torch.equal(alpha_case(1)[0], alpha_case(1)[0])
