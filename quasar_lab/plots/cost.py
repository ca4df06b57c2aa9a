"""Figures of the cost model: what it predicts beside what was measured, and where drafts pay."""

from collections.abc import Mapping

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from quasar_lab.plots import MARKERS, _figure, style
from quasar_lab.what_if import PARTS

_PALETTE = sns.color_palette("colorblind")


def _draw_prediction(axes: Axes, table: pd.DataFrame) -> None:
    for i, (name, rows) in enumerate(table.groupby("target", sort=False)):
        axes.plot(
            rows["x"], rows["predicted_ms"], color=_PALETTE[i], ls="--", lw=1.6,
            label=f"{name}, predicted",
        )  # fmt: skip
        axes.plot(
            rows["x"], rows["measured_ms"], color=_PALETTE[i], marker=MARKERS[i], ms=7, lw=0,
            label=f"{name}, measured",
        )  # fmt: skip
    axes.set_ylim(0, None)
    axes.set_ylabel("milliseconds a step")


def plot_prediction(table: pd.DataFrame, xlabel: str) -> Figure:
    """Predicted and measured time of a step.

    table: columns target, x, measured_ms and predicted_ms; xlabel says what x is.
    """
    with style():
        figure, axes = _figure(7.6, 4.8)
        _draw_prediction(axes, table)
        axes.set_xlabel(xlabel)
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def plot_scaling(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """`plot_prediction` for several quantities side by side: what x is -> table.

    An x in powers of two is drawn so.
    """
    with style():
        figure = Figure(figsize=(4.6 * len(panels), 4.6), layout="constrained")
        for axes, (xlabel, table) in zip(figure.subplots(1, len(panels)), panels.items(),
                                         strict=True):  # fmt: skip
            _draw_prediction(axes, table)
            values = sorted(set(table["x"]))
            if values[-1] > 20 * values[0]:
                axes.set_xscale("log", base=2)
                axes.set_xticks(values[:: -(-len(values) // 7)])
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
                axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel(xlabel)
            handles, labels = axes.get_legend_handles_labels()
            axes.legend(handles, labels, fontsize=9, loc="upper left")
    return figure


def plot_speedups(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Speedup over plain decoding against the drafted tokens, one line a verifier.

    tables: name -> what `cost_model.predict_speedups` gives. The best length is marked.
    """
    with style():
        figure, axes = _figure(7.6, 4.4)
        for i, (name, table) in enumerate(tables.items()):
            best = table["speedup"].idxmax()
            axes.plot(table.index, table["speedup"], color=_PALETTE[i], lw=2, label=name)
            axes.scatter(
                [best], [table.loc[best, "speedup"]], color=_PALETTE[i], marker=MARKERS[i], s=90,
                zorder=3, label=f"best: {best} drafted, {table.loc[best, 'speedup']:.2f}x",
            )  # fmt: skip
        axes.axhline(1, color="0.35", lw=1, ls=":")
        axes.set_ylim(0, None)
        axes.set_xlabel("tokens drafted a step (0: none)")
        axes.set_ylabel("times plain decoding")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def _draw_parts(axes: Axes, table: pd.DataFrame) -> None:
    """A bar a row, made of the milliseconds of its step: shades and hatches tell parts apart."""
    shades, hatches = sns.light_palette("0.25", len(PARTS)), ("", "//", "..", "xx", "\\\\")
    left = pd.Series(0.0, table.index)
    for part, shade, hatch in zip(PARTS, shades, hatches, strict=True):
        axes.barh(
            range(len(table)), table[part], left=left, color=shade, hatch=hatch, height=0.6,
            edgecolor="0.35", lw=0.7, label=part,
        )  # fmt: skip
        left += table[part]
    for place, (total, length) in enumerate(zip(table["step_ms"], table["L"], strict=True)):
        text = f" {total:.3g} ms for {length:.2f} tokens"
        axes.annotate(text, (0, place - 0.33), va="bottom", fontsize=10)
    axes.set_yticks(range(len(table)), table.index)
    axes.set_ylim(len(table) - 0.5, -0.75)
    axes.set_xlim(0, 1.05 * table["step_ms"].max())
    axes.grid(visible=False)
    axes.set_xlabel("milliseconds of a step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=3, fontsize=9, frameon=False)


def plot_scenarios(table: pd.DataFrame, curves: Mapping[str, pd.Series]) -> Figure:
    """Where the time of a step goes, and the speedup over plain decoding for each draft length.

    table: from `what_if.price_scenarios`; curves: name -> speedup by draft length, for those of its
    rows that draft. A large marker stands at the length of the row.
    """
    with style():
        figure = Figure(figsize=(9.6, 4.6), layout="constrained")
        parts, speed = figure.subplots(1, 2, width_ratios=[1, 1])
        _draw_parts(parts, table)
        for i, (name, curve) in enumerate(curves.items()):
            speedup = table.loc[name, "speedup"]
            at = (curve - speedup).abs().idxmin()
            line = ("-", "--", ":")[i % 3]  # where two are equal the earlier can still be seen
            speed.plot(curve.index, curve, color=_PALETTE[i], ls=line, lw=2.2)
            speed.plot(
                [at], [speedup], color=_PALETTE[i], marker=MARKERS[i], ms=13 - 2 * i, lw=2.2,
                ls=line, zorder=3 + i, mec="white", label=f"{name}: {speedup:.2f}x",
            )  # fmt: skip
        speed.axhline(1, color="0.35", lw=1, ls=":")
        speed.set_ylim(0, None)
        speed.xaxis.set_major_locator(MaxNLocator(integer=True))
        speed.set_xlabel("tokens drafted a step (0: none)")
        speed.set_ylabel("times plain 16-bit decoding")
        speed.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9,
                     frameon=False)  # fmt: skip
    return figure
