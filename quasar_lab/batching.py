"""Many requests at a time: when does a verify step stop being free?

A served step works for B requests at once. Plain decoding then multiplies B rows by each weight,
verification of k drafts B (k + 1) rows. As long as reading the weights takes longer than that
arithmetic, the extra rows cost nothing, and INT8 halves the reading. Beyond it each drafted token
is paid in full, accepted or not, and INT8 pays by its operation rate instead (`cost_model`).
"""

from collections.abc import Iterable

import pandas as pd

from quasar_lab.checks import check_whole
from quasar_lab.cost_model import Machine, StepWork, expected_tokens, predict_step, step_work


def batch_step(work: StepWork, machine: Machine, batch: int, tokens: int = 1) -> float:
    """Seconds of a step of `tokens` tokens for each of `batch` requests.

    The weights are read once for all; `work.context` is each request's own.
    """
    check_whole("batch", batch)
    bare = step_work(work.shape, work.layers, work.head, work.cache)
    attention = predict_step(work, machine, tokens) - predict_step(bare, machine, tokens)
    return predict_step(bare, machine, batch * tokens) + batch * attention


def batch_speedups(
    model: object,
    machine: Machine,
    acceptance: float,
    draft_tokens: int = 5,
    batches: Iterable[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    *,
    context: int = 1024,
) -> pd.DataFrame:
    """Tokens a second of the four methods, relative to plain bf16 at the same batch size.

    model: as for `step_work`; acceptance: chance that a draft is accepted, drafted at every step.
    Columns: batch, method ("plain", "ngram", "int8", "quasar"), step_ms, tokens_per_second (of all
    requests together), speedup.
    """
    length = expected_tokens(acceptance, draft_tokens)
    records = []
    for batch in batches:
        plain = float("nan")
        for method, kind, drafts in (
            ("plain", "bf16", 0),
            ("ngram", "bf16", draft_tokens),
            ("int8", "INT8", 0),
            ("quasar", "INT8", draft_tokens),
        ):
            work = step_work(model, kind, "bf16", context=context)
            seconds = batch_step(work, machine, batch, drafts + 1)
            speed = batch * (length if drafts else 1.0) / seconds
            plain = speed if method == "plain" else plain
            records.append(
                {
                    "batch": batch,
                    "method": method,
                    "step_ms": seconds * 1e3,
                    "tokens_per_second": speed,
                    "speedup": speed / plain,
                }
            )
    return pd.DataFrame(records)
