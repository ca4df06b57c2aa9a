"""Outliers of one linear: exact reference values, and pictures that draw what the data say."""

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import tiny_model

from quasar_lab import UserError, calibrate
from quasar_lab.activation_stats import ActivationStats
from quasar_lab.alpha_search import w8a8_error
from quasar_lab.outlier_study import (
    SCHEMES,
    LinearStudy,
    groups_by_reader,
    method_table,
    outlier_table,
    pool_largest,
    study_linear,
    token_errors,
)
from quasar_lab.plots.outliers import (
    magnitude_surface,
    plot_alpha_sweep,
    plot_magnitudes,
    plot_outlier_ratios,
    plot_scales,
    plot_scheme_errors,
    plot_study,
    plot_token_maxima,
)

DOWN, QUERY = "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def stats(model):
    generator = torch.Generator().manual_seed(1)
    return calibrate(model, [torch.randint(97, (24,), generator=generator) for _ in range(2)])


@pytest.fixture(scope="module")
def study(model, stats) -> LinearStudy:
    return study_linear(model, stats, QUERY, "smoothquant", 0.5)


def test_worked_example() -> None:
    """The reference values of the two-token example, through the study's own properties."""
    x, w = torch.tensor([[4.0, -1, 0], [-2, 9, 0]]), torch.tensor([[1.0, -0.25, 0], [0.5, 0.04, 2]])
    s = torch.tensor([2.0, 6.0, 1.0])
    stats = ActivationStats.from_batches(x)
    study = LinearStudy("a", "m2", s, x, w, stats.absmax, token_errors(x, w), token_errors(x, w, s))
    expected = torch.tensor([[2, -1 / 6, 0], [-1, 1.5, 0]])
    assert torch.allclose(study.smoothed_activations, expected)
    assert torch.allclose(study.smoothed_weight, torch.tensor([[2, -1.5, 0], [1, 0.24, 2]]))
    assert torch.allclose(study.smoothed_activations @ study.smoothed_weight.T, x @ w.T)
    assert study.numbers().loc["before", "activation max / median"] == pytest.approx(9 / 4)


def test_errors_are_those_of_the_alpha_search(study, model) -> None:
    """The explorer must show what the search minimises: two measures of one thing would differ."""
    total = study.activations @ study.weight.T
    squares = (study.errors * total.norm(dim=1)).square().sum() / total.square().sum()
    assert float(squares) == pytest.approx(
        w8a8_error(study.activations, [study.weight], study.scale), rel=1e-4
    )


