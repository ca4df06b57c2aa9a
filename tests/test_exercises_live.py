"""The judges of notebooks 00 and 08 say what is wrong with an answer, not only that it is."""

import pytest

from quasar_lab.cost_model import expected_tokens
from quasar_lab.exercises import check


def expect(name: str, answer: object, state: str, message: str = "") -> None:
    feedback = check(name, answer)
    assert feedback.state == state and message in feedback.message, feedback


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda n, h, d, c, b: 2 * n * h * d * c * b, "right", "a key and a value"),
        (lambda n, h, d, c, b: n * h * d * c * b, "wrong", "the keys alone"),
        (lambda n, h, d, c, b: 2 * n * h * d * b, "wrong", "one token's"),
        (lambda n, h, d, c, b: 2 * h * d * c * b, "wrong", "one layer's"),
        (lambda n, h, d, c, b: 2 * n * h * d * c, "wrong", "counts numbers"),
        (lambda n, h, d, c, b: 2 * n * h * d * c * b / 1e9, "wrong", "in gigabytes"),
        (lambda n, h, d, c, b: 7, "wrong", "not 1,207,959,552"),
        (lambda n, h, d, c, b: ..., "open", ""),
    ],
)
def test_kv_cache_bytes(answer, state: str, message: str) -> None:
    expect("kv_cache_bytes", answer, state, message)


def best(acceptance, step_ms):
    speeds = [expected_tokens(acceptance, k) / t for k, t in enumerate(step_ms)]
    return speeds.index(max(speeds))


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (best, "right", "not one longer"),
        (lambda a, t: best(a, t) + 1, "wrong", "not the number of tokens fed"),
        (lambda a, t: len(t) - 1, "wrong", "the longest"),
        (lambda a, t: t.index(min(t)), "wrong", "the cheapest step"),
        (lambda a, t: 1.5, "wrong", "one whole number"),
        (lambda a, t: [1], "wrong", "Return one number"),
        (lambda a, t: None, "open", ""),
    ],
)
def test_best_draft_length(answer, state: str, message: str) -> None:
    expect("best_draft_length", answer, state, message)


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda n, s: sum(n) / sum(s), "right", "all tokens over all seconds"),
        (lambda n, s: sum(a / b for a, b in zip(n, s)) / len(n), "wrong", "mean of the steps'"),  # noqa: B905
        (lambda n, s: sum(s) / sum(n), "wrong", "seconds a token"),
        (lambda n, s: len(n) / sum(s), "wrong", "steps a second"),
        (lambda n, s: sum(n) / len(n), "wrong", "that is L"),
        (lambda n, s: 3, "wrong", "not 181.8"),
        (lambda n, s: ..., "open", ""),
    ],
)
def test_total_not_mean(answer, state: str, message: str) -> None:
    expect("total_not_mean", answer, state, message)


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda n, v, s: n / v - n / (v * s), "right", "the difference"),
        (lambda n, v, s: n / v, "wrong", "plain decoding takes"),
        (lambda n, v, s: n / (v * s), "wrong", "the faster one takes"),
        (lambda n, v, s: n / (v * s) - n / v, "wrong", "the sign"),
        (lambda n, v, s: n / v * (s - 1), "wrong", "divides the time"),
        (lambda n, v, s: 1, "wrong", "not 6.667"),
        (lambda n, v, s: None, "open", ""),
    ],
)
def test_lead_in_seconds(answer, state: str, message: str) -> None:
    expect("lead_in_seconds", answer, state, message)
