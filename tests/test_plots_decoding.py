"""Figures of decoding: they draw what the data says, and leave matplotlib's settings alone."""

import io

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from quasar_lab import NGramDrafter, SamplingConfig, generate
from quasar_lab.acceptance_table import acceptance_table
from quasar_lab.plots.decoding import (
    plot_acceptance_check,
    plot_acceptance_rule,
    plot_curves,
    plot_trace,
)

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(autouse=True)
def settings_are_left_alone():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before


def drawn(figure: Figure) -> bytes:
    """Rendering must not fail on any label or number."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def test_the_two_ways_add_up_in_the_picture() -> None:
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    table = acceptance_table(p, q, ["$a$", "b", "c\n"])
    figure = plot_acceptance_rule(table)
    drawn(figure)
    right = figure.axes[1]
    tops = [bar.get_y() + bar.get_height() for bar in right.patches[3:]]
    assert tops == pytest.approx([0.6, 0.3, 0.1])


@pytest.mark.parametrize("predicted", [[0.0, 0.4, 1.0], [0.95, 0.97, 1.0]])
def test_no_point_of_a_check_is_cut_off(predicted: list[float]) -> None:
    measured = [0.0, 0.5, 1.0] if predicted[0] == 0 else [0.9, 1.0, 1.0]
    table = pd.DataFrame({"predicted": predicted, "measured": measured, "num_draws": 20})
    figure = plot_acceptance_check(table, "p")
    drawn(figure)
    low, high = figure.axes[0].get_xlim()
    assert all(low <= value <= high for value in [*predicted, *measured])


@pytest.mark.parametrize("drafter", [None, NGramDrafter()])
def test_a_trace_shows_every_token(tiny_llama, drafter) -> None:
    generation = generate(
        tiny_llama, PROMPT, drafter=drafter, max_new_tokens=12, eos_token_id=[],
        sampling=SamplingConfig(temperature=1.0, seed=2),
    )  # fmt: skip
    for trace in (generation, generation.trace):
        figure = plot_trace(trace)
        drawn(figure)
        points = sum(len(dots.get_offsets()) for dots in figure.axes[0].collections)
        assert points == sum(len(list(step.rows())) for step in generation.steps)
    first = plot_trace(generation, max_steps=2)
    assert "the first 2 of" in first.axes[0].get_xlabel()


def test_curves_leave_out_what_was_not_measured() -> None:
    table = pd.DataFrame(
        {"x": [1, 2, 1, 2], "y": [1.0, 2.0, np.nan, np.nan], "name": ["a", "a", "b", "b"]}
    )
    figure = plot_curves(
        table, "x", [("y", "speed", 1.0), ("x", "x", None)], "name", "x", log_x=True
    )
    drawn(figure)
    first, second = figure.axes
    assert [len(line.get_xdata()) for line in first.lines] == [2, 0, 2]  # the last: the baseline
    assert len(second.lines) == 2
