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
from quasar_lab.results import write_atomically
from quasar_lab.sampling import SamplingConfig
from quasar_lab.verification import Verification

_FORMAT = "quasar-lab trace 1"


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

        Columns per token: step, position (in prompt + output), token, kind (see `Step.rows`), p, q,
        acceptance, uniform, residual_mass, kv_length, seconds (of the step).
        Columns per step: step, num_drafted, num_accepted, num_emitted, outcome, residual_mass,
        num_fed, kv_length, draft_seconds, verify_seconds, seconds.
        """
        if per not in ("token", "step"):
            raise UserError(f'per is {per!r}: it must be "token" or "step"')
        rows = []
        position = len(self.prompt_ids)
        for index, step in enumerate(self.steps):
            shared = dict(
                residual_mass=step.verification.residual_mass,
                kv_length=step.kv_length,
                seconds=step.seconds,
            )
            if per == "step":
                rows.append(
                    dict(
                        step=index,
                        num_drafted=len(step.draft_tokens),
                        num_accepted=step.num_accepted,
                        num_emitted=len(step.tokens),
                        outcome=step.outcome,
                        num_fed=step.num_fed,
                        draft_seconds=step.draft_seconds,
                        verify_seconds=step.verify_seconds,
                        **shared,
                    )
                )
                continue
            for offset, row in enumerate(step.rows()):
                own = row["kind"] in ("replacement", "bonus")
                where = position + (step.num_accepted if own else offset)
                rows.append(dict(step=index, position=where, **row, **shared))
            position += len(step.tokens)
        return pd.DataFrame(rows)

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
            for name in ("steps", "first_tier_steps"):
                data[name] = tuple(_step(step) for step in data[name])
            data["sampling"] = SamplingConfig(**data["sampling"])
            for name in ("prompt_ids", "eos_token_ids"):
                data[name] = tuple(data[name])
            return cls(**data)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is no trace that quasar-lab saved: write one with Generation.save"
            ) from error


def _step(data: dict[str, Any]) -> Step:
    verification: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in data["verification"].items()
    }
    verification["residual_top"] = tuple(map(tuple, verification["residual_top"]))
    return Step(
        **{
            **data,
            "verification": Verification(**verification),
            "draft_tokens": tuple(data["draft_tokens"]),
            "tokens": tuple(data["tokens"]),
        }
    )
