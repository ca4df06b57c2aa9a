"""What a generation gives back: the tokens, why they end, and the figures of its trace."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quasar_lab.trace import Step, Trace


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens that were generated and how.

    tokens         the new tokens; the prompt is not included, an end-of-sequence token is
    finish_reason  "eos", "length" (max_new_tokens), "stopped" (should_stop), "stop_string" or
                   "context_length" (the model's context is full)
    trace          every step with its draft, draws and times
    """

    tokens: list[int]
    finish_reason: str
    trace: Trace

    @property
    def steps(self) -> list[Step]:
        """The verification steps; every token was emitted by one of them."""
        return list(self.trace.steps)

    def text(self, tokenizer: Any) -> str:
        """The tokens as text, special tokens left out."""
        return tokenizer.decode(self.tokens, skip_special_tokens=True)

    @property
    def acceptance_counts(self) -> list[int]:
        """Accepted drafts of each step; those cut off after the end do not count."""
        return [step.num_accepted for step in self.trace.steps]

    @property
    def mean_acceptance_length(self) -> float:
        """L = tokens emitted / verification steps; 1 for plain decoding, NaN without steps.

        The bonus or replacement token of each step counts, tokens cut off do not.
        """
        return len(self.tokens) / len(self.trace.steps) if self.trace.steps else math.nan

    @property
    def first_token_seconds(self) -> float:
        """From the start to the first token: prefill, drafter's reset, first step. NaN without."""
        steps = self.trace.steps
        return self.trace.prefill_seconds + steps[0].seconds if steps else math.nan

    @property
    def decode_seconds(self) -> float:
        """All steps: drafting, forwards and acceptance; the prefill is not in it."""
        return sum(step.seconds for step in self.trace.steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted per second of decoding; the prefill is not in it. NaN without tokens."""
        return len(self.tokens) / self.decode_seconds if self.tokens else math.nan

    @property
    def overruled(self) -> int:
        """Lossless mode: blocks in which the confirming model replaced a token; 0 otherwise."""
        if not self.trace.first_tier_steps:
            return 0
        return sum(step.outcome == "replacement" for step in self.trace.steps)

    @property
    def overrule_rate(self) -> float:
        """Lossless mode: the share of tokens put to the confirming model that it replaced.

        NaN where none was, and of a generation without a first tier.
        """
        lossless = bool(self.trace.first_tier_steps)
        examined = sum(self.acceptance_counts) + self.overruled if lossless else 0
        return self.overruled / examined if examined else math.nan

    def save(self, path: str | Path) -> None:
        """Write tokens and trace as JSON: whole or not at all. UserError if it cannot."""
        self.trace.save(path)

    @classmethod
    def load(cls, path: str | Path) -> "Generation":
        """Read what `save` wrote. UserError for any other file."""
        return cls.from_trace(Trace.load(path))

    @classmethod
    def from_trace(cls, trace: Trace) -> "Generation":
        """The generation that a trace records."""
        return cls(trace.tokens, trace.finish_reason, trace)
