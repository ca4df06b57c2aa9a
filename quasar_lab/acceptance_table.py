"""The acceptance rule on one page of arithmetic: for each token, how it can come to be emitted."""

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from quasar_lab.errors import UserError
from quasar_lab.verification import SUM_TOLERANCE, acceptance_probability


def acceptance_table(p: Tensor, q: Tensor, names: Sequence[str] | None = None) -> pd.DataFrame:
    """What happens to a draft from q that a target with distribution p verifies, both [V].

    One row a token: q (drafted), accept = min(1, p/q), accepted = q * accept, left = max(p - q, 0),
    replaced = chance that it comes as the replacement, emitted = accepted + replaced, and p. The
    last two columns are equal: that is the proof that the output is distributed as the target's
    (Leviathan et al. 2023, arXiv 2211.17192, appendix A.1).

    names: of the tokens. Raises UserError for vectors that are no two distributions of one size.
    """
    p, q = torch.as_tensor(p).double(), torch.as_tensor(q).double()
    if p.ndim != 1 or p.shape != q.shape or not len(p):
        raise UserError(
            f"p has shape {list(p.shape)} and q {list(q.shape)}: pass two of the same shape [V]"
        )
    for name, row in (("p", p), ("q", q)):
        if bool((row < 0).any()) or not abs(float(row.sum()) - 1) <= SUM_TOLERANCE:
            raise UserError(f"{name} sums to {float(row.sum()):.6g}: pass a distribution")
    chances = [acceptance_probability(*pair) for pair in zip(p.tolist(), q.tolist(), strict=True)]
    accept = torch.tensor(chances, dtype=torch.float64)
    accepted = q * accept
    left = (p - q).clamp(min=0)
    rejected = 1 - accepted.sum()
    # p = q: nothing is ever rejected
    replaced = rejected * left / left.sum() if bool(left.any()) else torch.zeros_like(p)
    columns = {
        "q": q,
        "accept": accept,
        "accepted": accepted,
        "left": left,
        "replaced": replaced,
        "emitted": accepted + replaced,
        "p": p,
    }
    index = pd.Index(list(names) if names is not None else list(range(len(p))), name="token")
    return pd.DataFrame({name: value.numpy() for name, value in columns.items()}, index=index)
