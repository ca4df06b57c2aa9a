"""The pictures of notebook 03: wrapped sums, errors by scale, the tile, time by rows, roofline."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from quasar_lab.plots import MARKERS, style

_PALETTE = sns.color_palette("colorblind")


def plot_wrapped_sums(sums: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """What an int8 accumulator holds against the true sum, one panel a pair (exact, wrapped)."""
    with style():
        figure = Figure(figsize=(9.0, 3.7), layout="constrained")
        panels = figure.subplots(1, len(sums), sharey=True, squeeze=False)[0]
        for axes, (title, (exact, wrapped)) in zip(panels, sums.items(), strict=True):
            first = axes is panels[0]
            low, high = int(exact.min()), int(exact.max())
            axes.axhspan(-128, 127, color="0.5", alpha=0.15, label="all that int8 can hold")
            axes.plot([low, high], [low, high], color="0.4", ls="--", lw=1.2, label="true sum")
            axes.scatter(
                exact.flatten(), wrapped.flatten(), s=12, marker="o", color=_PALETTE[3],
                label="int8 result",
            )  # fmt: skip
            axes.set_ylim(-420, 420)
            axes.set_title(title, fontsize=12)
            axes.set_xlabel("true sum")
            axes.xaxis.set_major_locator(MaxNLocator(5))
            if first:
                axes.set_ylabel("result")
                figure.legend(loc="outside lower center", fontsize=10, ncols=3)
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
            "1: nothing of the output is left", (errors.index[-1], 0.8), ha="right", va="top",
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
            "seven bits, up to 127:\nno pair can saturate ", (127, table["saturated"].max() / 2),
            ha="right", va="center", fontsize=10, color="0.35",
        )  # fmt: skip
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1%}"))
        axes.set_xlabel("largest value of the unsigned operand")
        axes.set_ylabel("pairs that saturate")
    return figure


def _strip(axes: Axes, y: float, before: str, after: str, color: tuple[float, ...]) -> None:
    for i in range(16):
        axes.add_patch(Rectangle((i, y), 0.9, 0.7, facecolor=color, edgecolor="white"))
    axes.annotate(before, (-0.4, y + 0.35), ha="right", va="center", fontsize=10)
    axes.annotate(after, (16.4, y + 0.35), va="center", fontsize=10)


def plot_tile(rows: int = 6) -> Figure:
    """The two orders of the same work: the weights read once a row, or once for all rows."""
    weight_color, token_color = sns.light_palette(_PALETTE[0], 4)[2], _PALETTE[1]
    arrow = {"arrowstyle": "-|>", "color": "0.35", "lw": 1.4}
    with style():
        figure = Figure(figsize=(9.2, 0.42 * rows + 1.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        for r in range(rows):
            _strip(left, -r, "read", f"× token {r + 1}", weight_color)
        left.set_title(f"row by row: {rows} trips to memory", fontsize=12)
        _strip(right, 0, "read", "once", weight_color)
        right.annotate("", (8, -1.1), (8, -0.1), arrowprops=arrow)
        for r in range(rows - 1, -1, -1):
            _strip(right, -2 - 0.8 * r, "×", f"token {r + 1}", token_color)
        right.set_title("one pass: one trip, all tokens use it", fontsize=12)
        for axes, bottom in ((left, -rows), (right, -2 - 0.8 * rows)):
            axes.set_xlim(-3, 22)
            axes.set_ylim(bottom, 1.0)
            axes.set_axis_off()
    return figure


def plot_rows(
    times: pd.DataFrame, weight_count: int, bandwidth: float, *, paths: list[str]
) -> Figure:
    """Time of one linear against its rows M (`roofline.time_linears`), bands up to the median.

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
                line["M"],
                line["seconds"] * 1e3,
                line["median"] * 1e3,
                color=_PALETTE[i],
                alpha=0.15,
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
    """Operations a second against operations a byte: the machine's roofs and measured products.

    points: columns format, M, intensity (operations a weight byte) and operations_per_second;
    peaks: format -> operations a second, its flat roof; bandwidth: bytes a second, the slope.
    """
    with style():
        figure = Figure(figsize=(8.6, 5.6), layout="constrained")
        axes = figure.subplots()
        top = max(peaks.values())
        left = points["intensity"].min() / 1.6
        right = max(points["intensity"].max(), top / bandwidth) * 1.6
        slope = np.array([left, top / bandwidth])
        axes.plot(
            slope, slope * bandwidth / 1e9, color="0.45", lw=1.8,
            label=f"memory: {bandwidth / 1e9:,.1f} GB/s",
        )  # fmt: skip
        for i, (name, peak) in enumerate(peaks.items()):
            axes.plot(
                [peak / bandwidth, right], [peak / 1e9] * 2, color=_PALETTE[i], lw=1.8,
                ls=("-", "--", "-.")[i % 3], label=f"{name} arithmetic: {peak / 1e9:,.0f} Gop/s",
            )  # fmt: skip
            axes.axvline(peak / bandwidth, color=_PALETTE[i], ls=":", lw=1)
            part = points[points["format"] == name]
            rate = part["operations_per_second"] / 1e9
            axes.plot(
                part["intensity"], rate, color=_PALETTE[i], marker=MARKERS[i], ms=7, lw=0.6,
                alpha=0.9, label=f"{name}, M rows",
            )  # fmt: skip
            for intensity, height, m in zip(part["intensity"], rate, part["M"], strict=True):
                axes.annotate(
                    f"{m}", (intensity, height), textcoords="offset points",
                    # neighbouring series keep their labels on different sides
                    xytext=(-11, 6) if i == 1 else (6, -12),
                    fontsize=9, color=_PALETTE[i],
                )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(left, right)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_xlabel("operations for each byte read")
        axes.set_ylabel("billion operations a second")
        figure.legend(loc="outside lower center", fontsize=10, ncols=2)
    return figure
