"""Figures of the paper's experiments, from `tables.measured_table`."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quasar_lab.methods import BASELINE
from quasar_lab.plots import look_of_methods, style
from quasar_lab.tables import ALL_TASKS
from quasar_lab.tasks import TASKS


def plot_by_task(measured: pd.DataFrame) -> Figure:
    """Speedup of each method on each task, with its 95 % interval; one temperature is drawn.

    The lowest temperature of the table, and the first model and draft setting.
    """
    table = _one(measured, "model", "temperature")
    tasks = list(dict.fromkeys(table["task"]))
    with style():
        figure = Figure(figsize=(8.0, 0.75 * len(tasks) + 1.8), layout="constrained")
        axes = figure.subplots()
        for method, offset in _offsets(table):
            rows = table[table["method"] == method].drop_duplicates("task").set_index("task")
            y = np.arange(len(tasks)) + offset
            _points(axes, rows.reindex(tasks), y, method, horizontal=True)
        axes.axvline(1, color="0.4", lw=1)
        axes.set_yticks(range(len(tasks)), [TASKS.get(task, task) for task in tasks])
        axes.set_ylim(len(tasks) - 0.5, -0.5)
        axes.set_xlabel("speed relative to plain decoding (bar: 95 % of resamplings)")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def plot_by_temperature(measured: pd.DataFrame) -> Figure:
    """Speedup and L over the temperature, all tasks pooled."""
    table = _one(_pooled(measured), "model")
    with style():
        figure, [left, right] = _pair()
        for method, _ in _offsets(table):
            rows = table[table["method"] == method].drop_duplicates("temperature")
            rows = rows.sort_values("temperature")
            color, marker = look_of_methods([method])[method]
            _points(left, rows, rows["temperature"], method)
            left.plot(rows["temperature"], rows["speedup"], color=color)
            right.plot(
                rows["temperature"], rows["mean_acceptance_length"], color=color, marker=marker
            )
        left.set_ylabel("speed relative to plain decoding")
        right.set_ylabel("L: tokens a verification step")
        for axes in (left, right):
            axes.set_xlabel("temperature (0: greedy)")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def plot_by_draft(measured: pd.DataFrame) -> Figure:
    """Speedup and L over the draft length, a line for each method and n-gram range."""
    table = _one(_pooled(measured), "model", "temperature")
    table = table[table["num_draft_tokens"].notna()]
    with style():
        figure, [left, right] = _pair()
        for method in dict.fromkeys(table["method"]):
            color, _ = look_of_methods([method])[method]
            own = table[table["method"] == method]
            for number, (bounds, rows) in enumerate(own.groupby(["min_ngram", "max_ngram"])):
                rows = rows.sort_values("num_draft_tokens")
                label = f"{rows['label'].iloc[0]}, n = {bounds[0]:g} to {bounds[1]:g}"
                look: dict[str, Any] = dict(
                    color=color,
                    ls=("-", "--", ":", "-.")[number % 4],
                    marker="osD^"[number % 4],
                )
                for axes, column in ((left, "speedup"), (right, "mean_acceptance_length")):
                    axes.plot(rows["num_draft_tokens"], rows[column], **look,
                              label=label if axes is left else None)  # fmt: skip
        left.set_ylabel("speed relative to plain decoding")
        right.set_ylabel("L: tokens a verification step")
        for axes in (left, right):
            axes.set_xlabel("drafted tokens, at most")
            axes.set_xticks(sorted(set(table["num_draft_tokens"])))
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def _pair() -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    return figure, list(figure.subplots(1, 2))


def _one(measured: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The rows with the first value of each column."""
    for column in columns:
        measured = measured[measured[column] == measured[column].iloc[0]]
    return measured


def _pooled(measured: pd.DataFrame) -> pd.DataFrame:
    pooled = measured[measured["task"] == ALL_TASKS]
    return pooled if len(pooled) else measured


def _offsets(table: pd.DataFrame) -> list[tuple[str, float]]:
    """The methods but the baseline, side by side."""
    methods = [method for method in dict.fromkeys(table["method"]) if method != BASELINE]
    return [(method, (i - (len(methods) - 1) / 2) * 0.16) for i, method in enumerate(methods)]


def _points(
    axes: Axes, rows: pd.DataFrame, place: Any, method: str, horizontal: bool = False
) -> None:
    color, marker = look_of_methods([method])[method]
    label = rows["label"].dropna().iloc[0]
    value = rows["speedup"].to_numpy()
    spread = np.stack([value - rows["speedup_low"], rows["speedup_high"] - value])
    spread = np.nan_to_num(spread)  # one prompt has no interval
    look: dict[str, Any] = dict(color=color, marker=marker, ls="none", capsize=3, ms=7, label=label)
    if horizontal:
        axes.errorbar(value, place, xerr=spread, **look)
    else:
        axes.errorbar(place, value, yerr=spread, **look)
