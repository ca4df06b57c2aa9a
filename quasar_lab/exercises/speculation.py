"""Exercises on speculative decoding: what drafts are worth, and how a step ends."""

import math
from typing import Any

from quasar_lab.exercises import answered, number


def expected_tokens_per_step(answer: Any) -> str | None:
    """1 + a + ... + a^K: one token is emitted for certain, draft i only after all before it.

    answer: function (a, num_draft_tokens) -> tokens a step emits on average.
    """
    for a, k in ((0.5, 1), (0.5, 2), (0.8, 5), (0.0, 4), (1.0, 3), (0.6, 0)):
        try:
            yours = number(answer(a, k))
        except ZeroDivisionError:
            return (
                f"At a = {a:g} your formula divides by zero: there every draft is accepted, and a "
                "step emits K + 1 tokens. Treat it apart, or add the powers up."
            )
        right = sum(a**i for i in range(k + 1))
        if math.isclose(yours, right, rel_tol=1e-9):
            continue
        said = f"For a = {a:g} and K = {k} you get {yours:.4g}, not {right:.4g}. "
        if math.isclose(yours, right - 1, abs_tol=1e-9):
            return said + "You left out the token that the target adds to every step."
        if math.isclose(yours, 1 + a * k, abs_tol=1e-9):
            return said + (
                "You count each draft with a: but draft i is emitted only if all before it were "
                "accepted too, which happens with a^i."
            )
        if math.isclose(yours, sum(a**i for i in range(k + 2)), abs_tol=1e-9):
            return said + "That is one power too many: there are K drafts, not K + 1."
        if math.isclose(yours, sum(a**i for i in range(k)), abs_tol=1e-9):
            return (
                said + "The power a^K is missing: all K drafts accepted still adds a bonus token."
            )
        return said + "Draft i is emitted with probability a^i, and one token always is."
    return None


def end_of_step(answer: Any) -> str | None:
    """The output ends at the first emitted EOS; the cache keeps all emitted tokens but the last.

    answer: function (draft, num_accepted, next_token, eos) -> (tokens, num_to_roll_back).
    """
    eos = 2
    cases: tuple[tuple[list[int], int, int, list[int]], ...] = (
        # draft, accepted, next token, what is emitted
        ([5, 6, 7], 3, 8, [5, 6, 7, 8]),
        ([5, 6, 7], 1, 8, [5, 8]),
        ([5, eos, 6], 3, 9, [5, eos]),
        ([5, eos, 6], 1, 9, [5, 9]),
        ([5, 6], 2, eos, [5, 6, eos]),
        ([eos, 5, eos], 3, 4, [eos]),
        ([], 0, 7, [7]),
    )
    for draft, accepted, next_token, right in cases:
        result = answered(answer(list(draft), accepted, next_token, eos))
        if not isinstance(result, tuple | list) or len(result) != 2:
            return f"Return the pair (tokens, num_to_roll_back): you return {result!r}."
        if not isinstance(result[0], list | tuple):
            return f"The first of the pair is the list of tokens: you return {result[0]!r}."
        tokens, rollback = list(result[0]), number(result[1])
        said = (
            f"For draft {draft} with {accepted} accepted and next token {next_token} (EOS is {eos})"
        )
        if tokens != right:
            return f"{said} you emit {tokens}, not {right}. " + _why_end_is_wrong(
                draft, accepted, next_token, tokens, right, eos
            )
        expected = len(draft) + 1 - len(right)
        if rollback != expected:
            return f"{said} you roll back {rollback:g}, not {expected}. " + _why_rollback_is_wrong(
                draft, accepted, rollback, expected
            )
    return None


def _why_end_is_wrong(
    draft: list[int], accepted: int, next_token: int, tokens: list[int], right: list[int], eos: int
) -> str:
    if eos in right and tokens == right[:-1]:
        return "The EOS itself belongs to the output: it is how a caller knows that it ended."
    if eos in right and right[-1] == eos and tokens == [*right, next_token]:
        return "After an EOS there is no next token: the text is over."
    if tokens == [*draft[:accepted], next_token]:
        return "An accepted EOS ends the output there, whatever was drafted and accepted after it."
    if eos in draft[accepted:] and tokens == draft[: draft.index(eos) + 1]:
        return "That EOS was drafted but rejected: only an accepted one ends the output."
    if len(tokens) > accepted + 1:
        return "A step emits the accepted drafts and one token more, nothing else."
    return "Emitted are the accepted drafts, then the next token, up to and with the first EOS."


def _why_rollback_is_wrong(draft: list[int], accepted: int, rollback: Any, right: int) -> str:
    if rollback == len(draft) - accepted:
        return (
            "You forget the rejected drafts only: an accepted draft that is not emitted must go "
            "as well, and the cache holds all but the last emitted token."
        )
    if rollback == right - 1 or rollback == right + 1:
        return (
            "The forward fed the K drafts and the token before them, K + 1 in all; of the emitted "
            "tokens the last one is not in the cache (it is fed in the next step)."
        )
    return "The forward put K + 1 tokens into the cache: keep as many of them as were emitted."
