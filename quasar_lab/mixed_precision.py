"""Which linears suffer most from W8A8, and keeping those in full precision.

A few linears (often early down projections, whose inputs hold the largest outliers) cause most of
the damage. `sensitivity` rounds one linear at a time and measures what that alone does to the
output distribution; `meet_budget` keeps the worst ones in full precision until the mean KL is
within a budget.

Cost: one linear is one run of the model from that linear's layer on (the layers before it are
answered from a cache), so a model of L linears costs about L / 2 runs of `num_tokens` tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from quasar_lab.errors import UserError
from quasar_lab.folding import Fold
from quasar_lab.quantization_report import QuantizationRecord, quantization_record
from quasar_lab.quantized_linear import W8A8Linear
from quasar_lab.structure import decoder_layers, linear_layers, weight_matrix
from quasar_lab.token_batches import unpadded

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
    rounded = {n: m for n, m in quantized.named_modules() if isinstance(m, W8A8Linear)}
    sources = linear_layers(model)
    batches = _first_tokens(sequences, num_tokens, model)
    totals = dict.fromkeys(rounded, 0.0)
    count = sum(ids.numel() for ids in batches)
    layers = decoder_layers(model)
    for ids in batches:
        with torch.no_grad(), _recorded(list(layers.values())) as outputs:
            reference = _log_probabilities(model, ids)
        for name, linear in rounded.items():
            first = next((i for i, layer in enumerate(layers) if name.startswith(layer + ".")), 0)
            with (
                torch.no_grad(),
                _answered(list(layers.values())[:first], outputs),
                _rounded(sources[name], linear, fold, name),
            ):
                totals[name] += _kl_sum(reference, _log_probabilities(model, ids))
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
    batches = _first_tokens(sequences, None, model)
    with torch.no_grad():
        total = sum(
            _kl_sum(_log_probabilities(model, ids), _log_probabilities(other, ids))
            for ids in batches
        )
    return total / sum(ids.numel() for ids in batches)


def meet_budget(
    model: nn.Module,
    quantized: nn.Module,
    budget_kl: float,
    sequences: Sequence[Tensor] | None,
) -> None:
    """Put the most sensitive linears of `quantized` back to full precision, in place.

    As few as it takes for the mean KL on (the first 512 tokens of) `sequences` to be at most
    `budget_kl`. The sensitivity table and the reasons go into the model's record.
    """
    if not budget_kl >= 0:
        raise UserError(f"budget_kl is {budget_kl}: choose a mean KL in nats, 0 or more")
    if not sequences:
        raise UserError(
            "budget_kl needs token ids to measure on: pass statistics from calibrate() or "
            "evaluation=[ids, ...]"
        )
    record = quantization_record(quantized)
    tokens = _first_tokens(sequences, BUDGET_TOKENS, model)
    if mean_kl(model, quantized, tokens) <= budget_kl:
        return
    record.sensitivity = sensitivity(model, quantized, sequences)
    names = list(record.sensitivity.name)
    rounded = {name: quantized.get_submodule(name) for name in names}

    def kl_with(count: int) -> float:
        """Mean KL with the `count` most sensitive linears in full precision."""
        for i, name in enumerate(names):
            now = quantized.get_submodule(name)
            if i < count and isinstance(now, W8A8Linear):
                _put(quantized, name, _folded_linear(name, model, record))
            elif i >= count and not isinstance(now, W8A8Linear):
                _put(quantized, name, rounded[name])
        return mean_kl(model, quantized, tokens)

    # grow by doubling, so that no more float weights than needed are made; then bisect
    too_few, enough = 0, 1
    while kl_with(enough) > budget_kl and enough < len(names):
        too_few, enough = enough, min(2 * enough, len(names))
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if kl_with(middle) > budget_kl:
            too_few = middle
        else:
            enough = middle
    reached = kl_with(enough)
    kept = record.report.name.isin(names[:enough])
    record.report.loc[kept, "precision"] = "full"
    record.report.loc[kept, "reason"] = (
        f"kept in full precision: one of the {enough} most sensitive; mean KL is now "
        f"{reached:.2g}, the budget {budget_kl:.2g}"
    )


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


def _log_probabilities(model: nn.Module, ids: Tensor) -> Float[Tensor, "tokens vocab"]:
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def _kl_sum(log_p: Float[Tensor, "T V"], log_q: Float[Tensor, "T V"]) -> float:
    return float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())


@contextmanager
def _rounded(source: nn.Module, linear: W8A8Linear, fold: Fold, name: str) -> Iterator[None]:
    """`source` computes in W8A8 as `linear` does, with the scales undone around it."""

    def replace(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        x = args[0]
        if name in fold.multiply:
            x = x / fold.multiply[name].to(x)
        y = linear(x)
        if name in fold.divide:
            s = fold.divide[name].to(y)
            y = torch.cat([y[..., : -len(s)], y[..., -len(s) :] * s], dim=-1)
        return y

    handle = source.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _recorded(layers: Sequence[nn.Module]) -> Iterator[list[object]]:
    """What each layer returns, in order."""
    outputs: list[object] = []
    handles = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(output))
        for layer in layers
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _answered(layers: Sequence[nn.Module], outputs: Sequence[object]) -> Iterator[None]:
    """The layers return the recorded outputs instead of computing."""
    saved = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer, output in zip(layers, outputs, strict=False):
            layer.__dict__["forward"] = lambda *args, output=output, **kwargs: output
        yield
    finally:
        for layer, forward in zip(layers, saved, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward
