"""Figures from data: each function takes a table and returns a matplotlib figure.

Colours are safe for colour-blind readers, and every series has a marker of its own besides.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from quasar_lab.methods import METHODS
from quasar_lab.tasks import TASKS

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures, restored afterwards."""
    with (
        sns.axes_style("whitegrid", {"axes.edgecolor": ".6"}),
        sns.plotting_context("notebook"),
    ):
        yield


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def look_of_methods(methods: list[str]) -> dict[str, tuple[tuple[float, float, float], str]]:
    """Colour and marker of each method, the same in every figure."""
    known = [*METHODS, *(name for name in methods if name not in METHODS)]
    colors = sns.color_palette("colorblind", len(known))
    return {name: (colors[i], MARKERS[i % len(MARKERS)]) for i, name in enumerate(known)}


def plot_speed(rows: pd.DataFrame, summary: pd.DataFrame) -> Figure:
    """Tokens per second: a dot a generation of `rows`, a bar at each method's in `summary`."""
    methods = list(summary.index)
    with style():
        figure, axes = _figure(8.0, 0.75 * len(methods) + 1.1)
        for y, method in enumerate(methods):
            color, marker = look_of_methods(methods)[method]
            values = rows.loc[rows["method"] == method, "tokens_per_second"]
            speed = summary.loc[method, "tokens_per_second"]
            axes.barh(y, speed, color=color, alpha=0.35, height=0.6, edgecolor="0.3", linewidth=0.6)
            axes.scatter(
                values, np.full(len(values), y), color=color, marker=marker, s=22, zorder=3
            )
            axes.annotate(
                f" {speed:.0f}", (0, y + 0.29), va="bottom", fontsize=12, fontweight="bold"
            )
        axes.set_yticks(range(len(methods)), summary["label"])
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.set_xlim(0, None)
        axes.set_xlabel("tokens per second\n(dots: generations; bar and number: median)")
    return figure


def plot_gain(summary: pd.DataFrame) -> Figure:
    """Where a speedup comes from: acceptance length against step cost; grey: equal speedup."""
    methods = list(summary.index)
    lengths = summary["mean_acceptance_length"].to_numpy()
    costs = summary["verify_step_in_plain_steps"].to_numpy()
    with style():
        figure, axes = _figure(7.2, 5.2)
        x = np.linspace(0.8, max(lengths.max() * 1.25, 2.0), 50)
        top = max(costs.max() * 1.3, 1.3)
        for speedup in (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8):
            axes.plot(x, x / speedup, color="0.8", lw=1, zorder=1)
            # the label stands where the line leaves the picture, at the right or at the top
            x_label = min(x[-1], top * speedup)
            if x_label > x[0] + 0.05:
                at_right = x_label == x[-1]
                axes.annotate(
                    f"{speedup:g}x", (x_label, x_label / speedup), fontsize=10, color="0.4",
                    textcoords="offset points", xytext=(-4, 0) if at_right else (0, -4),
                    ha="right" if at_right else "center", va="center" if at_right else "top",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1}, zorder=2,
                )  # fmt: skip
        for method, length, cost in zip(methods, lengths, costs, strict=True):
            color, marker = look_of_methods(methods)[method]
            label = f"{summary.loc[method, 'label']}: {summary.loc[method, 'speedup']:.2f}x"
            axes.scatter(length, cost, color=color, marker=marker, s=110, zorder=3, label=label,
                         edgecolor="white")  # fmt: skip
        axes.set_xlim(x[0], x[-1])
        axes.set_ylim(0, top)
        axes.set_xlabel("L: tokens a verification step")
        axes.set_ylabel("r: cost of that step, in plain steps")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def plot_acceptance(rows: pd.DataFrame) -> Figure:
    """Mean acceptance length of each speculative method, by kind of text."""
    drafting = rows[rows["drafted"] > 0]
    methods = [method for method in METHODS if method in set(drafting["method"])]
    tasks = list(dict.fromkeys(rows["task"]))
    totals = drafting.groupby(["method", "task"])[["new_tokens", "steps"]].sum()
    length = totals["new_tokens"] / totals["steps"]
    with style():
        figure, axes = _figure(8.0, 0.62 * len(tasks) + 1.6)
        for i, method in enumerate(methods):
            color, marker = look_of_methods(methods)[method]
            y = np.arange(len(tasks)) + (i - (len(methods) - 1) / 2) * 0.22
            values = [length.get((method, task), np.nan) for task in tasks]
            axes.hlines(y, 1, values, color=color, lw=2, alpha=0.6)
            axes.scatter(values, y, color=color, marker=marker, s=60, label=METHODS[method].label)
        axes.set_yticks(range(len(tasks)), [TASKS.get(task, task) for task in tasks])
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        axes.set_xlim(0.95, None)
        axes.set_xlabel("L: tokens a verification step (1 = no draft accepted)")
        figure.legend(loc="outside lower center", ncols=max(len(methods), 1), fontsize=10)
    return figure


def plot_divergence(fidelity: pd.DataFrame) -> Figure:
    """How far the INT8 distribution is from full precision: KL of every token, sorted."""
    kl = np.sort(fidelity["kl"].to_numpy())
    share = np.arange(1, len(kl) + 1) / len(kl)
    with style():
        figure, axes = _figure(7.2, 4.0)
        color = sns.color_palette("colorblind")[0]
        axes.plot(np.maximum(kl, 1e-7), share, color=color, lw=2)
        for value, name, line in (
            (float(np.median(kl)), "median", ":"),
            (float(kl.mean()), "mean", "--"),
        ):
            axes.axvline(value, color="0.35", ls=line, lw=1.2, label=f"{name} {value:.4f} nats")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_xlabel("KL(full precision || INT8) of one token's distribution, nats")
        axes.set_ylabel("share of tokens at or below")
        axes.legend(loc="upper left", fontsize=10)
    return figure


def plot_gemm(table: pd.DataFrame) -> Figure:
    """Time of one linear against the number of rows M, one panel a shape, from benchmarks/gemm.py.

    The dashed line is the time of reading the INT8 weight once, at what memory gave in the same
    turns.
    """
    shapes = list(table[["N", "K"]].drop_duplicates().itertuples(index=False, name=None))
    columns = min(3, len(shapes))
    height = -(-len(shapes) // columns)
    paths = list(dict.fromkeys(table["path"]))
    colors = sns.color_palette("colorblind", len(paths))
    with style():
        figure = Figure(figsize=(4.2 * columns, 3.3 * height + 0.5), layout="constrained")
        grid = figure.subplots(height, columns, squeeze=False).ravel()
        for axes, (n, k) in zip(grid, shapes, strict=False):
            part = table[(table["N"] == n) & (table["K"] == k)]
            for i, path in enumerate(paths):
                line = part[part["path"] == path].sort_values("M")
                axes.plot(
                    line["M"], line["microseconds"], color=colors[i], ms=5, lw=1.5,
                    marker=MARKERS[i % len(MARKERS)], label=path if axes is grid[0] else None,
                )  # fmt: skip
            line = part[part["path"] == paths[0]].sort_values("M")
            reading = line["microseconds"] * line["share_of_bandwidth"]
            axes.plot(line["M"], reading, color="0.3", ls="--", lw=1)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
            axes.set_title(f"{n} x {k}", fontsize=11)
            axes.set_xlabel("rows M")
            axes.set_ylabel("microseconds")
        for axes in grid[len(shapes) :]:
            axes.set_axis_off()
        figure.legend(loc="outside lower center", ncols=len(paths), fontsize=10)
    return figure
