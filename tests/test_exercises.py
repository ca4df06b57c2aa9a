"""`check` never fails a notebook: it tells."""

import sys
import types

import pytest

from quasar_lab import UserError, exercises


@pytest.fixture
def exercise(monkeypatch):
    def doubled(answer):
        """Right: every number is doubled."""
        if exercises.answered(answer(3)) != 6:
            return f"For 3 you give {answer(3)}, not 6."
        return None

    module = types.ModuleType("quasar_lab.exercises.trial")
    module.doubled = doubled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(exercises._HOME, "doubled", "trial")


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (None, "open", "Not answered yet"),
        (..., "open", "Not answered yet"),
        (lambda x: None, "open", "still returns nothing"),
        (lambda x: x + 1, "wrong", "For 3 you give 4, not 6."),
        (lambda x: 1 / 0, "wrong", "ZeroDivisionError"),
        (7, "wrong", "TypeError"),
        (lambda x: 2 * x, "right", "every number is doubled"),
    ],
)
def test_feedback_says_what_is_wrong(exercise, answer, state: str, message: str) -> None:
    feedback = exercises.check("doubled", answer)
    assert feedback.state == state and message in feedback.message
    assert state in repr(feedback) and state in feedback._repr_html_()


def test_feedback_is_escaped(exercise) -> None:
    feedback = exercises.Feedback("doubled", "wrong", "<script>")
    assert "<script>" not in feedback._repr_html_()


def test_unknown_exercise_is_one_line() -> None:
    with pytest.raises(UserError, match="there is no exercise 'nothing'"):
        exercises.check("nothing", 1)


def test_every_exercise_has_its_function() -> None:
    import importlib

    for name in exercises.names():
        module = importlib.import_module(f"quasar_lab.exercises.{exercises._HOME[name]}")
        assert callable(getattr(module, name)) and getattr(module, name).__doc__
