"""The judges of the first notebook say what is wrong with an answer, not only that it is."""

from collections.abc import Callable

import pytest

from quasar_lab.exercises import check
from quasar_lab.exercises.one_sitting import HAND_DRAFT, HAND_P

LEFT = {"the": 0.5 / 0.8, "cat": 0.2 / 0.8, "dog": 0.1 / 0.8}


def expect(name: str, answer: object, state: str, message: str = "") -> None:
    feedback = check(name, answer)
    assert feedback.state == state and message in feedback.message, feedback


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda n, b, gb: n * b / (gb * 1e9) * 1e3, "right", "bytes / bandwidth"),
        (lambda n, b, gb: n * b / (gb * 1e9), "wrong", "in seconds"),
        (lambda n, b, gb: gb * 1e9 / (n * b), "wrong", "steps a second"),
        (lambda n, b, gb: n * b / gb * 1e3, "wrong", "counts it as bytes"),
        (lambda n, b, gb: n / (gb * 1e9) * 1e3, "wrong", "all of them are read"),
        (lambda n, b, gb: n * b / (gb * 2**30) * 1e3, "wrong", "2**30"),
        (lambda n, b, gb: 7, "wrong", "not 40"),
        (lambda n, b, gb: None, "open", ""),
        (lambda n, b, gb: ..., "open", ""),
    ],
)
def test_memory_floor_ms(answer: Callable, state: str, message: str) -> None:
    expect("memory_floor_ms", answer, state, message)


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        ((0.2, LEFT), "right", "accepted as often"),
        ((0.2, {"the": 0.63, "cat": 0.25, "dog": 0.125}), "right", ""),  # rounded by hand
        ((0.8, LEFT), "wrong", "chance of a rejection"),
        ((1.0, LEFT), "wrong", "min(1, p / q)"),
        ((0.5, LEFT), "wrong", "not 0.5"),
        ((0.2, HAND_P), "wrong", "was just rejected"),
        ((0.2, {"the": 0.5, "cat": 0.2, "dog": 0.1}), "wrong", "normalise"),
        ((0.2, {"the": 1 / 3, "cat": 1 / 3, "dog": 1 / 3}), "wrong", "keeps its proportions"),
        ((0.2, {**LEFT, "bird": 0.0}), "wrong", "no token of this vocabulary"),
        (0.2, "wrong", "Give two things"),
        ((..., ...), "open", ""),
        ((0.2, ...), "open", ""),
    ],
)
def test_acceptance_by_hand(answer: object, state: str, message: str) -> None:
    expect("acceptance_by_hand", answer, state, message)


def test_acceptance_by_hand_is_the_rule_of_the_library() -> None:
    """The judge's right answer must be what `verify` does, not a second opinion."""
    import torch

    from quasar_lab.acceptance_table import acceptance_table

    p = torch.tensor(list(HAND_P.values()))
    q = torch.tensor([float(token == HAND_DRAFT) for token in HAND_P])
    table = acceptance_table(p, q, list(HAND_P))
    expect(
        "acceptance_by_hand",
        (table.loc[HAND_DRAFT, "accept"], (table["left"] / table["left"].sum()).to_dict()),
        "right",
    )


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda ln, rn, lq, rq: (lq / ln, rn / rq), "right", "multiply to the gain"),
        (lambda ln, rn, lq, rq: [lq / ln, rn / rq], "right", ""),
        (lambda ln, rn, lq, rq: (rn / rq, lq / ln), "wrong", "swapped"),
        (lambda ln, rn, lq, rq: (ln / lq, rn / rq), "wrong", "length term is upside down"),
        (lambda ln, rn, lq, rq: (lq / ln, rq / rn), "wrong", "step term is upside down"),
        (lambda ln, rn, lq, rq: (lq - ln, rn / rq), "wrong", "ratio of the Ls"),
        (lambda ln, rn, lq, rq: (lq / ln, rn - rq), "wrong", "ratio of the rs"),
        (lambda ln, rn, lq, rq: lq / ln * rn / rq, "wrong", "two numbers"),
        (lambda ln, rn, lq, rq: ..., "open", ""),
    ],
)
def test_gain_terms(answer: Callable, state: str, message: str) -> None:
    expect("gain_terms", answer, state, message)
