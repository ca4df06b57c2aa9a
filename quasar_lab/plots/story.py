"""The figures of the first notebook: steps against the memory floor, tokens' chances, two terms."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from quasar_lab.plots import MARKERS, _figure, style


def plot_steps(times: pd.DataFrame, floors: Mapping[str, float]) -> Figure:
    """Time of a step against its tokens, each target with its own floor.

    times: from `memory_wall.time_steps`. floors: target -> bytes / bandwidth, in seconds.
    """
    names = list(dict.fromkeys(times["target"]))
    colors = sns.color_palette("colorblind")
    with style():
        figure, axes = _figure(7.6, 4.6)
        for i, name in enumerate(names):
            rows = times[times["target"] == name]
            low_high = np.abs(rows[["low", "high"]].sub(rows["median"], axis=0).to_numpy().T)
            axes.errorbar(
                rows["tokens"], rows["median"] * 1e3, yerr=low_high * 1e3, color=colors[i],
                marker=MARKERS[i], ms=8, lw=2, capsize=3, label=f"{name}, measured",
            )  # fmt: skip
            axes.axhline(
                floors[name] * 1e3, color=colors[i], ls="--", lw=1.6,
                label=f"{name}, bytes / bandwidth: {floors[name] * 1e3:.1f} ms",
            )  # fmt: skip
        axes.set_ylim(0, None)
        axes.set_xticks(sorted(set(times["tokens"])))
        axes.set_xlabel("M: tokens in the step (1 = plain decoding)")
        axes.set_ylabel("milliseconds a step")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def plot_token_chances(table: pd.DataFrame) -> Figure:
    """Bars of a few tokens' probabilities: one row a token, one column a distribution."""
    colors = sns.color_palette("colorblind")
    height = 0.8 / len(table.columns)
    with style():
        figure, axes = _figure(7.6, 0.5 * len(table) + 1.7)
        for i, name in enumerate(table.columns):
            y = np.arange(len(table)) + (i - (len(table.columns) - 1) / 2) * height
            values = table[name].to_numpy()
            axes.barh(y, values, height=height * 0.9, color=colors[i], alpha=0.45)
            axes.scatter(values, y, color=colors[i], marker=MARKERS[i], s=36, label=name, zorder=3)
        axes.set_yticks(range(len(table)), [_literal(name) for name in table.index])
        axes.set_ylim(len(table) - 0.5, -0.5)
        axes.set_xlim(0, None)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_xlabel("probability of the next token")
        figure.legend(loc="outside lower center", ncols=len(table.columns), fontsize=10)
    return figure


def plot_terms(terms: pd.DataFrame) -> Figure:
    """A gain as the product of its two terms, for each row of a table.

    terms: columns length_term, step_term and gain; the index labels the rows.
    """
    colors = sns.color_palette("colorblind")
    names = {
        "length_term": "longer acceptance (L term)",
        "step_term": "cheaper step (step term)",
        "gain": "both: the gain over n-gram",
    }
    with style():
        figure, axes = _figure(7.6, 0.62 * len(terms) + 1.6)
        for i, (column, label) in enumerate(names.items()):
            y = np.arange(len(terms)) + (i - 1) * 0.25
            values = terms[column].to_numpy()
            axes.hlines(y, 1, values, color=colors[i], lw=3, alpha=0.5)
            axes.scatter(values, y, color=colors[i], marker=MARKERS[i], s=60, label=label, zorder=3)
            for place, value in zip(y, values, strict=True):
                axes.annotate(
                    f"{value:.2f}", (value, place), xytext=(9, 0), textcoords="offset points",
                    va="center", fontsize=9,
                )  # fmt: skip
        axes.axvline(1, color="0.3", lw=1.2)
        axes.margins(x=0.12)
        axes.set_yticks(range(len(terms)), terms.index)
        axes.set_ylim(len(terms) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.set_xlabel("Quasar against n-gram speculation in full precision")
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    return figure


def _literal(text: object) -> str:
    """A label that matplotlib writes as it stands: no mathematics between dollar signs."""
    return str(text).replace("$", r"\$")
