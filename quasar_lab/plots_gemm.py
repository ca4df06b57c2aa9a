"""The pictures of notebook 03: wrapped sums, errors by scale, the tile, time by rows, roofline."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter

from quasar_lab.plots import MARKERS, style

_PALETTE = sns.color_palette("colorblind")


def plot_wrapped_sums(exact: np.ndarray, wrapped: np.ndarray) -> Figure:
    """What an int8 accumulator holds against the true sum, one point a dot product."""
    with style():
        figure = Figure(figsize=(8.0, 3.6), layout="constrained")
        axes = figure.subplots()
        order = np.argsort(exact)
        axes.plot(exact[order], exact[order], color="0.4", ls="--", lw=1.2, label="the true sum")
        axes.scatter(
            exact, wrapped, s=14, marker="o", color=_PALETTE[3], label="the int8 accumulator"
        )
        axes.axhspan(-128, 127, color="0.5", alpha=0.15, label="all that int8 can hold")
        low, high = np.quantile(exact, [0.02, 0.98])
        axes.set_xlim(low, high)
        axes.set_ylim(-420, 420)
        axes.set_xlabel("true sum of the products")
        axes.set_ylabel("result")
        axes.legend(loc="upper left", fontsize=10, framealpha=0.95)
    return figure


def plot_token_errors(errors: pd.DataFrame, magnitude: pd.Series) -> Figure:
    """Relative error of each token's output (columns: choices of scale) above its largest input."""
    with style():
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.4])
        for i, column in enumerate(errors):
            top.plot(
                errors.index, errors[column], color=_PALETTE[i], marker=MARKERS[i], ms=4, lw=0.8,
                label=column,
            )  # fmt: skip
        top.axhline(1, color="0.35", ls=":", lw=1)
        top.annotate(
            "1: nothing of the output is left", (errors.index[-1], 1), ha="right", va="bottom",
            fontsize=10, color="0.35",
        )  # fmt: skip
        top.set_yscale("log")
        top.set_ylabel("relative error of the output")
        figure.legend(loc="outside upper center", fontsize=10, ncols=len(errors.columns))
        bottom.bar(magnitude.index, magnitude, color="0.45", width=0.9)
        bottom.set_yscale("log")
        bottom.set_ylabel("max |x|")
        bottom.set_xlabel("position of the token")
    return figure


def plot_saturation(table: pd.DataFrame) -> Figure:
    """Share of wrong sums and relative error against the range of the unsigned operand."""
    with style():
        figure = Figure(figsize=(7.4, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            table["largest"], table["saturated"], color=_PALETTE[3], marker=MARKERS[1], lw=1.5
        )
        axes.axvline(128, color="0.35", ls="--", lw=1)
        axes.annotate(
            "7 bits: up to 127 no pair can saturate ", (128, table["saturated"].max()),
            ha="right", va="top", fontsize=10, color="0.35",
        )  # fmt: skip
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1%}"))
        axes.set_xlabel("largest value of the unsigned operand")
        axes.set_ylabel("pairs that saturate")
    return figure


def _weights_strip(axes: Axes, y: float, label: str) -> None:
    for i in range(16):
        axes.add_patch(
            Rectangle((i, y), 0.9, 0.9, facecolor=_PALETTE[0], alpha=0.75, edgecolor="white")
        )
    axes.annotate(label, (16.4, y + 0.45), va="center", fontsize=10)


