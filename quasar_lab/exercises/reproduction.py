"""The exercises of notebook 09: what a published pair of numbers implies."""

import math
from typing import Any

from quasar_lab.exercises import number

_EXACT = 1e-6


def implied_step_cost(answer: Any) -> str | None:
    """Right: speedup = L / r, so a published L and speedup give the step's cost away."""
    for length, speedup in ((1.40, 1.28), (1.27, 0.68), (2.0, 2.0)):
        given = number(answer(length, speedup))
        right = length / speedup
        if math.isclose(given, right, rel_tol=_EXACT):
            continue
        said = f"For L = {length} and {speedup}x you give {given:.4g}, not {right:.3f}."
        if math.isclose(given, 1 / right, rel_tol=_EXACT):
            return f"{said} That is the other way up: a longer L hides a *dearer* step."
        if math.isclose(given, length * speedup, rel_tol=_EXACT):
            return f"{said} L is what the speedup would be if the step were free: divide."
        if math.isclose(given, length - speedup, abs_tol=_EXACT):
            return f"{said} L and the cost are factors of the speedup, not terms of a sum."
        return f"{said} From speedup = L / r follows r."
    return None


def other_denominator(answer: Any) -> str | None:
    """Right: ratios to the same baseline divide, and the baseline drops out."""
    for over_full, int8_alone in ((3.0, 2.0), (1.28, 1.1), (0.9, 0.5)):
        given = number(answer(over_full, int8_alone))
        right = over_full / int8_alone
        if math.isclose(given, right, rel_tol=_EXACT):
            continue
        said = f"For {over_full}x and {int8_alone}x you give {given:.4g}, not {right:.3f}."
        if math.isclose(given, 1 / right, rel_tol=_EXACT):
            return f"{said} That is INT8 alone over Quasar: turn it round."
        if math.isclose(given, over_full * int8_alone, rel_tol=_EXACT):
            return f"{said} Multiplying counts the gain of INT8 twice."
        if math.isclose(given, over_full - int8_alone, abs_tol=_EXACT):
            return f"{said} Speeds are compared by ratios, not by differences."
        return f"{said} Both are relative to the same plain decoding; which ratio cancels it?"
    return None
