"""A panel that shows one figure and one table, and stays readable in a page without a kernel."""

import html
from collections.abc import Sequence

import ipywidgets as widgets
import pandas as pd
from IPython.display import HTML, display
from matplotlib.figure import Figure

from quasar_lab.notebook import show
from quasar_lab.widgets.panel import Panel


class PicturePanel(Panel):
    """Subclasses define `view` (settings -> figure, alternative text, table); it is drawn at once.

    A page without a kernel shows no widget. For it the first picture is put out as plain HTML
    besides, which a rule hides where the widget is alive.
    """

    def __init__(self, key: str, controls: Sequence[widgets.Widget]) -> None:
        super().__init__(key, list(controls))
        self._fallback_class = f"quasar-lab-fallback-{key}"
        self.observe(self.draw, *controls)
        self.refresh(self.draw)

    def view(self) -> tuple[Figure, str, pd.DataFrame]:
        """(figure, its alternative text, the numbers) at the present settings."""
        raise NotImplementedError

    def settings(self) -> str:
        """The present settings in words."""
        return ", ".join(
            f"{control.description} {_in_words(getattr(control, 'label', None) or control.value)}"
            for control in self.controls
        )

    def draw(self) -> None:
        """Compute and show."""
        figure, alt, table = self.view()
        markup = show(figure, alt=alt)._repr_html_() + numbers_html(table)
        self.output.value = f"<style>.{self._fallback_class} {{ display: none; }}</style>{markup}"
        self.set_state("done", self.settings())

    def fallback_html(self) -> str:
        """The present picture as a saved page shows it."""
        markup = self.output.value.partition("</style>")[2]
        note = html.escape(self.settings())
        return (
            f'<div class="{self._fallback_class}"><p><i>The picture at {note}. With a running '
            f"kernel there are controls here.</i></p>{markup}</div>"
        )

    def _ipython_display_(self) -> None:
        display(self.box)
        display(HTML(self.fallback_html()))


def numbers_html(table: pd.DataFrame) -> str:
    """A table of numbers, three significant digits, escaped."""
    cell = 'style="text-align: right; padding: .15em .9em"'
    head = "".join(f'<th scope="col" {cell}>{html.escape(str(name))}</th>' for name in table)
    rows = "".join(
        f'<tr><th scope="row" {cell}>{html.escape(str(label))}</th>'
        + "".join(f"<td {cell}>{html.escape(_number(value))}</td>" for value in values)
        + "</tr>"
        for label, values in zip(table.index, table.itertuples(index=False), strict=True)
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _in_words(value: object) -> str:
    """A slider in steps of 0.01 says 0.28, not the 0.27999999999999997 that it sends."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _number(value: object) -> str:
    if isinstance(value, float):
        if value != value:
            return "–"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
