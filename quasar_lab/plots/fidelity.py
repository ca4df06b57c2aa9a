"""The pictures of notebook 06: how far two models' predictions are apart, and where."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from quasar_lab.fidelity_runs import bootstrap_interval
from quasar_lab.plots import MARKERS, style

_PALETTE = sns.color_palette("colorblind")
_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.3g}%")

# column -> (axis label, whether it is a share)
METRICS: dict[str, tuple[str, bool]] = {
    "kl": ("KL(full precision || variant), nats", False),
    "reverse_kl": ("KL(variant || full precision), nats", False),
    "js": ("Jensen-Shannon divergence, nats", False),
    "tv": ("total variation", True),
    "top1_match": ("same most likely token", True),
}


def plot_fidelity(
    frame: pd.DataFrame, metrics: Sequence[str] = ("kl", "tv", "top1_match"), by: str = "variant"
) -> Figure:
    """Mean of each metric for each value of `by`, with its 95 % interval over texts."""
    names = list(dict.fromkeys(frame[by]))
    with style():
        figure = Figure(figsize=(3.2 * len(metrics) + 1.2, 0.42 * len(names) + 1.3),
                        layout="constrained")  # fmt: skip
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            for i, name in enumerate(names):
                part = frame[frame[by] == name]
                low, high = bootstrap_interval(part[metric], part["text"])
                axes.hlines(i, low, high, color=_PALETTE[i % 10], lw=3, alpha=0.5)
                axes.plot(part[metric].mean(), i, color=_PALETTE[i % 10], ms=8, ls="none",
                          marker=MARKERS[i % len(MARKERS)])  # fmt: skip
            label, share = METRICS[metric]
            axes.set_xlabel(label, fontsize=10)
            axes.margins(x=0.12)
            if share:
                axes.xaxis.set_major_formatter(_PERCENT)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.tick_params(axis="x", labelsize=10)
        panels[0].set_yticks(range(len(names)), [str(name) for name in names])
        panels[0].set_ylim(len(names) - 0.5, -0.5)
    return figure


def plot_tokens(frame: pd.DataFrame, metric: str = "kl") -> Figure:
    """A metric of each token along one variant's texts, one colour a text."""
    values = frame[metric].astype(float).to_numpy()
    texts = list(dict.fromkeys(frame["text"]))
    with style():
        figure = Figure(figsize=(8.8, 3.6), layout="constrained")
        axes = figure.subplots()
        place = np.arange(len(frame))
        for i, text in enumerate(texts):
            here = (frame["text"] == text).to_numpy()
            label = str(frame.loc[frame["text"] == text, "label"].iloc[0]) or f"text {text}"
            axes.plot(
                place[here], np.maximum(values[here], 1e-6), color=_PALETTE[i % 10], ls="none",
                marker=MARKERS[i % len(MARKERS)], ms=5, label=label if len(texts) <= 8 else None,
            )  # fmt: skip
        mean = f"mean {values.mean():.4f}"
        axes.axhline(values.mean(), color="0.3", ls="--", lw=1, label=mean)
        axes.set_yscale("log")
        axes.set_xlabel("token, text after text")
        axes.set_ylabel(METRICS[metric][0])
        figure.legend(loc="outside lower center", ncols=6, fontsize=9)
    return figure


