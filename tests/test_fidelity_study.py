"""Fidelity by temperature, part and margin: agrees with the plain comparison; pictures of it."""

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import tiny_model

from quasar_lab import QuantizationConfig, UserError, quantize
from quasar_lab.fidelity_runs import Text, compare_models
from quasar_lab.fidelity_study import (
    by_margin,
    compare_at_temperatures,
    emitted_distribution,
    layer_group_variants,
)
from quasar_lab.plots.fidelity import (
    METRICS,
    plot_distances,
    plot_explorer,
    plot_fidelity,
    plot_margins,
    plot_temperatures,
    plot_tokens,
)
from quasar_lab.quantized_linear import W8A8Linear

TEXTS = [Text((1, 5, 9), (4, 8, 15, 16), "one"), Text((), (23, 42, 7), "two")]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def rounded(model):
    return quantize(model, None, QuantizationConfig(smoothing="none"))


@pytest.fixture(scope="module")
def frame(model, rounded):
    variants = {"INT8": rounded, "itself": lambda: model}
    return compare_at_temperatures(model, variants, TEXTS, (0.5, 1.0))


def test_it_is_the_plain_comparison(frame, model, rounded) -> None:
    plain = compare_models(model, rounded, TEXTS, temperature=0.5)
    here = frame[(frame["variant"] == "INT8") & (frame["temperature"] == 0.5)]
    assert np.allclose(here["kl"], plain["kl"]) and np.allclose(here["tv"], plain["tv"])
    assert here["position"].tolist() == plain["position"].tolist()
    assert here["label"].tolist() == ["one"] * 4 + ["two"] * 2
    assert len(frame) == 2 * 2 * 6
    assert (frame.loc[frame["variant"] == "itself", "tv"] == 0).all()


def test_only_one_made_variant_is_kept(model, rounded) -> None:
    """Five half-quantised copies of an 8B model at once would not fit."""
    made = []

    def maker():
        made.append(len(made))
        return rounded

    compare_at_temperatures(model, {"a": maker, "b": maker}, TEXTS[:1], (1.0, 2.0))
    assert made == [0, 1]


def test_nothing_to_compare(model) -> None:
    for texts, temperatures in (([], (1.0,)), (TEXTS, ()), ([Text((1,), ())], (1.0,))):
        with pytest.raises(UserError, match="nothing to compare"):
            compare_at_temperatures(model, {"a": model}, texts, temperatures)


def test_layer_groups_round_each_linear_once(model) -> None:
    """Groups that overlap or leave a linear out would not add up to the whole."""
    names: dict[str, set[str]] = {}
    for group, make in layer_group_variants(model, None, QuantizationConfig("none")).items():
        names[group] = {n for n, m in make().named_modules() if isinstance(m, W8A8Linear)}
    everything = names.pop("all of them")
    assert set.union(*names.values()) == everything
    assert sum(map(len, names.values())) == len(everything) == 21


def test_margins_count_every_token() -> None:
    frame = pd.DataFrame(
        {
            "reference_margin": [0.0, 0.1, 0.3, 1.0, 9.0],
            "top1_match": [False, True, True, True, True],
            "tv": [0.4, 0.2, 0.1, 0.1, 0.0],
        }
    )
    table = by_margin(frame, edges=(0, 0.25, 1))
    assert table.index.tolist() == ["0 to 0.25", "0.25 to 1", "over 1"]
    assert table["tokens"].tolist() == [2, 1, 2]
    assert table["disagreement_rate"].tolist() == [0.5, 0, 0]
    assert table["share"].sum() == 1 and table["mean_tv"].iloc[0] == pytest.approx(0.3)


def test_what_is_emitted_is_the_verifiers(generator) -> None:
    """Whoever drafts: the law of the emitted token is p, to the last digits."""
    p, q = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    p, q = p / p.sum(), q / q.sum()
    assert torch.allclose(emitted_distribution(q, p), p, atol=1e-15)
    assert torch.equal(emitted_distribution(p, p), p)


def test_pictures_draw_the_table(frame) -> None:
    one = frame[frame["temperature"] == 1.0]
    figure = plot_fidelity(one)
    assert len(figure.axes) == 3 and figure.axes[1].get_xlabel() == METRICS["tv"][0]
    drawn = figure.axes[0].lines[0].get_xdata()[0]
    assert drawn == pytest.approx(one.loc[one["variant"] == "INT8", "kl"].mean())
    tokens = plot_tokens(one[one["variant"] == "INT8"])
    assert len(tokens.axes[0].lines) == 3  # two texts and the mean
    margins = plot_margins(one).axes[0]
    assert sum(len(part.get_offsets()) for part in margins.collections) == len(one)
    panels = plot_temperatures(frame).axes
    assert [axes.get_xlabel() for axes in panels] == ["temperature"] * 2
    bars = plot_distances({"a": {"x": 0.1, "y": 0.2}, "b": {"x": 0, "y": 0.1}}).axes[0]
    assert sorted(patch.get_width() for patch in bars.patches) == [0, 0.1, 0.1, 0.2]


@pytest.mark.parametrize("metric", METRICS)
def test_the_explorers_picture(frame, metric: str) -> None:
    axes = plot_explorer(frame[frame["temperature"] == 1.0], metric).axes[0]
    assert METRICS[metric][0] in axes.get_xlabel()
    drawn = axes.patches if metric == "top1_match" else axes.lines
    assert len(drawn) == 2
