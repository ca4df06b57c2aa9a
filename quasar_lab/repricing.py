"""What would other settings have done? Answered from a recorded trace, without the model.

A deterministic drafter's guess is accepted exactly when it equals the token that the target
emits, so the recorded text tells the fate of every draft that another drafter would have made.
At temperature 0 the prediction is exact; with sampling it has the right distribution (drawing the
token first and then comparing is the same event as accepting with probability p). What a step
costs comes from the trace, or from bytes and bandwidth.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quasar_lab.draft import Draft, checked_draft
from quasar_lab.errors import UserError
from quasar_lab.generation import Generation
from quasar_lab.trace import Trace

# seconds of a verification step that feeds so many tokens with so many in the KV cache
StepCost = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class RepricedStep:
    """A step as it would have been; seconds is None without a cost."""

    num_drafted: int
    num_accepted: int
    num_tokens: int
    num_fed: int
    kv_length: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Repricing:
    """A generation as it would have been, step by step."""

    steps: tuple[RepricedStep, ...]

    @property
    def acceptance_counts(self) -> list[int]:
        """Accepted drafts of each step."""
        return [step.num_accepted for step in self.steps]

    @property
    def mean_acceptance_length(self) -> float:
        """L = tokens / steps."""
        return sum(step.num_tokens for step in self.steps) / len(self.steps)

    @property
    def seconds(self) -> float:
        """All steps; the prefill is not in it. UserError without a cost."""
        costs = [step.seconds for step in self.steps if step.seconds is not None]
        if len(costs) < len(self.steps):
            raise UserError("this repricing has no times: pass step_cost= to reprice")
        return sum(costs)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding."""
        return sum(step.num_tokens for step in self.steps) / self.seconds


def reprice(
    generation: Generation | Trace,
    drafter: Any = None,
    *,
    step_cost: StepCost | None = None,
    draft_seconds: float | int = 0.0,
) -> Repricing:
    """Replay the recorded text under another drafter, cost, or both.

    Args:
        generation: a recorded Generation, or its trace.
        drafter: a deterministic drafter (n-gram, suffix, ...) with other settings; None replays
            the recorded drafts and changes the costs only. `NoDrafts()` replays plain decoding.
        step_cost: seconds of a step as a function of (tokens fed, tokens in the KV cache): see
            `measured_step_cost` and `memory_step_cost`.
        draft_seconds: of one `propose` call, added to each step that drafts.

    Raises:
        UserError: a drafter that samples: its drafts depend on more than the text.
    """
    trace = generation.trace if isinstance(generation, Generation) else generation
    if drafter is None:
        drafter = _RecordedDrafts(trace)
    text = trace.tokens
    drafter.reset(list(trace.prompt_ids))
    steps = []
    position = 0
    while position < len(text):
        room = trace.token_budget - position - 1
        draft = checked_draft(drafter.propose(room), room, None) if room > 0 else Draft([])
        if draft.probs is not None:
            raise UserError(
                f"{drafter!r} drafts by sampling: a trace can be repriced for drafters whose probs "
                "are None only"
            )
        drafted = draft.tokens.tolist()
        rest = text[position:]
        accepted = 0
        while accepted < min(len(drafted), len(rest)) and drafted[accepted] == rest[accepted]:
            accepted += 1
        emitted = rest[: accepted + 1]
        num_fed = len(drafted) + 1
        kv_length = len(trace.prompt_ids) + position - 1
        seconds = None
        if step_cost is not None:
            seconds = step_cost(num_fed, kv_length) + (draft_seconds if drafted else 0.0)
        steps.append(
            RepricedStep(len(drafted), accepted, len(emitted), num_fed, kv_length, seconds)
        )
        drafter.extend(emitted)
        position += len(emitted)
    return Repricing(tuple(steps))


class _RecordedDrafts:
    """A drafter that proposes what the trace says was proposed."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def reset(self, prompt_ids: list[int]) -> None:
        self._steps = iter(self._trace.steps)

    def propose(self, max_tokens: int) -> Draft:
        return Draft(next(self._steps).draft_tokens)

    def extend(self, tokens: list[int]) -> None:
        pass


class NoDrafts:
    """The drafter of plain decoding: every draft is empty."""

    def reset(self, prompt_ids: Any) -> None:
        """Nothing to do."""

    def propose(self, max_tokens: int) -> Draft:
        """No tokens."""
        return Draft([])

    def extend(self, tokens: Any) -> None:
        """Nothing to do."""


def measured_step_cost(generations: Iterable[Generation]) -> StepCost:
    """Median seconds of the recorded verification steps by tokens fed; straight lines between.

    Beyond the largest number seen the last line goes on; below the smallest its value holds.
    Raises UserError without a single step.
    """
    seconds: dict[int, list[float]] = {}
    for generation in generations:
        for step in generation.trace.steps:
            seconds.setdefault(step.num_fed, []).append(step.verify_seconds)
    if not seconds:
        raise UserError("the generations have no steps to measure a cost from: generate first")
    known = sorted((fed, statistics.median(times)) for fed, times in seconds.items())

    def cost(num_fed: int, kv_length: int) -> float:
        if num_fed <= known[0][0] or len(known) == 1:
            return known[0][1]
        # the pair around num_fed, or the last one
        right = next((i for i, (fed, _) in enumerate(known) if fed >= num_fed), len(known) - 1)
        (x0, y0), (x1, y1) = known[right - 1], known[right]
        return y0 + (y1 - y0) * (num_fed - x0) / (x1 - x0)

    return cost


def memory_step_cost(
    weight_bytes: float | int,
    bandwidth: float | int,
    *,
    kv_bytes_per_token: float | int = 0,
    seconds_per_token: float | int = 0.0,
) -> StepCost:
    """The time to read everything once: (weights + KV cache) / bandwidth, in bytes and bytes/s.

    seconds_per_token adds arithmetic that grows with the tokens fed. Raises UserError for a
    bandwidth that is not positive or a negative size.
    """
    if not bandwidth > 0:
        raise UserError(f"bandwidth is {bandwidth!r}: it must be positive, in bytes per second")
    for name, value in (
        ("weight_bytes", weight_bytes),
        ("kv_bytes_per_token", kv_bytes_per_token),
        ("seconds_per_token", seconds_per_token),
    ):
        if value < 0:
            raise UserError(f"{name} is {value!r}: it must not be negative")

    def cost(num_fed: int, kv_length: int) -> float:
        read = weight_bytes + kv_bytes_per_token * (kv_length + num_fed)
        return read / bandwidth + seconds_per_token * num_fed

    return cost


@dataclass(frozen=True, slots=True)
class SpeedSplit:
    """Why one generation is faster than another: speedup = length_term / step_term.

    length_term: ratio of the mean acceptance lengths; step_term: ratio of the mean step times
    (drafting included), above 1 when a step became slower.
    """

    speedup: float
    length_term: float
    step_term: float


def split_speedup(reference: Generation, other: Generation) -> SpeedSplit:
    """The speed of `other` over `reference` and its two terms; 1, 1, 1 for the same generation.

    Raises UserError if one of them has no steps.
    """
    for name, generation in (("reference", reference), ("other", other)):
        if not generation.steps:
            raise UserError(f"{name} has no steps to time: generate at least one token")
    length = other.mean_acceptance_length / reference.mean_acceptance_length
    step = (other.decode_seconds / len(other.steps)) / (
        reference.decode_seconds / len(reference.steps)
    )
    return SpeedSplit(length / step, length, step)
