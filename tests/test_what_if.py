"""What if: prices that add up, break-evens that are even, and a panel that changes one row only."""

import pandas as pd
import pytest

from quasar_lab import UserError
from quasar_lab.cost_model import expected_tokens, own_machine, predict_step, step_work
from quasar_lab.model_shapes import SHAPES
from quasar_lab.what_if import PARTS, Scenario, price_scenarios
from quasar_lab.widgets.what_if_panel import CHANGED, NGRAM, PLAIN, QUASAR, WhatIfPanel

SHAPE = SHAPES["qwen3-8b"]
MACHINE = own_machine(800, {"INT4": 100, "INT8": 200, "bf16": 100})
SCENARIOS = {
    "plain": Scenario("bf16", 0.0, 0),
    "drafts": Scenario("bf16", 0.35, 5),
    "INT8": Scenario("INT8", 0.35, 5),
    "slow drafter": Scenario("INT8", 0.35, 5, draft_seconds=0.002),
    "4 bits": Scenario("INT4", 0.3, 8),
}


def test_the_parts_are_the_step_and_the_step_gives_the_speed() -> None:
    table = price_scenarios(SHAPE, SCENARIOS, MACHINE, context=1000)
    assert table[list(PARTS)].sum(axis=1).to_numpy() == pytest.approx(table["step_ms"].to_numpy())
    assert (table["drafting"] == [0, 0, 0, 2, 0]).all()
    plain = predict_step(step_work(SHAPE, "bf16", context=1000), MACHINE)
    assert table.loc["plain", "step_ms"] == pytest.approx(plain * 1e3)
    assert table.loc["plain", "speedup"] == 1
    assert (table["tokens_per_second"] * plain).to_numpy() == pytest.approx(table["speedup"])


def test_weights_of_four_bits_are_a_quarter_of_sixteen_and_their_scales() -> None:
    """A 16-bit scale for each 128 weights: 4.125 bits a weight."""
    int4, bf16 = (step_work(SHAPE, kind).layer_bytes for kind in ("INT4", "bf16"))
    assert int4 / bf16 == pytest.approx(4.125 / 16)


def test_break_evens_are_even() -> None:
    table = price_scenarios(SHAPE, SCENARIOS, MACHINE, context=1000, beside="drafts")
    assert table.loc["drafts", "equals_from"] == pytest.approx(0.35, abs=1e-6)
    slow = table.loc["slow drafter"]
    for column, other in (("pays_from", ("INT8", 0)), ("equals_from", ("bf16", 5))):
        acceptance, (verifier, k) = slow[column], other
        same = {
            "slow": Scenario("INT8", acceptance, 5, draft_seconds=0.002),
            "other": Scenario(verifier, 0.35, k),
        }
        if acceptance == 0:  # without an accepted draft it is the faster one already
            priced = price_scenarios(SHAPE, same, MACHINE, context=1000)["speedup"]
            assert priced["slow"] >= priced["other"]
            continue
        priced = price_scenarios(SHAPE, same, MACHINE, context=1000)["speedup"]
        assert priced["slow"] == pytest.approx(priced["other"], rel=1e-6)
    hopeless = {"fast": Scenario("INT4", 0.95, 16), "slow": Scenario("bf16", 0.5, 1)}
    assert price_scenarios(SHAPE, hopeless, MACHINE)["equals_from"].isna().tolist() == [False, True]


def test_wrong_scenarios_are_named() -> None:
    for wrong, message in (
        ({"verifier": "INT2"}, "verifier is 'INT2': choose from INT4, INT8"),
        ({"acceptance": 1.2}, r"acceptance is 1\.2"),
        ({"draft_tokens": -1}, "draft_tokens is -1"),
        ({"draft_seconds": -0.1}, r"draft_seconds is -0\.1"),
    ):
        with pytest.raises(UserError, match=message):
            Scenario(**wrong)
    with pytest.raises(UserError, match="beside is 'nothing': choose from plain"):
        price_scenarios(SHAPE, SCENARIOS, MACHINE, beside="nothing")


@pytest.fixture
def panel():
    panel = WhatIfPanel(Scenario(acceptance=0.35))
    yield panel
    panel.close()


def settle(panel: WhatIfPanel) -> pd.DataFrame:
    panel.flush()
    assert "done" in panel.state.value, panel.state.value
    return panel.view()[2]


def test_the_first_picture_asks_for_four_bits(panel) -> None:
    page = panel.fallback_html()
    assert "data:image/png" in page and "4 bits" in page and "alt=" in page
    _, alt, numbers = panel.view()
    assert list(numbers.index) == [PLAIN, NGRAM, QUASAR, CHANGED]
    assert numbers.loc[CHANGED, "times plain"] > numbers.loc[QUASAR, "times plain"]
    assert f"what if {numbers.loc[CHANGED, 'times plain']:.2f}" in alt


def test_drafts_change_one_row_and_the_machine_all(panel) -> None:
    before = settle(panel)
    panel.verifier.value, panel.acceptance.value = "INT8", 0.2
    panel.draft_tokens.value, panel.draft_ms.value = 3, 2.0
    after = settle(panel)
    assert before.loc[:QUASAR].equals(after.loc[:QUASAR])
    assert after.loc[CHANGED, "L"] == pytest.approx(expected_tokens(0.2, 3))
    machine = panel.machine()
    alone = predict_step(step_work(SHAPE, context=1000), machine, 4)
    assert after.loc[CHANGED, "ms a step"] == pytest.approx(alone * 1e3 + 2)
    panel.bandwidth.value, panel.overhead.value = 100, 4.0
    slower = settle(panel)
    assert (slower["ms a step"] > after["ms a step"]).all()
    # 16-bit weights and cache at 100 GB/s, and 4 ms beside
    read = step_work(SHAPE, "bf16", context=1000).bytes.total / 100e9
    assert slower.loc[PLAIN, "ms a step"] == pytest.approx(read * 1e3 + 4, rel=1e-3)


def test_the_state_says_the_number_of_the_slider(panel) -> None:
    panel.acceptance.value = 0.29 - 0.01  # what the page sends: 0.27999999999999997
    settle(panel)
    assert "chance of acceptance 0.28, tokens" in panel.state.value


def test_a_text_that_is_always_accepted_can_be_the_start() -> None:
    """Guards the slider: the acceptance found from a recorded text may lie beyond its end."""
    panel = WhatIfPanel(Scenario(acceptance=1.0))
    assert panel.acceptance.value == 0.95 and settle(panel).loc[QUASAR, "L"] == 6
    panel.close()
