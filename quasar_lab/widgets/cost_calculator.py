"""What would it bring elsewhere? The cost model with a reader's chip, model and text."""

from collections.abc import Mapping

import ipywidgets as widgets
import pandas as pd
from matplotlib.figure import Figure

from quasar_lab.cost_model import (
    Machine,
    break_even_draft_length,
    own_machine,
    predict_speedups,
    predict_step,
    step_work,
)
from quasar_lab.data_sheets import DATA_SHEETS
from quasar_lab.model_shapes import SHAPES
from quasar_lab.plots.cost import plot_speedups
from quasar_lab.widgets.picture_panel import PicturePanel

OWN = "my own"


class CostCalculator(PicturePanel):
    """Controls before `cost_model.predict_speedups`: n-gram in bf16 beside Quasar.

    measured: name -> machine, offered beside the chips of the data sheets (this machine, say).
    """

    def __init__(
        self, measured: Mapping[str, Machine] | None = None, key: str = "cost-calculator"
    ) -> None:
        self.machines = {**(measured or {}), **DATA_SHEETS}
        wide = {"layout": {"width": "20em"}, "style": {"description_width": "initial"}}
        self.chip = widgets.Dropdown(options=[*self.machines, OWN], description="chip", **wide)
        self.model = widgets.Dropdown(
            options=list(SHAPES), value="qwen3-8b", description="model", **wide
        )
        self.acceptance = widgets.FloatSlider(
            value=0.4, min=0.0, max=0.95, step=0.05, description="chance of acceptance",
            continuous_update=False, **wide,
        )  # fmt: skip
        self.context = widgets.SelectionSlider(
            options=[0, 512, 2048, 8192, 32768], value=512, description="context",
            continuous_update=False, **wide,
        )  # fmt: skip
        self.bandwidth = widgets.BoundedFloatText(
            value=100.0, min=1.0, max=1e5, description="own: GB/s", **wide
        )
        self.operations = widgets.BoundedFloatText(
            value=4.0, min=0.01, max=1e5, description="own: bf16, 1e12 op/s", **wide
        )
        super().__init__(
            key,
            [
                self.chip, self.model, self.acceptance, self.context, self.bandwidth,
                self.operations,
            ],
        )  # fmt: skip

    def machine(self) -> Machine:
        """The chosen one; a chip of one's own computes twice as fast in INT8 as in bf16."""
        if self.chip.value != OWN:
            return self.machines[self.chip.value]
        rate = self.operations.value
        return own_machine(self.bandwidth.value, {"bf16": rate, "INT8": 2 * rate}, name=OWN)

    def view(self) -> tuple[Figure, str, pd.DataFrame]:
        machine, shape = self.machine(), SHAPES[self.model.value]
        plain = step_work(shape, "bf16", context=self.context.value)
        works = {"n-gram, bf16": plain, "Quasar": step_work(shape, context=self.context.value)}
        tables = {
            name: predict_speedups(plain, work, machine, self.acceptance.value)
            for name, work in works.items()
        }
        numbers = {
            name: {
                "GB read a step": work.bytes.total / 1e9,
                "1 token, ms": predict_step(work, machine) * 1e3,
                "6 tokens, ms": predict_step(work, machine, 6) * 1e3,
                "tokens/s without drafts": 1 / predict_step(work, machine),
                "best: tokens/s": tables[name]["speedup"].max() / predict_step(plain, machine),
                "best draft": str(tables[name]["speedup"].idxmax()),
                "drafts pay up to": str(break_even_draft_length(tables[name])),
            }
            for name, work in works.items()
        }
        best = ", ".join(f"{name} {table['speedup'].max():.2f}" for name, table in tables.items())
        alt = f"Predicted speedup over plain bf16 by drafted tokens; best: {best}."
        return plot_speedups(tables), alt, pd.DataFrame.from_dict(numbers, orient="index")
