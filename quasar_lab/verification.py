"""The acceptance rule of speculative decoding.

A drafter guessed K tokens d_1 .. d_K, drawn from q_1 .. q_K; the target computed its own
distributions p_1 .. p_{K+1} in one forward. `verify` keeps a prefix of the guess and adds one
token such that the result is distributed exactly as if the target had been sampled token by token
(Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318):

    accept d_i with probability min(1, p_i(d_i) / q_i(d_i));
    at the first rejection draw from normalise(max(p_i - q_i, 0)) and stop;
    if all were accepted draw one bonus token from p_{K+1}.

A deterministic drafter's q_i is one-hot, so d_i is accepted with probability p_i(d_i). Sums and
ratios are float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from quasar_lab.checks import check_instance, check_integers, check_rows, check_tokens
from quasar_lab.errors import UserError

# The sums of p and q may be off by the rounding of a float16 softmax over 100,000 tokens.
SUM_TOLERANCE = 1e-2


def fresh_generator(seed: int | None) -> torch.Generator:
    """A CPU generator with this seed; None: one of the system's choosing."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def uniform(generator: torch.Generator) -> float:
    """One number in [0, 1). Every random decision in this package consumes exactly one."""
    draw = torch.rand((), dtype=torch.float64, generator=generator, device=generator.device)
    return float(draw)


