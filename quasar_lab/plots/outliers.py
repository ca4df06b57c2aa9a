"""The pictures of notebook 02: uneven channels, before and after smoothing, and what it costs."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from plotly.subplots import make_subplots
from torch import Tensor

from quasar_lab.outlier_study import LinearStudy, pool_largest
from quasar_lab.plots import MARKERS, style

_PALETTE = sns.color_palette("colorblind")
_BEFORE, _AFTER = _PALETTE[3], _PALETTE[0]

# The projections that share an input, by the first of their names in a Llama.
_INPUTS = {
    "q_proj": "q, k, v",
    "o_proj": "o",
    "gate_proj": "gate, up",
    "down_proj": "down",
}


def _series(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Label -> rows of each projection whose input differs from the others' in its layer."""
    table = table[table["layer"] >= 0]
    present = list(dict.fromkeys(table["projection"]))
    wanted = [name for name in present if name in _INPUTS] or present
    return {_INPUTS.get(n, n): table[table["projection"] == n] for n in wanted}


def plot_outlier_ratios(table: pd.DataFrame, column: str = "ratio", label: str = "") -> Figure:
    """A column of `outlier_table` by layer, one line an input; the largest value is named."""
    with style():
        figure = Figure(figsize=(8.6, 4.4), layout="constrained")
        axes = figure.subplots()
        series = _series(table)
        for i, (name, rows) in enumerate(series.items()):
            axes.plot(
                rows["layer"], rows[column], color=_PALETTE[i], marker=MARKERS[i], ms=6, lw=1,
                label=f"input of {name}",
            )  # fmt: skip
        shown = pd.concat(series.values())
        worst = shown.loc[shown[column].idxmax()]
        at_left = worst["layer"] < shown["layer"].max() * 0.6
        axes.annotate(
            f"layer {worst['layer']} {worst['projection']}: {_readable(worst[column])}",
            (worst["layer"], worst[column]), xytext=(8 if at_left else -8, 2), fontsize=11,
            textcoords="offset points", ha="left" if at_left else "right",
        )  # fmt: skip
        axes.set_yscale("log")
        axes.margins(y=0.12)
        axes.set_xlabel("decoder layer")
        axes.set_ylabel(label or "largest / median channel |x|")
        figure.legend(loc="outside lower center", ncols=len(series), fontsize=10)
    return figure


