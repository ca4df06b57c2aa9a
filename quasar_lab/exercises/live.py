"""The exercises on measuring: what a rate is the ratio of, and what a speedup is made of."""

import math
from typing import Any

from quasar_lab.exercises import number

_EXACT = 1e-6


def total_not_mean(answer: Any) -> str | None:
    """Right: all tokens over all seconds; a mean of rates would favour the quick steps."""
    for tokens, seconds in (([1, 6, 1, 2], [0.01, 0.02, 0.01, 0.015]), ([3, 1], [0.5, 0.1])):
        given = number(answer(list(tokens), list(seconds)))
        right = sum(tokens) / sum(seconds)
        if math.isclose(given, right, rel_tol=_EXACT):
            continue
        case = f"For tokens {tokens} in steps of {seconds} seconds you give {given:.4g}"
        mean = sum(t / s for t, s in zip(tokens, seconds, strict=True)) / len(tokens)
        mistakes = {
            mean: "that is the mean of the steps' rates: short steps count as much as long ones.",
            1 / right: "those are seconds a token. Turn the ratio over.",
            len(tokens) / sum(seconds): "those are steps a second. A step may emit several tokens.",
            sum(tokens) / len(tokens): "that is L, tokens a step. How long did the steps take?",
        }
        for value, words in mistakes.items():
            if math.isclose(given, value, rel_tol=_EXACT):
                return f"{case}: {words}"
        return f"{case}, not {right:.4g}: all tokens over all seconds."
    return None


def lead_in_seconds(answer: Any) -> str | None:
    """Right: the text's length over each speed, and the difference between the two."""
    for num_tokens, plain_speed, speedup in ((600, 60.0, 3.0), (128, 20.0, 0.8)):
        given = number(answer(num_tokens, plain_speed, speedup))
        right = num_tokens / plain_speed * (1 - 1 / speedup)
        if math.isclose(given, right, rel_tol=_EXACT):
            continue
        case = f"For {num_tokens} tokens, {plain_speed:g} tokens/s and a speedup of {speedup:g}"
        said = f"{case} you give {given:.4g}"
        mistakes = {
            num_tokens / plain_speed: "that is how long plain decoding takes.",
            num_tokens / plain_speed / speedup: "that is how long the faster one takes.",
            -right: "the sign is wrong: what is saved counts positive, what is lost negative.",
            num_tokens / plain_speed * (speedup - 1): (
                "a speedup divides the time; it does not multiply what is saved."
            ),
        }
        for value, words in mistakes.items():
            if math.isclose(given, value, rel_tol=_EXACT):
                return f"{said}: {words}"
        return f"{said}, not {right:.4g} seconds."
    return None
