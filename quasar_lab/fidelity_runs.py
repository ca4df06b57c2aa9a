"""Fidelity over texts: run two models on the same prefixes and summarise with intervals.

Two kinds of text answer two questions: a text that somebody else wrote (how well is it
predicted?) and the reference's own greedy continuation (what happens along the path that the
model itself takes while decoding?).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from quasar_lab.decoding import generate
from quasar_lab.errors import UserError
from quasar_lab.fidelity import compare_logits
from quasar_lab.structure import as_module


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a prompt and of what follows it; only the latter's predictions are compared.

    An empty prompt stands for text that is compared from its second token on. label: e.g. the
    task it belongs to.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    label: str = ""


def greedy_continuations(
    target: object,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 64,
    labels: Sequence[str] | None = None,
    **options: Any,
) -> list[Text]:
    """The target's own greedy text after each prompt (token ids), as `Text`s.

    target, options: as `generate` takes them; with drafter=... the text is the same, sooner.
    """
    labels = [""] * len(prompts) if labels is None else labels
    texts = []
    for ids, label in zip(prompts, labels, strict=True):
        new = generate(target, ids, max_new_tokens=max_new_tokens, **options).tokens
        prompt = ids.flatten().tolist() if isinstance(ids, Tensor) else list(ids)
        texts.append(Text(tuple(prompt), tuple(new), label))
    return texts


def compare_models(
    reference: object,
    others: object,
    texts: Sequence[Text | Tensor],
    *,
    temperature: float = 1.0,
) -> pd.DataFrame:
    """`compare_logits` of one model or several (a dict name -> model) with the reference.

    texts: `Text`s, or token ids (LongTensor[S]) that are compared from the second token on.
    One row a token and model: variant, text (index), label, position (in the text, from 0),
    token (the id that follows there), and the columns of `compare_logits`.
    """
    variants = dict(others) if isinstance(others, Mapping) else {"other": others}
    models = {name: as_module(model) for name, model in variants.items()}
    tables = []
    for index, text in enumerate(texts):
        if isinstance(text, Tensor):
            text = Text((), tuple(text.flatten().tolist()))
        start = max(len(text.prompt), 1)
        ids = torch.tensor([*text.prompt, *text.tokens])
        if len(ids) <= start:
            continue
        expected = next_token_logits(as_module(reference), ids, start)
        for name, model in models.items():
            table = compare_logits(expected, next_token_logits(model, ids, start), temperature)
            place = {"variant": name, "text": index, "label": text.label}
            table.insert(0, "position", range(start, len(ids)))
            table.insert(1, "token", ids[start:].numpy())
            tables.append(table.assign(**place)[[*place, *table.columns]])
    if not tables:
        raise UserError("nothing to compare: every text is empty")
    return pd.concat(tables, ignore_index=True)


@torch.no_grad()
def next_token_logits(model: nn.Module, ids: Tensor, start: int) -> Float[Tensor, "T V"]:
    """The logits that predict ids[start:], each seeing all tokens before it."""
    device = next(model.parameters()).device
    keep = len(ids) - start
    # the output layer of a 49,152-word vocabulary is dear: not for the prompt
    output = model(input_ids=ids[None, :-1].to(device), use_cache=False, logits_to_keep=keep)
    return output.logits[0, -keep:]


def bootstrap_interval(
    values: Sequence[float] | np.ndarray | pd.Series,
    clusters: Sequence[object] | np.ndarray | pd.Series | None = None,
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """A confidence interval for the mean of `values` by resampling (percentile bootstrap).

    clusters: which text each value belongs to. Tokens of one text resemble each other, so whole
    texts are drawn; resampling tokens one by one gives intervals that are much too narrow.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or len(numbers) == 0:
        raise UserError(f"values of shape {numbers.shape}: pass at least one number in a row")
    if not 0 < level < 1:
        raise UserError(f"level is {level}: choose it between 0 and 1, e.g. 0.95")
    codes = np.arange(len(numbers)) if clusters is None else pd.factorize(np.asarray(clusters))[0]
    if len(codes) != len(numbers):
        raise UserError(f"{len(codes)} clusters for {len(numbers)} values: pass one for each")
    sums, counts = np.bincount(codes, numbers), np.bincount(codes)
    rng = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    for i in range(num_resamples):
        drawn = rng.integers(len(sums), size=len(sums))
        means[i] = sums[drawn].sum() / counts[drawn].sum()
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def summarize_fidelity(frame: pd.DataFrame, by: str | Sequence[str] = "variant") -> pd.DataFrame:
    """Means of a `compare_models` table for each value of `by`, with 95 % intervals over texts.

    Columns: tokens, kl, kl_low, kl_high, kl_median, tv, tv_low, tv_high, top1, top1_low, top1_high
    (shares in [0, 1]), and margin_where_wrong (median reference margin where the top-1 differs).
    """
    names = [by] if isinstance(by, str) else list(by)
    # groups in the order in which their values appear, the first name outermost
    order = {n: pd.Categorical(frame[n], categories=frame[n].unique()) for n in names}
    rows = []
    for key, part in frame.assign(**order).groupby(names, observed=True):
        row: dict[str, object] = {"tokens": len(part)}
        for column, name in (("kl", "kl"), ("tv", "tv"), ("top1_match", "top1")):
            low, high = bootstrap_interval(part[column], part["text"])
            row |= {name: part[column].mean(), f"{name}_low": low, f"{name}_high": high}
        row["kl_median"] = part.kl.median()
        row["margin_where_wrong"] = part.reference_margin[~part.top1_match].median()
        rows.append(dict(zip(names, key, strict=True)) | row)
    return pd.DataFrame(rows).set_index(names if len(names) > 1 else names[0])
