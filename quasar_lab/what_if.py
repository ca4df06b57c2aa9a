"""What if? The price of speculative decoding in parts, and what one other number would make of it.

A scenario is a verifier with its drafts. Beside its price stand two break-evens: the chance of
acceptance from which its drafts pay, and the one from which it is as fast as another scenario.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from quasar_lab.checks import check_number
from quasar_lab.cost_model import (
    FORMAT_BYTES,
    Machine,
    break_even_acceptance,
    expected_tokens,
    predict_speedups,
    step_parts,
    step_work,
)
from quasar_lab.errors import UserError
from quasar_lab.model_shapes import ModelShape

PARTS = ("layers", "output layer", "attention", "overhead", "drafting")


@dataclass(frozen=True, slots=True)
class Scenario:
    """How a text is decoded.

    verifier: format of its layers' linears ("INT4" means weights of 4 bits, computed with in 16);
    acceptance: chance that a draft is accepted; draft_tokens: drafted a step, 0 for plain decoding;
    draft_seconds: drafting them, a step.
    """

    verifier: str = "INT8"
    acceptance: float = 0.4
    draft_tokens: int = 5
    draft_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.verifier not in FORMAT_BYTES:
            known = ", ".join(FORMAT_BYTES)
            raise UserError(f"verifier is {self.verifier!r}: choose from {known}")
        expected_tokens(check_number("acceptance", self.acceptance), self.draft_tokens)  # checks
        check_number("draft_seconds", self.draft_seconds)

    def speedups(
        self, shape: ModelShape, machine: Machine, draft_tokens: Iterable[int], *, context: int = 0
    ) -> pd.DataFrame:
        """`predict_speedups` over plain 16-bit decoding, for these draft lengths."""
        plain, verify = (step_work(shape, k, context=context) for k in ("bf16", self.verifier))
        return predict_speedups(
            plain, verify, machine, self.acceptance, draft_tokens, draft_seconds=self.draft_seconds
        )


def price_scenarios(
    shape: ModelShape,
    scenarios: Mapping[str, Scenario],
    machine: Machine,
    *,
    context: int = 0,
    beside: str | None = None,
) -> pd.DataFrame:
    """One row a scenario, all on one machine and model; speedups are over plain 16-bit decoding.

    context: tokens in the KV cache; beside: the scenario that the others are to be as fast as
    (None: the first).

    Returns columns layers, output layer, attention, overhead and drafting (milliseconds of a step),
    step_ms (their sum), L, tokens_per_second, speedup, pays_from (the chance of acceptance from
    which drafts are better than none) and equals_from (from which it is as fast as `beside`); NaN
    where no chance is enough. Raises UserError for a scenario that is not there.
    """
    beside = next(iter(scenarios)) if beside is None else beside
    if beside not in scenarios:
        raise UserError(f"beside is {beside!r}: choose from {', '.join(scenarios)}")
    rows = {}
    for name, scenario in scenarios.items():
        k = scenario.draft_tokens
        priced = scenario.speedups(shape, machine, [k], context=context).loc[k]
        work = step_work(shape, scenario.verifier, context=context)
        seconds = step_parts(work, machine, k + 1)
        seconds["drafting"] = scenario.draft_seconds if k else 0.0
        rows[name] = {part: seconds[part] * 1e3 for part in PARTS} | {
            "step_ms": priced["verify_ms"],
            "L": priced["L"],
            "tokens_per_second": 1e3 * priced["L"] / priced["verify_ms"],
            "speedup": priced["speedup"],
            "pays_from": priced["break_even_acceptance"],
        }
    table = pd.DataFrame.from_dict(rows, orient="index")
    length_to_match = table["step_ms"] * table.loc[beside, "tokens_per_second"] / 1e3
    table["equals_from"] = [
        break_even_acceptance(length_to_match[name], scenario.draft_tokens)
        for name, scenario in scenarios.items()
    ]
    return table
