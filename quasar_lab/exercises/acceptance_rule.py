"""The exercise "write verify", judged by enumeration.

The learner's function is run for every way in which its random decisions may fall, so that a wrong
rule is found with certainty, and recognised by the law that it follows instead.
"""

from typing import Any

import torch
from torch import Tensor

from quasar_lab.enumeration import Chance, emitted_law, every_outcome, largest_error
from quasar_lab.errors import UserError
from quasar_lab.exercises import WrongError, answered, number

TOLERANCE = 1e-9

# token 0 and 1 are drafted too rarely, 2 and 3 too often
_P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
_Q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
_BONUS = torch.tensor([0.25, 0.0, 0.25, 0.5], dtype=torch.float64)


def verify_rule(answer: Any) -> str | None:
    """All drafts and all outcomes enumerated: what your rule emits is distributed exactly as p.

    answer: function (p [K + 1, V], draft, q [K, V], chance) -> (num_accepted, next_token).
    """
    _check_empty_draft(answer)
    _check_acceptance(answer)
    _check_bonus(answer)
    _check_replacement(answer)
    _check_first_rejection(answer)
    _check_joint_law(answer)
    return None


def _law(answer: Any, p: Tensor, draft: list[int], q: Tensor) -> dict[tuple[int, int], float]:
    """The exact law of (num_accepted, next_token) for one draft."""
    p_before, q_before, draft_before = p.clone(), q.clone(), list(draft)

    def step(chance: Chance) -> tuple[int, int]:
        return _checked_result(answer(p, draft, q, chance), len(draft))

    try:
        law = every_outcome(step)
    except UserError as error:
        hint = "" if "hold -" not in str(error) else " The residual is max(p - q, 0): clamp it."
        raise WrongError(f"Your function stopped: {error}.{hint}") from error
    if not (torch.equal(p_before, p) and torch.equal(q_before, q) and draft_before == draft):
        raise WrongError("Your function changes p, q or the draft in place: work on a copy.")
    return law


def _checked_result(result: Any, num_drafted: int) -> tuple[int, int]:
    answered(result)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise WrongError(f"Return the pair (num_accepted, next_token): you return {result!r}.")
    accepted, token = result
    if token is None:
        where = "all drafts are accepted" if accepted == num_drafted else "a draft is rejected"
        raise WrongError(
            f"When {where} your next_token is None: each step adds one token of its own, the "
            "replacement or, after a fully accepted draft, the bonus token from p[K]."
        )
    accepted, token = number(accepted), number(token)
    if accepted not in range(num_drafted + 1):
        raise WrongError(f"num_accepted is {accepted:g} for a draft of {num_drafted} tokens.")
    if token not in range(len(_P)):
        raise WrongError(f"next_token is {token:g}: the vocabulary has the tokens 0 to 3.")
    return int(accepted), int(token)


def _next_token_law(law: dict[tuple[int, int], float], accepted: int) -> Tensor:
    """Of the next token, given the number accepted; all zeros if that never happens."""
    weights = torch.zeros(4, dtype=torch.float64)
    for (count, token), probability in law.items():
        if count == accepted:
            weights[token] += probability
    return weights / max(float(weights.sum()), 1e-300)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < TOLERANCE)


def _check_empty_draft(answer: Any) -> None:
    law = _law(answer, _P[None], [], _Q[None, :][:0])
    if not _same(_next_token_law(law, 0), _P):
        raise WrongError(
            "With an empty draft (K = 0) a step is plain decoding: draw the token from p[0]."
        )


def _check_bonus(answer: Any) -> None:
    # p = q at the draft: it is always accepted
    law = _law(answer, torch.stack([_P, _BONUS]), [1], _P[None])
    bonus = _next_token_law(law, 1)
    if _same(bonus, _P):
        raise WrongError(
            "Your bonus token comes from p[K - 1], the distribution before the last draft: "
            "after K accepted drafts the next one is p[K], the last row."
        )
    if not _same(bonus, _BONUS):
        raise WrongError(
            "After a fully accepted draft there is a bonus token, drawn from p[K]: the forward "
            f"has computed that row anyway. Yours is distributed as {_row(bonus)}, p[K] is "
            f"{_row(_BONUS)}."
        )


