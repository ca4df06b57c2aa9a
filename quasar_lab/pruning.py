"""The other way to a cheaper verifier: leave layers out (structural pruning).

A model with three quarters of its layers reads three quarters of the bytes a step, about what INT8
saves on bf16 beside an INT8-free part. What it does to the predictions is another matter: see
notebook 07. Which layers go:

- "uniform": evenly spaced ones, the first and the last stay;
- "last": the last ones;
- "block_influence": those that change the residual stream least, 1 - cos(input, output) averaged
  over calibration tokens (Men et al. 2024, "ShortGPT", arXiv 2403.03853).

`pruning_width` narrows layers instead (attention heads, MLP neurons).
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quasar_lab.drafting.layer_skip import chosen_layers, with_layers
from quasar_lab.errors import UserError
from quasar_lab.structure import as_module, decoder_layers
from quasar_lab.token_batches import unpadded

STRATEGIES = ("uniform", "last", "block_influence")


def prune_layers(
    model: Any,
    keep: float | int | Iterable[int] = 0.75,
    strategy: str = "uniform",
    *,
    batches: Iterable[object] | None = None,
) -> PreTrainedModel:
    """A new model with some of the decoder layers of `model`, which is unchanged and independent.

    Args:
        model: a Hugging Face causal model of any family, full precision or quantised, or what
            `load` returned.
        keep: the share of layers that stay (a float up to 1, rounded, at least one layer), their
            number (an int), or their indices in ascending order.
        strategy: see above; not used with indices.
        batches: calibration token ids, LongTensor[S] each, for "block_influence".

    With keep=1.0 the result computes exactly what `model` does. Raises UserError for layers that
    do not exist, an unknown strategy and "block_influence" without batches.
    """
    module = as_module(model)
    if not isinstance(module, PreTrainedModel):
        raise UserError(f"a {type(module).__name__} cannot be pruned: pass a Hugging Face model")
    kept = kept_layers(module, keep, strategy, batches=batches)
    pruned = copy.deepcopy(with_layers(module, kept))
    # in a KV cache of its own the layers are numbered from 0
    for position, layer in enumerate(decoder_layers(pruned).values()):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = position  # type: ignore[assignment]
    return pruned


def kept_layers(
    model: nn.Module,
    keep: float | int | Iterable[int],
    strategy: str = "uniform",
    *,
    batches: Iterable[object] | None = None,
) -> tuple[int, ...]:
    """The indices of the layers that `prune_layers` keeps, ascending; the same errors."""
    if strategy not in STRATEGIES:
        raise UserError(f"strategy {strategy!r}: choose from {', '.join(STRATEGIES)}")
    total = len(decoder_layers(model))
    first = chosen_layers(keep, total)  # checks what was asked for, and counts
    if strategy == "last" or not isinstance(keep, (int, float)):
        return first
    if strategy == "uniform":
        return tuple(torch.linspace(0, total - 1, len(first)).round().int().tolist())
    if batches is None:
        raise UserError(
            'strategy "block_influence" looks at activations: pass batches of token ids'
        )
    influence = torch.tensor(block_influence(model, batches))
    return tuple(sorted(influence.topk(len(first)).indices.tolist()))


@torch.no_grad()
def block_influence(model: nn.Module, batches: Iterable[object]) -> list[float]:
    """For each decoder layer 1 - cos(its input, its output), the mean over all tokens.

    0: the layer only scales the residual stream; 2: it turns it round. Raises UserError without
    a batch and for batches that `calibrate` would refuse.
    """
    totals = [0.0] * len(decoder_layers(model))
    tokens = 0
    with _residual_streams(model) as pairs:
        for index, batch in enumerate(batches):
            for ids in unpadded(batch, index, model):
                pairs.clear()
                model(ids.to(next(model.parameters()).device), use_cache=False)
                tokens += ids.numel()
                for layer, (before, after) in enumerate(pairs):
                    cosine = torch.cosine_similarity(before.double(), after.double(), dim=-1)
                    totals[layer] += float((1 - cosine).sum())
    if not tokens:
        raise UserError("there are no batches to calibrate on: pass at least one")
    return [total / tokens for total in totals]


@contextmanager
def _residual_streams(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While in force, a forward appends (input, output) of each decoder layer, in order."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def record(_: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
        before = arguments[0] if arguments else keywords["hidden_states"]
        pairs.append((before, output[0] if isinstance(output, tuple) else output))

    handles = [
        layer.register_forward_hook(record, with_kwargs=True)
        for layer in decoder_layers(model).values()
    ]
    try:
        yield pairs
    finally:
        for handle in handles:
            handle.remove()
