"""Exercises of notebook 10: read the counters, name what stays, find the largest free batch."""

from typing import Any

from quasar_lab.exercises import answered, number


def counters_to_length(answer: Any) -> str | None:
    """Right: a step emits its accepted drafts and one token more, so steps = tokens - accepted."""
    for tokens, drafted, accepted in ((300, 260, 120), (64, 0, 0), (500, 900, 400)):
        right = tokens / (tokens - accepted)
        found = number(answer(tokens, drafted, accepted))
        if abs(found - right) < 1e-6:
            continue
        case = f"{tokens} tokens, {drafted} drafted, {accepted} accepted: you give {found:g}"
        if drafted and abs(found - accepted / drafted) < 1e-9:
            return (
                f"{case}. That is the share of drafts that were accepted; L is tokens for each "
                "step, at least 1."
            )
        if abs(found - (1 + accepted / tokens)) < 1e-9:
            return f"{case}. You divide the accepted drafts by all tokens; divide by the steps."
        if drafted and abs(found - tokens / drafted) < 1e-9:
            return f"{case}. Drafted tokens are no steps: a step drafts several, or none."
        return (
            f"{case}, and it is {right:.3g}: every step emits one token of its own besides the "
            "drafts it accepts, so how many steps were there?"
        )
    return None


def ignore_list(answer: Any) -> str | None:
    """Right: q, k and v are one matrix to the engine, gate and up too: they stay together."""
    layer = "model.layers.3"
    cases = (
        ([f"{layer}.self_attn.q_proj"], ["q_proj", "k_proj", "v_proj"]),
        ([f"{layer}.mlp.up_proj"], ["gate_proj", "up_proj"]),
        ([f"{layer}.mlp.down_proj"], ["down_proj"]),
        (["lm_head"], ["lm_head"]),
    )
    for given, parts in cases:
        parent = given[0].rpartition(".")[0]
        right = {f"{parent}.{part}" if parent else part for part in parts}
        before = list(given)
        found: Any = answered(answer(given))
        if given != before:
            return "Your function changed the list it was given: build a new one."
        names = list(found) if isinstance(found, list | tuple | set) else []
        if not isinstance(found, list | tuple | set) or not all(isinstance(x, str) for x in names):
            return f"Return a list of names: you return {found!r}."
        if len(names) != len(set(names)):
            return f"For {before} you name a linear twice: {names}."
        if set(names) == right:
            continue
        missing, extra = sorted(right - set(names)), sorted(set(names) - right)
        if missing:
            return (
                f"For {before} you leave out {missing[0]}, which the engine multiplies together "
                "with it."
            )
        return f"For {before} you also name {extra[0]}, which can stay INT8."
    return None


def largest_free_batch(answer: Any) -> str | None:
    """Right: B (k + 1) rows must not exceed the break-even, so B = floor(rows / (k + 1))."""
    for rows, k in ((206.0, 5), (103.0, 5), (300.0, 0), (17.0, 16)):
        right = int(rows // (k + 1))
        found = number(answer(rows, k))
        if found == right:
            continue
        case = f"With a break-even of {rows:g} rows and {k} drafts you give {found:g}"
        if k and found == int(rows // k):
            return f"{case}: a step verifies k drafts and computes one token more."
        if found != int(found):
            return f"{case}: a batch is a whole number of requests, rounded down."
        if found == int(rows):
            return f"{case}: each request brings k + 1 rows, not one."
        return f"{case}; {right} requests with {k + 1} rows each still fit."
    return None
