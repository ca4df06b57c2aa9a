"""Figures of decoding: the acceptance rule, a trace, and what settings would do."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quasar_lab.generation import Generation
from quasar_lab.plots import MARKERS, style
from quasar_lab.trace import Trace

# what became of a token -> place in the palette, marker, filled, what the legend says
_FATES = {
    "accepted": (2, "o", True, "drafted, accepted"),
    "rejected": (3, "X", True, "drafted, rejected"),
    "untested": (7, "o", False, "drafted, behind a rejection"),
    "cut": (7, "|", True, "drafted, behind the end"),
    "replacement": (1, "s", True, "the target's own, in place of a rejected draft"),
    "bonus": (0, "P", True, "the target's own, after the draft"),
    "plain": (7, "s", True, "the target's own, nothing drafted"),
}


def plot_acceptance_rule(table: pd.DataFrame) -> Figure:
    """The two ways to a token, from `acceptance_table`: p and q, and what is kept and replaced."""
    colors = sns.color_palette("colorblind")
    x = np.arange(len(table))
    with style():
        figure = Figure(figsize=(9.6, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for name, color, shift, marker in (("q", colors[1], -0.2, "s"), ("p", colors[0], 0.2, "o")):
            label = {"q": "q: the drafter", "p": "p: the target"}[name]
            left.bar(x + shift, table[name], 0.36, color=color, alpha=0.45, label=label)
            left.scatter(x + shift, table[name], color=color, marker=marker, s=40, zorder=3)
        kept = np.minimum(table["p"], table["q"])
        left.hlines(kept, x - 0.42, x + 0.42, color="0.15", lw=2, ls="--", label="min(p, q)")
        left.set_title("what the two distributions say", fontsize=12)
        right.bar(x, table["accepted"], 0.6, color=colors[2], alpha=0.6, label="drafted and kept")
        right.bar(
            x, table["replaced"], 0.6, bottom=table["accepted"], color=colors[4], alpha=0.6,
            hatch="//", edgecolor="white", label="drawn from the residual",
        )  # fmt: skip
        right.scatter(x, table["p"], color=colors[0], s=60, zorder=3, label="p")
        right.set_title("how a token comes to be emitted", fontsize=12)
        for axes in (left, right):
            axes.set_xticks(x, [_literal(name) for name in table.index])
            axes.legend(fontsize=10)
        left.set_ylabel("probability")
    return figure


def plot_acceptance_check(table: pd.DataFrame, what: str) -> Figure:
    """Acceptance predicted and measured, a point a row; grey bars: two standard errors.

    table: columns predicted, measured and num_draws. what: names the prediction on the axis.
    """
    with style():
        figure = Figure(figsize=(5.6, 4.8), layout="constrained")
        axes = figure.subplots()
        predicted, measured = table["predicted"].to_numpy(), table["measured"].to_numpy()
        error = 2 * np.sqrt(predicted * (1 - predicted) / table["num_draws"].to_numpy())
        axes.plot([0, 1], [0, 1], color="0.4", lw=1.2, label="predicted = measured")
        axes.errorbar(
            predicted, measured, fmt="o",
            yerr=[np.minimum(error, measured), np.minimum(error, 1 - measured)],
            color=sns.color_palette("colorblind")[0],
            ecolor="0.65", ms=7, capsize=3, label="measured, ± 2 standard errors",
        )  # fmt: skip
        low = min(predicted.min(), (measured - error).min()) - 0.05
        low = low if low > 0.2 else -0.03  # zoomed in on where the points are
        axes.set_xlim(low, 1.03)
        axes.set_ylim(low, 1.03)
        axes.set_xlabel(what)
        axes.set_ylabel("share of draws accepted")
        axes.legend(fontsize=10, loc="upper left")
    return figure


def plot_trace(trace: Trace | Generation, max_steps: int = 40) -> Figure:
    """Each step as a column of tokens, drafted ones first, with what became of them."""
    trace = trace.trace if isinstance(trace, Generation) else trace
    places: dict[str, list[tuple[int, int]]] = {}
    steps = trace.steps[:max_steps]
    for number, step in enumerate(steps, start=1):
        own_place = step.num_accepted + 1
        for place, row in enumerate(step.rows(), start=1):
            kind = row["kind"]
            if kind == "bonus" and not step.draft_tokens:
                kind = "plain"
            if kind == "replacement":  # beside the rejected token, whose place it takes
                places.setdefault(kind, []).append((number, own_place))
            else:
                places.setdefault(kind, []).append((number, place))
    colors = sns.color_palette("colorblind")
    with style():
        figure = Figure(figsize=(10.0, 3.6), layout="constrained")
        axes = figure.subplots()
        for kind, (color, marker, filled, label) in _FATES.items():
            if kind not in places:
                continue
            x, y = np.array(places[kind], dtype=float).T
            if kind == "replacement":
                x = x + 0.36
            axes.scatter(
                x, y, s=42, marker=marker, label=label,
                facecolor=colors[color] if filled else "none", edgecolor=colors[color],
            )  # fmt: skip
        axes.set_xlim(0, len(steps) + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        highest = max(y for pairs in places.values() for _, y in pairs)
        axes.set_ylim(0.4, highest + 0.6)
        axes.set_yticks(range(1, highest + 1))
        total = len(trace.steps)
        shown = f"{total} in all" if len(steps) == total else f"the first {max_steps} of {total}"
        axes.set_xlabel(f"verification step ({shown})")
        axes.set_ylabel("token of the step")
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    return figure


def plot_curves(
    table: pd.DataFrame,
    x: str,
    panels: Sequence[tuple[str, str, float | None]],
    by: str,
    x_label: str,
    *,
    log_x: bool = False,
) -> Figure:
    """Lines over a setting x, one for each value of the column `by`.

    panels: (column, label, baseline) of each; a dashed line marks the baseline unless it is None.
    """
    names = list(dict.fromkeys(table[by]))
    colors = sns.color_palette("colorblind")
    with style():
        figure = Figure(figsize=(3.6 * len(panels) + 1.6, 3.9), layout="constrained")
        all_axes: Any = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, (axes, (column, label, baseline)) in enumerate(
            zip(all_axes, panels, strict=True)
        ):
            for i, name in enumerate(names):
                line = table[table[by] == name].dropna(subset=[column]).sort_values(x)
                axes.plot(
                    line[x], line[column], color=colors[i % len(colors)], lw=2, ms=7,
                    marker=MARKERS[i % len(MARKERS)], label=str(name) if panel == 0 else None,
                )  # fmt: skip
            _finish(axes, x_label, label, baseline, log_x)
        figure.legend(loc="outside lower center", ncols=min(len(names), 3), fontsize=10)
    return figure


def _finish(axes: Axes, x_label: str, label: str, baseline: float | None, log_x: bool) -> None:
    if baseline is not None:
        axes.axhline(baseline, color="0.3", lw=1.2, ls="--")
    if log_x:
        axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(label)


def _literal(text: object) -> str:
    """A label that matplotlib writes as it stands: no mathematics between dollar signs."""
    return str(text).replace("$", r"\$").replace("\n", "⏎")
