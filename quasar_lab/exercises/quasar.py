"""Exercises on Quasar: whose output it is, how often INT8 agrees, what certainty costs."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quasar_lab.exercises import answered, number, shown

# Set-ups, the model whose distribution their output has, and why.
_WHOSE = {
    "n-gram drafts, full verifies": ("full", "The verifier decides, and it is full precision."),
    "n-gram drafts, INT8 verifies": (
        "int8",
        "The rule makes the output match the distribution p that it was given, and here p is the "
        "INT8 model's. Drafting changed nothing; quantising the verifier did.",
    ),
    "INT8 drafts, full verifies": (
        "full",
        "The drafter's distribution q cancels out of what is emitted: a bad drafter costs speed, "
        "never correctness.",
    ),
    "n-gram drafts, INT8 verifies, full confirms": (
        "full",
        "The INT8 model's output is a draft for the last verifier, whose distribution remains.",
    ),
}


def whose_distribution(answer: Any) -> str | None:
    """The output always follows the last verifier; the drafter only decides how fast it comes.

    answer: dict set-up -> "full" or "int8".
    """
    if not isinstance(answer, dict):
        return f"Give a dict of set-ups and models: this is {shown(answer)}."
    missing = [name for name in _WHOSE if answer.get(name) is None or answer.get(name) is ...]
    if len(missing) == len(_WHOSE):
        answered(None)
    if missing:
        return f"Still missing: {', '.join(missing)}."
    for name, (right, why) in _WHOSE.items():
        if answer[name] not in ("full", "int8"):
            return f'For "{name}" you gave {answer[name]!r}: answer "full" or "int8".'
        if answer[name] != right:
            return f'"{name}" does not follow the {answer[name]} model. {why}'
    return None


def draft_acceptance(answer: Any) -> str | None:
    """The sum of min(p, q), which is 1 - TV: the mass that the two distributions share.

    answer: function (p [V], q [V]) -> chance that a token drawn from q is accepted against p.
    """
    cases: tuple[tuple[list[float], list[float]], ...] = (
        ([0.6, 0.25, 0.15], [0.2, 0.5, 0.3]),
        ([0.25, 0.25, 0.5], [0.25, 0.25, 0.5]),
        ([1.0, 0.0, 0.0], [0.0, 0.5, 0.5]),
        ([0.5, 0.5, 0.0], [0.0, 1.0, 0.0]),
    )
    mistakes: tuple[tuple[Callable[[Tensor, Tensor], Tensor], str], ...] = (
        (
            lambda p, q: (p - q).abs().sum() / 2,
            "That is TV itself, the chance of a rejection: the chance of acceptance is 1 - TV.",
        ),
        (
            lambda p, q: 1 - (p - q).abs().sum(),
            "You left out the half: TV is half the sum of |p - q|; each difference counts twice.",
        ),
        (
            lambda p, q: (p * q).sum(),
            "You compute the chance that a draw from q and one from p agree by luck. The rule does "
            "better: sum over d of q(d) min(1, p(d) / q(d)).",
        ),
        (
            lambda p, q: p[q.argmax()],
            "You took the drafter's most likely token only: average over all tokens it may draw.",
        ),
    )
    for p_list, q_list in cases:
        p, q = torch.tensor(p_list, dtype=torch.float64), torch.tensor(q_list, dtype=torch.float64)
        yours = number(
            answer(p.clone(), q.clone()),
            "Where q is 0 the ratio p / q is no number: that token is never drafted.",
        )
        right = float(torch.minimum(p, q).sum())
        if math.isclose(yours, right, abs_tol=1e-9):
            continue
        said = f"For p = {_row(p)} and q = {_row(q)} you get {yours:.4g}, not {right:.4g}. "
        for mistake, message in mistakes:
            if math.isclose(yours, float(mistake(p, q)), abs_tol=1e-9):
                return said + message
        return said + "Sum over d: drafted with q(d), then kept with min(1, p(d) / q(d))."
    return None


def confirmed_ms_per_token(answer: Any) -> str | None:
    """A block costs its INT8 steps and one full-precision step, shared by the tokens it kept.

    answer: function (block, kept, length, int8_ms, full_ms) -> milliseconds a token.
    """
    for block, kept, length, int8_ms, full_ms in (
        (8, 9, 2.0, 20.0, 60.0),
        (8, 5, 1.6, 20.0, 60.0),
        (4, 4, 1.0, 10.0, 30.0),
    ):
        yours = number(answer(block, kept, length, int8_ms, full_ms))
        steps = block / length
        right = (steps * int8_ms + full_ms) / kept
        if math.isclose(yours, right, rel_tol=1e-9):
            continue
        said = (
            f"For a block of {block} of which {kept} tokens come out, L = {length:g}, "
            f"{int8_ms:g} ms and {full_ms:g} ms you get {yours:.4g}, not {right:.4g}. "
        )
        mistakes = (
            (steps * int8_ms / kept, "You left out the full-precision step that confirms a block."),
            (
                (block * int8_ms + full_ms) / kept,
                "The INT8 tier speculates too: it needs block / L steps for a block.",
            ),
            (
                (steps * int8_ms + full_ms) / block,
                "Divide by the tokens that come out: an overruled block keeps fewer than drafted.",
            ),
            (
                (steps * int8_ms + block * full_ms) / kept,
                "The full model confirms a whole block in one step, not token by token.",
            ),
            (1 / right, "That is tokens a millisecond: turn it the other way up."),
            (right * kept, "That is the time of the whole block: share it among its tokens."),
        )
        for wrong, message in mistakes:
            if math.isclose(yours, wrong, rel_tol=1e-9):
                return said + message
        return said + "Add the INT8 steps of a block and one full step, then share them out."
    return None


def _row(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values.tolist()) + "]"
