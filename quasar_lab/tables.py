"""The paper's tables from measured rows: one tidy table, and what each question takes of it.

Everything here is a pure function of the rows that `run_benchmark` or `run_experiment` gives. The
speeds are measured against plain decoding in full precision on the same prompts in the same run,
and every gain comes with its acceptance length L and its step cost r: speedup = L / r.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from quasar_lab.errors import UserError
from quasar_lab.methods import BASELINE, DRAFT_COLUMNS, METHODS, DraftSettings
from quasar_lab.paper_figures import paper_pruning, paper_table
from quasar_lab.summary import interval, resample, summarize

ALL_TASKS, MEAN_OF_TASKS = "all tasks", "mean of tasks"
_DRAFT = list(DRAFT_COLUMNS)
_MEASURED = ("speedup", "mean_acceptance_length")
_WHERE = ["model", "temperature", "task"]
_COLUMNS = (
    *_WHERE, "method", *_DRAFT, "label", "prompts", "tokens_per_second",
    "speedup", "speedup_low", "speedup_high",
    "mean_acceptance_length", "mean_acceptance_length_low", "mean_acceptance_length_high",
    "verify_step_in_plain_steps", "draft_acceptance", "same_as_baseline",
)  # fmt: skip
_BOUNDS = [f"{name}_{bound}" for name in _MEASURED for bound in ("low", "high")]


def measured_table(rows: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """One row for each model, draft setting, temperature, task and method.

    Besides the tasks there are "all tasks", their generations pooled, and "mean of tasks", the
    mean of their figures, which is what the paper reports. Columns: model, temperature, task,
    method, the fields of `DraftSettings`, label, prompts, tokens_per_second (median),
    speedup, mean_acceptance_length (L), their bounds _low and _high (95 % of 2,000 resamplings of
    the prompts, NaN for a single prompt), verify_step_in_plain_steps (r), draft_acceptance,
    same_as_baseline (share of the baseline's tokens before the first difference).
    Raises UserError for rows without the baseline.
    """
    if rows.empty:
        raise UserError("there are no rows to make a table of: run a benchmark first")
    if "model" not in rows:
        rows = rows.assign(model="")
    # as the methods are listed everywhere; they were stored in the order in which they took turns
    rank = {name: position for position, name in enumerate(METHODS)}
    rows = rows.sort_values("method", key=lambda names: names.map(rank), kind="stable")
    parts = []
    for settings, group in _settings(rows):
        tasks = dict.fromkeys(group["task"])
        tables = [_summary(group[group["task"] == task], seed).assign(task=task) for task in tasks]
        if len(tables) > 1:
            mean = _mean_of_tasks(group, pd.concat(tables), seed)
            tables.append(_summary(group, seed).assign(task=ALL_TASKS))
            tables.append(mean.assign(task=MEAN_OF_TASKS))
        parts += [table.assign(**settings) for table in tables]
    table = pd.concat(parts, ignore_index=True).reindex(columns=list(_COLUMNS))
    drafting = rows.loc[rows[_DRAFT[0]].notna(), "method"]
    table.loc[~table["method"].isin(drafting), _DRAFT] = np.nan
    # what drafts nothing was compared with every draft setting, and is the same each time
    return table.drop_duplicates([*_DRAFT, *_WHERE, "method"]).reset_index(drop=True)


def _settings(rows: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The rows of each model, draft setting and temperature; what drafts nothing is in each."""
    plain = rows[_DRAFT].isna().all(axis=1)
    drafts = rows.loc[~plain, _DRAFT].drop_duplicates().to_dict("records")
    for model in dict.fromkeys(rows["model"]):
        for draft in drafts or [{}]:
            own = plain | (rows[list(draft)] == list(draft.values())).all(axis=1)
            for temperature in sorted(set(rows["temperature"])):
                chosen = rows[own & (rows["model"] == model) & (rows["temperature"] == temperature)]
                if len(chosen):
                    yield {"model": model, "temperature": temperature, **draft}, chosen


def _summary(rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    """`summarize`, without bounds where there is one prompt: it tells nothing of others."""
    table = summarize(rows, seed=seed).reset_index(names="method")
    prompts = len(rows[["task", "question_id"]].drop_duplicates())
    if prompts == 1:
        table[_BOUNDS] = np.nan
    return table.assign(prompts=prompts)


def _mean_of_tasks(rows: pd.DataFrame, by_task: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The mean over tasks of each figure; prompts are drawn within each task."""
    methods = list(dict.fromkeys(by_task["method"]))
    groups = by_task.groupby("method", sort=False)
    table = groups[[*_MEASURED, "draft_acceptance", "same_as_baseline"]].mean().reset_index()
    table["label"] = groups["label"].first().to_numpy()
    table["prompts"] = groups["prompts"].sum().to_numpy()
    draws = [
        resample(group, BASELINE, methods, seed + number)
        for number, (_, group) in enumerate(rows.groupby("task", sort=False))
    ]
    for name in _MEASURED:
        mean = np.mean([draw[name] for draw in draws], axis=0)
        for bound, values in interval(mean).items():
            table[f"{name}_{bound}"] = values
    if (by_task["prompts"] == 1).any():
        table[_BOUNDS] = np.nan
    # L / speedup, as everywhere: the mean of the ratios would break the identity
    table["verify_step_in_plain_steps"] = table["mean_acceptance_length"] / table["speedup"]
    return table


def by_task(measured: pd.DataFrame) -> pd.DataFrame:
    """The paper's main table: speedup and L of each method, a column a task.

    A cell reads "1.28x (1.10-1.43), L 1.40", with the 95 % interval of the speedup.
    """
    return _pivot(measured, "task")


def by_temperature(measured: pd.DataFrame) -> pd.DataFrame:
    """How well each method keeps its speed as sampling gets freer: a column a temperature."""
    return _pivot(_overall(measured).sort_values("temperature", kind="stable"), "temperature")


def by_draft(measured: pd.DataFrame) -> pd.DataFrame:
    """The ablation of draft length and lookup: a row an n-gram range, a column a length.

    Raises UserError where nothing was drafted.
    """
    overall = _overall(measured)
    drafting = overall[overall["num_draft_tokens"].notna()]
    if drafting.empty:
        raise UserError("no method of these rows drafts: there are no draft lengths to compare")
    return _pivot(drafting.sort_values("num_draft_tokens", kind="stable"), "num_draft_tokens")


def beside_paper(measured: pd.DataFrame) -> pd.DataFrame:
    """Ours and what the paper reports (second-hand), at the temperatures that both have.

    Both are means over the tasks. A row a temperature and method; NaN: not reported. Of several
    draft settings the paper's is taken, 5 tokens and n-grams of 1 to 3, or else the first. The two
    were measured on other models and machines: compare the pattern, not the numbers.
    """
    measured = _default_draft(measured)
    mean = measured[measured["task"] == MEAN_OF_TASKS]
    mean = mean if len(mean) else measured
    theirs = paper_table()
    theirs = theirs[theirs["tasks"] == "mean of five"]
    records = []
    for row in mean[mean["method"].isin(["ngram", "quasar"])].itertuples():
        record: dict[Any, Any] = {
            ("", "temperature"): row.temperature,
            ("", "method"): row.label,
            (f"here, {row.model}", "speedup"): row.speedup,
            (f"here, {row.model}", "L"): row.mean_acceptance_length,
        }
        same = theirs[theirs["temperature"] == row.temperature]
        for paper in same.to_dict("records"):
            for name, column in (("speedup", f"speedup_{row.method}"), ("L", f"L_{row.method}")):
                record[f"paper (second-hand), {paper['model']}", name] = paper[column]
        if len(same):
            records.append(record)
    table = pd.DataFrame(records)
    return table.set_axis(pd.MultiIndex.from_tuples(table.columns), axis="columns")


def by_pruning(measured: pd.DataFrame) -> pd.DataFrame:
    """The pruning ablation in both readings, the paper's rows (second-hand) beside them.

    A row a model, temperature and share of layers kept. The verifier's L says how well n-grams
    guess *its own* text; "same text" is the share of plain decoding's tokens before it differs.
    Raises UserError where no pruned method ran.
    """
    overall = _default_draft(_overall(measured))
    overall = overall[overall["method"].str.startswith("pruned_")]
    if overall.empty:
        raise UserError("no pruned method ran: add pruned_verifier_75 or pruned_drafter_75")
    paper = paper_pruning().set_index("kept_percent")
    records: dict[Any, dict[Any, Any]] = {}
    for row in overall.itertuples():
        _, role, percent = str(row.method).split("_")
        record = records.setdefault((row.model, row.temperature, int(percent)), {})
        record[f"{role}, measured", "L"] = row.mean_acceptance_length
        record[f"{role}, measured", "speedup"] = row.speedup
        if role == "verifier":
            record[f"{role}, measured", "same text"] = row.same_as_baseline
        for name in ("L", "speedup"):
            record["paper (second-hand), Qwen3-8B", name] = paper.loc[int(percent), name]
    groups = ("verifier, measured", "drafter, measured", "paper (second-hand), Qwen3-8B")
    columns = [(group, name) for group in groups for name in ("L", "speedup", "same text")]
    table = pd.DataFrame.from_dict(records, orient="index")
    table = table[[column for column in columns if column in table]]
    table.index = table.index.set_names(["model", "temperature", "layers kept, %"])
    return table.sort_index(ascending=[True, True, False])


def _overall(measured: pd.DataFrame) -> pd.DataFrame:
    """The rows over all tasks (of the only task, where there is one)."""
    pooled = measured[measured["task"] == ALL_TASKS]
    return pooled if len(pooled) else measured


def _default_draft(measured: pd.DataFrame) -> pd.DataFrame:
    """What drafts, at the default setting (the paper's), or at the first where that did not run."""
    drafting = measured[measured["num_draft_tokens"].notna()]
    default = (drafting[_DRAFT] == list(asdict(DraftSettings()).values())).all(axis=1)
    if not default.any():
        default = (drafting[_DRAFT] == drafting[_DRAFT].iloc[:1].to_numpy()).all(axis=1)
    return drafting[default]


def _pivot(table: pd.DataFrame, across: str) -> pd.DataFrame:
    """A row a method and whatever else differs, a column a value of `across`."""
    shown = pd.DataFrame(
        {
            "model": table["model"],
            "temperature": table["temperature"].map("{:g}".format),
            "task": table["task"],
            "method": table["label"],
            "draft tokens": table["num_draft_tokens"].map("{:g}".format).replace("nan", ""),
            "n-gram": _range(table),
            "cell": [_cell(row) for row in table.itertuples()],
        }
    )
    column = {"num_draft_tokens": "draft tokens"}.get(across, across)
    rows = [
        name
        for name in ("model", "temperature", "task", "method", "draft tokens", "n-gram")
        if name != column and (name == "method" or shown[name].replace("", np.nan).nunique() > 1)
    ]
    order = list(
        dict.fromkeys(shown[column] if column in ("task",) else sorted(set(shown[column])))
    )
    wide = shown.drop_duplicates([*rows, column]).set_index([*rows, column])["cell"].unstack(column)
    first = list(dict.fromkeys(map(tuple, shown[rows].to_numpy())))
    return wide.loc[first if len(rows) > 1 else [key[0] for key in first], order]


def _range(table: pd.DataFrame) -> list[str]:
    """ "1-3" for n-grams of one to three tokens."""
    pairs = zip(table["min_ngram"], table["max_ngram"], strict=True)
    return ["" if pd.isna(low) else f"{low:g}-{high:g}" for low, high in pairs]


def _cell(row: Any) -> str:
    bounds = f" ({row.speedup_low:.2f}-{row.speedup_high:.2f})"
    known = "" if np.isnan(row.speedup_low) else bounds
    return f"{row.speedup:.2f}x{known}, L {row.mean_acceptance_length:.2f}"
