"""The exercises on the memory wall: what the cache adds, and how long a draft should be."""

import math
from typing import Any

from quasar_lab.cost_model import expected_tokens
from quasar_lab.exercises import number

_EXACT = 1e-6


def kv_cache_bytes(answer: Any) -> str | None:
    """Right: a key and a value for each token, layer and KV head, and nothing for query heads."""
    for layers, kv_heads, head_dim, context, size in ((36, 8, 128, 4096, 4), (30, 3, 64, 200, 2)):
        given = number(answer(layers, kv_heads, head_dim, context, size))
        right = 2.0 * layers * kv_heads * head_dim * context * size
        if math.isclose(given, right, rel_tol=_EXACT):
            continue
        case = (
            f"For {layers} layers, {kv_heads} KV heads of {head_dim} numbers, {context} tokens and "
            f"{size} bytes a number you give {given:,.0f}"
        )
        mistakes = {
            right / 2: "that is the keys alone. The values are read as well.",
            right / context: "that is one token's. Every step reads those of all tokens before it.",
            right / layers: "that is one layer's. Every layer has a cache of its own.",
            right / size: "that counts numbers, and each has several bytes.",
            right / 1e9: "that is in gigabytes. The question is about bytes.",
        }
        for value, words in mistakes.items():
            if math.isclose(given, value, rel_tol=_EXACT):
                return f"{case}: {words}"
        return f"{case}, not {right:,.0f}. Count a key and a value for each token and KV head."
    return None


def best_draft_length(answer: Any) -> str | None:
    """Right: as long as another token brings more than it costs, and not one longer."""
    flat_then_steep = (10.0, 10.0, 10.2, 10.5, 11.0, 14.0, 18.0, 23.0)
    for acceptance, step_ms in (
        (0.5, flat_then_steep),
        (0.9, flat_then_steep),
        (0.1, (10.0, 12.0, 14.0, 16.0)),
    ):
        given = number(answer(acceptance, list(step_ms)))
        speeds = [expected_tokens(acceptance, k) / t for k, t in enumerate(step_ms)]
        right = speeds.index(max(speeds))
        if int(given) != given:
            return "Return one whole number: how many tokens to draft."
        if given == right:
            continue
        costs = ", ".join(f"{t:g}" for t in step_ms)
        case = f"For a chance of {acceptance:g} and steps of {costs} ms you give {given:g}"
        if given == right + 1:
            return (
                f"{case}, not {right}: step_ms[0] is the step without drafts, so the index is the "
                "number of drafts, and not the number of tokens fed."
            )
        if given == len(step_ms) - 1:
            return (
                f"{case}, the longest. L grows with every token, but what counts is L divided by "
                f"the time of the step: {right}."
            )
        if given == step_ms.index(min(step_ms)):
            return (
                f"{case}, the cheapest step. A dearer one that emits more may be faster: {right}."
            )
        return f"{case}, not {right}. Compute L = 1 + a + ... + a**k over step_ms[k] for each k."
    return None
