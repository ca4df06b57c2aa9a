"""The outlier explorer: drawn at once, quick, and readable without a kernel."""

import re

import pytest
import torch
from tiny_models import tiny_model

from quasar_lab import UserError, calibrate
from quasar_lab.widgets.outlier_explorer import OutlierExplorer
from quasar_lab.widgets.panel import Panel
from quasar_lab.widgets.picture_panel import numbers_html


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def stats(model):
    return calibrate(model, [torch.arange(1, 40)])


@pytest.fixture
def explorer(model, stats):
    panel = OutlierExplorer(model, stats)
    yield panel
    panel.close()


def test_the_first_picture_is_there(explorer, stats) -> None:
    """A saved page must be readable: the picture is drawn when the cell runs."""
    page = explorer.fallback_html()
    assert "data:image/png" in page and "error, median token" in page
    assert "display: none" not in page  # hidden only where the widget is alive
    worst = max(stats[name].outlier_ratio for name in stats if name != "lm_head")
    assert explorer.study().name != "lm_head"
    assert stats[explorer.study().name].outlier_ratio == worst


def test_every_control_changes_the_picture(explorer) -> None:
    seen = {explorer.output.value}
    for control, value in (
        (explorer.layer, (explorer.layer.value + 1) % 3),
        (explorer.projection, "self_attn.o_proj"),
        (explorer.alpha, 0.85),
        (explorer.method, "m2"),
    ):
        control.value = value
        explorer.flush()
        assert "done" in explorer.state.value, explorer.state.value
        seen.add(explorer.output.value)
    assert len(seen) == 5
    assert explorer.alpha.disabled and "m2" in explorer.state.value
    explorer.method.value = "none"
    explorer.flush()
    numbers = explorer.study().numbers()
    assert numbers.loc["before"].equals(numbers.loc["after"])


def test_five_quick_changes_give_one_picture(explorer, monkeypatch) -> None:
    """Case 36."""
    drawn = []
    view = explorer.view
    monkeypatch.setattr(explorer, "view", lambda: drawn.append(explorer.alpha.value) or view())
    for alpha in (0.1, 0.2, 0.3, 0.4, 0.9):
        explorer.alpha.value = alpha
    explorer.flush()
    assert drawn == [0.9]


def test_the_model_and_the_statistics_must_belong_together(model, stats) -> None:
    with pytest.raises(UserError, match="calibrate this very"):
        OutlierExplorer(model, {})
    assert "outlier-explorer" not in Panel._open


def test_a_second_explorer_replaces_the_first(model, stats) -> None:
    first = OutlierExplorer(model, stats)
    second = OutlierExplorer(model, stats)
    assert first._closed and Panel._open["outlier-explorer"] is second
    second.close()


def test_numbers_are_escaped() -> None:
    import pandas as pd

    page = numbers_html(pd.DataFrame({"<b>": [1.23456, float("nan")]}, index=["<i>", "x"]))
    assert "<b>" not in page and "<i>" not in page and "1.23<" in page and "–" in page
    assert re.search(r'scope="row"', page)
