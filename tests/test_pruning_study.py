"""The pruning notebook's study, figures, slider and exercises."""

import pandas as pd
import pytest
import torch

from quasar_lab import UserError, generate, prune_layers
from quasar_lab.exercises import check
from quasar_lab.fidelity_runs import Text
from quasar_lab.plots.pruning import plot_collapse, plot_influence, plot_roles
from quasar_lab.pruning_study import prune_and_compare
from quasar_lab.widgets.pruning_explorer import PruningExplorer

PROMPT = torch.arange(5, 15)


@pytest.fixture(scope="module")
def table(tiny_language_model) -> pd.DataFrame:
    texts = [Text(tuple(range(5, 15)), tuple(range(20, 30)), "a"),
             Text(tuple(range(40, 50)), tuple(range(60, 66)), "b")]  # fmt: skip
    return prune_and_compare(
        tiny_language_model, texts, (1.0, 0.67, 0.34), batches=[torch.arange(3, 40)],
        prompt=PROMPT, max_new_tokens=5,
    )  # fmt: skip


def test_everything_kept_is_no_distance(table) -> None:
    whole = table[table["keep"] == 1.0]
    assert len(whole) == 3 and (whole["kl"] == 0).all() and (whole["top1"] == 1).all()
    assert (table.loc[table["keep"] < 1, "kl"] > 0).all()
    assert (table["tokens"] == 16).all()


def test_the_text_is_the_pruned_models_own(table, tiny_language_model) -> None:
    row = table[(table["strategy"] == "last") & (table["layers"] == 2)].iloc[0]
    assert row["kept"] == (0, 1)
    pruned = prune_layers(tiny_language_model.model, (0, 1))
    expected = generate(pruned, PROMPT, max_new_tokens=5).text(tiny_language_model.tokenizer)
    assert row["text"] == expected


def test_no_ratio_is_refused(tiny_language_model) -> None:
    with pytest.raises(UserError, match="nothing to prune"):
        prune_and_compare(
            tiny_language_model, [], (), batches=[torch.arange(3, 40)], prompt=PROMPT
        )  # fmt: skip


def test_the_figures_are_drawn_from_their_tables(table) -> None:
    assert len(plot_influence([0.5, 0.1, 0.2]).axes[0].patches) == 3
    left, right = plot_collapse(table, table.iloc[0], ("uniform", 1.0)).axes
    assert len(left.lines) == 3 + 1 + 1 and right.get_ylim()[0] == 0
    columns = pd.MultiIndex.from_product([["verifier, measured", "paper (second-hand)"],
                                          ["L", "speedup"]])  # fmt: skip
    index = pd.MultiIndex.from_tuples(
        [("m", 0.0, 90), ("m", 0.0, 50)], names=["model", "temperature", "layers kept, %"]
    )
    panels = plot_roles(pd.DataFrame(1.0, index=index, columns=columns)).axes
    assert [len(axes.lines) for axes in panels] == [3, 3]


def test_the_slider_shows_numbers_and_text(table) -> None:
    panel = PruningExplorer(table)
    try:
        panel.strategy.value = "last"
        panel.keep.value = sorted(table["keep"].unique())[1]
        panel.flush()
        row = table[(table["strategy"] == "last") & (table["layers"] == 2)].iloc[0]
        assert f"{row['top1']:.0%}" in panel.output.value and "<img" in panel.output.value
        assert "done" in panel.state.value
    finally:
        panel.close()
    with pytest.raises(UserError, match="no column 'text'"):
        PruningExplorer(table.drop(columns="text"))


@pytest.mark.parametrize(
    ("name", "answer", "state", "message"),
    [
        ("equal_bytes_keep", lambda b, h: 1 / b, "right", ""),
        ("equal_bytes_keep", lambda b, h: (1 + h) / (b + h), "wrong", "shrinks the layers only"),
        ("equal_bytes_keep", lambda b, h: 1 - 1 / b if b != 2 else b, "wrong", "other way up"),
        ("equal_bytes_keep", lambda b, h: 0.9 if b == 2 else 1 / b, "wrong", "Solve keep"),
        ("equal_bytes_keep", lambda b, h: 1 / b if b == 2 else 1 - 1 / b, "wrong", "that goes"),
        ("equal_bytes_keep", lambda b, h: None, "open", ""),
        ("one_draft_acceptance", lambda length: length - 1, "right", ""),
        ("one_draft_acceptance", lambda length: 1 - 1 / length, "wrong", "without an end"),
        ("one_draft_acceptance", lambda length: length / 2, "wrong", "two chances"),
        ("one_draft_acceptance", lambda length: 7, "wrong", "L = 1 + a"),
    ],
)
def test_the_judges_say_what_is_wrong(name, answer, state, message) -> None:
    feedback = check(name, answer)
    assert feedback.state == state and message in feedback.message, feedback
