"""What if the verifier had 4 bits, the text were harder to guess, the memory twice as fast?"""

import ipywidgets as widgets
import pandas as pd
from matplotlib.figure import Figure

from quasar_lab.cost_model import Machine
from quasar_lab.model_shapes import SHAPES, ModelShape
from quasar_lab.plots.cost import plot_scenarios
from quasar_lab.what_if import Scenario, price_scenarios
from quasar_lab.widgets.picture_panel import PicturePanel

PLAIN, NGRAM, QUASAR, CHANGED = "plain, 16 bit", "n-gram, 16 bit", "Quasar", "what if"
LENGTHS = range(17)
_VERIFIERS = {"4 bits (weights only)": "INT4", "8 bits (INT8)": "INT8", "16 bits (bf16)": "bf16"}


class WhatIfPanel(PicturePanel):
    """Controls before `what_if.price_scenarios`.

    The verifier and its drafts belong to the row "what if" alone, the rows that it stands beside
    keep `start`'s; the machine belongs to all. The first question is what 4 bits would bring.
    start: how a text was decoded; shape: the model that it is priced for; context: tokens in the
    KV cache.
    """

    def __init__(
        self,
        start: Scenario | None = None,
        shape: ModelShape = SHAPES["qwen3-8b"],
        context: int = 1000,
        key: str = "what-if",
    ) -> None:
        self.start_scenario = start = start or Scenario()
        self.shape, self.context = shape, context
        wide = {"layout": {"width": "24em"}, "style": {"description_width": "11em"}}
        dragged = {**wide, "continuous_update": False}
        self.verifier = widgets.Dropdown(
            options=_VERIFIERS, value="INT4", description="verifier's weights", **wide
        )
        self.acceptance = widgets.FloatSlider(
            value=round(start.acceptance, 2), min=0.0, max=0.95, step=0.01,
            description="chance of acceptance", **dragged,
        )  # fmt: skip
        self.draft_tokens = widgets.IntSlider(
            value=start.draft_tokens, min=LENGTHS[0], max=LENGTHS[-1],
            description="tokens drafted a step", **dragged,
        )  # fmt: skip
        self.draft_ms = widgets.FloatSlider(
            value=1e3 * start.draft_seconds, min=0.0, max=20.0, step=0.1,
            description="drafting them, ms", **dragged,
        )  # fmt: skip
        self.bandwidth = widgets.SelectionSlider(
            options=[25, 50, 100, 200, 400, 800, 1600, 3200, 4800], value=800,
            description="machine: GB/s", **dragged,
        )  # fmt: skip
        self.operations = widgets.SelectionSlider(
            options=[0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], value=100,
            description="bf16, 1e12 op/s", **dragged,
        )  # fmt: skip
        self.overhead = widgets.FloatSlider(
            value=1.0, min=0.0, max=10.0, step=0.1, description="overhead of a step, ms", **dragged
        )
        super().__init__(
            key,
            [
                self.verifier, self.acceptance, self.draft_tokens, self.draft_ms, self.bandwidth,
                self.operations, self.overhead,
            ],
        )  # fmt: skip

    def machine(self) -> Machine:
        """The machine of all rows: INT8 computes twice as fast as bf16, weights of 4 bits as it."""
        bf16 = self.operations.value * 1e12
        operations = {"INT4": bf16, "INT8": 2 * bf16, "bf16": bf16}
        return Machine(
            "what if",
            dict.fromkeys(operations, self.bandwidth.value * 1e9),
            operations,
            layer_seconds=self.overhead.value / 1e3 / self.shape.layers,
        )

    def scenarios(self) -> dict[str, Scenario]:
        start = self.start_scenario
        drafts = (start.acceptance, start.draft_tokens, start.draft_seconds)
        return {
            PLAIN: Scenario("bf16", 0.0, 0),
            NGRAM: Scenario("bf16", *drafts),
            QUASAR: Scenario("INT8", *drafts),
            CHANGED: Scenario(
                self.verifier.value, self.acceptance.value, self.draft_tokens.value,
                self.draft_ms.value / 1e3,
            ),
        }  # fmt: skip

    def view(self) -> tuple[Figure, str, pd.DataFrame]:
        scenarios, machine = self.scenarios(), self.machine()
        table = price_scenarios(self.shape, scenarios, machine, context=self.context, beside=QUASAR)
        curves = {
            name: each.speedups(self.shape, machine, LENGTHS, context=self.context)["speedup"]
            for name, each in scenarios.items()
            if name != PLAIN
        }
        speeds = ", ".join(f"{name} {table.loc[name, 'speedup']:.2f}" for name in curves)
        alt = f"Milliseconds of a step by part, and times plain 16-bit decoding: {speeds}."
        numbers = table[["step_ms", "L", "tokens_per_second", "speedup"]].copy()
        numbers.columns = pd.Index(["ms a step", "L", "tokens/s", "times plain"])
        drafting = table.index != PLAIN
        numbers["drafts pay from acceptance"] = table["pays_from"].where(drafting).round(3)
        numbers[f"as fast as {QUASAR} from"] = table["equals_from"].where(drafting).round(3)
        return plot_scenarios(table, curves), alt, numbers
