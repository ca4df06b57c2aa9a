"""The table: counted alike on both sides, and every gain split into its two terms."""

import pandas as pd
import pytest

from quasar_lab import UserError
from quasar_lab.summary import common_prefix, split_gain, summarize, verdict


def row(method: str, question: int, tokens: list[int], steps: int, seconds: float, **more) -> dict:
    return {
        "task": "t", "question_id": question, "turn": 0, "temperature": 0.0, "seed": 0,
        "method": method, "engine": "e", "prompt_tokens": 3, "tokens": tokens,
        "new_tokens": len(tokens), "steps": steps, "drafted": 0, "accepted": 0,
        "tokens_per_second": len(tokens) / seconds, "decode_seconds": seconds, **more,
    }  # fmt: skip


def rows(seconds: dict[str, float]) -> pd.DataFrame:
    text = list(range(12))
    steps = {"plain": 12, "ngram": 6, "int8": 12, "quasar": 4}
    return pd.DataFrame(
        [
            row(method, question, text, steps[method], seconds[method] * (1 + question))
            for question in range(3)
            for method in steps
        ]
    )


def test_plain_against_plain_is_one() -> None:
    """Case 21: with the same counting on both sides, plain over plain is exactly 1."""
    table = summarize(rows({"plain": 2.0, "ngram": 1.5, "int8": 1.0, "quasar": 0.5}))
    plain = table.loc["plain"]
    assert plain["speedup"] == plain["speedup_low"] == plain["speedup_high"] == 1.0
    assert plain["mean_acceptance_length"] == 1.0
    assert plain["verify_step_in_plain_steps"] == 1.0


def test_longer_acceptance_with_a_slower_step_shows_both_terms() -> None:
    """Case 22: L doubles, the step costs three times as much: 2 / 3, and both are in the table."""
    table = summarize(rows({"plain": 2.0, "ngram": 3.0, "int8": 1.0, "quasar": 1.0}))
    ngram = table.loc["ngram"]
    assert ngram["mean_acceptance_length"] == pytest.approx(2)
    assert ngram["verify_step_in_plain_steps"] == pytest.approx(3)
    assert ngram["speedup"] == pytest.approx(2 / 3)


def test_a_gain_is_the_product_of_its_terms() -> None:
    table = summarize(rows({"plain": 2.0, "ngram": 1.5, "int8": 1.0, "quasar": 0.5}))
    gain = split_gain(table, "quasar", "ngram")
    assert gain.speedup == pytest.approx(gain.length_term * gain.step_term)
    assert gain.speedup == pytest.approx(3.0)
    assert gain.length_term == pytest.approx(1.5)
    with pytest.raises(UserError, match="no method 'eagle'"):
        split_gain(table, "eagle", "ngram")


def test_totals_not_means_of_ratios() -> None:
    """A short answer must not weigh as much as a long one: L is tokens over steps of all."""
    data = pd.DataFrame(
        [
            row("plain", 0, [1] * 100, 100, 10.0),
            row("plain", 1, [1], 1, 1.0),
            row("ngram", 0, [1] * 100, 50, 10.0),
            row("ngram", 1, [1], 1, 1.0),
        ]
    )
    assert summarize(data).loc["ngram", "mean_acceptance_length"] == pytest.approx(101 / 51)


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    data = pd.DataFrame(
        [row("plain", 0, [1, 2, 3, 4], 4, 1.0), row("int8", 0, [1, 2, 9, 4], 4, 1.0)]
    )
    assert summarize(data)["same_as_baseline"].to_dict() == {"plain": 1.0, "int8": 0.5}
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0


def test_the_verdict_is_honest_about_a_slow_int8() -> None:
    """Case 34: INT8 alone is named first-hand, slower included, and so is a better method."""
    text = verdict(summarize(rows({"plain": 1.0, "ngram": 0.5, "int8": 2.0, "quasar": 0.9})))
    assert "INT8 alone is 2.00x slower" in text
    assert "the fastest method here was not Quasar but n-gram" in text
    text = verdict(summarize(rows({"plain": 2.0, "ngram": 1.5, "int8": 1.0, "quasar": 0.5})))
    assert "INT8 alone is 2.00x faster" in text and "not Quasar" not in text


def test_rows_without_the_baseline_are_refused() -> None:
    with pytest.raises(UserError, match="no method 'plain'"):
        summarize(pd.DataFrame([row("int8", 0, [1], 1, 1.0)]))
