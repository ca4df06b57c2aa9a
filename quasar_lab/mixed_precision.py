"""Which linears suffer most from W8A8, and keeping those in full precision.

A few linears (often early down projections, whose inputs hold the largest outliers) cause most of
the damage. `sensitivity` rounds one linear at a time and measures what that alone does to the
output distribution; `meet_budget` keeps the worst ones in full precision until the mean KL is
within a budget.

Cost: one linear is one run of the model from that linear's layer on, so a model of L linears costs
about L / 2 runs of `num_tokens` tokens, and as many of its output layer again: no distribution is
kept (`trial_runs`). The default model takes two minutes on two cores.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import pandas as pd
import torch
from torch import Tensor, nn

from quasar_lab.errors import UserError
from quasar_lab.folding import Fold
from quasar_lab.quantization_report import QuantizationRecord, quantization_record
from quasar_lab.quantized_linear import W8A8Linear
from quasar_lab.structure import decoder_layers, linear_layers, weight_matrix
from quasar_lab.token_batches import unpadded
from quasar_lab.trial_runs import TrialRun, answered, kl_sums, layer_output

# Tokens on which one linear is judged, and on which the budget is checked.
SENSITIVITY_TOKENS = 128
BUDGET_TOKENS = 512


def sensitivity(
    model: nn.Module,
    quantized: nn.Module,
    sequences: Sequence[Tensor],
    *,
    num_tokens: int = SENSITIVITY_TOKENS,
) -> pd.DataFrame:
    """Mean KL(full precision || one linear in W8A8) for each linear of `quantized`.

    model: the full-precision model that `quantized` was made from; sequences: token ids, the first
    `num_tokens` are used. Columns: name, kl (nats a token), share (of the sum), num_weights; the
    most sensitive linear first. The KLs add up to roughly that of all linears together.
    """
    fold = quantization_record(quantized).fold
    rounded = _w8a8_linears(quantized)
    batches = _first_tokens(sequences, num_tokens, model)
    totals = dict.fromkeys(rounded, 0.0)
    count = sum(ids.numel() for ids in batches)
    layers = list(decoder_layers(model).values())
    depth = {name: _layer_index(name, model) for name in rounded}
    for ids in batches:
        reference = TrialRun(model, ids)
        done, output = 0, None  # layers that need not run again, and what the last of them returned
        for index, group in groupby(sorted(rounded, key=depth.__getitem__), key=depth.__getitem__):
            while done < index:
                with answered(layers[:done], output):
                    output = layer_output(model, ids, layers[done])
                done += 1
            names = list(group)
            with answered(layers[:done], output):
                runs = [TrialRun(model, ids, {name: rounded[name]}, fold) for name in names]
            for name, total in zip(names, kl_sums(reference, runs), strict=True):
                totals[name] += total
    table = pd.DataFrame(
        {
            "name": list(totals),
            "kl": [total / count for total in totals.values()],
            "num_weights": [linear.qweight.numel() for linear in rounded.values()],
        }
    )
    table.insert(2, "share", table.kl / max(table.kl.sum(), 1e-30))
    return table.sort_values("kl", ascending=False, ignore_index=True)


def mean_kl(model: nn.Module, other: nn.Module, sequences: Sequence[Tensor]) -> float:
    """Mean KL(model || other) in nats a token over `sequences` of token ids."""
    texts = _first_tokens(sequences, None, model)
    return _mean_kl((TrialRun(model, ids), TrialRun(other, ids)) for ids in texts)


def _mean_kl(pairs: Iterable[tuple[TrialRun, TrialRun]]) -> float:
    """Mean KL(first || second), a token, of two runs over each text."""
    total, tokens = 0.0, 0
    for expected, other in pairs:
        total += kl_sums(expected, [other])[0]
        tokens += expected.ids.numel()
    return total / tokens


def meet_budget(
    model: nn.Module,
    quantized: nn.Module,
    budget_kl: float,
    sequences: Sequence[Tensor] | None,
) -> None:
    """Put the most sensitive linears of `quantized` back to full precision, in place.

    As few as it takes for the mean KL on (the first 512 tokens of) `sequences` to be at most
    `budget_kl`. The sensitivity table and the reasons go into the model's record. How many it
    takes is tried out on `model`, whose weights are there anyway: only then are any copied.
    """
    if not budget_kl >= 0:
        raise UserError(f"budget_kl is {budget_kl}: choose a mean KL in nats, 0 or more")
    if not sequences:
        raise UserError(
            "budget_kl needs token ids to measure on: pass statistics from calibrate() or "
            "evaluation=[ids, ...]"
        )
    record = quantization_record(quantized)
    expected = [TrialRun(model, ids) for ids in _first_tokens(sequences, BUDGET_TOKENS, model)]

    def measured() -> float:
        return _mean_kl((run, TrialRun(quantized, run.ids)) for run in expected)

    if measured() <= budget_kl:
        return
    record.sensitivity = sensitivity(model, quantized, sequences)
    names = list(record.sensitivity.name)
    rounded = _w8a8_linears(quantized)
    kept = _how_many(expected, {name: rounded[name] for name in names}, record.fold, budget_kl)
    del rounded  # what is put back frees its INT8 weights
    for name in names[:kept]:
        _put(quantized, name, _folded_linear(name, model, record))
    # the trial undid the scales around each linear, which rounds a little differently
    while (reached := measured()) > budget_kl and kept < len(names):
        _put(quantized, names[kept], _folded_linear(names[kept], model, record))
        kept += 1
    chosen = record.report.name.isin(names[:kept])
    record.report.loc[chosen, "precision"] = "full"
    record.report.loc[chosen, "reason"] = (
        f"kept in full precision: one of the {kept} most sensitive; mean KL is now "
        f"{reached:.2g}, the budget {budget_kl:.2g}"
    )


def _how_many(
    expected: Sequence[TrialRun], rounded: dict[str, W8A8Linear], fold: Fold, budget_kl: float
) -> int:
    """How many of these linears must stay in full precision, taken in order, to meet the budget.

    expected: runs of the full-precision model.
    """

    def within(count: int) -> bool:
        rest = dict(list(rounded.items())[count:])
        pairs = ((run, TrialRun(run.model, run.ids, rest, fold)) for run in expected)
        return _mean_kl(pairs) <= budget_kl

    too_few, enough = 0, 1
    while enough < len(rounded) and not within(enough):
        too_few, enough = enough, min(2 * enough, len(rounded))
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if within(middle) else (middle, enough)
    return enough


def _layer_index(name: str, model: nn.Module) -> int:
    """Of the layer that the linear is in; 0 for one outside of them."""
    layers = enumerate(decoder_layers(model))
    return next((i for i, layer in layers if name.startswith(layer + ".")), 0)


def _w8a8_linears(quantized: nn.Module) -> dict[str, W8A8Linear]:
    return {n: m for n, m in quantized.named_modules() if isinstance(m, W8A8Linear)}


def _folded_linear(name: str, model: nn.Module, record: QuantizationRecord) -> nn.Linear:
    source = linear_layers(model)[name]
    matrix = weight_matrix(source)
    weight, bias = record.fold.linear(name, source)
    linear = nn.Linear(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None,
        device=matrix.device,
        dtype=matrix.dtype,
    ).requires_grad_(matrix.requires_grad)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear.train(source.training)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _first_tokens(
    sequences: Sequence[Tensor], num_tokens: int | None, model: nn.Module
) -> list[Tensor]:
    """LongTensor[1, S] on the model's device, `num_tokens` in all."""
    device = next(model.parameters()).device
    batches: list[Tensor] = []
    left = num_tokens
    for index, sequence in enumerate(sequences):
        for ids in unpadded(sequence, index, model):
            for row in ids.to(device):
                if left is None or left > 0:
                    batches.append(row[None, :left])
                    left = None if left is None else left - batches[-1].numel()
    return batches
