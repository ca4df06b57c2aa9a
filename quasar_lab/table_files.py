"""The paper's tables on paper: Markdown, LaTeX and JSON, and the figures beside them."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from quasar_lab.errors import UserError
from quasar_lab.paper_figures import PAPER_LINK
from quasar_lab.plots.bench import plot_by_draft, plot_by_task, plot_by_temperature
from quasar_lab.results import write_atomically
from quasar_lab.tables import (
    beside_paper,
    by_draft,
    by_pruning,
    by_task,
    by_temperature,
    measured_table,
)

_SECOND_HAND = f"Columns marked second-hand are the paper's own figures, {PAPER_LINK}."


def paper_tables(measured: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Title -> each of the paper's tables that these measurements can fill."""
    makers: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
        "Speedup and acceptance length by task": by_task,
        "Temperature": by_temperature,
        "Draft length and lookup": by_draft,
        "Pruning": by_pruning,
        "Beside the paper": beside_paper,
    }
    tables = {}
    for title, make in makers.items():
        try:
            table = make(measured)
        except UserError:  # these methods were not run
            continue
        if not table.empty:
            tables[title] = table
    return tables


def to_markdown(table: pd.DataFrame) -> str:
    """A table as Markdown, its index as the first columns, numbers with two decimals."""
    flat = table if table.index.names == [None] else table.reset_index()
    header = [_name(column) for column in flat.columns]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in flat.itertuples(index=False):
        lines.append("| " + " | ".join(map(_text, row)) + " |")
    return "\n".join(lines) + "\n"


def to_latex(table: pd.DataFrame, caption: str) -> str:
    """A table as LaTeX (booktabs), numbers with two decimals."""
    flat = table if table.index.names == [None] else table.reset_index()
    flat = flat.map(_text).set_axis([_name(column) for column in flat.columns], axis="columns")
    return flat.to_latex(index=False, escape=True, caption=caption)


def write_tables(rows: pd.DataFrame, folder: Path, name: str = "bench") -> list[Path]:
    """The tables as NAME.md, NAME.tex and NAME.json, the figures as NAME-*.png; their paths.

    The JSON holds `measured_table`, of which the others are views.
    """
    measured = measured_table(rows)
    tables = paper_tables(measured)
    markdown = [f"## {title}\n\n{to_markdown(table)}" for title, table in tables.items()]
    texts = {
        f"{name}.md": "\n".join(["# Measured\n", *markdown, _SECOND_HAND, ""]),
        f"{name}.tex": "\n".join(
            to_latex(table, f"{title}. {_SECOND_HAND}" if "paper" in str(table.columns) else title)
            for title, table in tables.items()
        ),
        f"{name}.json": json.dumps(json.loads(measured.to_json(orient="records")), indent=1),
    }
    paths = []
    try:
        for file, text in texts.items():
            write_atomically(folder / file, text)
            paths.append(folder / file)
        for title, plot in _figures(measured).items():
            buffer = io.BytesIO()
            plot(measured).savefig(buffer, format="png", dpi=140)
            paths.append(folder / f"{name}-{title}.png")
            paths[-1].write_bytes(buffer.getvalue())
    except OSError as error:
        raise UserError(f"cannot write tables to {folder}: {error.strerror}") from error
    return paths


def _figures(measured: pd.DataFrame) -> dict[str, Callable]:
    figures: dict[str, Callable] = {"tasks": plot_by_task}
    if measured["temperature"].nunique() > 1:
        figures["temperature"] = plot_by_temperature
    if measured["num_draft_tokens"].nunique() > 1:
        figures["draft"] = plot_by_draft
    return figures


def _name(column: object) -> str:
    return (
        ": ".join(part for part in map(str, column) if part)
        if isinstance(column, tuple)
        else str(column)
    )


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.2f}"
    return "" if value is None else str(value)
