"""What a drafter is: something that guesses the next few tokens, cheaply."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from quasar_lab.checks import check_integers, check_tokens
from quasar_lab.errors import UserError
from quasar_lab.verification import SUM_TOLERANCE


@dataclass(frozen=True, slots=True)
class Draft:
    """K guessed tokens, K >= 0.

    tokens  LongTensor [K]; a list is converted
    probs   [K, V], the distribution each token was drawn from; None when the drafter is
            deterministic, which is the same as one-hot rows
    """

    tokens: Any
    probs: Float[Tensor, "drafted vocab"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", check_integers("a draft", self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)


@runtime_checkable
class Drafter(Protocol):
    """What `generate` needs of a drafter. All methods work on one sequence.

    It also calls, where they exist:
    `prepare(sampling, generator, vocab_size, eos_token_ids)` before reset: a drafter that samples
    must draw from this generator and under this SamplingConfig;
    `rollback(n)` to forget the last n tokens of the sequence (without it: reset);
    `observe(step)` with the `quasar_lab.trace.Step` of each step.
    """

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """Start over on a sequence that begins with the prompt."""
        ...

    def propose(self, max_tokens: int) -> Draft:
        """Guess at most max_tokens tokens that continue the sequence; may be none."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append what was really emitted."""
        ...


def checked_draft(draft: Any, max_tokens: int, vocab_size: int | None) -> Draft:
    """A draft as `generate` can use it: cut to max_tokens, on the CPU, its errors told.

    Raises UserError: tokens that are no flat row of whole numbers or lie outside the vocabulary,
    probs of another shape, rows that are no distributions, a token its own row calls impossible.
    """
    if not hasattr(draft, "tokens"):
        raise UserError(
            f"the drafter proposed {reprlib.repr(draft)}: propose must return a Draft, maybe an "
            "empty one"
        )
    tokens = check_integers("the draft", draft.tokens)
    if tokens.ndim != 1:
        raise UserError(
            f"the draft has shape {tuple(tokens.shape)}: it must be whole numbers in one row"
        )
    probs = getattr(draft, "probs", None)
    if probs is not None:
        probs = torch.as_tensor(probs)
        if probs.ndim != 2 or probs.shape[0] != len(tokens):
            raise UserError(
                f"the drafter proposed {len(tokens)} tokens with probs of shape "
                f"{tuple(probs.shape)}: they must be [{len(tokens)}, vocabulary], or None"
            )
        probs = probs[:max_tokens]
    tokens = tokens[:max_tokens]
    if len(tokens) == 0:
        return Draft([])
    check_tokens("the drafter proposed", tokens.tolist(), vocab_size)
    if probs is not None:
        check_probs(probs, tokens, vocab_size)
    return Draft(tokens, probs)


def check_probs(probs: Tensor, tokens: Tensor, vocab_size: int | None) -> None:
    """UserError unless the rows are distributions that the tokens can have been drawn from."""
    if vocab_size is not None and probs.shape[1] != vocab_size:
        raise UserError(
            f"the drafter's probs cover {probs.shape[1]} tokens and the target's {vocab_size}: "
            "both must share one vocabulary"
        )
    sums = probs.double().sum(dim=-1)
    if not bool(((sums - 1).abs() <= SUM_TOLERANCE).all()) or bool((probs < 0).any()):
        raise UserError(
            f"a row of the drafter's probs sums to {float(sums[(sums - 1).abs().argmax()]):.6g}: "
            "each must be a distribution that sums to one"
        )
    drawn = probs.gather(1, tokens.to(probs.device)[:, None])
    if not bool((drawn > 0).all()):
        raise UserError(
            "the drafter proposed a token to which its own probs give no chance: the output would "
            "not follow the target's distribution; draw each token from its row"
        )


def to_ids(tokens: Any) -> list[int]:
    """A flat list of ints from a list or an integer tensor [S] or [1, S]."""
    if isinstance(tokens, Tensor):
        return tokens.reshape(-1).tolist()
    return [int(token) for token in tokens]