def test_static_scale_gives_ordinary_tokens_away() -> None:
    """One giant token: per token the others keep their precision, per tensor they lose it."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 64, generator=generator), torch.randn(8, 64, generator=generator)
    x[0] *= 1000
    dynamic, static = (token_errors(x, w, scheme=scheme) for scheme in SCHEMES)
    assert dynamic.median() < 0.03 and static[1:].median() > 0.5
    assert torch.allclose(static[0], dynamic[0], rtol=1e-5)
    clipped = token_errors(x, w, scheme=SCHEMES[1], absmax=float(x[1:].abs().max()))
    assert clipped[1:].median() < 0.05 and clipped[0] > 0.9
    with pytest.raises(UserError, match="per channel"):
        token_errors(x, w, scheme="per channel")


@pytest.mark.parametrize("method", ["none", "smoothquant", "m2"])
@pytest.mark.parametrize("name", [QUERY, DOWN, "model.layers.0.self_attn.o_proj", "lm_head"])
def test_a_study_keeps_the_product(model, stats, name: str, method: str) -> None:
    study = study_linear(model, stats, name, method, 0.7)
    product = study.smoothed_activations @ study.smoothed_weight.T
    assert torch.allclose(product, study.activations @ study.weight.T, atol=1e-4)
    if method == "none" or name == "lm_head":
        assert study.method == "none" and torch.equal(study.errors, study.errors_before)


def test_readers_of_one_input_get_one_scale(model, stats) -> None:
    names = [f"model.layers.1.self_attn.{p}_proj" for p in "qkv"]
    scales = [study_linear(model, stats, name, "smoothquant").scale for name in names]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[0], scales[2])
    assert set(names) <= set(groups_by_reader(model))


def test_wrong_names_are_told(model, stats) -> None:
    with pytest.raises(UserError, match=r"no linear named 'layers\.9'"):
        study_linear(model, stats, "layers.9")
    with pytest.raises(UserError, match="choose from m2"):
        study_linear(model, stats, QUERY, "awq")


def test_tables(model, stats) -> None:
    table = outlier_table(model, stats)
    assert len(table) == len(stats) and table["layer"].tolist()[-1] == -1
    row = table[table["name"] == DOWN].iloc[0]
    assert row["layer"] == 1 and row["projection"] == "down_proj"
    assert row["ratio"] == pytest.approx(stats[DOWN].outlier_ratio)
    assert row["channel"] == int(stats[DOWN].absmax.argmax())
    methods = method_table(model, stats, [QUERY], alphas=(0.0, 0.5))
    assert methods["method"].tolist() == ["none", "m2", "smoothquant", "smoothquant"]
    assert methods["channels"].iloc[0] == 0
    figure = plot_outlier_ratios(table)
    assert len(figure.axes[0].lines) == 4 and "layer" in figure.axes[0].get_xlabel()
    largest = max(line.get_ydata().max() for line in figure.axes[0].lines)
    assert largest == pytest.approx(table.loc[table["layer"] >= 0, "ratio"].max())
    sweep = plot_alpha_sweep(methods)
    assert len(sweep.axes) == 1 and sweep.axes[0].get_xlabel() == "alpha"
    assert np.allclose(sweep.axes[0].lines[0].get_ydata(), methods["error"].iloc[2:])


def test_pooling_keeps_the_outlier() -> None:
    """A picture of 1,536 channels in 100 cells must not skip the one channel it is about."""
    matrix = torch.zeros(50, 301)
    matrix[37, 123] = -9
    cells = pool_largest(matrix, 8, 10)
    assert cells.shape == (8, 10) and cells.max() == 9 and (cells > 0).sum() == 1
    assert torch.equal(pool_largest(matrix, 99, 999), matrix.abs())


def test_pictures_draw_the_study(study) -> None:
    maxima = plot_token_maxima(study.activations).axes[0]
    assert np.allclose(maxima.lines[0].get_ydata(), study.activations.abs().amax(1))
    assert len(plot_scales({"a": study, "b": study}).axes[0].collections) == 2
    errors = plot_scheme_errors({"one": study.errors, "two": study.errors_before}).axes[0]
    assert errors.get_yscale() == "log" and "error" in errors.get_ylabel()
    panels = plot_study(study).axes
    before, after = (line.get_ydata() for line in panels[0].lines)
    assert np.all(np.diff(before) <= 0)
    assert before[0] == pytest.approx(float(study.activation_absmax.max()))
    order = study.activation_absmax.argsort(descending=True)
    assert np.allclose(after, (study.activation_absmax / study.scale)[order])


def test_heat_maps_and_surface(study) -> None:
    figure = plot_magnitudes(study, max_cells=16)
    images = [axes.images[0] for axes in figure.axes[:4]]
    assert {axes.get_title() for axes in figure.axes[:4]} == {
        "activations |x|, before",
        "activations |x|, after",
        "weights |W|, before",
        "weights |W|, after",
    }
    assert images[0].get_array().max() == pytest.approx(float(study.activations.abs().max()))
    # one colour scale a column, or before and after could not be compared
    assert images[0].norm.vmax == images[2].norm.vmax
    surface = magnitude_surface(study, rows=4, columns=8)
    assert study.name in surface.layout.meta["alt"]
    assert len(surface.data) == 2 and np.shape(surface.data[0].z) == (4, 8)
    assert np.max(surface.data[0].z) == pytest.approx(
        float(study.activations.abs().max()), rel=1e-2
    )
    assert len(surface.to_json()) < 20_000


def test_only_a_subset_of_names_is_studied(model, stats) -> None:
    table = outlier_table(model, stats, [DOWN])
    assert isinstance(table, pd.DataFrame) and table["name"].tolist() == [DOWN]
