"""A trace, step by step: what was drafted, what the target thought of it, which number was drawn.

`replay_html` is the picture of one step, as a string; the `Replayer` puts buttons and a slider
before it. In a page without a kernel the widget is not drawn, and the table of all steps that the
same cell puts out stands in its place.
"""

import html
import math
from collections.abc import Iterable
from typing import Any

import ipywidgets as widgets
from IPython.display import HTML, display

from quasar_lab.draft_strip import KINDS, legend
from quasar_lab.errors import UserError
from quasar_lab.generation import Generation
from quasar_lab.trace import Step, Trace
from quasar_lab.widgets.panel import Panel

_PAGE = "background: #ffffff; color: #1c1c1c; padding: .6em .8em; max-width: 60em"
_TEXT = "white-space: pre-wrap; line-height: 2.1; overflow-wrap: anywhere"
_CELL = "text-align: left; padding: .15em .7em; color: #1c1c1c"
# The fallback hides where the widget is alive: only there this rule is part of the page.
_FALLBACK = "quasar-lab-replay-fallback"
_HIDE_FALLBACK = f"<style>.{_FALLBACK} {{ display: none; }}</style>"


def replay_html(trace: Any, tokenizer: Any, step: Any, *, all_steps: bool = True) -> str:
    """The text up to and with one step, its tokens marked, and the figures of that step.

    Args:
        trace: a Trace, or a Generation.
        tokenizer: whatever decodes a list of token ids.
        step: from 1 to the number of steps.
        all_steps: add the table of all steps, folded away in a <details>.

    Every token carries p, q and u in its title. Text is escaped. Raises UserError for a step that
    is not there and for a trace without steps.
    """
    trace = _trace(trace)
    if not isinstance(step, int) or not 1 <= step <= len(trace.steps):
        raise UserError(f"step is {step!r}: choose 1 to {len(trace.steps)}")
    current = trace.steps[step - 1]
    before = "".join(
        _span(row, tokenizer, signed=False)
        for earlier in trace.steps[: step - 1]
        for row in _rows(earlier)
        if row["emitted"]
    )
    now = "".join(_span(row, tokenizer, signed=True) for row in _rows(current))
    box = "outline: 2px solid #1c1c1c; outline-offset: 2px; border-radius: 2px; padding: .2em 0"
    return (
        f'<div style="{_PAGE}">{legend()}'
        f'<div style="{_TEXT}">{before}<span style="{box}">{now}</span></div>'
        f"<p><b>Step {step} of {len(trace.steps)}.</b> {_account(current)}</p>"
        f"{_table([(step, current)], tokenizer)}{_residual(current, tokenizer)}"
        f"{_all_steps(trace, tokenizer) if all_steps else ''}</div>"
    )


class Replayer(Panel):
    """Buttons and a slider before `replay_html`; the slider's arrow keys step as well.

    trace: a Trace or a Generation; tokenizer: whatever decodes a list of token ids.
    Shown at the first step; `slider.value` is the step.
    """

    def __init__(self, trace: Any, tokenizer: Any, key: str = "replayer") -> None:
        self.trace, self.tokenizer = _trace(trace), tokenizer
        last = len(self.trace.steps)
        self.slider = widgets.IntSlider(
            value=1, min=1, max=last, description="step", layout={"width": "22em"}
        )
        goes = (
            ("First", lambda now: 1),
            ("Prev", lambda now: max(now - 1, 1)),
            ("Next", lambda now: min(now + 1, last)),
            ("Last", lambda now: last),
        )
        self.buttons = {
            name: widgets.Button(description=name, tooltip=f"{name} step", layout={"width": "5em"})
            for name, _ in goes
        }
        for name, go in goes:
            self.buttons[name].on_click(lambda _button, go=go: self._go(go(self.slider.value)))
        super().__init__(key, [*self.buttons.values(), self.slider])
        self.observe(self.draw, self.slider)
        self.refresh(self.draw)

    def _go(self, step: int) -> None:
        self.slider.value = step

    def draw(self) -> None:
        """Show the step that the slider is at."""
        step = self.slider.value
        picture = replay_html(self.trace, self.tokenizer, step, all_steps=False)
        self.output.value = _HIDE_FALLBACK + picture
        self.set_state("ready", f"step {step} of {len(self.trace.steps)}")

    def fallback_html(self) -> str:
        """What a saved page shows in place of the widget: the whole text and all steps."""
        page = replay_html(self.trace, self.tokenizer, len(self.trace.steps))
        return f'<div class="{_FALLBACK}">{page}</div>'

    def _ipython_display_(self) -> None:
        display(self.box)
        display(HTML(self.fallback_html()))


def _trace(trace: Any) -> Trace:
    trace = trace.trace if isinstance(trace, Generation) else trace
    if not isinstance(trace, Trace):
        raise UserError(f"pass a Trace or a Generation to replay, not a {type(trace).__name__}")
    if not trace.steps:
        raise UserError("the trace has no steps to replay: generate at least one token")
    return trace


