"""`check` never fails a notebook: it tells."""

import math
import sys
import types

import pytest
import torch

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
        (lambda x: None, "open", "the function still returns nothing"),
        (lambda x: x + 1, "wrong", "For 3 you give 4, not 6."),
        (lambda x: 1 / 0, "wrong", "ZeroDivisionError"),
        (7, "wrong", 'Hand in the function itself, check("doubled", its_name): this is an int, 7'),
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
    code = exercises.Feedback("doubled", "wrong", "replace `a < b`")._repr_html_()
    assert "<code>a &lt; b</code>" in code


def test_unknown_exercise_is_one_line() -> None:
    with pytest.raises(UserError, match="there is no exercise 'nothing'"):
        exercises.check("nothing", 1)


def test_every_exercise_has_its_function() -> None:
    import importlib

    for name in exercises.names():
        module = importlib.import_module(f"quasar_lab.exercises.{exercises._HOME[name]}")
        assert callable(getattr(module, name)) and getattr(module, name).__doc__


ODD = {
    "text": lambda *_: "text",
    "a list": lambda *_: [1, 2],
    "no number": lambda *_: math.nan,
    "no end": lambda *_: math.inf,
    "a dict": lambda *_: {},
    "a tensor": lambda *_: torch.ones(3),
    "half a pair": lambda *_: ("a", "b"),
    "complex": lambda *_: 1j,
    "minus one": lambda *_: -1,
    "a far token": lambda *_: (0, 99),
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", exercises.names())
def test_what_a_function_returns_is_never_a_crash_nor_right(name: str, answer) -> None:
    """Guards the judges: nan once passed for right, and a text was "your code stopped with"."""
    feedback = exercises.check(name, answer)
    assert feedback.state == "wrong", feedback
    for word in ("stopped", "cannot be read", "Error", "hold -"):
        assert word not in feedback.message, feedback


@pytest.mark.parametrize("name", exercises.names())
def test_a_value_in_place_of_a_function_is_named(name: str) -> None:
    message = exercises.check(name, 7).message
    assert "an int" in message or "Give two" in message, message


def test_a_function_of_other_arguments_is_named() -> None:
    message = exercises.check("kv_cache_bytes", lambda: 6).message
    assert message.startswith("Your function must take the arguments that the exercise gives it")


def test_the_line_shown_is_the_learners_own() -> None:
    """Guards the search for it: torch's own line was shown instead."""

    def answer(p, q):
        return torch.stack([p, q[:2]]).sum()  # sizes differ

    message = exercises.check("draft_acceptance", answer).message
    assert "RuntimeError" in message and "in the line `return torch.stack" in message

    def deeper(x, weight):
        return torch.nn.functional.linear(x, weight, bias=weight)

    message = exercises.check("best_alpha", deeper).message
    assert "in the line `return torch.nn.functional.linear" in message

    def iterates(names):
        return [name for name in torch.tensor(1)]

    message = exercises.check("ignore_list", iterates).message
    assert "in the line `return [name for name in torch.tensor(1)]`" in message
