"""The fidelity explorer: drawn at once from a table, and no model in sight."""

import numpy as np
import pandas as pd
import pytest

from quasar_lab import UserError
from quasar_lab.widgets.fidelity_explorer import EVERYTHING, FidelityExplorer


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    rows = [
        {"variant": v, "text": t, "label": ("chat", "code")[t], "temperature": temperature,
         "kl": rng.exponential(0.01), "reverse_kl": 0.01, "js": 0.002, "tv": rng.uniform(),
         "top1_match": bool(rng.uniform() < 0.9)}
        for v in ("m2", "none") for t in (0, 1) for temperature in (0.5, 1.0) for _ in range(20)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture
def explorer(frame):
    panel = FidelityExplorer(frame)
    yield panel
    panel.close()


def test_the_first_picture_is_there(explorer) -> None:
    page = explorer.fallback_html()
    assert "data:image/png" in page and "95 % from" in page and "alt=" in page
    assert explorer.temperature.value == 1.0 and explorer.task.value == EVERYTHING


def test_settings_choose_the_rows(explorer, frame) -> None:
    explorer.task.value = "code"
    explorer.variant.value = "m2"
    explorer.temperature.value = 0.5
    explorer.metric.value = "tv"
    explorer.flush()
    assert "done" in explorer.state.value, explorer.state.value
    chosen = frame[(frame["label"] == "code") & (frame["variant"] == "m2")]
    chosen = chosen[chosen["temperature"] == 0.5]
    assert explorer.rows().equals(chosen)
    _, alt, numbers = explorer.view()
    assert numbers.loc["m2", "mean"] == pytest.approx(chosen["tv"].mean())
    assert numbers.loc["m2", "tokens"] == 20 and "total variation" in alt


def test_every_metric_draws(explorer) -> None:
    seen = {explorer.output.value}
    for value in ("tv", "js", "top1_match", "reverse_kl", "kl"):
        explorer.metric.value = value
        explorer.flush()
        assert "done" in explorer.state.value, explorer.state.value
        seen.add(explorer.output.value)
    assert len(seen) == 5  # back at the first


def test_nothing_at_these_settings_is_said(explorer) -> None:
    explorer.frame = explorer.frame[explorer.frame["variant"] == "m2"]
    explorer.variant.value = "none"
    explorer.flush()
    assert "no tokens at these settings" in explorer.state.value


def test_a_table_without_its_columns() -> None:
    with pytest.raises(UserError, match="no column 'js'"):
        FidelityExplorer(pd.DataFrame({"variant": [], "kl": []}))