def plot_margins(frame: pd.DataFrame) -> Figure:
    """Every token: how sure the reference was against how much probability moved."""
    with style():
        figure = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = figure.subplots()
        for match, color, marker, label in (
            (True, _PALETTE[0], "o", "same most likely token"),
            (False, _PALETTE[3], "X", "another most likely token"),
        ):
            part = frame[frame["top1_match"] == match]
            axes.scatter(
                part["reference_margin"].clip(lower=1e-3), part["tv"].clip(lower=1e-4),
                s=22 if match else 70,
                color=color, marker=marker, alpha=0.55 if match else 1, linewidth=0,
                label=f"{label}: {len(part)} tokens",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("margin of the reference's best two tokens, nats")
        axes.set_ylabel("total variation")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def plot_temperatures(frame: pd.DataFrame, metrics: Sequence[str] = ("kl", "tv")) -> Figure:
    """Mean of each metric against temperature, one line a variant, with 95 % intervals."""
    variants = list(dict.fromkeys(frame["variant"]))
    with style():
        figure = Figure(figsize=(4.1 * len(metrics), 3.8), layout="constrained")
        panels = figure.subplots(1, len(metrics), squeeze=False)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            for i, variant in enumerate(variants):
                rows = frame[frame["variant"] == variant]
                groups = list(rows.groupby("temperature"))
                means = np.array([part[metric].mean() for _, part in groups])
                ends = np.array([bootstrap_interval(p[metric], p["text"]) for _, p in groups])
                axes.errorbar(
                    # a little apart, so that the intervals can be told apart
                    [t + 0.02 * (i - (len(variants) - 1) / 2) for t, _ in groups],
                    means, yerr=np.abs(ends.T - means), color=_PALETTE[i],
                    marker=MARKERS[i], ms=7, lw=1.6, capsize=3,
                    label=variant if axes is panels[0] else None,
                )  # fmt: skip
            label, share = METRICS[metric]
            axes.set_ylim(0, None)
            axes.set_xlabel("temperature")
            axes.set_ylabel(label, fontsize=11)
            if share:
                axes.yaxis.set_major_formatter(_PERCENT)
        figure.legend(loc="outside lower center", ncols=len(variants), fontsize=10)
    return figure


def plot_distances(distances: Mapping[str, Mapping[str, float]]) -> Figure:
    """Total variation of what is emitted (first key) from each model (second key), as bars."""
    table = pd.DataFrame(distances).T
    height = 0.8 / len(table.columns)
    with style():
        figure = Figure(figsize=(8.0, 0.75 * len(table) + 1.3), layout="constrained")
        axes = figure.subplots()
        for i, name in enumerate(table.columns):
            y = np.arange(len(table)) + (i - (len(table.columns) - 1) / 2) * height
            axes.barh(y, table[name], height=height * 0.9, color=_PALETTE[i], alpha=0.5)
            axes.plot(table[name], y, color=_PALETTE[i], marker=MARKERS[i], ms=8, ls="none",
                      label=f"from {name}")  # fmt: skip
        axes.set_yticks(range(len(table)), table.index)
        axes.set_ylim(len(table) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1%}"))
        axes.set_xlabel("mean total variation of the emitted token's distribution")
        figure.legend(loc="outside lower center", ncols=len(table.columns), fontsize=10)
    return figure


def plot_explorer(frame: pd.DataFrame, metric: str) -> Figure:
    """What the explorer shows: a metric's tokens, sorted, one line a variant."""
    variants = list(dict.fromkeys(frame["variant"]))
    label, share = METRICS[metric]
    with style():
        figure = Figure(figsize=(8.4, 3.6))
        figure.subplots_adjust(left=0.1, right=0.98, top=0.96, bottom=0.17)
        axes = figure.subplots()
        if metric == "top1_match":
            means = [frame.loc[frame["variant"] == v, metric].mean() for v in variants]
            axes.barh(range(len(variants)), means, height=0.6,
                      color=[_PALETTE[i % 10] for i in range(len(variants))])  # fmt: skip
            for i, mean in enumerate(means):
                axes.annotate(f" {mean:.1%}", (mean, i), va="center")
            figure.subplots_adjust(left=0.24)
            axes.set_yticks(range(len(variants)), variants)
            axes.set_xlim(0, 1.15)
            axes.set_ylim(len(variants) - 0.5, -0.5)
            axes.xaxis.set_major_formatter(_PERCENT)
            axes.set_xlabel(f"{label}, share of tokens")
            return figure
        for i, variant in enumerate(variants):
            values = np.sort(frame.loc[frame["variant"] == variant, metric].to_numpy(float))
            mean = f"{values.mean():.1%}" if share else f"{values.mean():.4f}"
            axes.plot(
                np.maximum(values, 1e-6), np.arange(1, len(values) + 1) / len(values), lw=1.6,
                color=_PALETTE[i % 10], marker=MARKERS[i % len(MARKERS)], ms=6,
                markevery=max(len(values) // 8, 1), label=f"{variant}: mean {mean}",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(_PERCENT)
        axes.set_xlabel(label)
        axes.set_ylabel("share of tokens at or below")
        axes.legend(loc="upper left", fontsize=10)
    return figure
