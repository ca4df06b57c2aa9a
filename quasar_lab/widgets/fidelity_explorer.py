"""Choose text, temperature, metric and variants: how far are the predictions apart?

Everything is drawn from one table, made beforehand by `fidelity_study.compare_at_temperatures`.
"""

import ipywidgets as widgets
import pandas as pd
from matplotlib.figure import Figure

from quasar_lab.errors import UserError
from quasar_lab.fidelity_runs import bootstrap_interval
from quasar_lab.plots.fidelity import METRICS, plot_explorer
from quasar_lab.widgets.picture_panel import PicturePanel

EVERYTHING = "all"
_COLUMNS = {"variant", "text", "label", "temperature", *METRICS}


class FidelityExplorer(PicturePanel):
    """Controls before `plot_explorer`; shown with all texts and variants, and KL.

    frame: one row a token, variant and temperature.
    """

    def __init__(self, frame: pd.DataFrame, key: str = "fidelity-explorer") -> None:
        if missing := sorted(_COLUMNS - set(frame)):
            raise UserError(
                f"the table has no column {missing[0]!r}: pass what compare_at_temperatures gives"
            )
        self.frame = frame
        temperatures = sorted(frame["temperature"].unique().tolist())
        self.task = widgets.Dropdown(
            options=[EVERYTHING, *dict.fromkeys(frame["label"])], description="task"
        )
        self.temperature = widgets.SelectionSlider(
            options=temperatures, value=min(temperatures, key=lambda t: abs(t - 1)),
            description="temperature", continuous_update=False,
        )  # fmt: skip
        self.metric = widgets.Dropdown(
            options={label: name for name, (label, _) in METRICS.items()}, value="kl",
            description="metric", layout={"width": "26em"},
        )  # fmt: skip
        self.variant = widgets.Dropdown(
            options=[EVERYTHING, *dict.fromkeys(frame["variant"])], description="variant"
        )
        super().__init__(key, [self.task, self.temperature, self.metric, self.variant])

    def rows(self) -> pd.DataFrame:
        """The tokens that the present settings choose."""
        rows = self.frame[self.frame["temperature"] == self.temperature.value]
        for column, chosen in (("label", self.task.value), ("variant", self.variant.value)):
            if chosen != EVERYTHING:
                rows = rows[rows[column] == chosen]
        if rows.empty:
            raise UserError("no tokens at these settings: choose another task or variant")
        return rows

    def view(self) -> tuple[Figure, str, pd.DataFrame]:
        rows, metric = self.rows(), self.metric.value
        numbers = {}
        for name in dict.fromkeys(rows["variant"]):
            part = rows[rows["variant"] == name]
            values = part[metric].astype(float)
            low, high = bootstrap_interval(values, part["text"], num_resamples=500)
            numbers[name] = {
                "tokens": len(part),
                "mean": values.mean(),
                "95 % from": low,
                "to": high,
                "median": values.median(),
                "largest": values.max(),
            }
        table = pd.DataFrame.from_dict(numbers, orient="index").astype({"tokens": object})
        means = ", ".join(f"{name} {row['mean']:.3g}" for name, row in numbers.items())
        label = METRICS[metric][0]
        alt = f"Distribution over tokens of {label} by variant; means: {means}."
        return plot_explorer(rows, metric), alt, table
