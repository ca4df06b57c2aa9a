"""One sequence under one target and one drafter, and the step that lengthens it.

Between steps the target's KV cache holds every token but the last one: the last token's logits
are what the next step needs, so it is fed together with the draft. The prompt is prefilled up to
its last token for the same reason, and every emitted token comes from a verification step.
"""

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quasar_lab.checks import check_tokens
from quasar_lab.draft import Draft, checked_draft
from quasar_lab.errors import UserError
from quasar_lab.sampling import SamplingConfig, adjusted_logits, greedy_tokens, probabilities
from quasar_lab.targets import Target
from quasar_lab.trace import Step
from quasar_lab.verification import verify_greedy, verify_in_detail


class StepResult(NamedTuple):
    """A step and the distributions [tokens, V] its tokens follow (None when greedy)."""

    step: Step
    p: Tensor | None


class SpeculativeSequence:
    """Tokens, the target that continues them and the drafter that guesses.

    Args:
        target: whatever its cache holds is forgotten at `start`.
        drafter: None for plain decoding.
        sampling, generator: how tokens are chosen; the drafter shares both.
        vocab_size: the width of the distributions; None: the target's own. Models of one family
            pad their vocabulary to different sizes: columns are cut off, or added as impossible.
        eos_token_ids: told to the drafter, which need not draft beyond one.
    """

    def __init__(
        self,
        target: Target,
        drafter: Any,
        sampling: SamplingConfig,
        generator: torch.Generator,
        vocab_size: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.sampling = sampling
        self.generator = generator
        self.tokens: list[int] = []
        self._wanted_size = vocab_size
        self.vocab_size: int | None = vocab_size or getattr(target, "vocab_size", None)
        self.eos_token_ids = eos_token_ids
        self._can_limit_logits = "num_logits" in inspect.signature(target.forward).parameters
        # token -> occurrences: all that the repetition penalty needs to know of the context
        self._counts: Counter[int] = Counter()

    def start(self, prompt_ids: list[int]) -> float:
        """Begin with a prompt; returns the seconds of the prefill and the drafter's reset."""
        started = time.perf_counter()
        if self.target.length > 0:
            self.target.rollback(self.target.length)
        self.tokens = list(prompt_ids)
        self._counts = Counter(prompt_ids)
        if len(prompt_ids) > 1:
            self._forward(prompt_ids[:-1], num_logits=1)
        if self.drafter is not None:
            prepare = getattr(self.drafter, "prepare", None)
            if prepare is not None:
                prepare(self.sampling, self.generator, self.vocab_size, self.eos_token_ids)
            self.drafter.reset(list(prompt_ids))
        return time.perf_counter() - started

    def step(self, max_draft: int, cut: Callable[[list[int]], list[int]]) -> StepResult:
        """Draft, verify, emit.

        Args:
            max_draft: the most tokens to draft, >= 0.
            cut: given the tokens the step would emit, returns those to keep (a prefix, not
                empty): it knows about budgets and end-of-sequence tokens.
        """
        began = time.perf_counter()
        draft = self._draft(max_draft)
        drafted = time.perf_counter()
        draft_tokens = draft.tokens.tolist()
        fed = self.tokens[self.target.length :] + draft_tokens
        logits = self._forward(fed, num_logits=len(draft) + 1)
        if draft_tokens:  # an outsider's target may not have told its vocabulary before
            check_tokens("the drafter proposed", draft_tokens, self.vocab_size)
        if self.sampling.greedy:
            p = None
            scores = adjusted_logits(logits, self.sampling, **self._context(draft_tokens))
            verification = verify_greedy(greedy_tokens(scores), draft_tokens)
        else:
            p = probabilities(logits, self.sampling, **self._context(draft_tokens))
            verification = verify_in_detail(p, draft_tokens, draft.probs, self.generator)
        verified = time.perf_counter()

        tokens = cut([*draft_tokens[: verification.num_accepted], verification.next_token])
        self.append(tokens)
        step = Step(
            draft_tokens=tuple(draft_tokens),
            verification=verification,
            tokens=tuple(tokens),
            kv_length=self.target.length,
            num_fed=len(fed),
            draft_seconds=drafted - began,
            verify_seconds=verified - drafted,
        )
        if hasattr(self.drafter, "observe"):
            self.drafter.observe(step)
        return StepResult(step, None if p is None else p[: len(tokens)])

    def append(self, tokens: list[int]) -> None:
        """Append tokens; the cache forgets what was fed and is not among them."""
        self.tokens += tokens
        self._counts.update(tokens)
        self._trim_cache()
        if self.drafter is not None:
            self.drafter.extend(tokens)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens, in the cache and in the drafter too."""
        removed = self.tokens[length:]
        if not removed:
            return
        del self.tokens[length:]
        self._counts.subtract(removed)
        self._trim_cache()
        if self.drafter is None:
            return
        if hasattr(self.drafter, "rollback"):
            self.drafter.rollback(len(removed))
        else:
            self.drafter.reset(list(self.tokens))

    def _trim_cache(self) -> None:
        surplus = self.target.length - (len(self.tokens) - 1)
        if surplus > 0:
            self.target.rollback(surplus)

    def _draft(self, max_draft: int) -> Draft:
        if self.drafter is None or max_draft <= 0:
            return Draft([])
        draft = self.drafter.propose(max_draft)
        return checked_draft(draft, max_draft, self.vocab_size)

    def _forward(self, tokens: list[int], num_logits: int) -> Tensor:
        """Logits [num_logits, V] of what follows the last num_logits of the tokens fed."""
        ids = torch.tensor(tokens, dtype=torch.long)
        if self._can_limit_logits:
            logits = self.target.forward(ids, num_logits=num_logits)  # type: ignore[call-arg]
        else:
            with torch.no_grad():
                logits = self.target.forward(ids)
        expected = num_logits if self._can_limit_logits else len(tokens)
        if logits.ndim != 2 or logits.shape[0] != expected:
            raise UserError(
                f"the target returned logits of shape {tuple(logits.shape)} for {len(tokens)} "
                f"tokens: forward must return [{expected}, vocabulary]"
            )
        logits = logits[-num_logits:]
        if self._wanted_size is not None:
            missing = self._wanted_size - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
        self.vocab_size = logits.shape[1]
        return logits

    def _context(self, draft_tokens: list[int]) -> dict[str, Any]:
        arguments: dict[str, Any] = {"first_position": len(self.tokens)}
        if self.sampling.repetition_penalty != 1:
            arguments["context"] = [token for token, count in self._counts.items() if count > 0]
            arguments["draft_tokens"] = draft_tokens
        return arguments
