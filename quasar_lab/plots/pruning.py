"""Figures of the pruning notebook, from `pruning_study` and `tables.by_pruning`."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from quasar_lab.plots import MARKERS, style

_PALETTE = sns.color_palette("colorblind")
_PERCENT = FuncFormatter(lambda value, _: f"{value:.0%}")
_LABELS = {
    "uniform": "evenly spaced",
    "last": "last layers go",
    "block_influence": "least influence goes",
}


def plot_influence(influence: Sequence[float]) -> Figure:
    """How much each layer turns the residual stream: 1 - cos(input, output), on a log axis."""
    with style():
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(influence)), influence, color=_PALETTE[0], alpha=0.8)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("layer")
        axes.set_ylabel("block influence, 1 - cos")
        axes.set_xlim(-0.7, len(influence) - 0.3)
    return figure


def plot_collapse(
    table: pd.DataFrame, int8: Any = None, chosen: tuple[str, float] | None = None
) -> Figure:
    """Mean KL and top-1 agreement with the full model over the share of layers kept.

    table: from `prune_and_compare`; int8: a row of `summarize_fidelity` to draw as a line; chosen:
    (strategy, keep) to be circled.
    """
    with style():
        figure = Figure(figsize=(9.5, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for number, (strategy, rows) in enumerate(table.groupby("strategy", sort=False)):
            rows = rows.sort_values("keep")
            look: dict[str, Any] = dict(
                color=_PALETTE[number],
                marker=MARKERS[number],
                label=_LABELS.get(strategy, strategy),
            )
            for axes, name in ((left, "kl"), (right, "top1")):
                axes.plot(rows["keep"], rows[name], **look)
                axes.fill_between(rows["keep"], rows[f"{name}_low"], rows[f"{name}_high"],
                                  color=_PALETTE[number], alpha=0.15)  # fmt: skip
                if chosen is not None and chosen[0] == strategy:
                    point = rows[rows["keep"] == chosen[1]]
                    axes.plot(point["keep"], point[name], "o", ms=18, mfc="none", color="0.2")
        if int8 is not None:
            for axes, name in ((left, "kl"), (right, "top1")):
                axes.axhline(int8[name], color="0.3", ls="--",
                             label="INT8, all layers" if axes is left else None)  # fmt: skip
        left.set_yscale("log")
        left.set_ylabel("mean KL(full || pruned), nats")
        right.set_ylabel("same most likely token")
        right.set_ylim(0, 1.03)
        right.yaxis.set_major_formatter(_PERCENT)
        for axes in (left, right):
            axes.set_xlabel("layers kept")
            axes.xaxis.set_major_formatter(_PERCENT)
            axes.invert_xaxis()
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10)
    return figure


def plot_roles(ablation: pd.DataFrame) -> Figure:
    """L and speedup over the layers kept, from `by_pruning`: both readings, the paper's rows."""
    groups = list(dict.fromkeys(ablation.columns.get_level_values(0)))
    kept = ablation.index.get_level_values("layers kept, %")
    with style():
        figure = Figure(figsize=(9.5, 4.2), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, name in zip(panels, ("L", "speedup"), strict=True):
            for number, group in enumerate(groups):
                axes.plot(kept, ablation[group, name], color=_PALETTE[number],
                          marker=MARKERS[number], ls=":" if "paper" in group else "-",
                          label=group if name == "L" else None)  # fmt: skip
            axes.axhline(1, color="0.5", lw=1)
            axes.set_xlabel("layers kept, %")
            axes.set_xticks(sorted(set(kept)))
            axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
            axes.invert_xaxis()
        panels[0].set_ylabel("L: tokens a verification step")
        panels[1].set_ylabel("speed relative to plain decoding")
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    return figure
