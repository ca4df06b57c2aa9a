"""The enumeration that notebooks prove with, and exercises are judged by."""

import itertools

import pytest
import torch

from quasar_lab import UserError, verify
from quasar_lab.enumeration import (
    Chance,
    acceptance_rule,
    emitted_law,
    every_outcome,
    largest_error,
)
from quasar_lab.verification import acceptance_probability


def rows(count: int, vocab_size: int, seed: int) -> torch.Tensor:
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(2 * logits.double(), -1)


def test_two_coins_and_a_die() -> None:
    """Paths must be weighted and none left out or met twice."""

    def procedure(chance: Chance) -> int:
        if chance.happens(0.25):
            return 10 + chance.draw([1, 0, 3])
        return int(chance.happens(2.0))

    law = every_outcome(procedure)
    assert law == pytest.approx({10: 0.25 * 0.25, 12: 0.25 * 0.75, 1: 0.75})


@pytest.mark.parametrize("num_drafted", [0, 1, 2, 3])
def test_the_rule_emits_p(num_drafted: int) -> None:
    """Case 15 once more, through the public enumeration."""
    for seed in range(3):
        p = rows(num_drafted + 1, 3, seed)
        if num_drafted:
            q = rows(num_drafted, 3, seed + 50)
            assert largest_error(emitted_law(p, q), p) < 1e-12
        for draft in itertools.product(range(3), repeat=num_drafted):
            assert largest_error(emitted_law(p, None, draft), p) < 1e-12


def test_a_wrong_rule_is_noticed() -> None:
    """A proof must be able to fail: a replacement drawn from p is off by percents."""

    def wrong(p, draft, q, chance):
        for i, token in enumerate(draft):
            if not chance.happens(acceptance_probability(float(p[i, token]), float(q[i, token]))):
                return i, chance.draw(p[i])
        return len(draft), chance.draw(p[-1])

    p, q = rows(2, 4, 0), rows(1, 4, 1)
    assert largest_error(emitted_law(p, q, rule=wrong), p) > 0.01


def test_the_rule_is_verify() -> None:
    """The enumerated rule must be the one that `generate` uses: same numbers, same outcome."""
    for seed in range(40):
        p, q = rows(4, 5, seed), rows(3, 5, seed + 99)
        draft = torch.randint(5, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
        for known in (q, None):
            expected = verify(p, draft, known, torch.Generator().manual_seed(seed))
            chance = Chance(torch.Generator().manual_seed(seed))
            assert acceptance_rule(p, draft, known, chance) == expected


def test_chance_draws_from_its_generator_only() -> None:
    state = torch.random.get_rng_state()
    chance = Chance(torch.Generator().manual_seed(3))
    counts = [sum(chance.happens(0.2) for _ in range(2000)), 0, 0]
    assert abs(counts[0] / 2000 - 0.2) < 5 * (0.16 / 2000) ** 0.5
    assert {chance.draw([0, 1, 1]) for _ in range(50)} == {1, 2}
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("weights", "message"),
    [([0.5, -0.25], "hold -0.25"), ([0.0, 0.0], "nothing above 0"), ([float("nan")], "hold nan")],
)
def test_weights_that_are_none(weights: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        every_outcome(lambda chance: chance.draw(weights))


def test_a_procedure_without_end_is_stopped() -> None:
    """A learner's endless loop must not hang the notebook."""

    def endless(chance: Chance) -> int:
        while chance.happens(0.5):
            pass
        return 0

    with pytest.raises(UserError, match="does the procedure end"):
        every_outcome(endless)
