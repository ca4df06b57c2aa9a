"""How many tokens to draft: as many as make the expected tokens per second largest.

A step that drafts k tokens emits 1 + a_1 + a_1 a_2 + ... + a_1...a_k tokens on average, where a_i
is the chance that the i-th draft is accepted if all before it were (Leviathan et al. 2023, arXiv
2211.17192, section 3.1, with one rate a position). It costs a verification of k + 1 tokens and
the drafting of k. Both are learned while decoding; the best k is the one with the best ratio.
"""

import itertools
import math
import operator
from collections.abc import Mapping
from typing import Any

from quasar_lab.checks import check_drafter, check_number, check_whole
from quasar_lab.draft import Draft
from quasar_lab.errors import UserError
from quasar_lab.trace import Step


class AdaptiveDrafter:
    """Another drafter, asked each step for the number of tokens that pays best.

    Args:
        drafter: any Drafter; give it a num_draft_tokens of at least max_draft_tokens.
        max_draft_tokens: never ask for more.
        step_cost: seconds (or any unit) of a step that feeds M tokens, as a function or a table
            of M, drafting included. None: the step times measured so far. Those vary from run to
            run, and with them the lengths: greedy text stays the same, sampled text may not.
        explore_every: every so many steps one token more than the best is tried, so that a rate
            is never given up on for good.
        memory: steps after which an observation has lost most of its weight.

    Raises UserError for a value outside its range.
    """

    def __init__(
        self,
        drafter: Any,
        max_draft_tokens: Any = 16,
        *,
        step_cost: Any = None,
        explore_every: Any = 16,
        memory: Any = 64,
    ) -> None:
        check_drafter(drafter)
        self.drafter = drafter
        self.max_draft_tokens = check_whole("max_draft_tokens", max_draft_tokens)
        self.explore_every = check_whole("explore_every", explore_every, 2)
        self.memory = check_whole("memory", memory)
        if not (step_cost is None or callable(step_cost) or isinstance(step_cost, Mapping)):
            raise UserError(
                f"step_cost is {step_cost!r}: it must be a function or a table of the tokens fed"
            )
        self._given_cost = step_cost
        self._forget()

    def __getattr__(self, name: str) -> Any:
        # `prepare`, `rollback` and the like exist where the inner drafter has them
        if name == "drafter":
            raise AttributeError(name)
        return getattr(self.drafter, name)

    def _forget(self) -> None:
        # of the drafts at position i: how many were tested and accepted, old ones fading
        self._tested = [0.0] * self.max_draft_tokens
        self._accepted = [0.0] * self.max_draft_tokens
        # tokens fed -> mean seconds of such a step
        self._seconds: dict[int, float] = {}
        self._num_steps = 0

    def reset(self, prompt_ids: Any) -> None:
        """Start over on the prompt; what was learned of another text is forgotten."""
        self._forget()
        self.drafter.reset(prompt_ids)

    def propose(self, max_tokens: int) -> Draft:
        """The inner drafter's draft, of the best length; empty if drafting does not pay."""
        length = self.best_length()
        if self._num_steps % self.explore_every == self.explore_every - 1:
            length = min(length + 1, self.max_draft_tokens)
        length = min(length, max_tokens)
        return self.drafter.propose(length) if length > 0 else Draft([])

    def extend(self, tokens: Any) -> None:
        """Append what was emitted."""
        self.drafter.extend(tokens)

    def observe(self, step: Step) -> None:
        """Learn from a step: which drafts were accepted, and what it cost."""
        if self._given_cost is None and not 0 < step.seconds < math.inf:
            raise UserError(
                f"a step took {step.seconds!r} seconds: AdaptiveDrafter chooses lengths by times; "
                "give it a step_cost (and `reprice` one too, to predict with measured times)"
            )
        self._num_steps += 1
        drafted, accepted = len(step.draft_tokens), step.verification.num_accepted
        for i in range(min(drafted, accepted + 1, self.max_draft_tokens)):
            keep = 1 - 1 / self.memory
            self._tested[i] = keep * self._tested[i] + 1
            self._accepted[i] = keep * self._accepted[i] + (i < accepted)
        # the first step may feed several tokens that were pending: its M says what it cost
        before = self._seconds.get(step.num_fed, step.seconds)
        self._seconds[step.num_fed] = before + (step.seconds - before) / 4
        if hasattr(self.drafter, "observe"):
            self.drafter.observe(step)

    def acceptance_rates(self) -> list[float]:
        """For each position the chance that its draft is accepted if those before it were.

        Few observations are completed by the rate over all positions, and none at all by 1/2.
        """
        overall = (sum(self._accepted) + 1) / (sum(self._tested) + 2)
        return [
            (accepted + 2 * overall) / (tested + 2)
            for accepted, tested in zip(self._accepted, self._tested, strict=True)
        ]

    def expected_tokens(self) -> list[float]:
        """Tokens that a step with 0, 1, ... max_draft_tokens drafts emits on average."""
        reached = itertools.accumulate(self.acceptance_rates(), operator.mul)
        return list(itertools.accumulate(reached, initial=1.0))

    def step_cost(self, length: int) -> float:
        """What a step with this many drafts costs, given or measured."""
        if self._given_cost is None:
            return line_through(self._seconds, length + 1)
        if callable(self._given_cost):
            cost = self._given_cost(length + 1)
        elif length + 1 in self._given_cost:
            cost = self._given_cost[length + 1]
        else:
            raise UserError(
                f"step_cost has no entry for {length + 1} tokens: it needs 1 to "
                f"{self.max_draft_tokens + 1}"
            )
        return check_number(f"step_cost of {length + 1} tokens", cost, above=0)

    def best_length(self) -> int:
        """The number of drafts with the most expected tokens per unit of cost; smallest of ties."""
        speeds = [
            tokens / self.step_cost(length) for length, tokens in enumerate(self.expected_tokens())
        ]
        return speeds.index(max(speeds))

    def __repr__(self) -> str:
        return f"AdaptiveDrafter({self.drafter!r}, max_draft_tokens={self.max_draft_tokens})"


def line_through(points: Mapping[int, float], x: int) -> float:
    """The least-squares line through points (x, y), at x; constant through fewer than two.

    Never below a tenth of the smallest y: a line through noisy times may cross zero.
    """
    if not points:
        return 1.0
    mean_x = sum(points) / len(points)
    mean_y = sum(points.values()) / len(points)
    spread = sum((px - mean_x) ** 2 for px in points)
    slope = 0.0
    if spread > 0:
        slope = sum((px - mean_x) * (py - mean_y) for px, py in points.items()) / spread
    return max(mean_y + slope * (x - mean_x), min(points.values()) / 10)
