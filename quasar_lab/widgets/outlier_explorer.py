"""Pick a linear and a way to smooth it; see its channels even out (or not), and the error left.

Everything comes from recorded statistics and their sample, no model runs: a change shows within
half a second.
"""

import functools
from collections.abc import Mapping

import ipywidgets as widgets
import pandas as pd
from matplotlib.figure import Figure

from quasar_lab.activation_stats import ActivationStats
from quasar_lab.errors import UserError
from quasar_lab.outlier_study import LinearStudy, groups_by_reader, study_linear
from quasar_lab.plots.outliers import plot_study
from quasar_lab.structure import as_module, decoder_layers, linear_layers
from quasar_lab.widgets.picture_panel import PicturePanel

METHOD_LABELS = {"none": "none", "SmoothQuant": "smoothquant", "m2": "m2"}


class OutlierExplorer(PicturePanel):
    """Layer, projection, method and alpha; shown with m2 at the layer with the largest outlier.

    model: as `calibrate` takes it; stats: what `calibrate` returned for it.
    """

    def __init__(
        self,
        model: object,
        stats: Mapping[str, ActivationStats],
        key: str = "outlier-explorer",
    ) -> None:
        self.model, self.stats = as_module(model), stats
        self.groups = groups_by_reader(self.model)
        self.layers = [
            {name.removeprefix(f"{prefix}."): name for name in linear_layers(self.model)
             if name.startswith(f"{prefix}.") and name in stats}
            for prefix in decoder_layers(self.model)
        ]  # fmt: skip
        if not any(self.layers):
            raise UserError("the statistics name no linear of this model: calibrate this very one")
        # going back to a setting is instant; few, as a study of a bfloat16 model holds a float copy
        self._study = functools.lru_cache(maxsize=8)(self._compute)
        worst = max(
            (stats[name].outlier_ratio, index, projection)
            for index, names in enumerate(self.layers)
            for projection, name in names.items()
        )
        slider = {"continuous_update": False, "layout": {"width": "20em"}}
        self.layer = widgets.IntSlider(
            worst[1], min=0, max=len(self.layers) - 1, description="layer", **slider
        )
        self.projection = widgets.Dropdown(
            options=list(self.layers[worst[1]]), value=worst[2], description="projection"
        )
        self.method = widgets.ToggleButtons(
            options=METHOD_LABELS, value="smoothquant", description="method",
            style={"button_width": "9em"},
        )  # fmt: skip
        self.alpha = widgets.FloatSlider(
            0.5, min=0, max=1, step=0.05, description="alpha", **slider
        )
        super().__init__(key, [self.layer, self.projection, self.method, self.alpha])

    def study(self) -> LinearStudy:
        """The linear at the present settings."""
        names = self.layers[self.layer.value]
        if self.projection.value not in names:
            raise UserError(f"layer {self.layer.value} has no {self.projection.value}")
        alpha = self.alpha.value if self.method.value == "smoothquant" else 0.5
        return self._study(names[self.projection.value], self.method.value, round(alpha, 2))

    def _compute(self, name: str, method: str, alpha: float) -> LinearStudy:
        return study_linear(self.model, self.stats, name, method, alpha, groups=self.groups)

    def view(self) -> tuple[Figure, str, pd.DataFrame]:
        study = self.study()
        self.alpha.disabled = self.method.value != "smoothquant"
        numbers = study.numbers()
        before, after = numbers["error, median token"]
        alt = (
            f"Channels of {study.name} before and after smoothing ({study.method}): the largest "
            f"activation is {numbers.iloc[0, 0]:.3g} times the median before and "
            f"{numbers.iloc[1, 0]:.3g} times after; the output's median error goes from "
            f"{before:.2g} to {after:.2g}."
        )
        return plot_study(study), alt, numbers
