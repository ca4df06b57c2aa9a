"""The exercises of notebook 06: KL by hand, and the acceptance that total variation predicts."""

import math
from typing import Any

from quasar_lab.exercises import number

_P, _Q = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)
_P_ZERO, _Q_ZERO = (0.5, 0.5, 0.0), (0.25, 0.5, 0.25)
_NOTHING = "A token that p rules out adds nothing: p log p goes to 0 with p."


def _kl(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def _tv(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def kl_by_hand(answer: Any) -> str | None:
    """Right: each token's surprise under q instead of p, weighted by how often p says it."""
    given = number(answer(list(_P), list(_Q)))
    right = _kl(_P, _Q)
    said = f"For p = {_P} and q = {_Q} you give {given:.4g}, not {right:.4f}."
    if not math.isclose(given, right, rel_tol=1e-3):
        close = {
            -right: "The sign is the other way: log p - log q, not log q - log p.",
            _kl(_Q, _P): "That is KL(q||p). The first distribution does the weighting.",
            right / math.log(2): "Those are bits. In nats the logarithm is the natural one.",
            right / math.log(10): "In nats the logarithm is the natural one, not that of base 10.",
            sum(math.log(a / b) for a, b in zip(_P, _Q, strict=True)): (
                "The weights are missing: each term counts p times."
            ),
            right / len(_P): "Sum over the tokens; do not divide by how many there are.",
            -sum(a * math.log(b) for a, b in zip(_P, _Q, strict=True)): (
                "That is the cross-entropy. Subtract the entropy of p."
            ),
        }
        for value, hint in close.items():
            if math.isclose(given, value, rel_tol=1e-3):
                return f"{said} {hint}"
        return f"{said} KL(p||q) is the sum of p * log(p / q)."
    given = number(answer(list(_P_ZERO), list(_Q_ZERO)), _NOTHING)
    if not math.isclose(given, _kl(_P_ZERO, _Q_ZERO), rel_tol=1e-3):
        return f"For p = {_P_ZERO} you give {given:.4g}. {_NOTHING}"
    return None


def acceptance_from_tv(answer: Any) -> str | None:
    """Right: what two distributions share, the sum of min(p, q), is what passes the test."""
    for p, q in ((_P, _Q), (_P_ZERO, _Q_ZERO), (_P, _P)):
        given = number(answer(list(p), list(q)))
        tv = _tv(p, q)
        if math.isclose(given, 1 - tv, rel_tol=1e-3):
            continue
        said = f"For p = {p} and q = {q} you give {given:.4g}, not {1 - tv:.4g}."
        if p == q:
            return f"{said} Equal distributions: every draft is accepted."
        close = {
            tv: "That is TV, the chance of a rejection. Acceptance is what is left of 1.",
            1 - 2 * tv: "TV is *half* the sum of |p - q|.",
            2 * tv: "TV is *half* the sum of |p - q|, and acceptance is 1 - TV.",
            sum(a * b for a, b in zip(p, q, strict=True)): (
                "That is the chance that two independent draws agree. The rule accepts more often: "
                "with min(1, p / q) for a token drawn from q."
            ),
            sum(min(1.0, a / b) for a, b in zip(p, q, strict=True)) / len(p): (
                "The acceptance of each token has to be weighted by how often q drafts it."
            ),
            math.exp(-_kl(p, q)): "KL does not give the acceptance rate; total variation does.",
        }
        for value, hint in close.items():
            if math.isclose(given, value, rel_tol=1e-3):
                return f"{said} {hint}"
        return f"{said} A token x is drafted q(x) of the time and kept with min(1, p(x) / q(x))."
    return None