def _rows(step: Step) -> Iterable[dict[str, Any]]:
    """The tokens of a step; kind "plain" if nothing was drafted, `emitted` if it is output."""
    for row in step.rows():
        kind = row["kind"]
        if kind == "bonus" and not step.draft_tokens:
            kind = "plain"
        yield row | {
            "kind": kind,
            "emitted": kind in ("accepted", "replacement", "bonus", "plain"),
            "greedy": not step.verification.uniforms,
        }


def _mark(kind: str, text: str, title: str = "", sign: bool = True, breaks: bool = True) -> str:
    symbol, _, style = KINDS[kind]
    shown = html.escape(text).replace("\n", "⏎\n" if breaks else "⏎").replace("\t", "⇥")
    return (
        f'<span style="color: #1c1c1c; {style}" title="{html.escape(title)}">'
        f"{f'<sup>{symbol}</sup>' if sign else ''}{shown}</span>"
    )


def _span(row: dict[str, Any], tokenizer: Any, signed: bool) -> str:
    numbers = ", ".join(f"{name} {_number(row.get(key))}" for name, key in _FIGURES)
    title = f"{KINDS[row['kind']][1]}: {numbers}"
    return _mark(row["kind"], tokenizer.decode([row["token"]]), title, signed)


_FIGURES = (("p", "p"), ("q", "q"), ("u", "uniform"))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if value == 0 or value >= 0.001 else f"{value:.0e}"


def _account(step: Step) -> str:
    drafted = len(step.draft_tokens)
    ending = {
        "replacement": "the target put its own token in place of the next one",
        "bonus": "the target added a token" if drafted else "one token of plain decoding",
        "cut": "then the output was at its end",
    }[step.outcome]
    kept = f"{drafted} drafted, {step.num_accepted} accepted; " if drafted else ""
    times = (
        f"; drafting {step.draft_seconds * 1e3:.2f} ms, verification "
        f"{step.verify_seconds * 1e3:.1f} ms"
        if math.isfinite(step.seconds)  # a repriced trace may have no times
        else ""
    )
    return (
        f"{kept}{ending}. {step.num_fed} token{'s' * (step.num_fed > 1)} in one forward, "
        f"{step.kv_length} in the KV cache afterwards{times}."
    )


def _why(row: dict[str, Any]) -> str:
    """The decision on one token, in words."""
    kind, greedy = row["kind"], row["greedy"]
    if kind in ("accepted", "rejected"):
        if greedy:
            return "the most likely token" if kind == "accepted" else "not the most likely token"
        sign = "&lt;" if kind == "accepted" else "≥"
        return f"u {_number(row['uniform'])} {sign} {_number(row['acceptance'])} = min(1, p / q)"
    if kind == "replacement":
        return "the most likely token" if greedy else "drawn from the residual max(p − q, 0)"
    if kind in ("bonus", "plain"):
        return "the most likely token" if greedy else "drawn from p"
    return KINDS[kind][1]


def _table(steps: Iterable[tuple[int, Step]], tokenizer: Any) -> str:
    body = []
    for number, step in steps:
        rows = list(_rows(step))
        for index, row in enumerate(rows):
            first = f'<th rowspan="{len(rows)}" scope="rowgroup" style="{_CELL}">{number}</th>'
            text = _mark(row["kind"], tokenizer.decode([row["token"]]), breaks=False)
            cells = (
                text,
                row["kind"],
                *(_number(row.get(key)) for _, key in _FIGURES),
                _why(row),
            )
            line = "".join(
                f'<td style="{_CELL}{"; white-space: pre" if not i else ""}">{cell}</td>'
                for i, cell in enumerate(cells)
            )
            body.append(f"<tr>{first if index == 0 else ''}{line}</tr>")
    names = ("step", "token", "became", "p", "q", "u", "because")
    head = "".join(f'<th scope="col" style="{_CELL}">{name}</th>' for name in names)
    return (
        '<div style="overflow-x: auto"><table style="border-collapse: collapse; font-size: 90%">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _residual(step: Step, tokenizer: Any) -> str:
    """What the replacement was drawn from; nothing to say if there is none, or no draw."""
    result = step.verification
    if step.outcome != "replacement" or not result.uniforms:
        return ""
    likely = ", ".join(
        f"<code>{html.escape(repr(tokenizer.decode([token])))}</code> {probability:.0%}"
        for token, probability in result.residual_top
    )
    return (
        f"<p>The residual at the rejected position holds {result.residual_mass:.3f} of p, which is "
        f"the chance that a draft is rejected here. Most of it: {likely}.</p>"
    )


def _all_steps(trace: Trace, tokenizer: Any) -> str:
    table = _table(enumerate(trace.steps, start=1), tokenizer)
    return (
        f"<details><summary>All {len(trace.steps)} steps as a table</summary>"
        f'<div style="max-height: 30em; overflow-y: auto">{table}</div></details>'
    )