def plot_tile(rows: int = 6) -> Figure:
    """The two orders of the same work: the weight read once a row, or once for all rows."""
    with style():
        figure = Figure(figsize=(9.0, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        for r in range(rows):
            _weights_strip(left, -1.25 * r, f"for token {r + 1}")
        left.set_title(f"Row by row: {rows} trips to memory", fontsize=12)

        _weights_strip(right, 0, "loaded once")
        right.annotate("register", (-0.3, 0.45), ha="right", va="center", fontsize=10)
        for r in range(rows):
            y = -2.0 - 0.85 * r
            right.add_patch(FancyArrowPatch(
                (8, -0.05), (8.1, y + 0.75), arrowstyle="-", color="0.75", lw=1, zorder=0,
            ))  # fmt: skip
            right.add_patch(
                Rectangle((0, y), 15.9, 0.6, facecolor=_PALETTE[1], alpha=0.55, edgecolor="white")
            )
            right.annotate(f"token {r + 1}", (-0.3, y + 0.3), ha="right", va="center", fontsize=10)
            right.annotate("→ sum", (16.2, y + 0.3), va="center", fontsize=10)
        right.set_title("Tile: one trip, all tokens use it", fontsize=12)
        for axes, start in ((left, -1.0), (right, -4.0)):
            axes.set_xlim(start, 22)
            axes.set_ylim(-2.2 - 0.85 * rows, 1.3)
            axes.set_axis_off()
    return figure


def plot_rows(
    times: pd.DataFrame, weight_count: int, bandwidth: float, *, paths: list[str]
) -> Figure:
    """Time of one linear against its rows M (from `roofline.time_linears`), band: 10 to 90 %.

    The dashed line is the time of reading the INT8 weight once at `bandwidth` bytes a second.
    """
    with style():
        figure = Figure(figsize=(8.2, 4.6), layout="constrained")
        axes = figure.subplots()
        for i, path in enumerate(paths):
            line = times[times["path"] == path].sort_values("M")
            axes.plot(
                line["M"], line["seconds"] * 1e3, color=_PALETTE[i], marker=MARKERS[i], ms=6,
                lw=1.6, label=path,
            )  # fmt: skip
            axes.fill_between(
                line["M"], line["low"] * 1e3, line["high"] * 1e3, color=_PALETTE[i], alpha=0.15
            )
        reading = weight_count / bandwidth * 1e3
        axes.axhline(reading, color="0.25", ls="--", lw=1.3, label="reading the INT8 weight once")
        axes.set_ylim(0, None)
        axes.set_xlim(0, None)
        axes.set_xlabel("M: rows (tokens verified together)")
        axes.set_ylabel("milliseconds")
        figure.legend(loc="outside lower center", fontsize=10, ncols=2)
    return figure


def plot_roofline(points: pd.DataFrame, peaks: Mapping[str, float], bandwidth: float) -> Figure:
    """Operations a second against operations a byte: the machine's roof and the measured products.

    points: columns path, M, intensity (operations a weight byte) and operations_per_second; peaks:
    name -> operations a second of the flat roofs; bandwidth: bytes a second, the sloping roof.
    """
    with style():
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        axes = figure.subplots()
        right = max(points["intensity"].max(), max(peaks.values()) / bandwidth) * 2.5
        left = points["intensity"].min() / 1.6
        for i, (name, peak) in enumerate(peaks.items()):
            x = np.geomspace(left, right, 200)
            axes.plot(
                x, np.minimum(x * bandwidth, peak) / 1e9, color=_PALETTE[i], lw=1.6, alpha=0.8
            )
            axes.annotate(
                f"{name} arithmetic: {peak / 1e9:,.0f} Gop/s", (right, peak / 1e9), ha="right",
                va="bottom", fontsize=10, color=_PALETTE[i],
            )  # fmt: skip
            axes.axvline(peak / bandwidth, color=_PALETTE[i], ls=":", lw=1)
        for i, (path, line) in enumerate(points.groupby("path", sort=False)):
            axes.plot(
                line["intensity"], line["operations_per_second"] / 1e9, color=_PALETTE[i],
                marker=MARKERS[i], ms=7, lw=0, label=path,
            )  # fmt: skip
            for _, point in line.iterrows():
                axes.annotate(
                    f"{point['M']:.0f}", (point["intensity"], point["operations_per_second"] / 1e9),
                    xytext=(0, -13), textcoords="offset points", ha="center", fontsize=9,
                    color=_PALETTE[i],
                )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(left, right)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_xlabel("operations for each byte of weights")
        axes.set_ylabel("billion operations a second")
        axes.legend(loc="upper left", fontsize=10, title="points: M rows, sloping line: memory")
    return figure
