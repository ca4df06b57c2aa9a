"""The paper's tables: pure functions of the rows, with L and r beside every speedup."""

import json

import numpy as np
import pandas as pd
import pytest

from quasar_lab import UserError
from quasar_lab.methods import METHODS, DraftSettings, Variant
from quasar_lab.summary import summarize
from quasar_lab.table_files import to_latex, to_markdown, write_tables
from quasar_lab.tables import (
    ALL_TASKS,
    MEAN_OF_TASKS,
    beside_paper,
    by_draft,
    by_pruning,
    by_task,
    by_temperature,
    measured_table,
)

DRAFTS = (DraftSettings(3), DraftSettings(5), DraftSettings(5, min_ngram=2))


def rows(prompts: int = 3, temperatures=(0.0, 0.6), drafts=DRAFTS[1:2]) -> pd.DataFrame:
    """Task b has texts of another length than a, so that pooling and averaging differ."""
    rng = np.random.default_rng(0)
    made = []
    for temperature in temperatures:
        for task, length in (("a", 10), ("b", 40)):
            for question in range(prompts):
                for name in ("plain", "ngram", "int8", "quasar"):
                    for draft in drafts if METHODS[name].make_drafter else [None]:
                        steps = length if draft is None else length // 2
                        seconds = steps * rng.uniform(0.5, 1.5)
                        made.append({
                            "model": "m", "task": task, "question_id": question, "turn": 0,
                            "temperature": temperature, "seed": 0,
                            **Variant(METHODS[name], draft).columns(),
                            "tokens": [1] * length, "new_tokens": length, "steps": steps,
                            "drafted": 4 if draft else 0, "accepted": 1 if draft else 0,
                            "decode_seconds": seconds, "tokens_per_second": length / seconds,
                        })  # fmt: skip
    return pd.DataFrame(made)


def chosen(table: pd.DataFrame, **where) -> pd.Series:
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_speedup_is_acceptance_length_over_step_cost_in_every_row() -> None:
    table = measured_table(rows())
    ratio = table["mean_acceptance_length"] / table["verify_step_in_plain_steps"]
    np.testing.assert_allclose(table["speedup"], ratio, rtol=1e-12)
    assert (table.loc[table["method"] == "plain", "speedup"] == 1).all()


def test_pooled_and_averaged_over_tasks_are_told_apart() -> None:
    """The paper averages the tasks' ratios; pooling weighs by length. Both are in the table."""
    data = rows(temperatures=(0.0,))
    table = measured_table(data)
    own = [chosen(table, task=task, method="quasar")["speedup"] for task in "ab"]
    mean = chosen(table, task=MEAN_OF_TASKS, method="quasar")
    pooled = chosen(table, task=ALL_TASKS, method="quasar")
    assert mean["speedup"] == pytest.approx(np.mean(own))
    assert pooled["speedup"] == pytest.approx(summarize(data).loc["quasar", "speedup"])
    assert mean["speedup"] != pytest.approx(pooled["speedup"])
    assert mean["prompts"] == pooled["prompts"] == 6
    assert mean["speedup_low"] < mean["speedup"] < mean["speedup_high"]


def test_one_prompt_has_no_interval() -> None:
    table = measured_table(rows(prompts=1))
    single = table[table["task"] != ALL_TASKS]
    assert single[["speedup_low", "mean_acceptance_length_high"]].isna().all().all()
    assert table.loc[table["task"] == ALL_TASKS, "speedup_low"].notna().all()
    assert by_task(table).loc[("0", "plain"), "a"] == "1.00x, L 1.00"


def test_each_draft_setting_is_compared_with_the_same_plain_runs() -> None:
    table = measured_table(rows(drafts=DRAFTS))
    assert (table[table["method"] == "plain"].groupby(["temperature", "task"]).size() == 1).all()
    assert (table[table["method"] == "ngram"].groupby(["temperature", "task"]).size() == 3).all()
    shown = by_draft(table)
    assert list(shown.columns) == ["3", "5"]
    assert set(shown.index.get_level_values("n-gram")) == {"1-3", "2-3"}
    assert shown.loc[("0", "n-gram", "2-3")].notna().tolist() == [False, True]
    with pytest.raises(UserError, match="no method of these rows drafts"):
        by_draft(table[table["method"] == "plain"])


