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


def paper_table() -> pd.DataFrame:
    """One row a setting: what the paper reports, and what follows from it; NaN: not reported.

    r = L / speedup is the cost of a verify step in plain steps; gain = length_term * step_term is
    Quasar over n-gram speculation in full precision (algorithms: section 9).
    """
    table = pd.DataFrame(_REPORTED, columns=list(_NAMES))
    for method in ("ngram", "quasar"):
        table[f"r_{method}"] = table[f"L_{method}"] / table[f"speedup_{method}"]
    table["gain"] = table["speedup_quasar"] / table["speedup_ngram"]
    table["length_term"] = table["L_quasar"] / table["L_ngram"]
    table["step_term"] = table["r_ngram"] / table["r_quasar"]
    return table
