"""The judges of notebooks 04 and 05: right is right, and each usual mistake has its own words."""

import pytest
import torch

from quasar_lab.exercises import check


def rule(
    accept=lambda p, q, d: p[d] / q[d],
    residual=lambda p, q, d: (p - q).clamp(min=0),
    bonus=lambda p, q, chance: chance.draw(p[-1]),
):
    """The acceptance rule with one part replaced."""

    def verify(p, draft, q, chance):
        for i, d in enumerate(draft):
            if not chance.happens(accept(p[i], q[i], d)):
                return i, chance.draw(residual(p[i], q[i], d))
        return len(draft), bonus(p, q, chance)

    return verify


def never_stops(p, draft, q, chance):
    kept = [chance.happens(p[i][d] / q[i][d]) for i, d in enumerate(draft)]
    if all(kept):
        return len(draft), chance.draw(p[-1])
    i = kept.index(False)
    return sum(kept), chance.draw((p[i] - q[i]).clamp(min=0))


def in_place(p, draft, q, chance):
    for i, d in enumerate(draft):
        if not chance.happens(p[i][d] / q[i][d]):
            p[i] -= q[i]
            return i, chance.draw(p[i].clamp(min=0))
    return len(draft), chance.draw(p[-1])


def struck_out(p, q, d):
    rest = p.clone()
    rest[d] = 0
    return rest


def first_rows_only(p, draft, q, chance):
    for i, d in enumerate(draft):
        if not chance.happens(p[0][d] / q[0][d]):
            return i, chance.draw((p[0] - q[0]).clamp(min=0))
    return len(draft), chance.draw(p[-1])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (rule(accept=lambda p, q, d: q[d] / p[d]), "probability q / p"),
        (rule(accept=lambda p, q, d: p[d]), "probability p(d)"),
        (rule(accept=lambda p, q, d: float(p[d] >= q[d])), "p >= q and never otherwise"),
        (rule(accept=lambda p, q, d: (p[d] / q[d]) ** 2), "min(1, p / q)"),
        (rule(residual=lambda p, q, d: p), "forget the residual"),
        (rule(residual=struck_out), "strike out"),
        (rule(residual=lambda p, q, d: (p - q).abs()), "|p - q|"),
        (rule(residual=lambda p, q, d: p - q), "clamp"),
        (rule(residual=lambda p, q, d: q), "max(p - q, 0), normalised"),
        (rule(bonus=lambda p, q, chance: None), "all drafts are accepted your next_token is None"),
        (rule(bonus=lambda p, q, chance: 0), "With an empty draft"),
        (rule(bonus=lambda p, q, chance: chance.draw(p[max(len(q) - 1, 0)])), "p[K - 1]"),
        (
            rule(bonus=lambda p, q, chance: chance.draw(p[-1]) if len(q) == 0 else 2),
            "there is a bonus token, drawn from p[K]",
        ),
        (never_stops, "does not stop at the first rejection"),
        (in_place, "in place"),
        (first_rows_only, "its own rows"),
        (lambda p, draft, q, chance: 3, "the pair"),
        (lambda p, draft, q, chance: (9, 0), "num_accepted is 9"),
    ],
)
def test_a_wrong_rule_is_recognised(answer, message: str) -> None:
    feedback = check("verify_rule", answer)
    assert feedback.state == "wrong" and message in feedback.message


def test_the_right_rule_is_right() -> None:
    """Written with min(1, .) or without, with tensors or numbers as results."""
    assert check("verify_rule", rule()).state == "right"
    capped = rule(accept=lambda p, q, d: min(1.0, float(p[d] / q[d])))
    assert check("verify_rule", capped).state == "right"
    normalised = rule(
        residual=lambda p, q, d: (
            torch.where(p > q, p - q, 0.0) / torch.where(p > q, p - q, 0.0).sum()
        )
    )
    assert check("verify_rule", normalised).state == "right"
    assert check("verify_rule", lambda p, draft, q, chance: None).state == "open"


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda a, k: sum(a**i for i in range(k + 1)), "right", "1 + a"),
        (lambda a, k: k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a), "right", ""),
        (lambda a, k: (1 - a ** (k + 1)) / (1 - a), "wrong", "divides by zero"),
        (lambda a, k: sum(a**i for i in range(1, k + 1)), "wrong", "left out the token"),
        (lambda a, k: 1 + a * k, "wrong", "all before it were accepted"),
        (lambda a, k: sum(a**i for i in range(k + 2)), "wrong", "one power too many"),
        (lambda a, k: sum(a**i for i in range(k)), "wrong", "a^K is missing"),
        (lambda a, k: 7, "wrong", "a^i"),
        (lambda a, k: ..., "open", ""),
    ],
)
def test_expected_tokens(answer, state: str, message: str) -> None:
    feedback = check("expected_tokens_per_step", answer)
    assert feedback.state == state and message in feedback.message