def plot_token_maxima(x: Tensor) -> Figure:
    """Largest and median |x| of each token of an input x[T, C]: is it one token or all of them?"""
    magnitude = x.abs()
    largest, median = magnitude.amax(1).numpy(), magnitude.median(1).values.numpy()
    with style():
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(largest, color=_PALETTE[3], marker="^", ms=5, lw=0.8, label="largest channel")
        axes.plot(median, color=_PALETTE[0], marker="o", ms=4, lw=0.8, label="median channel")
        axes.set_yscale("log")
        axes.set_xlabel("token of the calibration sample")
        axes.set_ylabel("|x|")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def plot_magnitudes(study: LinearStudy, *, max_cells: int = 128) -> Figure:
    """Heat maps of both operands, before and after smoothing; the colours mean the same in all."""
    pairs = {
        "activations |x|": (study.activations, study.smoothed_activations, "token"),
        "weights |W|": (study.weight, study.smoothed_weight, "output channel"),
    }
    with style():
        figure = Figure(figsize=(9.4, 6.4), layout="constrained")
        grid = figure.subplots(2, 2, sharex=True)
        for column, (title, (before, after, rows)) in enumerate(pairs.items()):
            cells = [pool_largest(m, max_cells // 2, max_cells).numpy() for m in (before, after)]
            top = max(float(c.max()) for c in cells)
            norm = LogNorm(vmin=max(float(np.quantile(cells[0], 0.02)), top * 1e-5), vmax=top)
            for row, (when, matrix) in enumerate(zip(("before", "after"), (before, after),
                                                     strict=True)):  # fmt: skip
                axes = grid[row, column]
                image = axes.imshow(
                    cells[row], norm=norm, cmap="viridis", aspect="auto", interpolation="nearest",
                    extent=(0, matrix.shape[1], matrix.shape[0], 0),
                )  # fmt: skip
                axes.grid(False)
                axes.set_title(f"{title}, {when}", fontsize=12)
                axes.set_ylabel(rows)
                if row == 1:
                    axes.set_xlabel("input channel")
            figure.colorbar(image, ax=grid[:, column], shrink=0.8)
    return figure


def magnitude_surface(study: LinearStudy, *, rows: int = 32, columns: int = 96) -> go.Figure:
    """The activations as two surfaces to turn with the mouse: before and after smoothing."""
    figure = make_subplots(
        1, 2, specs=[[{"type": "surface"}] * 2], horizontal_spacing=0.02,
        subplot_titles=("before smoothing", "after smoothing"),
    )  # fmt: skip
    tokens, channels = study.activations.shape
    for column, matrix in enumerate((study.activations, study.smoothed_activations), start=1):
        cells = pool_largest(matrix, rows, columns)
        z = [[float(f"{value:.3g}") for value in row] for row in cells.tolist()]
        surface = go.Surface(
            z=z,
            x=np.linspace(0, channels - 1, cells.shape[1]).round().astype(int),
            y=np.linspace(0, tokens - 1, cells.shape[0]).round().astype(int),
            colorscale="Viridis", showscale=False,
            hovertemplate="channel %{x}<br>token %{y}<br>|x| = %{z}<extra></extra>",
        )  # fmt: skip
        figure.add_trace(surface, 1, column)
    axes = {
        "xaxis_title": "channel", "yaxis_title": "token", "zaxis_title": "|x|",
        "camera_eye": {"x": -1.3, "y": -1.6, "z": 0.8},
    }  # fmt: skip
    alt = (
        f"Two surfaces, |x| over token and channel of {study.name}: before smoothing up to "
        f"{float(study.activations.abs().max()):.3g}, after smoothing up to "
        f"{float(study.smoothed_activations.abs().max()):.3g}."
    )
    figure.update_layout(
        scene=axes, scene2=axes, height=430, width=900, margin={"l": 0, "r": 0, "t": 40, "b": 0},
        meta={"alt": alt},
    )  # fmt: skip
    return figure


def plot_alpha_sweep(table: pd.DataFrame) -> Figure:
    """Error of the output against alpha, from `method_table`: a panel a linear."""
    names = list(dict.fromkeys(table["name"]))
    with style():
        figure = Figure(figsize=(3.1 * len(names) + 0.6, 3.8), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            rows = table[table["name"] == name]
            sweep = rows[rows["method"] == "smoothquant"]
            best = sweep.loc[sweep["error"].idxmin()]
            axes.plot(
                sweep["alpha"], sweep["error"], color=_PALETTE[0], marker="o", ms=5,
                label="SmoothQuant",
            )  # fmt: skip
            for method, line, i in (("none", "--", 3), ("m2", ":", 2)):
                error = rows.loc[rows["method"] == method, "error"].iloc[0]
                label = {"none": "no smoothing", "m2": "m2 (has no alpha)"}[method]
                axes.axhline(error, color=_PALETTE[i], ls=line, lw=2, label=label)
            axes.plot(best["alpha"], best["error"], marker="*", ms=15, color=_PALETTE[1],
                      ls="none", label="best alpha")  # fmt: skip
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.tick_params(axis="y", labelsize=10)
            axes.set_title(_short(name), fontsize=11)
            axes.set_xlabel("alpha")
        figure.axes[0].set_ylabel("relative error, median token")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10)
    return figure


def plot_scales(studies: Mapping[str, LinearStudy]) -> Figure:
    """The scales that each method (label -> study of the same linear) chose, by channel size."""
    with style():
        figure = Figure(figsize=(8.0, 4.6), layout="constrained")
        axes = figure.subplots()
        for i, (label, study) in enumerate(studies.items()):
            axes.scatter(
                study.activation_absmax, study.scale, s=14, color=_PALETTE[i], alpha=0.6,
                marker=MARKERS[i], label=label, linewidth=0,
            )  # fmt: skip
        axes.axhline(1, color="0.4", lw=1, ls="--")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("largest |x| of the channel in calibration, a")
        axes.set_ylabel("scale s (1: left alone)")
        figure.legend(loc="outside lower center", ncols=len(studies), fontsize=10, markerscale=1.8)
    return figure


def plot_scheme_errors(errors: Mapping[str, Tensor]) -> Figure:
    """Relative error of each token's output, for each way of scaling: label -> errors[T]."""
    with style():
        figure = Figure(figsize=(8.4, 4.2), layout="constrained")
        axes = figure.subplots()
        for i, (label, values) in enumerate(errors.items()):
            axes.plot(
                values.numpy(), color=_PALETTE[i], marker=MARKERS[i], ms=5, lw=0.8,
                label=f"{label}: median {float(values.median()):.2g}",
            )  # fmt: skip
        axes.axhline(1, color="0.35", ls=":", lw=1)
        axes.set_yscale("log")
        axes.set_xlabel("token of the calibration sample")
        axes.set_ylabel("relative error of the output")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure


def plot_study(study: LinearStudy) -> Figure:
    """What the explorer shows: both operands' channels, before and after, largest first."""
    order = study.activation_absmax.argsort(descending=True)
    operands = {
        "activations: largest |x|": (
            study.activation_absmax,
            study.activation_absmax / study.scale,
        ),
        "weights: largest |W|": (study.weight_absmax, study.weight_absmax * study.scale),
    }
    with style():
        # a fixed layout and no small ticks: half the time of drawing, and the explorer's time limit
        figure = Figure(figsize=(9.0, 3.4))
        figure.subplots_adjust(left=0.07, right=0.975, top=0.9, bottom=0.17, wspace=0.17)
        panels: list[Axes] = list(figure.subplots(1, 2))
        for axes, (title, (before, after)) in zip(panels, operands.items(), strict=True):
            for i, (label, values) in enumerate((("before", before), ("after smoothing", after))):
                axes.plot(
                    values[order].numpy(), color=(_BEFORE, _AFTER)[i], ls="none", label=label,
                    marker=MARKERS[2 - 2 * i], ms=3, mew=0,
                )  # fmt: skip
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_title(title, fontsize=12)
            axes.set_xlabel("channels, largest activation first", fontsize=11)
        panels[0].legend(fontsize=10, markerscale=2.5)
    return figure


def _readable(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _short(name: str) -> str:
    """model.layers.11.mlp.down_proj -> layer 11 down_proj."""
    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return f"layer {numbers[0]} {parts[-1]}" if numbers else parts[-1]
