"""What would other settings have done? Answered from a recorded trace, without the model.

A deterministic drafter's guess is accepted exactly when it equals the token that the target
emits, so the recorded text tells the fate of every draft that another drafter would have made.
At temperature 0 the prediction is exact; with sampling it has the right distribution (drawing the
token first and then comparing is the same event as accepting with probability p). What a step
costs comes from the trace, or from bytes and bandwidth.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from quasar_lab.checks import check_callable, check_drafter, check_instance, check_number
from quasar_lab.draft import Draft, checked_draft
from quasar_lab.errors import UserError
from quasar_lab.generation import Generation
from quasar_lab.trace import Step, Trace
from quasar_lab.verification import verify_greedy

# seconds of a verification step that feeds so many tokens with so many in the KV cache
StepCost = Callable[[int, int], float]


# Checked below, with an error for people. numpy's scalars are welcome.
Number = Any


def reprice(
    generation: Any,
    drafter: Any = None,
    *,
    step_cost: Any = None,
    draft_seconds: Number = 0.0,
) -> Generation:
    """The generation as another drafter, another cost, or both would have made it.

    Args:
        generation: a recorded Generation, or its trace.
        drafter: a deterministic drafter (n-gram, suffix, ...) with other settings; None replays
            the recorded drafts and changes the costs only. `NoDrafts()` replays plain decoding.
        step_cost: seconds of a step as a function of (tokens fed, tokens in the KV cache): see
            `measured_step_cost` and `memory_step_cost`. None leaves the times NaN.
        draft_seconds: of one `propose` call, added to each step that drafts.

    Returns:
        A Generation with the same tokens and other steps. In its trace p of a draft is 1 or 0:
        whether it is what the text says. A first tier's steps stay with the drafts that it made.

    Raises:
        UserError: a drafter that samples: its drafts depend on more than the text. An adaptive one
            without costs, here or of its own: its drafts depend on the times. Anything that is not
            what it should be.
    """
    trace = generation.trace if isinstance(generation, Generation) else generation
    check_instance("generation", trace, Trace)
    check_callable("step_cost", step_cost)
    draft_seconds = check_number("draft_seconds", draft_seconds)
    first_tier_steps = trace.first_tier_steps if drafter is None else ()
    if drafter is None:
        drafter = _RecordedDrafts(trace)
    check_drafter(drafter)
    if hasattr(drafter, "prepare"):
        generator = trace.sampling.generator()
        drafter.prepare(trace.sampling, generator, None, trace.eos_token_ids)
    drafter.reset(list(trace.prompt_ids))
    text = trace.tokens
    steps: list[Step] = []
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
        # -1 is no token: what the model would have said after the end is not known, nor needed
        truth = (text[position:] + [-1] * (len(drafted) + 1))[: len(drafted) + 1]
        verification = verify_greedy(truth, drafted)
        cached = len(trace.prompt_ids) + position - 1
        emitted = text[position : position + verification.num_accepted + 1]
        step = Step(
            draft_tokens=tuple(drafted),
            verification=verification,
            tokens=tuple(emitted),
            kv_length=cached + len(emitted),
            num_fed=len(drafted) + 1,
            draft_seconds=draft_seconds if drafted else 0.0,
            verify_seconds=math.nan
            if step_cost is None
            else check_number("step_cost", step_cost(len(drafted) + 1, cached), above=0),
        )
        steps.append(step)
        position += len(emitted)
        drafter.extend(emitted)
        if hasattr(drafter, "observe"):
            drafter.observe(step)
    changes = dict(steps=tuple(steps), drafter=repr(drafter), first_tier_steps=first_tier_steps)
    return Generation.from_trace(replace(trace, **changes))


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

    def __repr__(self) -> str:
        return self._trace.drafter


class NoDrafts:
    """The drafter of plain decoding: every draft is empty."""

    def reset(self, prompt_ids: Any) -> None:
        """Nothing to do."""

    def propose(self, max_tokens: int) -> Draft:
        """No tokens."""
        return Draft([])

    def extend(self, tokens: Any) -> None:
        """Nothing to do."""

    def __repr__(self) -> str:
        return "NoDrafts()"


def measured_step_cost(generations: Any) -> StepCost:
    """Median seconds of the recorded verification steps by tokens fed; straight lines between.

    generations: one Generation, or several. Beyond the largest number of tokens seen the last line
    goes on, but never below a tenth of the fastest step; below the smallest its value holds.
    Raises UserError without a single step.
    """
    seconds: dict[int, list[float]] = {}
    several = isinstance(generations, Iterable) and not isinstance(generations, str)
    for generation in generations if several else (generations,):
        check_instance("each generation", generation, Generation)
        for step in generation.trace.steps:
            seconds.setdefault(step.num_fed, []).append(step.verify_seconds)
    if not seconds:
        raise UserError("the generations have no steps to measure a cost from: generate first")
    known = sorted((fed, statistics.median(times)) for fed, times in seconds.items())
    least = min(time for _, time in known) / 10  # a line through noisy times may cross zero

    def cost(num_fed: int, kv_length: int) -> float:
        if num_fed <= known[0][0] or len(known) == 1:
            return known[0][1]
        # the pair around num_fed, or the last one
        right = next((i for i, (fed, _) in enumerate(known) if fed >= num_fed), len(known) - 1)
        (x0, y0), (x1, y1) = known[right - 1], known[right]
        return max(y0 + (y1 - y0) * (num_fed - x0) / (x1 - x0), least)

    return cost


def memory_step_cost(
    weight_bytes: Number,
    bandwidth: Number,
    *,
    kv_bytes_per_token: Number = 0,
    seconds_per_token: Number = 0.0,
) -> StepCost:
    """The time to read everything once: (weights + KV cache) / bandwidth, in bytes and bytes/s.

    seconds_per_token adds arithmetic that grows with the tokens fed. Raises UserError unless
    weight_bytes and bandwidth are positive and the others at least 0.
    """
    check_number("weight_bytes", weight_bytes, above=0)
    check_number("bandwidth", bandwidth, above=0)
    check_number("kv_bytes_per_token", kv_bytes_per_token)
    check_number("seconds_per_token", seconds_per_token)

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


def split_speedup(reference: Any, other: Any) -> SpeedSplit:
    """The speed of `other` over `reference` and its two terms; 1, 1, 1 for the same generation.

    Raises UserError if one of them has no steps.
    """
    for name, generation in (("reference", reference), ("other", other)):
        check_instance(name, generation, Generation)
        if not generation.steps:
            raise UserError(f"{name} has no steps to time: generate at least one token")
    length = other.mean_acceptance_length / reference.mean_acceptance_length
    step = (other.decode_seconds / len(other.steps)) / (
        reference.decode_seconds / len(reference.steps)
    )
    return SpeedSplit(length / step, length, step)
