"""The record of a generation: what each step drafted, drew and accepted, and how long it took.

The figures of a report come out of it, a widget replays it, and `quasar_lab.repricing` asks it
what other settings would have done.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from quasar_lab.errors import UserError
from quasar_lab.results import read_as, write_atomically
from quasar_lab.sampling import SamplingConfig
from quasar_lab.verification import Verification

_FORMAT = "quasar-lab trace 1"

_TOKEN_COLUMNS = ("position", "token", "kind", "p", "q", "acceptance", "uniform")
_STEP_COLUMNS = (
    "draft_tokens", "tokens", "num_drafted", "num_accepted", "num_emitted", "outcome", "num_fed",
    "draft_seconds", "verify_seconds",
)  # fmt: skip
_SHARED_COLUMNS = ("residual_mass", "residual_top", "kv_length", "seconds")


@dataclass(frozen=True, slots=True)
class Step:
    """One verification step: a draft, one forward of the target, the tokens emitted.

    draft_tokens    the K drafted tokens
    verification    p and q of each, the numbers drawn, the residual, the next token
    tokens          emitted: accepted drafts and then a replacement or a bonus token, cut off after
                    an end-of-sequence token, a stop string or the budget
    kv_length       tokens in the target's KV cache after the rollback: all but the last emitted
    num_fed         tokens in the forward, M: those not yet in the cache, then the draft
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
    def outcome(self) -> str:
        """What the last token emitted is: "replacement", "bonus", or "cut": an accepted draft."""
        if len(self.tokens) <= self.verification.num_accepted:
            return "cut"
        accepted_all = self.verification.num_accepted == len(self.draft_tokens)
        return "bonus" if accepted_all else "replacement"

    @property
    def seconds(self) -> float:
        """Drafting and verification."""
        return self.draft_seconds + self.verify_seconds

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each drafted token, then one for the replacement or bonus.

        kind is "accepted", "rejected", "untested" (after a rejection), "cut" (after the end of the
        output), "replacement" or "bonus".
        """
        result = self.verification
        # greedy verification draws nothing
        uniforms = iter(result.uniforms)
        for i, token in enumerate(self.draft_tokens):
            if i < result.num_accepted:
                kind = "accepted" if i < len(self.tokens) else "cut"
            elif i == result.num_accepted:
                kind = "rejected" if self.outcome == "replacement" else "cut"
            else:
                kind = "untested"
            p, q = result.p_draft[i], result.q_draft[i]
            u = next(uniforms, None) if i <= result.num_accepted else None
            yield dict(token=token, kind=kind, p=p, q=q, acceptance=min(1.0, p / q), uniform=u)
        if self.outcome != "cut":
            u = next(uniforms, None)
            yield dict(token=result.next_token, kind=self.outcome, p=result.p_next, uniform=u)

    def positioned_rows(self) -> Iterator[dict[str, Any]]:
        """`rows` with the position of each token in prompt and output."""
        # the cache holds all but the last emitted token
        first = self.kv_length + 1 - len(self.tokens)
        for offset, row in enumerate(self.rows()):
            follows = row["kind"] in ("replacement", "bonus")
            yield dict(position=first + (self.num_accepted if follows else offset), **row)

    def is_consistent(self) -> bool:
        """Whether the parts agree, as those of a file need not."""
        result = self.verification
        kept = self.draft_tokens[: result.num_accepted]
        return (
            0 <= result.num_accepted <= len(self.draft_tokens)
            and len(self.draft_tokens) == len(result.p_draft) == len(result.q_draft)
            and all(q > 0 for q in result.q_draft)
            and 0 < len(self.tokens) <= len(kept) + 1
            and self.tokens == (*kept, result.next_token)[: len(self.tokens)]
        )

    def summary(self) -> dict[str, Any]:
        """The step in one row."""
        return dict(
            draft_tokens=self.draft_tokens,
            tokens=self.tokens,
            num_drafted=len(self.draft_tokens),
            num_accepted=self.num_accepted,
            num_emitted=len(self.tokens),
            outcome=self.outcome,
            num_fed=self.num_fed,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything about one call of `generate`; the text can be replayed from it.

    token_budget      tokens that could be emitted: max_new_tokens, or what the context had room for
    prefill_seconds   the prompt: the target's prefill and the drafter's reset
    first_tier_steps  in lossless mode, the steps of the target that was confirmed
    """

    prompt_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    sampling: SamplingConfig
    token_budget: int
    eos_token_ids: tuple[int, ...]
    finish_reason: str
    prefill_seconds: float
    drafter: str = ""
    first_tier_steps: tuple[Step, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The tokens emitted, in order."""
        return [token for step in self.steps for token in step.tokens]

    def to_dataframe(self, per: str = "token") -> pd.DataFrame:
        """One row a token (drafted, replacement or bonus) or, with per="step", one row a step.

        Columns: tier and step count up from 0 within it; per token position (in prompt + output),
        token, kind (see `Step.rows`), p, q, acceptance, uniform; per step draft_tokens, tokens
        (those emitted), num_drafted, num_accepted, num_emitted, outcome, num_fed, draft_seconds,
        verify_seconds; and of the step residual_mass, residual_top (its most likely tokens with
        their probabilities), kv_length, seconds. Rows of tier "target" emitted the text; in
        lossless mode those of tier "first" follow: the drafting for it, with every token that the
        second tier then overruled. A trace without steps gives no rows and the same columns.
        """
        if per not in ("token", "step"):
            raise UserError(f'per is {per!r}: it must be "token" or "step"')
        tiers = {"target": self.steps, "first": self.first_tier_steps}
        numbered = [(name, *each) for name, steps in tiers.items() for each in enumerate(steps)]
        own = _STEP_COLUMNS if per == "step" else _TOKEN_COLUMNS
        rows: list[dict[str, Any]] = []
        for tier, index, step in numbered:
            shared = dict(
                tier=tier,
                step=index,
                residual_mass=step.verification.residual_mass,
                residual_top=step.verification.residual_top,
                kv_length=step.kv_length,
                seconds=step.seconds,
            )
            parts = [step.summary()] if per == "step" else step.positioned_rows()
            rows += [part | shared for part in parts]
        return pd.DataFrame(rows, columns=["tier", "step", *own, *_SHARED_COLUMNS])

    def save(self, path: str | Path) -> None:
        """Write as JSON: whole or not at all. UserError if the place cannot be written to."""
        try:
            write_atomically(Path(path), json.dumps({"format": _FORMAT, **asdict(self)}))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what `save` wrote. UserError for any other file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data.pop("format") != _FORMAT:
                raise ValueError
            trace: Trace = read_as(cls, data)
            if not trace.prompt_ids or not all(
                step.is_consistent() for step in trace.steps + trace.first_tier_steps
            ):
                raise ValueError
            return trace
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} is no trace that quasar-lab saved: write one with Generation.save"
            ) from error
