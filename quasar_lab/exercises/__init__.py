"""The exercises of the notebooks: `check(name, answer)` says what is right, or what is wrong.

An exercise is a function that is given the learner's answer (a value or a function of theirs) and
returns None when it is right, or one or two sentences that say where it goes wrong and what to
look at. An unanswered exercise is no error: "Run all" goes through an untouched notebook.
"""

import html
import importlib
import inspect
import math
import re
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quasar_lab.errors import UserError

# exercise -> the module of this package that holds its function
_HOME: dict[str, str] = {
    "int8_per_token": "int8",
    "int8_break_even": "int8",
    "int8_largest_k": "int8",
    "kv_cache_bytes": "memory_wall",
    "best_draft_length": "memory_wall",
    "total_not_mean": "live",
    "lead_in_seconds": "live",
    "memory_floor_ms": "one_sitting",
    "acceptance_by_hand": "one_sitting",
    "gain_terms": "one_sitting",
    "verify_rule": "acceptance_rule",
    "expected_tokens_per_step": "speculation",
    "end_of_step": "speculation",
    "whose_distribution": "quasar",
    "draft_acceptance": "quasar",
    "confirmed_ms_per_token": "quasar",
    "smoothing_scale": "outliers",
    "dead_channel": "outliers",
    "best_alpha": "outliers",
    "kl_by_hand": "divergence_judges",
    "acceptance_from_tv": "divergence_judges",
    "counters_to_length": "serving",
    "ignore_list": "serving",
    "largest_free_batch": "serving",
    "equal_bytes_keep": "pruning",
    "one_draft_acceptance": "pruning",
    "implied_step_cost": "reproduction",
    "other_denominator": "reproduction",
}
# those that are answered by values; the others want a function
_VALUES = {"acceptance_by_hand", "dead_channel", "whose_distribution"}


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a learner is told. state: "right", "wrong" or "open" (not answered yet)."""

    exercise: str
    state: str
    message: str

    def __repr__(self) -> str:
        return f"{self.exercise}: {self.state}. {self.message}"

    def _repr_html_(self) -> str:
        # a sign and a word besides the colour
        sign, color = {
            "right": ("✓", "#029e73"),
            "wrong": ("✗", "#d55e00"),
            "open": ("…", "#777777"),
        }[self.state]
        text = html.escape(self.message).replace("\n", "<br>")
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
        return (
            f'<div role="status" style="border-left: 4px solid {color}; padding: .3em .8em">'
            f"<b>{sign} {html.escape(self.exercise)}: {self.state}</b><br>{text}</div>"
        )


def names() -> list[str]:
    """All exercises."""
    return list(_HOME)


def check(name: str, answer: object) -> Feedback:
    """Judge an answer. None and ... count as not answered yet; nothing is ever raised for a wrong
    or a crashing answer. Raises UserError for an unknown exercise."""
    if name not in _HOME:
        raise UserError(f"there is no exercise {name!r}: choose from {', '.join(_HOME)}")
    if answer is None or answer is ...:
        return Feedback(name, "open", "Not answered yet: replace the `...` and run the cell again.")
    if name not in _VALUES and not callable(answer):
        return Feedback(
            name,
            "wrong",
            f'Hand in the function itself, check("{name}", its_name): this is {shown(answer)}, '
            "perhaps what it returned.",
        )
    module = importlib.import_module(f"quasar_lab.exercises.{_HOME[name]}")
    judge: Callable[[object], str | None] = getattr(module, name)
    try:
        wrong = judge(answer)
    except NotAnsweredError:
        still = (
            "a part of it is still `...`"
            if name in _VALUES
            else "the function still returns nothing"
        )
        return Feedback(name, "open", f"Not answered yet: {still}.")
    except WrongError as error:
        return Feedback(name, "wrong", str(error))
    except Exception as error:  # the learner's code may fail in any way
        return Feedback(name, "wrong", _what_stopped(error))
    if wrong is None:
        return Feedback(name, "right", (inspect.getdoc(judge) or "").split("\n")[0])
    return Feedback(name, "wrong", wrong)


class NotAnsweredError(Exception):
    """Raised by `answered` when a learner's function still returns None or `...`."""


def answered(value: object) -> object:
    """The value a learner's function returned, unless it is still the empty exercise's."""
    if value is None or value is ...:
        raise NotAnsweredError
    return value


class WrongError(Exception):
    """Raised inside a judge: its text says what is wrong with the answer."""


def number(value: object, if_nan: str = "That is no number.") -> float:
    """What a learner's function returned, as a finite float; anything else is wrong.

    if_nan: why it may have become one.
    """
    found: Any = answered(value)
    try:
        if isinstance(found, str | bytes | bool):
            raise TypeError
        given = float(found)
    except (TypeError, ValueError, RuntimeError):
        raise WrongError(f"Return one number: you return {shown(found)}.") from None
    if math.isnan(given):
        raise WrongError(f"You return nan. {if_nan}")
    if math.isinf(given):
        raise WrongError(f"You return {given}: the answer is finite.")
    return given


def shown(value: object) -> str:
    """A value in an article, its kind and, if short, itself."""
    kind = type(value).__name__
    text = " ".join(repr(value).split())
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}" + (f", {text}" if len(text) < 60 else "")


_LIBRARIES = [Path(__file__).parents[1], *map(Path, sysconfig.get_paths().values())]


def _what_stopped(error: Exception) -> str:
    """The error with the learner's own line, or what it says of an answer that cannot be read."""
    said = f"{type(error).__name__}: {error}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _LIBRARIES):
            return f"Your code stopped with {said} (in the line `{frame.line}`)"
    if isinstance(error, TypeError) and "argument" in str(error):
        return f"Your function must take the arguments that the exercise gives it ({said})."
    return f"What your function returned cannot be read ({said})."
