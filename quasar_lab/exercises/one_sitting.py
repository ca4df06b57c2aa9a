"""The exercises of the first notebook: memory, acceptance, and the two terms of a gain."""

import math
from collections.abc import Sequence
from typing import Any

from quasar_lab.exercises import answered, number

# a tolerance for answers that were computed, and for those that were rounded by hand
_EXACT, _BY_HAND = 1e-6, 0.006

# The rule by hand: the target's p over four tokens, and the token an n-gram drafter proposed.
HAND_P = {"the": 0.5, "a": 0.2, "cat": 0.2, "dog": 0.1}
HAND_DRAFT = "a"


def memory_floor_ms(answer: Any) -> str | None:
    """Right: no step can be faster than its bytes / bandwidth, however many cores compute."""
    for parameters, bytes_per_weight, gigabytes in ((8e9, 2, 400.0), (8e9, 1, 400.0), (1e9, 4, 20)):
        given = number(answer(parameters, bytes_per_weight, gigabytes))
        right = parameters * bytes_per_weight / (gigabytes * 1e9) * 1e3
        if math.isclose(given, right, rel_tol=_EXACT):
            continue
        case = f"For {parameters:.0e} weights of {bytes_per_weight} bytes at {gigabytes:g} GB/s"
        said = f"{case} you give {given:.6g}"
        if math.isclose(given, right / 1e3, rel_tol=_EXACT):
            return f"{said}: that is the time in seconds. The question is about milliseconds."
        if math.isclose(given, 1e3 / right, rel_tol=_EXACT):
            return f"{said}: those are steps a second. Turn bytes / bandwidth the other way up."
        if math.isclose(given, right * 1e9, rel_tol=_EXACT):
            return f"{said}: a bandwidth in GB/s is 1e9 bytes a second; yours counts it as bytes."
        if math.isclose(given, right / bytes_per_weight, rel_tol=_EXACT):
            return f"{said}: each weight has {bytes_per_weight} bytes, and all of them are read."
        if math.isclose(given, right / 1.073741824, rel_tol=_EXACT):
            return f"{said}: you counted 2**30 bytes a gigabyte; bandwidths are given in 1e9 bytes."
        return f"{said}, not {right:.6g}. Time is bytes / bandwidth, and a millisecond is 1e-3 s."
    return None


def acceptance_by_hand(answer: Any) -> str | None:
    """Right: accepted as often as the target itself would say it, and otherwise never said."""
    if isinstance(answer, Sequence):
        for part in answer:
            answered(part)
    if not isinstance(answer, Sequence) or len(answer) != 2 or not hasattr(answer[1], "get"):
        return (
            "Give two things: the chance of acceptance, and a dict with the chance of each token "
            "as the replacement."
        )
    accept, given = number(answer[0]), answer[1]
    right = HAND_P[HAND_DRAFT]
    if abs(accept - right) > _BY_HAND:
        if abs(accept - (1 - right)) <= _BY_HAND:
            return f"{accept:g} is the chance of a rejection; acceptance is what is left of 1."
        if abs(accept - 1) <= _BY_HAND:
            return "An n-gram drafter is sure of its token (q = 1), but the rule is min(1, p / q)."
        return f"The chance of acceptance is min(1, p / q) with q = 1 here, not {accept:g}."
    chances = {token: number(given.get(token, 0.0)) for token in HAND_P}
    if unknown := set(given) - set(HAND_P):
        return f"{sorted(map(str, unknown))[0]!r} is no token of this vocabulary."
    if chances[HAND_DRAFT] > _BY_HAND:
        return (
            f"{HAND_DRAFT!r} was just rejected: max(p - q, 0) leaves it nothing, or it would be "
            "said more often than the target says it."
        )
    total = sum(chances.values())
    if abs(total - 1) > 2 * _BY_HAND:
        return f"Your chances of a replacement sum to {total:.3g}: normalise them to 1."
    for token, p in HAND_P.items():
        expected = 0.0 if token == HAND_DRAFT else p / (1 - right)
        if abs(chances[token] - expected) > _BY_HAND:
            return (
                f"{token!r} comes with {chances[token]:.3g} in your answer. What is left of p "
                "keeps its proportions: divide each p by the sum of those that remain."
            )
    return None


def gain_terms(answer: Any) -> str | None:
    """Right: the two terms multiply to the gain, and each says what it is owed to."""
    for l_ngram, r_ngram, l_quasar, r_quasar in ((2.0, 1.25, 2.2, 1.0), (1.33, 1.127, 1.4, 1.094)):
        given = answered(answer(l_ngram, r_ngram, l_quasar, r_quasar))
        if not isinstance(given, Sequence) or len(given) != 2:
            return "Return two numbers: the length term, then the step term."
        length, step = (number(value) for value in given)
        right_length, right_step = l_quasar / l_ngram, r_ngram / r_quasar
        if math.isclose(length, right_length, rel_tol=_EXACT) and math.isclose(
            step, right_step, rel_tol=_EXACT
        ):
            continue
        case = f"For L {l_ngram:g} -> {l_quasar:g} and r {r_ngram:g} -> {r_quasar:g}"
        if math.isclose(length, right_step, rel_tol=_EXACT) and math.isclose(
            step, right_length, rel_tol=_EXACT
        ):
            return f"{case} the terms are right but swapped: the length term comes first."
        if math.isclose(length, 1 / right_length, rel_tol=_EXACT):
            return f"{case} your length term is upside down: more tokens a step is a gain above 1."
        if not math.isclose(length, right_length, rel_tol=_EXACT):
            return (
                f"{case} the length term is {right_length:.4g} (ratio of the Ls), not {length:.4g}."
            )
        if math.isclose(step, 1 / right_step, rel_tol=_EXACT):
            return (
                f"{case} your step term is upside down: a step that costs less is a gain above 1."
            )
        return f"{case} the step term is {right_step:.4g} (ratio of the rs), not {step:.4g}."
    return None
