"""How far one model's next-token distribution is from another's, token by token.

p is the reference (full precision), q the other model, both on the same prefix. KL(p||q) is the
usual measure; the total variation TV matters most here, because 1 - TV is the chance that a token
drawn from q passes the acceptance test against p (algorithms: sections 6 and 8).
"""

import math

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from quasar_lab.errors import UserError
from quasar_lab.verification import verify

# rows of a 49,152-word vocabulary in float64 that are compared at a time: 25 MB a tensor
CHUNK_ROWS = 64

COLUMNS = ("kl", "reverse_kl", "js", "tv", "top1_match", "reference_margin")


def compare_logits(reference: Tensor, other: Tensor, temperature: float = 1.0) -> pd.DataFrame:
    """Compare two models' logits [T, V] for the same T positions, in float64.

    One row a token: kl = KL(p||q), reverse_kl = KL(q||p), js (Jensen-Shannon), all in nats; tv in
    [0, 1]; top1_match (bool); reference_margin = log p(best) - log p(second best), in nats: a small
    margin where top1_match is False is a near-tie, not a mistake.
    temperature divides both logits first; 0 is refused, as two one-hot distributions are equal or
    infinitely far apart, which top1_match tells.
    """
    if reference.ndim != 2 or reference.shape != other.shape or reference.numel() == 0:
        raise UserError(
            f"logits of shape {list(reference.shape)} and {list(other.shape)}: pass two of the "
            "same shape [tokens, vocabulary]"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise UserError(
            f"temperature is {temperature}: choose it above 0 (at 0, top1_match is the comparison)"
        )
    chunks = []
    for start in range(0, len(reference), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        log_p = _log_probabilities(reference[rows], temperature, "reference", start)
        log_q = _log_probabilities(other[rows].to(reference.device), temperature, "other", start)
        chunks.append(_compare(log_p, log_q))
    return pd.concat(chunks, ignore_index=True)


def _log_probabilities(
    logits: Tensor, temperature: float, name: str, start: int
) -> Float64[Tensor, "T V"]:
    bad = (logits.isnan() | (logits == torch.inf)).any(dim=1) | (logits == -torch.inf).all(dim=1)
    if bad.any():
        raise UserError(f"{name} logits: NaN or Inf in row {start + int(bad.nonzero()[0])}")
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def _kl(log_p: Float64[Tensor, "T V"], log_q: Float64[Tensor, "T V"]) -> Float64[Tensor, "T"]:
    """Sum of p (log p - log q); outcomes that p rules out count nothing."""
    terms = log_p.exp() * (log_p - log_q)
    # rounding can leave a sum of 0 at -1e-17
    return torch.where(log_p == -torch.inf, 0.0, terms).sum(dim=-1).clamp_min(0.0)


def _compare(log_p: Float64[Tensor, "T V"], log_q: Float64[Tensor, "T V"]) -> pd.DataFrame:
    log_mixture = torch.logaddexp(log_p, log_q) - math.log(2)
    best_two = log_p.topk(min(2, log_p.shape[1]), dim=-1).values
    columns = (
        _kl(log_p, log_q),
        _kl(log_q, log_p),
        (_kl(log_p, log_mixture) + _kl(log_q, log_mixture)) / 2,
        (log_p.exp() - log_q.exp()).abs().sum(dim=-1) / 2,
        log_p.argmax(dim=-1) == log_q.argmax(dim=-1),
        best_two[:, 0] - best_two[:, -1],
    )
    return pd.DataFrame({n: c.cpu().numpy() for n, c in zip(COLUMNS, columns, strict=True)})


def acceptance_rates(
    reference: Tensor,
    other: Tensor,
    temperature: float = 1.0,
    *,
    num_draws: int = 1,
    seed: int = 0,
) -> pd.DataFrame:
    """Predicted and measured chance that a token of q passes the acceptance test against p.

    reference, other: logits [T, V] of the verifier (p) and of the drafter (q). One row a position:
    predicted = 1 - TV(p, q); measured = share of `num_draws` tokens drawn from q that the lab's
    own acceptance rule (`verify`) keeps.
    """
    predicted = 1 - compare_logits(reference, other, temperature).tv
    generator = torch.Generator().manual_seed(seed)
    measured = []
    for row in range(len(reference)):
        here = slice(row, row + 1)
        p = _log_probabilities(reference[here].cpu(), temperature, "reference", row).exp()
        q = _log_probabilities(other[here].cpu(), temperature, "other", row).exp()
        drawn = torch.multinomial(q[0], num_draws, replacement=True, generator=generator)
        # verify wants the distribution after the draft too, which plays no part here
        accepted = [verify(p.expand(2, -1), d[None], q, generator)[0] for d in drawn]
        measured.append(sum(accepted) / num_draws)
    return pd.DataFrame({"predicted": predicted, "measured": measured})
