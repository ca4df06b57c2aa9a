"""A generation as a strip of text in which every token says how it came: HTML that needs no script.

Each kind of token has a sign and a shape besides its colour, so that the strip reads in grey, on
paper and to a screen reader.
"""

import html
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from quasar_lab.generation import Generation
from quasar_lab.trace import Step

# kind -> sign, what it means, style. The colours are safe for colour-blind readers, on light tints.
KINDS = {
    "accepted": ("✓", "drafted, accepted", "background: #d5efe6; border-bottom: 3px solid #029e73"),
    "rejected": (
        "✗",
        "drafted, rejected",
        "background: #fbe3d3; border-bottom: 3px dotted #d55e00; text-decoration: line-through",
    ),
    "untested": (
        "·",
        "drafted, behind a rejection",
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
        "the target's own, after a draft kept whole",
        "background: #d6e8f7; border-bottom: 3px solid #0173b2",
    ),
    "plain": (
        "○",
        "the target's own: nothing was drafted",
        "background: #ffffff; border-bottom: 3px solid #777777",
    ),
}
_TOKEN = "color: #1c1c1c; padding: 0 .15em; margin: 0 1px; white-space: pre-wrap"
_CELL = "text-align: left; padding: .2em .6em; white-space: normal"


class Html:
    """HTML for display, with a plain text of the same for a terminal."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup, self.text = markup, text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def draft_strip(generation: Generation, tokenizer: Any, max_steps: int | None = None) -> Html:
    """The steps of a generation as a table, its tokens marked by what became of them.

    One row a step; steps in a row that had no draft share one. tokenizer: what decodes single
    tokens. max_steps: how many steps are shown, None for all.
    """
    steps = generation.steps[:max_steps]
    groups = [
        list(some)
        for _, some in itertools.groupby(
            enumerate(steps, start=1), key=lambda item: 0 if not item[1].draft_tokens else item[0]
        )
    ]
    head = "".join(
        f'<th style="{_CELL}">{name}</th>' for name in ("step", "drafted", "kept", "tokens")
    )
    rows = "".join(_row(group, tokenizer) for group in groups)
    markup = (
        f'<div>{legend()}<table style="border-collapse: collapse"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{_rest(len(generation.steps) - len(steps))}</div>"
    )
    lines = [
        " ".join(
            f"{KINDS[kind][0]}{text}"
            for _, step in group
            for text, kind in _tokens(step, tokenizer)
        )
        for group in groups
    ]
    return Html(markup, "\n".join(lines))


def legend(
    kinds: Iterable[str] = ("accepted", "rejected", "untested", "replacement", "bonus", "plain"),
) -> str:
    """What the signs mean, in HTML."""
    parts = "".join(
        f'<span style="display: inline-block; margin-right: 1em">'
        f"{_span('token', kind)} {KINDS[kind][1]}</span> "
        for kind in kinds
    )
    return f'<p style="line-height: 2">{parts}</p>'


def _tokens(step: Step, tokenizer: Any) -> Sequence[tuple[str, str]]:
    return [
        (_readable(tokenizer.decode([row["token"]])), row["kind"] if step.draft_tokens else "plain")
        for row in step.rows()
    ]


def _row(group: Sequence[tuple[int, Step]], tokenizer: Any) -> str:
    (first, _), (last, _) = group[0], group[-1]
    drafted = sum(len(step.draft_tokens) for _, step in group)
    kept = sum(step.num_accepted for _, step in group)
    spans = "".join(
        _span(text, kind) for _, step in group for text, kind in _tokens(step, tokenizer)
    )
    number = f"{first}" if first == last else f"{first} to {last}"
    cells = (number, drafted or "–", kept if drafted else "–", spans)
    return "<tr>" + "".join(f'<td style="{_CELL}">{value}</td>' for value in cells) + "</tr>"


def _span(text: str, kind: str) -> str:
    sign, meaning, style = KINDS[kind]
    return (
        f'<span style="{_TOKEN}; {style}" title="{meaning}">'
        f"<sup>{sign}</sup>{html.escape(text)}</span>"
    )


def _rest(steps: int) -> str:
    return f"<p>… and {steps} more step{'s' * (steps != 1)}.</p>" if steps > 0 else ""


def _readable(text: str) -> str:
    """Line breaks and a lone space made visible."""
    visible = text.replace("\n", "⏎").replace("\t", "⇥")
    return visible if visible.strip() else visible.replace(" ", "␣")
