"""Every outcome of a random procedure with its exact probability: a proof where draws would hint.

A procedure that takes its random decisions from a `Chance` can be run once for every way in which
they may fall. On a vocabulary of a few tokens that gives the exact law of what the acceptance rule
emits, to be compared with p to the last digit.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float64
from torch import Tensor

from quasar_lab.errors import UserError
from quasar_lab.verification import (
    acceptance_probability,
    draw,
    fresh_generator,
    residual_distribution,
    uniform,
)

Outcome = TypeVar("Outcome", bound=Hashable)
# a rule: (p [K + 1, V], draft tokens, q [K, V] or None, chance) -> (num_accepted, next_token)
Rule = Callable[..., tuple[int, int]]

# Far beyond what the rule needs; a procedure that never ends must not hang a notebook.
MAX_DECISIONS, MAX_PATHS = 200, 200_000


class Chance:
    """Random decisions of the two kinds that sampling consists of.

    Each consumes one number of the generator (None: a generator of its own).
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator or fresh_generator(None)

    def happens(self, probability: Any) -> bool:
        """True with this probability; values above 1 count as 1."""
        return uniform(self._generator) < float(probability)

    def draw(self, weights: Any) -> int:
        """An index, each as likely as its weight (which need not sum to one)."""
        weights = checked_weights(weights)
        return draw(torch.tensor(weights, dtype=torch.float64), uniform(self._generator))


def checked_weights(weights: Any) -> list[float]:
    """The weights as floats; UserError for a negative one, a NaN, or nothing above 0."""
    values = torch.as_tensor(weights, dtype=torch.float64).reshape(-1).tolist()
    wrong = next((value for value in values if not value >= 0), None)
    if wrong is not None or not sum(values) > 0:
        what = "hold nothing above 0" if wrong is None else f"hold {wrong:.4g}"
        raise UserError(f"the weights of a draw {what}: they must be >= 0, and one of them > 0")
    return values


class _Path(Chance):
    """A Chance whose first decisions are prescribed; later ones take the first possible option."""

    def __init__(self, prescribed: tuple[int, ...]) -> None:
        self._prescribed = prescribed
        self._taken: tuple[int, ...] = ()
        self.probability = 1.0
        # the paths that leave this one at a decision that was not prescribed
        self.branches: list[tuple[int, ...]] = []

    def happens(self, probability: Any) -> bool:
        yes = min(max(float(probability), 0.0), 1.0)
        return self._choose([yes, 1.0 - yes]) == 0

    def draw(self, weights: Any) -> int:
        values = checked_weights(weights)
        total = sum(values)
        return self._choose([value / total for value in values])

    def _choose(self, options: Sequence[float]) -> int:
        depth = len(self._taken)
        if depth >= MAX_DECISIONS:
            raise UserError(f"more than {MAX_DECISIONS} random decisions: does the procedure end?")
        if depth < len(self._prescribed):
            choice = self._prescribed[depth]
        else:
            choice, *others = [index for index, value in enumerate(options) if value > 0]
            self.branches += [(*self._taken, other) for other in others]
        self._taken += (choice,)
        self.probability *= options[choice]
        return choice


def every_outcome(procedure: Callable[[Chance], Outcome]) -> dict[Outcome, float]:
    """The exact probability of each result of procedure(chance).

    The procedure runs once for each way in which its decisions may fall; it must be random through
    `chance` only. Raises UserError for one that makes too many decisions to go through.
    """
    law: dict[Outcome, float] = {}
    waiting: list[tuple[int, ...]] = [()]
    for _ in range(MAX_PATHS):
        if not waiting:
            return law
        chance = _Path(waiting.pop())
        outcome = procedure(chance)
        law[outcome] = law.get(outcome, 0.0) + chance.probability
        waiting += chance.branches
    raise UserError(f"more than {MAX_PATHS} outcomes: use fewer tokens or a shorter draft")


def acceptance_rule(
    p: Tensor, draft_tokens: Sequence[int], q: Tensor | None, chance: Chance
) -> tuple[int, int]:
    """`verify` with its decisions taken by `chance`; the probabilities are the library's own."""
    for i, token in enumerate(draft_tokens):
        drafted = 1.0 if q is None else float(q[i, token])
        if not chance.happens(acceptance_probability(float(p[i, token]), drafted)):
            rest = residual_distribution(p[i], None if q is None else q[i], token)
            return i, chance.draw(rest)
    return len(draft_tokens), chance.draw(p[-1])


def emitted_law(
    p: Float64[Tensor, "drafted_plus_1 vocab"],
    q: Float64[Tensor, "drafted vocab"] | None = None,
    draft_tokens: Sequence[int] = (),
    rule: Rule = acceptance_rule,
) -> dict[tuple[int, ...], float]:
    """The exact law of the tokens that one step emits.

    With q the draft itself is drawn, so all drafts are gone through; without, `draft_tokens` is
    the draft of a deterministic drafter. p depends on the position only, which loses no
    generality: after each prefix the rule sees one row of it.
    """

    def step(chance: Chance) -> tuple[int, ...]:
        draft = list(draft_tokens) if q is None else [chance.draw(row) for row in q]
        num_accepted, next_token = rule(p, draft, q, chance)
        return (*draft[:num_accepted], next_token)

    return every_outcome(step)


def largest_error(
    law: dict[tuple[int, ...], float], p: Float64[Tensor, "drafted_plus_1 vocab"]
) -> float:
    """How far any emitted token is from being distributed as p, given the tokens before it."""
    after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens, probability in law.items():
        for i, token in enumerate(tokens):
            after[tokens[:i]][token] += probability  # type: ignore[assignment]
    error = abs(sum(law.values()) - 1)
    for prefix, following in after.items():
        total = sum(following.values())
        for token, probability in enumerate(p[len(prefix)].tolist()):
            error = max(error, abs(following[token] - total * probability))
    return error
