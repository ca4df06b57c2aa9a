"""The pictures of notebook 10: servers side by side, and what a growing batch does."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from quasar_lab.methods import METHODS
from quasar_lab.plots import look_of_methods, style

_PALETTE = sns.color_palette("colorblind")


def plot_servers(table: pd.DataFrame) -> Figure:
    """Tokens a second of each server for one request at a time, from `EndpointRun.table` rows."""
    alone = table[table["concurrency"] == 1].iloc[::-1]
    with style():
        figure = Figure(figsize=(8.0, 0.5 * len(alone) + 1.0), layout="constrained")
        axes = figure.subplots()
        engines = alone["method"].str.split(",").str[0]
        number = engines.map({engine: i for i, engine in enumerate(engines.unique())})
        bars = axes.barh(
            alone["method"], alone["tokens_per_second"], height=0.65, edgecolor="white",
            color=[_PALETTE[i] for i in number], hatch=[("", "//", "..")[i % 3] for i in number],
        )  # fmt: skip
        axes.bar_label(bars, fmt="{:.0f}", padding=4, fontsize=11)
        axes.set_xlabel("tokens a second, one request at a time")
        axes.margins(x=0.1)
        axes.grid(axis="y", visible=False)
    return figure


def plot_batches(speedups: pd.DataFrame) -> Figure:
    """Speed over plain bf16 at the same batch size (rows of `batch_speedups`)."""
    with style():
        figure = Figure(figsize=(8.0, 4.4), layout="constrained")
        axes = figure.subplots()
        look = look_of_methods(list(METHODS))
        for method, rows in speedups.groupby("method", sort=False):
            color, marker = look[str(method)]
            label = METHODS[str(method)].label.replace("INT8 (Quasar)", "INT8: Quasar")
            axes.plot(rows["batch"], rows["speedup"], color=color, marker=marker, label=label)
        axes.axhline(1, color="0.4", lw=1, ls="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(speedups["batch"].unique()))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests at a time")
        axes.set_ylabel("speed over plain bf16")
        axes.legend(fontsize=10)
    return figure