def draw(p: Float64[Tensor, " vocab"], u: float) -> int:
    """The token at quantile u of the distribution p, which need not be normalised.

    Only tokens with p > 0 can be returned, whatever the rounding of the sums.
    """
    support = p.nonzero().squeeze(-1)
    cumulative = p[support].cumsum(0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return int(support[min(index, len(support) - 1)])


def acceptance_probability(p: float, q: float) -> float:
    """min(1, p / q) of a drafted token with target probability p and drafter probability q.

    q = 0 means that the token cannot have been drawn; it is accepted where p allows it at all.
    """
    return min(1.0, p / q) if q > 0 else float(p > 0)


def residual_distribution(
    p: Float64[Tensor, " vocab"], q: Float64[Tensor, " vocab"] | None, token: int
) -> Float64[Tensor, " vocab"]:
    """max(p - q, 0), what is left of p once accepted drafts took their share; not normalised.

    Its sum is the probability that a draft is rejected here. q = None is one-hot on the token.
    """
    if q is None:
        residual = p.clone()
        residual[token] = 0.0
    else:
        residual = (p - q).clamp_(min=0.0)
    # p = q up to rounding: a rejection is itself a rounding error, and p is the right answer
    return residual if bool(residual.any()) else p


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` did, draw by draw; a trace is made of these."""

    num_accepted: int
    next_token: int
    # the target's probability of the next token
    p_next: float
    # of each drafted token, its probability under the target and under the drafter
    p_draft: tuple[float, ...]
    q_draft: tuple[float, ...]
    # the numbers drawn: one for each token that was tested, then one for the next token
    uniforms: tuple[float, ...]
    # the residual at the rejected position: its mass and its most likely tokens with probability
    residual_mass: float | None = None
    residual_top: tuple[tuple[int, float], ...] = ()


def verify(
    p: Any,
    draft_tokens: object,
    q: Any = None,
    generator: Any = None,
) -> tuple[int, int]:
    """How many drafted tokens to keep, and the token that follows them.

    The tokens kept and the one that follows are distributed as sampled from p one by one.

    Args:
        p: [K + 1, V], the target's distribution before each drafted token and after the last; a
            tensor, or rows of numbers.
        draft_tokens: [K] tokens, d_i drawn from q_i.
        q: [K, V], the drafter's distributions; None when the drafter is deterministic.
        generator: one number is drawn for each token tested and one for the token that follows,
            so that an empty draft draws what plain sampling draws. None: a private generator
            seeded by the system. The global torch generator is never used.

    Returns:
        (num_accepted, next_token). Nothing that was passed in is modified.

    Raises:
        UserError: a shape, a token or a row that is no distribution.
    """
    result = verify_in_detail(p, draft_tokens, q, generator)
    return result.num_accepted, result.next_token


def verify_in_detail(
    p: Any,
    draft_tokens: object,
    q: Any = None,
    generator: Any = None,
) -> Verification:
    """`verify`, with every probability and every number drawn."""
    p, draft, q = _checked(p, draft_tokens, q)
    generator = _private_generator() if generator is None else generator
    check_instance("generator", generator, torch.Generator)
    at_draft = (torch.arange(len(draft)), torch.tensor(draft, dtype=torch.long))
    p_draft = tuple(p[at_draft].tolist())
    q_draft = (1.0,) * len(draft) if q is None else tuple(q[at_draft].tolist())
    uniforms = []
    for i, token in enumerate(draft):
        uniforms.append(uniform(generator))
        if uniforms[-1] >= acceptance_probability(p_draft[i], q_draft[i]):
            num_accepted = i
            following = residual_distribution(p[i], None if q is None else q[i], token)
            break
    else:
        num_accepted = len(draft)
        following = p[-1]
    uniforms.append(uniform(generator))
    next_token = draw(following, uniforms[-1])
    mass, top = _summary(following) if num_accepted < len(draft) else (None, ())
    return Verification(
        num_accepted=num_accepted,
        next_token=next_token,
        p_next=float(p[num_accepted, next_token]),
        p_draft=p_draft,
        q_draft=q_draft,
        uniforms=tuple(uniforms),
        residual_mass=mass,
        residual_top=top,
    )


def verify_greedy(best_tokens: Sequence[int], draft_tokens: Sequence[int]) -> Verification:
    """`verify` for temperature 0, where p_i is one-hot on best_tokens[i]: nothing is drawn.

    best_tokens [K + 1] is the argmax of each row: with it a vocabulary-wide softmax is never
    computed.
    """
    matches = [best == token for best, token in zip(best_tokens, draft_tokens, strict=False)]
    num_accepted = count_accepted(matches)
    replaced = num_accepted < len(draft_tokens)
    return Verification(
        num_accepted,
        best_tokens[num_accepted],
        p_next=1.0,
        p_draft=tuple(map(float, matches)),
        q_draft=(1.0,) * len(draft_tokens),
        uniforms=(),
        residual_mass=1.0 if replaced else None,
        residual_top=((best_tokens[num_accepted], 1.0),) if replaced else (),
    )


def count_accepted(mask: Sequence[object]) -> int:
    """The number of leading true values: a draft after the first rejection never counts."""
    return next((i for i, kept in enumerate(mask) if not kept), len(mask))


def _summary(residual: Tensor) -> tuple[float, tuple[tuple[int, float], ...]]:
    mass = float(residual.sum())
    values, tokens = residual.topk(min(5, len(residual)))
    pairs = zip(tokens.tolist(), (values / mass).tolist(), strict=True)
    return mass, tuple((token, value) for token, value in pairs if value > 0)


def _checked(p: Any, draft_tokens: object, q: Any) -> tuple[Tensor, list[int], Tensor | None]:
    draft = check_integers("the draft", draft_tokens).reshape(-1).tolist()
    p = _distributions("p", p, len(draft) + 1)
    check_tokens("the draft holds", draft, p.shape[1])
    if q is None:
        return p, draft, None
    q = _distributions("q", q, len(draft)).to(p.device)
    if q.shape[1] != p.shape[1]:
        raise UserError(
            f"q covers {q.shape[1]} tokens and p {p.shape[1]}: drafter and target must share "
            "one vocabulary"
        )
    return p, draft, q


def _distributions(name: str, rows: Any, num_rows: int) -> Tensor:
    rows = check_rows(name, rows)
    if rows.shape[0] != num_rows:
        raise UserError(
            f"{name} has shape {tuple(rows.shape)}: a draft of {num_rows - (name == 'p')} tokens "
            f"needs [{num_rows}, vocabulary]"
        )
    rows = rows.double()
    sums = rows.sum(dim=-1)
    wrong = ~((sums - 1).abs() <= SUM_TOLERANCE)  # also true for NaN
    if rows.numel() and (bool(wrong.any()) or float(rows.amin()) < 0):
        row = int(wrong.nonzero()[0]) if bool(wrong.any()) else int(rows.amin(-1).argmin())
        raise UserError(
            f"row {row} of {name} is no distribution (sum {float(sums[row]):.6g}, smallest "
            f"{float(rows[row].amin()):.3g}): pass probabilities, not logits"
        )
    # what `probabilities` returns needs no correction, nor another copy
    exact = bool(((sums - 1).abs() < 1e-12).all())
    return rows if exact else rows / sums[:, None]


_PRIVATE: list[torch.Generator] = []


def _private_generator() -> torch.Generator:
    if not _PRIVATE:
        _PRIVATE.append(fresh_generator(None))
    return _PRIVATE[0]