def test_views_say_what_the_table_says() -> None:
    table = measured_table(rows())
    cell = chosen(table, temperature=0.6, task="b", method="quasar")
    shown = by_task(table).loc[("0.6", "n-gram, INT8 (Quasar)"), "b"]
    assert shown == (
        f"{cell['speedup']:.2f}x ({cell['speedup_low']:.2f}-{cell['speedup_high']:.2f}), L 2.00"
    )
    over_all = by_temperature(measured_table(rows().sample(frac=1, random_state=1)))  # any order
    assert list(over_all.columns) == ["0", "0.6"]
    assert list(over_all.index) == ["plain", "n-gram", "plain, INT8", "n-gram, INT8 (Quasar)"]


def test_the_paper_stands_beside_at_its_own_temperatures_and_is_marked() -> None:
    table = beside_paper(measured_table(rows(temperatures=(0.0, 0.2, 1.0), drafts=DRAFTS)))
    assert table[("", "temperature")].tolist() == [0, 0, 1, 1]  # 0.2 is not reported
    theirs = table[("paper (second-hand), Qwen3-8B", "speedup")]
    assert theirs.tolist() == [1.18, 1.28, 1.15, 1.23]
    assert table[("paper (second-hand), OpenPangu-7B", "L")].tolist()[:2] == [1.27, 1.29]


def test_the_pruning_ablation_keeps_its_two_readings_apart() -> None:
    """A pruned verifier and a pruned drafter are two experiments; the paper's rows stand beside."""
    data = rows(temperatures=(0.0,))
    new_names = {"ngram": "pruned_verifier_75", "quasar": "pruned_drafter_75"}
    table = by_pruning(measured_table(data.assign(method=data["method"].replace(new_names))))
    row = table.loc[("m", 0.0, 75)]
    assert row["verifier, measured", "same text"] == 1.0
    assert row["verifier, measured", "L"] == row["drafter, measured", "L"] == 2.0
    assert row["verifier, measured", "speedup"] != row["drafter, measured", "speedup"]
    assert row["paper (second-hand), Qwen3-8B", "L"] == 1.27
    with pytest.raises(UserError, match="no pruned method"):
        by_pruning(measured_table(data))


def test_files_hold_what_the_tables_hold(tmp_path) -> None:
    data = rows(drafts=DRAFTS[:2])
    paths = write_tables(data, tmp_path / "new", "run")
    assert [path.name for path in paths] == [
        "run.md", "run.tex", "run.json", "run-tasks.png", "run-temperature.png", "run-draft.png",
    ]  # fmt: skip
    measured = measured_table(data)
    stored = json.loads((tmp_path / "new" / "run.json").read_text())
    assert [row["speedup"] for row in stored] == pytest.approx(measured["speedup"].tolist())
    markdown = (tmp_path / "new" / "run.md").read_text()
    assert by_task(measured).iloc[0, 0] in markdown and "second-hand" in markdown
    assert "## Pruning" not in markdown  # no pruned method ran
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines[:4]}) == 1
    latex = (tmp_path / "new" / "run.tex").read_text()
    assert latex.count("\\begin{table}") == latex.count("\\end{table}") == 4
    for path in paths[3:]:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_markdown_and_latex_escape_nothing_away() -> None:
    table = pd.DataFrame({("", "method"): ["a_b & c"], ("here", "L"): [1.5], ("x", "y"): [np.nan]})
    assert to_markdown(table).splitlines()[-1] == "| a_b & c | 1.50 |  |"
    assert "a\\_b \\& c & 1.50" in to_latex(table, "t")


def test_rows_of_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="no rows"):
        measured_table(pd.DataFrame())
