"""A generation as a strip of text in which every token says how it came: HTML that needs no script.

Each kind of token has a sign and a shape besides its colour, so that the strip reads in grey, on
paper and to a screen reader.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from quasar_lab.generation import Generation
from quasar_lab.trace import Step

# kind -> sign, what it means, style. Colours: Wong's colour-blind-safe palette, on light tints.
KINDS = {
    "accepted": ("✓", "drafted, accepted", "background: #d5efe6; border-bottom: 3px solid #029e73"),
    "rejected": (
        "✗",
        "drafted, rejected",
        "background: #fbe3d3; border-bottom: 3px dotted #d55e00; text-decoration: line-through",
    ),
    "untested": (
        "·",
        "drafted, behind a rejection: never looked at",
        "background: #eeeeee; border-bottom: 3px dotted #999999; text-decoration: line-through",
    ),
    "cut": ("|", "drafted, behind the end of the output", "background: #eeeeee"),
    "replacement": (
        "↻",
        "the target's own, in place of a rejected token",
        "background: #fff3c4; border-bottom: 3px double #b07d00",
    ),
    "bonus": (
        "+",
        "the target's own, after a draft kept whole (or none)",
        "background: #d6e8f7; border-bottom: 3px solid #0173b2",
    ),
}
_TOKEN = "color: #1c1c1c; padding: 0 .15em; margin: 0 1px; white-space: pre-wrap"


class Html:
    """HTML for display, with a plain text of the same for a terminal."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup, self.text = markup, text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def draft_strip(generation: Generation, tokenizer: Any, max_steps: int | None = None) -> Html:
    """The steps of a generation as a table: one row a step, its tokens marked by what became of
    them. tokenizer: what decodes single tokens; max_steps: rows shown, None for all."""
    steps = generation.steps[:max_steps]
    rows = "".join(_row(number, step, tokenizer) for number, step in enumerate(steps, start=1))
    head = "".join(
        f'<th style="text-align: left; padding: .2em .6em">{name}</th>'
        for name in ("step", "drafted", "kept", "tokens")
    )
    markup = (
        f"<div>{legend()}"
        f'<table style="border-collapse: collapse; text-align: left"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{_rest(len(generation.steps) - len(steps))}</div>"
    )
    lines = [
        " ".join(f"{KINDS[kind][0]}{text}" for text, kind in _tokens(step, tokenizer))
        for step in steps
    ]
    return Html(markup, "\n".join(lines))


def legend(
    kinds: Iterable[str] = ("accepted", "rejected", "untested", "replacement", "bonus"),
) -> str:
    """What the signs mean, as one line of HTML."""
    parts = "".join(f"<span>{_span(KINDS[kind][1], kind)}</span> &ensp;" for kind in kinds)
    return f'<p style="line-height: 2">{parts}</p>'


def _tokens(step: Step, tokenizer: Any) -> Sequence[tuple[str, str]]:
    return [(_readable(tokenizer.decode([row["token"]])), row["kind"]) for row in step.rows()]


def _row(number: int, step: Step, tokenizer: Any) -> str:
    def cell(value: object) -> str:
        return f'<td style="text-align: left; padding: .2em .6em">{value}</td>'

    spans = "".join(_span(text, kind) for text, kind in _tokens(step, tokenizer))
    values = (number, len(step.draft_tokens), step.num_accepted)
    return f"<tr>{''.join(map(cell, values))}{cell(spans)}</tr>"


def _span(text: str, kind: str) -> str:
    sign, meaning, style = KINDS[kind]
    return (
        f'<span style="{_TOKEN}; {style}" title="{meaning}">'
        f"<sup>{sign}</sup>{html.escape(text)}</span>"
    )


def _rest(steps: int) -> str:
    return f"<p>… and {steps} more steps.</p>" if steps > 0 else ""


def _readable(text: str) -> str:
    """Line breaks and a lone space made visible."""
    visible = text.replace("\n", "⏎").replace("\t", "⇥")
    return visible if visible.strip() else visible.replace(" ", "␣")
