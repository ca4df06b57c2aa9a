"""The record of a generation, step by step."""

from dataclasses import dataclass, field

from quasar_lab.sampling import SamplingConfig
from quasar_lab.verification import Verification


@dataclass(frozen=True, slots=True)
class Step:
    """One verification step: a draft, one forward of the target, the tokens emitted.

    tokens          emitted: accepted drafts and then a replacement or a bonus token, cut off after
                    an end-of-sequence token, a stop string or the budget
    kv_length       tokens in the target's KV cache after the rollback: all but the last emitted
    num_fed         tokens in the forward, M = tokens not yet in the cache + drafted
    draft_seconds   spent in the drafter's `propose`
    verify_seconds  forward and acceptance rule, until the tokens are known
    """

    draft_tokens: tuple[int, ...]
    verification: Verification
    tokens: tuple[int, ...]
    kv_length: int
    num_fed: int
    draft_seconds: float
    verify_seconds: float

    @property
    def num_accepted(self) -> int:
        """Accepted drafts that were emitted: those cut off do not count."""
        return min(self.verification.num_accepted, len(self.tokens))

    @property
    def seconds(self) -> float:
        """Drafting and verification."""
        return self.draft_seconds + self.verify_seconds


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything about one call of `generate`; the text can be replayed from it.

    first_tier_steps: in lossless mode, the steps of the target that was confirmed.
    """

    prompt_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    sampling: SamplingConfig
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    finish_reason: str
    prefill_seconds: float
    drafter: str = ""
    first_tier_steps: tuple[Step, ...] = field(default=())
