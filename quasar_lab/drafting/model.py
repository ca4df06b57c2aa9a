"""A small model as drafter: it decodes ahead, and its own probabilities are q.

The same class confirms one target by another (`generate(..., confirm_with=...)`): a target with
a drafter of its own emits tokens that follow exactly its distribution, which makes them a draft
with known q for a second, more exact target. See Leviathan et al. 2023, arXiv 2211.17192.
"""

import sys
from typing import Any

import torch

from quasar_lab.checks import check_drafter, check_whole
from quasar_lab.draft import Draft, to_ids
from quasar_lab.errors import UserError
from quasar_lab.sampling import SamplingConfig
from quasar_lab.sequence import SpeculativeSequence
from quasar_lab.targets import as_target
from quasar_lab.trace import Step


class ModelDrafter:
    """Draft with a language model that shares the target's tokenizer.

    Args:
        model: a Target, a Hugging Face causal language model, or what `load` returned.
        num_draft_tokens: so many tokens are proposed at most.
        tokenizer, target_tokenizer: compared when both are known; where `load` returned the
            models they are. Without them the vocabulary sizes must agree.
        drafter: a drafter for this model, so that it decodes speculatively itself.

    Under a SamplingConfig with a temperature the tokens are sampled and `probs` is q; at
    temperature 0 they are the most likely ones and `probs` is None.

    Raises UserError when the tokenizers differ.
    """

    def __init__(
        self,
        model: object,
        num_draft_tokens: Any = 5,
        *,
        tokenizer: Any = None,
        target_tokenizer: Any = None,
        drafter: Any = None,
    ) -> None:
        self.num_draft_tokens = check_whole("num_draft_tokens", num_draft_tokens)
        self.target = as_target(model)
        self.tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
        self._compared_with: Any = None
        if target_tokenizer is not None:
            self.check_tokenizer(target_tokenizer)
        if drafter is not None:
            check_drafter(drafter, self.target)
        self.drafter = drafter
        self._max_length = getattr(self.target, "max_length", None) or sys.maxsize
        self.prepare(SamplingConfig(), SamplingConfig().generator(), None, ())

    def prepare(
        self,
        sampling: SamplingConfig,
        generator: torch.Generator,
        vocab_size: int | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Sample as the target does; drafts end at its end-of-sequence tokens."""
        own_size = getattr(self.target, "vocab_size", None)
        both_known = own_size is not None and vocab_size is not None
        if both_known and own_size != vocab_size and self._compared_with is None:
            raise UserError(
                f"the drafter's vocabulary has {own_size} tokens and the target's {vocab_size}: "
                "use a drafter with the same tokenizer, or pass tokenizer= and target_tokenizer= "
                "if they differ in padding only"
            )
        self._eos = frozenset(eos_token_ids)
        self._sequence = SpeculativeSequence(
            self.target, self.drafter, sampling, generator, vocab_size, eos_token_ids
        )
        self._known = 0  # tokens of the sequence that were really emitted; drafts follow them
        # of these, how many this model has read: fewer where it cannot hold one, as a smaller
        # vocabulary or a short context may not; until they are taken back it proposes nothing
        self._read = 0
        self.steps: list[Step] = []

    def check_tokenizer(self, target_tokenizer: Any) -> None:
        """UserError unless the target's tokenizer is this model's, as far as that is known."""
        if self.tokenizer is not None and target_tokenizer is not self._compared_with:
            check_same_tokenizer(self.tokenizer, target_tokenizer)
            self._compared_with = target_tokenizer

    def reset(self, prompt_ids: Any) -> None:
        """Start over on the prompt (a list or an integer tensor)."""
        prompt = to_ids(prompt_ids)
        self._known = len(prompt)
        self.steps = []
        fits = 0 < len(prompt) < self._max_length and self._readable(prompt) == len(prompt)
        self._read = len(prompt) if fits else -1
        if fits:
            self._sequence.start(prompt)

    def propose(self, max_tokens: int) -> Draft:
        """The tokens this model would emit next."""
        room = self._max_length - self._known
        num_tokens = min(max_tokens, self.num_draft_tokens, room)
        if self._read < self._known or num_tokens <= 0:
            return Draft([])
        self._sequence.truncate(self._known)
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        while len(tokens) < num_tokens and not self._eos.intersection(tokens):
            room = num_tokens - len(tokens)
            result = self._sequence.step(room - 1, self._cut_at_eos)
            tokens += result.step.tokens
            if result.p is not None:
                rows.append(result.p)
            self.steps.append(result.step)
        return Draft(tokens, torch.cat(rows) if rows else None)

    def extend(self, tokens: Any) -> None:
        """Append what was emitted; drafts that agree with it stay in this model's cache."""
        emitted = to_ids(tokens)
        if self._read == self._known:
            drafted = self._sequence.tokens[self._known :]
            readable = emitted[: self._readable(emitted)]
            agreed = _common_prefix(drafted, readable)
            self._sequence.truncate(self._known + agreed)
            self._sequence.append(readable[agreed:])
            self._read += len(readable)
        self._known += len(emitted)

    def rollback(self, n: int) -> None:
        """Forget the last n tokens of the sequence."""
        self._known -= n
        if self._read >= 0:
            self._read = min(self._read, self._known)
            self._sequence.truncate(self._read)

    def _readable(self, tokens: list[int]) -> int:
        """How many of the tokens come before the first that this model's vocabulary lacks."""
        size = getattr(self.target, "vocab_size", None) or sys.maxsize
        return next((i for i, token in enumerate(tokens) if token >= size), len(tokens))

    def _cut_at_eos(self, tokens: list[int]) -> list[int]:
        for count, token in enumerate(tokens, start=1):
            if token in self._eos:
                return tokens[:count]
        return tokens

    def __repr__(self) -> str:
        inner = "" if self.drafter is None else f", drafter={self.drafter!r}"
        name = type(getattr(self.target, "model", self.target)).__name__
        return f"{type(self).__name__}({name}, num_draft_tokens={self.num_draft_tokens}{inner})"


def check_same_tokenizer(tokenizer: Any, target_tokenizer: Any) -> None:
    """UserError unless both give every token the same number."""
    if tokenizer is target_tokenizer:
        return
    own, target = tokenizer.get_vocab(), target_tokenizer.get_vocab()
    if own == target:
        return
    differing = sorted(
        token for token in own.keys() | target.keys() if own.get(token) != target.get(token)
    )
    token = differing[0]
    raise UserError(
        f"the drafting model's tokenizer differs from the verifying one's in {len(differing)} "
        f"tokens, e.g. {token!r} is {own.get(token)} there and {target.get(token)} here: use two "
        "models of one family"
    )


def _common_prefix(a: list[int], b: list[int]) -> int:
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
