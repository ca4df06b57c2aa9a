"""Where two greedy texts part, and by how little.

Speculative decoding computes the same sums as plain decoding in another order (M tokens in one
forward instead of one): in float32 and bfloat16 two tokens with nearly equal logits can swap.
Such a divergence is harmless and has a tiny margin; a bug has a large one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quasar_lab.targets import as_target


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two continuations differ.

    index            in the new tokens
    token, other     the two tokens there; None where a text has already ended
    margin           logit of the most likely token minus that of the second, by the target
    """

    index: int
    token: int | None
    other: int | None
    margin: float


def first_divergence(
    target: object, prompt_ids: Sequence[int], tokens: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """The first difference between two continuations of a prompt, or None if there is none.

    target: a Target, a Hugging Face model or what `load` returned; its cache is emptied and the
    text up to the difference is fed to it, to see its two best logits.
    """
    for index in range(max(len(tokens), len(other))):
        one = tokens[index] if index < len(tokens) else None
        two = other[index] if index < len(other) else None
        if one == two:
            continue
        model = as_target(target)
        model.rollback(model.length)
        text = torch.tensor([*prompt_ids, *tokens[:index]], dtype=torch.long)
        with torch.no_grad():
            best = model.forward(text)[-1].double().topk(2).values
        return Divergence(index, one, two, float(best[0] - best[1]))
    return None
