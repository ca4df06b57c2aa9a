"""The speedups that the paper reports, to stand beside what is measured here.

Second-hand: Huang and Wen, "Quasar", arXiv 2603.01399. Averages over five tasks, relative to plain
decoding, on one Ascend 910B2 with up to 5 drafted tokens and n-grams of 1 to 3. Wherever they are
shown, say so and give `PAPER_LINK`.
"""

import pandas as pd

PAPER_LINK = "https://arxiv.org/abs/2603.01399"

_NAMES = (
    "model", "tasks", "temperature", "speedup_ngram", "L_ngram", "speedup_quasar", "L_quasar"
)  # fmt: skip
_NAN = float("nan")  # not reported
_REPORTED = (
    ("Qwen3-8B", "mean of five", 0.0, 1.18, 1.33, 1.28, 1.40),
    ("Qwen3-8B", "mean of five", 0.6, 1.15, _NAN, 1.25, _NAN),
    ("Qwen3-8B", "mean of five", 1.0, 1.15, 1.31, 1.23, 1.36),
    ("OpenPangu-7B", "mean of five", 0.0, 1.08, 1.27, 1.13, 1.29),
    ("Qwen3-8B", "GSM8K (its best)", _NAN, 1.43, _NAN, 1.64, _NAN),
    ("OpenPangu-7B", "GSM8K (its best)", _NAN, 1.23, _NAN, 1.26, _NAN),
)


def paper_pruning() -> pd.DataFrame:
    """What the paper reports of a pruned verifier: layers kept (%), L and speedup; one row each.

    An L of at most 2 that falls to 1 is what one drafted token with a pruned *drafter* and a full
    verifier gives: a verifier of any quality accepts what it would say itself.
    """
    rows = [(90, 1.62, 0.80), (75, 1.27, 0.68), (50, 1.03, 0.62)]
    return pd.DataFrame(rows, columns=["kept_percent", "L", "speedup"])


def paper_table() -> pd.DataFrame:
    """One row a setting: what the paper reports, and what follows from it; NaN: not reported.

    label names the setting, by its temperature or, where that is not reported, by its task.
    r = L / speedup is the cost of a verify step in plain steps; gain = length_term * step_term is
    Quasar over n-gram speculation in full precision (algorithms: section 9).
    """
    table = pd.DataFrame(_REPORTED, columns=list(_NAMES))
    where = (
        table["temperature"]
        .map("T = {:g}".format)
        .where(table["temperature"].notna(), table["tasks"])
    )
    table.insert(0, "label", table["model"] + ", " + where)
    for method in ("ngram", "quasar"):
        table[f"r_{method}"] = table[f"L_{method}"] / table[f"speedup_{method}"]
    table["gain"] = table["speedup_quasar"] / table["speedup_ngram"]
    table["length_term"] = table["L_quasar"] / table["L_ngram"]
    table["step_term"] = table["r_ngram"] / table["r_quasar"]
    return table


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """`paper_table` for a page: its numbers in three groups, the settings as the index."""
    groups = {
        "n-gram": ("speedup_ngram", "L_ngram", "r_ngram"),
        "Quasar": ("speedup_quasar", "L_quasar", "r_quasar"),
    }
    columns = {name: (group, "SLr"[i]) for group in groups for i, name in enumerate(groups[group])}
    columns |= {
        name: ("Quasar / n-gram", text)
        for name, text in (("gain", "gain"), ("length_term", "L term"), ("step_term", "step term"))
    }
    shown = table.set_index("label")[list(columns)].rename_axis(None)
    return shown.set_axis(pd.MultiIndex.from_tuples(columns.values()), axis="columns")
