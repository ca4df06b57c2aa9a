"""A live race between the four cells: Start, Stop, and texts that grow side by side.

The first race, a short one, is run while the panel is made: it warms everything up, and a page
without a kernel shows its table and figure.
"""

import html
import threading
import time
from typing import Any

import ipywidgets as widgets
from IPython.display import HTML, display

from quasar_lab.errors import UserError
from quasar_lab.loading import LanguageModel
from quasar_lab.notebook import show
from quasar_lab.plots.race import plot_race
from quasar_lab.race import DRAFTERS, Lane, Race, RaceSettings, race_table, run_race
from quasar_lab.tasks import TASKS
from quasar_lab.widgets.panel import Panel
from quasar_lab.widgets.picture_panel import numbers_html

_REFRESH_SECONDS = 0.15


class RacePanel(Panel):
    """Controls before `race.run_race`; `lanes` holds the last race.

    model: what `load` gave; quantized: its INT8 form. max_new_tokens: of a race;
    first_tokens: of the short one that is run at once.
    """

    def __init__(
        self,
        model: LanguageModel,
        quantized: Any,
        *,
        max_new_tokens: int = 128,
        first_tokens: int = 24,
        key: str = "race",
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.task = widgets.Dropdown(
            options=[(label, name) for name, label in TASKS.items()], description="task"
        )
        self.drafter = widgets.Dropdown(options=list(DRAFTERS), description="drafter")
        self.length = widgets.IntSlider(
            value=5, min=1, max=16, description="draft tokens", continuous_update=False,
            style={"description_width": "initial"},
        )  # fmt: skip
        self.temperature = widgets.FloatSlider(
            value=0.0, min=0.0, max=1.5, step=0.1, description="temperature",
            continuous_update=False, style={"description_width": "initial"},
        )  # fmt: skip
        self.start_button = widgets.Button(description="Start", icon="play")
        self.stop_button = widgets.Button(description="Stop", icon="stop", disabled=True)
        self._fallback_class = f"quasar-lab-fallback-{key}"
        # where the panel is alive, the copy for pages without a kernel is hidden
        hide = widgets.HTML(f"<style>.{self._fallback_class} {{ display: none; }}</style>")
        settings = [self.task, self.drafter, self.length, self.temperature]
        super().__init__(key, [*settings, self.start_button, self.stop_button, hide])
        self._race: Race | None = Race(model, quantized)
        self.lanes: list[Lane] = []
        self.start_button.on_click(lambda _: self.start_race())
        self.stop_button.on_click(lambda _: self.stop())
        self._run(self.settings(first_tokens), threading.Event())
        self.set_state("ready", "a short first race is shown; press Start for a longer one")

    def set_state(self, state: str, message: str = "") -> None:
        super().set_state(state, message)
        self.start_button.disabled = state == "running"
        self.stop_button.disabled = state != "running"

    def settings(self, max_new_tokens: int | None = None) -> RaceSettings:
        """What the controls say."""
        return RaceSettings(
            task=self.task.value,
            drafter=self.drafter.value,
            num_draft_tokens=self.length.value,
            temperature=self.temperature.value,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
        )

    def start_race(self) -> bool:
        """Race in the background with the present settings; False while one is going on."""
        settings = self.settings()
        return self.start(lambda stop: self._run(settings, stop))

    def _run(self, settings: RaceSettings, stop: threading.Event) -> None:
        race = self._race
        if race is None:
            raise UserError("this panel is closed: run its cell again")
        self.lanes = race.lanes(settings)
        shown = 0.0

        def update(_: Lane) -> None:
            nonlocal shown
            if time.perf_counter() - shown > _REFRESH_SECONDS:
                self.output.value = lanes_html(self.lanes)
                shown = time.perf_counter()

        run_race(self.lanes, update, stop.is_set)
        self.output.value = lanes_html(self.lanes) + self._result_html()

    def _result_html(self) -> str:
        if any(not lane.run.steps for lane in self.lanes):
            return ""  # stopped before every lane had a step
        table = race_table(self.lanes)
        speeds = ", ".join(f"{label} {speed:.0f}" for label, speed in table["tokens/s"].items())
        figure = plot_race({lane.label: lane.progress for lane in self.lanes})
        alt = f"Tokens written against seconds of decoding. Tokens a second: {speeds}."
        return numbers_html(table) + show(figure, alt=alt)._repr_html_()

    def close(self) -> None:
        """Stop, and let go of the KV caches."""
        super().close()
        self._race, self.lanes = None, []

    def _ipython_display_(self) -> None:
        display(self.box)
        display(HTML(self.fallback_html()))

    def fallback_html(self) -> str:
        """The last race as a saved page shows it."""
        return (
            f'<div class="{self._fallback_class}"><p><i>A short race. With a running kernel there '
            f"are Start, Stop and settings here.</i></p>{self.output.value}</div>"
        )


def lanes_html(lanes: list[Lane]) -> str:
    """The lanes side by side; accepted drafts are underlined."""
    most = max((len(lane.run.tokens) for lane in lanes), default=0) or 1
    boxes = []
    for lane in lanes:
        text = "".join(
            f'<u style="text-decoration-color: #0173b2; text-decoration-thickness: 2px">'
            f"{html.escape(piece)}</u>"
            if drafted
            else html.escape(piece)
            for piece, drafted in lane.pieces
        )
        figures = "…"
        if lane.run.steps:
            figures = (
                f"{lane.tokens_per_second:.0f} tokens/s, L = {lane.mean_acceptance_length:.2f}"
            )
            if lane.drafted:
                figures += f", {lane.accepted / lane.drafted:.0%} of drafts accepted"
        width = 100 * len(lane.run.tokens) / most
        boxes.append(
            '<div style="flex: 1 1 13em; min-width: 13em; border: 1px solid #bbb; padding: .5em">'
            f"<b>{html.escape(lane.label)}</b><br>{figures}"
            f'<div style="background: #ddd; margin: .4em 0"><div style="background: #0173b2; '
            f'height: 6px; width: {width:.0f}%"></div></div>'
            f'<div style="white-space: pre-wrap; line-height: 1.4; max-height: 22em; '
            f'overflow-y: auto">{text}</div></div>'
        )
    return f'<div style="display: flex; flex-wrap: wrap; gap: .6em">{"".join(boxes)}</div>'
