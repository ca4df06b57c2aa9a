"""The judges of notebook 09 say what is wrong with an answer, not only that it is."""

import pytest

from quasar_lab.exercises import check


@pytest.mark.parametrize(
    ("name", "answer", "state", "message"),
    [
        ("implied_step_cost", lambda length, s: length / s, "right", ""),
        ("implied_step_cost", lambda length, s: s / length, "wrong", "other way up"),
        ("implied_step_cost", lambda length, s: length * s, "wrong", "divide"),
        ("implied_step_cost", lambda length, s: length - s, "wrong", "not terms of a sum"),
        ("implied_step_cost", lambda length, s: 7, "wrong", "follows r"),
        ("implied_step_cost", lambda length, s: ..., "open", ""),
        ("other_denominator", lambda a, b: a / b, "right", ""),
        ("other_denominator", lambda a, b: b / a, "wrong", "turn it round"),
        ("other_denominator", lambda a, b: a * b, "wrong", "twice"),
        ("other_denominator", lambda a, b: a - b, "wrong", "by ratios"),
        ("other_denominator", lambda a, b: 7, "wrong", "cancels"),
        ("other_denominator", lambda a, b: None, "open", ""),
    ],
)
def test_the_judges_say_what_is_wrong(name, answer, state, message) -> None:
    feedback = check(name, answer)
    assert feedback.state == state and message in feedback.message, feedback
