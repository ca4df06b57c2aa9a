"""From measured rows to the table: speed, and why.

With the same counting on both sides, a method's speedup over plain decoding is exactly S = L / r:
L tokens a verification step, r the cost of that step in plain steps (algorithms: section 9). A gain
of one method over another splits into an L term and a step term, whose product it is.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from quasar_lab.errors import UserError
from quasar_lab.methods import BASELINE, METHODS
from quasar_lab.peers import PEERS

_RESAMPLES = 2000


def label_of(method: str) -> str:
    """What figures and tables call a method or a peer."""
    known = METHODS.get(method) or PEERS.get(method)
    return known.label if known else method


def _pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """Tokens, steps and seconds of each method, summed over its generations."""
    return rows.groupby("method", sort=False)[
        ["new_tokens", "steps", "decode_seconds", "drafted", "accepted"]
    ].sum()


def _ratios(totals: pd.DataFrame, baseline: str) -> pd.DataFrame:
    steps = totals["steps"].where(totals["steps"] > 0)  # a peer may not tell
    step_seconds = totals["decode_seconds"] / steps
    speed = totals["new_tokens"] / totals["decode_seconds"]
    return pd.DataFrame(
        {
            "speedup": speed / speed[baseline],
            "mean_acceptance_length": totals["new_tokens"] / steps,
            "verify_step_in_plain_steps": step_seconds / step_seconds[baseline],
            "step_ms": step_seconds * 1e3,
        }
    )


def summarize(rows: pd.DataFrame, *, baseline: str = BASELINE, seed: int = 0) -> pd.DataFrame:
    """One row a method, from the rows of `run_benchmark`.

    tokens_per_second is the median over generations; speedup, mean_acceptance_length (L) and
    verify_step_in_plain_steps (r) are of the totals, so that speedup = L / r; L and r are NaN for
    a peer that does not tell its steps;
    _low and _high of the first two bound 95 % of 2,000 resamplings of the prompts;
    same_as_baseline: share of the baseline's tokens before the first difference, pooled.
    """
    if baseline not in set(rows["method"]):
        raise UserError(f"the rows hold no method {baseline!r} to compare with")
    table = _ratios(_pooled(rows), baseline)
    table.insert(0, "label", [label_of(name) for name in table.index])
    table.insert(1, "tokens_per_second", rows.groupby("method")["tokens_per_second"].median())
    draws = resample(rows, baseline, list(table.index), seed)
    for name, position in (("mean_acceptance_length", 4), ("speedup", 3)):
        for bound, values in reversed(interval(draws[name]).items()):
            table.insert(position, f"{name}_{bound}", values)
    drafted = _pooled(rows)["drafted"]
    table["draft_acceptance"] = (_pooled(rows)["accepted"] / drafted).where(drafted > 0)
    table["same_as_baseline"] = _agreement(rows, baseline)
    return table


def resample(
    rows: pd.DataFrame, baseline: str, methods: list[str], seed: int = 0
) -> dict[str, np.ndarray]:
    """What other prompts of the same kind might have given: 2,000 draws of each method's figures.

    "speedup" over the baseline and "mean_acceptance_length", each [draws, methods]. Whole prompts
    are drawn, with replacement, since their turns belong together.
    """
    counted = ["new_tokens", "decode_seconds", "steps"]
    groups = [_pooled(group).loc[methods] for _, group in rows.groupby(["task", "question_id"])]
    stacked = np.stack([group[counted].to_numpy() for group in groups])
    rng = np.random.default_rng(seed)
    draws = rng.integers(len(groups), size=(_RESAMPLES, len(groups)))
    tokens, seconds, steps = np.moveaxis(stacked[draws].sum(axis=1), -1, 0)
    speed = tokens / seconds
    return {
        "speedup": speed / speed[:, [methods.index(baseline)]],
        "mean_acceptance_length": tokens / steps,
    }


def interval(draws: np.ndarray) -> dict[str, np.ndarray]:
    """The bounds of the middle 95 % of the draws: {"low": [methods], "high": [methods]}."""
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    return {"low": low, "high": high}


def _agreement(rows: pd.DataFrame, baseline: str) -> pd.Series:
    keys = ["task", "question_id", "turn", "temperature", "seed"]
    reference = rows[rows["method"] == baseline].set_index(keys)["tokens"]
    shares = {}
    for method, group in rows.groupby("method"):
        same = total = 0
        for key, tokens in group.set_index(keys)["tokens"].items():
            expected = reference[key]
            same += common_prefix(tokens, expected)
            total += len(expected)
        shares[method] = same / total
    return pd.Series(shares)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True)
class GainSplit:
    """speedup of one method over another = length_term * step_term."""

    speedup: float
    length_term: float
    step_term: float


def split_gain(summary: pd.DataFrame, method: str, over: str) -> GainSplit:
    """How much of a gain is a longer acceptance length, and how much a cheaper verify step.

    S_a / S_b = (L_a / L_b) * (r_b / r_a), algorithms section 9.
    """
    for name in (method, over):
        if name not in summary.index:
            raise UserError(
                f"the summary has no method {name!r}: it has {', '.join(summary.index)}"
            )
    a, b = summary.loc[method], summary.loc[over]
    length = a["mean_acceptance_length"] / b["mean_acceptance_length"]
    step = b["verify_step_in_plain_steps"] / a["verify_step_in_plain_steps"]
    return GainSplit(length * step, length, step)


def verdict(summary: pd.DataFrame) -> str:
    """One sentence on what this machine showed, whichever way it went."""
    quasar = summary.loc["quasar"]
    ngram, plain_int8 = summary.loc["ngram"], summary.loc["int8"]
    gain = split_gain(summary, "quasar", "ngram")
    direction = "faster" if plain_int8["speedup"] > 1 else "slower"
    factor = max(plain_int8["speedup"], 1 / plain_int8["speedup"])
    best = summary["speedup"].idxmax()
    result = (
        f"On this machine Quasar decoded {quasar['speedup']:.2f}x as fast as plain full precision "
        f"(95 % of resamplings: {quasar['speedup_low']:.2f} to {quasar['speedup_high']:.2f}) and "
        f"{gain.speedup:.2f}x as fast as n-gram speculation in full precision "
        f"({ngram['speedup']:.2f}x): {gain.length_term:.2f}x from the acceptance length, "
        f"{gain.step_term:.2f}x from the verify step; INT8 alone is {factor:.2f}x {direction} "
        "than full precision"
    )
    if best != "quasar":
        result += f", and the fastest method here was not Quasar but {summary.loc[best, 'label']}"
    return result + "."