def end(draft, accepted, token, eos):
    tokens = [*draft[:accepted], token]
    if eos in tokens:
        tokens = tokens[: tokens.index(eos) + 1]
    return tokens, len(draft) + 1 - len(tokens)


def without_eos(draft, accepted, token, eos):
    tokens, rollback = end(draft, accepted, token, eos)
    return [t for t in tokens if t != eos], rollback


def any_eos(draft, accepted, token, eos):
    if eos in draft:
        tokens = draft[: draft.index(eos) + 1]
        return tokens, len(draft) + 1 - len(tokens)
    return end(draft, accepted, token, eos)


def token_after_eos(draft, accepted, token, eos):
    kept = draft[:accepted]
    if eos in kept:
        kept = kept[: kept.index(eos) + 1]
    return [*kept, token], len(draft) - len(kept)


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (end, "right", "first emitted EOS"),
        (
            lambda d, n, t, eos: ([*d[:n], t], len(d) - n),
            "wrong",
            "An accepted EOS ends the output there",
        ),
        (without_eos, "wrong", "belongs to the output"),
        (any_eos, "wrong", "drafted but rejected"),
        (token_after_eos, "wrong", "no next token"),
        (lambda d, n, t, eos: (end(d, n, t, eos)[0], len(d) - n), "wrong", "not emitted must go"),
        (lambda d, n, t, eos: (end(d, n, t, eos)[0], end(d, n, t, eos)[1] - 1), "wrong", "K + 1"),
        (lambda d, n, t, eos: ([*d, t], 0), "wrong", "nothing else"),
        (lambda d, n, t, eos: [5], "wrong", "the pair"),
        (lambda d, n, t, eos: None, "open", ""),
    ],
)
def test_end_of_step(answer, state: str, message: str) -> None:
    feedback = check("end_of_step", answer)
    assert feedback.state == state and message in feedback.message


WHOSE = {
    "n-gram drafts, full verifies": "full",
    "n-gram drafts, INT8 verifies": "int8",
    "INT8 drafts, full verifies": "full",
    "n-gram drafts, INT8 verifies, full confirms": "full",
}


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (WHOSE, "right", "last verifier"),
        (WHOSE | {"n-gram drafts, INT8 verifies": "full"}, "wrong", "p is the INT8 model's"),
        (WHOSE | {"INT8 drafts, full verifies": "int8"}, "wrong", "costs speed, never correctness"),
        (WHOSE | {"INT8 drafts, full verifies": "both"}, "wrong", '"full" or "int8"'),
        (WHOSE | {"INT8 drafts, full verifies": ...}, "wrong", "Still missing: INT8 drafts"),
        (dict.fromkeys(WHOSE, ...), "open", ""),
        ("full", "wrong", "a dict"),
    ],
)
def test_whose_distribution(answer, state: str, message: str) -> None:
    feedback = check("whose_distribution", answer)
    assert feedback.state == state and message in feedback.message


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda p, q: torch.minimum(p, q).sum(), "right", "1 - TV"),
        (lambda p, q: 1 - (p - q).abs().sum() / 2, "right", ""),
        (lambda p, q: (p - q).abs().sum() / 2, "wrong", "TV itself"),
        (lambda p, q: 1 - (p - q).abs().sum(), "wrong", "the half"),
        (lambda p, q: (p * q).sum(), "wrong", "agree by luck"),
        (lambda p, q: p[q.argmax()], "wrong", "most likely token only"),
        (lambda p, q: (q * (p / q).clamp(max=1)).sum(), "wrong", "Where q is 0"),
        (lambda p, q: 0.5, "wrong", "drafted with q(d)"),
        (lambda p, q: ..., "open", ""),
    ],
)
def test_draft_acceptance(answer, state: str, message: str) -> None:
    feedback = check("draft_acceptance", answer)
    assert feedback.state == state and message in feedback.message


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        (lambda b, k, n, i, f: (b / n * i + f) / k, "right", "one full-precision step"),
        (lambda b, k, n, i, f: b / n * i / k, "wrong", "left out the full-precision step"),
        (lambda b, k, n, i, f: (b * i + f) / k, "wrong", "block / L steps"),
        (lambda b, k, n, i, f: (b / n * i + f) / b, "wrong", "tokens that come out"),
        (lambda b, k, n, i, f: (b / n * i + b * f) / k, "wrong", "in one step"),
        (lambda b, k, n, i, f: k / (b / n * i + f), "wrong", "the other way up"),
        (lambda b, k, n, i, f: b / n * i + f, "wrong", "whole block"),
        (lambda b, k, n, i, f: 1.0, "wrong", "share them out"),
        (lambda b, k, n, i, f: None, "open", ""),
    ],
)
def test_confirmed_ms_per_token(answer, state: str, message: str) -> None:
    feedback = check("confirmed_ms_per_token", answer)
    assert feedback.state == state and message in feedback.message
