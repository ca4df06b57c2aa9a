"""Drag the share of layers that stay: how far are the predictions, and what does the model write?

Everything is drawn from one table, made beforehand by `pruning_study.prune_and_compare`.
"""

from typing import Any

import ipywidgets as widgets
import pandas as pd
from matplotlib.figure import Figure

from quasar_lab.errors import UserError
from quasar_lab.plots.pruning import plot_collapse
from quasar_lab.widgets.picture_panel import PicturePanel

_COLUMNS = ("strategy", "keep", "layers", "kl", "tv", "top1", "text")


class PruningExplorer(PicturePanel):
    """A keep-ratio slider and the strategy before `plot_collapse`, the numbers and the text.

    table: from `prune_and_compare`; int8: the INT8 row of `summarize_fidelity`, drawn as a line.
    """

    def __init__(
        self, table: pd.DataFrame, int8: Any = None, key: str = "pruning-explorer"
    ) -> None:
        if missing := [name for name in _COLUMNS if name not in table]:
            raise UserError(
                f"the table has no column {missing[0]!r}: pass what prune_and_compare gives"
            )
        self.table, self.int8 = table, int8
        keeps = sorted(table["keep"].unique().tolist(), reverse=True)
        self.keep = widgets.SelectionSlider(
            options=[(f"{keep:.0%}", keep) for keep in keeps], description="layers kept",
            continuous_update=False, layout={"width": "24em"},
        )  # fmt: skip
        self.strategy = widgets.Dropdown(
            options=list(dict.fromkeys(table["strategy"])), description="strategy"
        )
        super().__init__(key, [self.keep, self.strategy])

    def view(self) -> tuple[Figure, str, pd.DataFrame]:
        chosen = (self.strategy.value, self.keep.value)
        rows = self.table[(self.table["strategy"] == chosen[0]) & (self.table["keep"] == chosen[1])]
        if rows.empty:
            raise UserError("this ratio was not measured with this strategy: choose another")
        row = rows.iloc[0]
        numbers = {
            "layers": str(row["layers"]),
            "mean KL, nats": float(row["kl"]),
            "mean TV": float(row["tv"]),
            "same top token": f"{row['top1']:.0%}",
            "it writes": " ".join(str(row["text"]).split()),
        }
        figure = plot_collapse(self.table, self.int8, chosen)
        alt = (
            f"KL and top-1 agreement over the share of layers kept; {chosen[0]} at "
            f"{chosen[1]:.0%}: KL {row['kl']:.3g}, top-1 {row['top1']:.0%}."
        )
        return (
            figure,
            alt,
            pd.DataFrame(numbers, index=[""]).astype(object).T.rename(columns={"": "value"}),
        )
