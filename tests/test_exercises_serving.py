"""The judges of notebook 10: right answers pass, each typical mistake gets its own sentence."""

import pytest

from quasar_lab.exercises import check

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def together(names):
    found = []
    for name in names:
        parent, _, own = name.rpartition(".")
        group = next((group for group in _FUSED if own in group), (own,))
        found += [f"{parent}.{part}" if parent else part for part in group]
    return found


RIGHT = {
    "counters_to_length": lambda tokens, drafted, accepted: tokens / (tokens - accepted),
    "ignore_list": together,
    "largest_free_batch": lambda rows, k: int(rows // (k + 1)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers(name) -> None:
    assert check(name, RIGHT[name]).state == "right"
    assert check(name, ...).state == "open"
    assert check(name, lambda *_: ...).state == "open"


@pytest.mark.parametrize(
    "name, answer, words",
    [
        ("counters_to_length", lambda t, d, a: a / d if d else 1, "share of drafts"),
        ("counters_to_length", lambda t, d, a: 1 + a / t, "divide by the steps"),
        ("counters_to_length", lambda t, d, a: t / d if d else 1, "are no steps"),
        ("counters_to_length", lambda t, d, a: 7, "how many steps"),
        ("ignore_list", list, "leave out model.layers.3.self_attn.k_proj"),
        ("ignore_list", lambda names: [*together(names), "lm_head"], "also name lm_head"),
        ("ignore_list", lambda names: together(names) * 2, "twice"),
        ("ignore_list", lambda names: names.append("x") or names, "changed the list"),
        ("largest_free_batch", lambda rows, k: rows // (k or 1), "one token more"),
        ("largest_free_batch", lambda rows, k: rows / (k + 1), "rounded down"),
        ("largest_free_batch", lambda rows, k: int(rows), "k + 1 rows"),
        ("largest_free_batch", lambda rows, k: 1, "still fit"),
    ],
)
def test_mistakes_are_named(name, answer, words) -> None:
    feedback = check(name, answer)
    assert feedback.state == "wrong" and words in feedback.message, feedback