def _check_acceptance(answer: Any) -> None:
    p, q = torch.stack([_P, _BONUS]), _Q[None]
    yours = []
    for token in range(4):
        law = _law(answer, p, [token], q)
        yours.append(sum(chance for (count, _), chance in law.items() if count == 1))
    measured = torch.tensor(yours, dtype=torch.float64)
    if _same(measured, (_P / _Q).clamp(max=1.0)):
        return
    if _same(measured, (_Q / _P).clamp(max=1.0)):
        raise WrongError(
            "You accept with probability q / p: it is min(1, p / q). A token that the drafter "
            "proposes more often than the target wants it (q > p) is what must be thinned out."
        )
    if _same(measured, _P):
        raise WrongError(
            "You accept with probability p(d): that is right for a deterministic drafter, where "
            "q(d) = 1. In general it is min(1, p(d) / q(d))."
        )
    if _same(measured, torch.minimum(_P, _Q)):
        raise WrongError(
            "You accept with probability min(p, q): that is how often d is drafted *and* kept. "
            "Given that it was drafted (which happens with q), it is min(1, p / q)."
        )
    if _same(measured, (_P >= _Q).double()):
        raise WrongError(
            "You accept whenever p >= q and never otherwise: below that the draft still has the "
            "chance p / q. Ask chance.happens(p / q)."
        )
    token = int((measured - (_P / _Q).clamp(max=1.0)).abs().argmax())
    raise WrongError(
        f"A draft with p = {_P[token]:.2g} and q = {_Q[token]:.2g} is accepted with probability "
        f"{yours[token]:.3g}: it should be {min(1.0, float(_P[token] / _Q[token])):.3g}, which is "
        "min(1, p / q)."
    )


def _check_replacement(answer: Any) -> None:
    token = 3
    law = _law(answer, torch.stack([_P, _BONUS]), [token], _Q[None])
    yours = _next_token_law(law, 0)
    residual = (_P - _Q).clamp(min=0)
    if _same(yours, residual / residual.sum()):
        return
    without = _P.clone()
    without[token] = 0
    if _same(yours, _P):
        raise WrongError(
            "You forget the residual: after a rejection you draw from p itself, so that tokens "
            "which the drafter had already brought in come a second time. Draw from max(p - q, 0)."
        )
    if _same(yours, without / without.sum()):
        raise WrongError(
            "After a rejection you only strike out the drafted token. That is the residual of a "
            "one-hot q; for a general q it is max(p - q, 0) over the whole vocabulary."
        )
    absolute = (_P - _Q).abs()
    if _same(yours, absolute / absolute.sum()):
        raise WrongError("You take |p - q|: where q is larger, nothing is left. max(p - q, 0).")
    if _same(yours, _BONUS):
        raise WrongError(
            "Your replacement comes from the last row of p: it stands at the rejected position i, "
            "so it comes from the residual of p[i] and q[i]."
        )
    raise WrongError(
        f"After a rejection your token is distributed as {_row(yours)}: the residual "
        f"max(p - q, 0), normalised, is {_row(residual / residual.sum())}."
    )


def _check_first_rejection(answer: Any) -> None:
    impossible = torch.tensor([0.0, 0.5, 0.3, 0.2], dtype=torch.float64)
    certain = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    p, q = torch.stack([impossible, certain, _BONUS]), torch.full((2, 4), 0.25).double()
    law = _law(answer, p, [0, 1], q)
    counted = max(count for count, _ in law)
    if counted > 0:
        raise WrongError(
            "Your rule does not stop at the first rejection: the first draft has p = 0 and is "
            f"rejected, yet num_accepted is {counted}. What follows a rejected token was a "
            "continuation of a text that does not exist."
        )


def _check_joint_law(answer: Any) -> None:
    p, q = torch.stack([_P, _P.flip(0), _BONUS]), torch.stack([_Q, _Q])

    def rule(p: Tensor, draft: list[int], q: Tensor, chance: Chance) -> tuple[int, int]:
        return _checked_result(answer(p, draft, q, chance), len(draft))

    error = largest_error(emitted_law(p, q, rule=rule), p)
    if error > TOLERANCE:
        raise WrongError(
            "One drafted token comes out right, but two do not: some emitted token's probability "
            f"is off by {error:.3g}. Does each position use its own rows p[i] and q[i]?"
        )


def _row(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values.tolist()) + "]"
