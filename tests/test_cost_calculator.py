"""The calculator: a picture at once, chips of the reader's own, and figures from tables."""

import pandas as pd
import pytest

from quasar_lab.cost_model import own_machine, predict_step, step_work
from quasar_lab.data_sheets import DATA_SHEETS
from quasar_lab.model_shapes import SHAPES
from quasar_lab.plots.cost import plot_prediction, plot_scaling
from quasar_lab.widgets.cost_calculator import OWN, CostCalculator


@pytest.fixture
def calculator():
    panel = CostCalculator({"measured here": own_machine(30, {"bf16": 0.2, "INT8": 0.6})})
    yield panel
    panel.close()


def test_the_first_picture_is_of_this_machine(calculator) -> None:
    page = calculator.fallback_html()
    assert "data:image/png" in page and "tokens/s without drafts" in page and "alt=" in page
    assert calculator.machine().read_rate["bf16"] == 30e9


def test_settings_reach_the_model(calculator) -> None:
    calculator.chip.value, calculator.model.value = "H200 SXM", "openpangu-7b"
    calculator.context.value, calculator.acceptance.value = 8192, 0.6
    calculator.flush()
    assert "done" in calculator.state.value, calculator.state.value
    _, alt, numbers = calculator.view()
    work = step_work(SHAPES["openpangu-7b"], context=8192)
    expected = predict_step(work, DATA_SHEETS["H200 SXM"], 6) * 1e3
    assert numbers.loc["Quasar", "6 tokens, ms"] == pytest.approx(expected)
    assert "Quasar" in alt


def test_a_chip_of_ones_own(calculator) -> None:
    calculator.chip.value, calculator.bandwidth.value = OWN, 200.0
    calculator.operations.value = 10.0
    machine = calculator.machine()
    assert machine.read_rate == {"bf16": 200e9, "INT8": 200e9}
    assert machine.operation_rate == {"bf16": 10e12, "INT8": 20e12}


def test_predictions_are_drawn_for_each_target_and_quantity() -> None:
    rows = [{"target": t, "x": x, "measured_ms": x + 1.0, "predicted_ms": x + 1.1}
            for t in ("full precision", "INT8") for x in (1, 4, 16, 64)]  # fmt: skip
    table = pd.DataFrame(rows)
    assert len(plot_prediction(table, "tokens").axes[0].lines) == 4
    figure = plot_scaling({"tokens in the cache": table, "tokens a step": table[table["x"] < 20]})
    assert [axes.get_xlabel() for axes in figure.axes] == ["tokens in the cache", "tokens a step"]
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "linear"]
