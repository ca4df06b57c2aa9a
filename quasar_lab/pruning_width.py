"""Pruning inside the layers: MLP neurons and attention heads, every layer keeps its place.

The least important go, by the size of the weights that carry their output into the residual stream
(and, for neurons, of those that make it): |down column| x |up row|. A key-value head goes together
with the query heads that read it. All layers keep equally many, as the configuration has one number
for all.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quasar_lab.architectures import SmoothingGroup, find_groups
from quasar_lab.errors import UserError
from quasar_lab.quantized_linear import W8A8Linear
from quasar_lab.structure import as_module

PARTS = ("mlp", "heads")


@torch.no_grad()
def prune_width(model: Any, keep: Any = 0.75, part: str = "mlp") -> PreTrainedModel:
    """A new model whose layers have `keep` of their MLP neurons or of their attention heads.

    keep: a share up to 1, rounded, at least one neuron or key-value head; part: "mlp" or "heads".
    For families whose layers have separate up and down (query, key, value and output) linears:
    Llama, Mistral, Qwen2, Qwen3, Gemma, openPangu, OPT (MLP only). The model itself is unchanged.
    With keep=1.0 the result computes exactly what `model` does. Raises UserError for another
    share, part or family, and for a quantised model: prune first.
    """
    module = as_module(model)
    if part not in PARTS:
        raise UserError(f"part {part!r}: choose from {', '.join(PARTS)}")
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
        raise UserError(f"keep is {keep!r}: it must be a share above 0, up to 1.0")
    if not isinstance(module, PreTrainedModel):
        raise UserError(f"a {type(module).__name__} cannot be pruned: pass a Hugging Face model")
    if any(isinstance(part, W8A8Linear) for part in module.modules()):
        raise UserError("the model is quantised: prune first, then quantise")
    pruned = copy.deepcopy(module)
    groups = find_groups(pruned, ("up_down",) if part == "mlp" else ("v_o",))
    modules = dict(pruned.named_modules())
    for group in groups:
        (_cut_mlp if part == "mlp" else _cut_heads)(pruned, modules, group, keep)
    if not groups:
        raise UserError(f"no {part} of a {type(module).__name__} could be pruned: {_FAMILIES}")
    return pruned


_FAMILIES = "separate linears are needed, as in Llama, Mistral, Qwen, Gemma or openPangu"


def _cut_mlp(
    model: PreTrainedModel, modules: dict[str, nn.Module], group: SmoothingGroup, keep: float
) -> None:
    parent = group.source.rpartition(".")[0]
    [reader] = group.readers
    up, down = _linear(modules, group.source), _linear(modules, reader)
    importance = up.weight.norm(dim=1) * down.weight.norm(dim=0)
    kept = _largest(importance, keep)
    producers = [up]
    if f"{parent}.gate_proj" in modules:
        producers.append(_linear(modules, f"{parent}.gate_proj"))
    for linear in producers:
        _keep_outputs(linear, kept)
    _keep_inputs(down, kept)
    config: Any = model.config.get_text_config()
    setattr(config, "ffn_dim" if hasattr(config, "ffn_dim") else "intermediate_size", len(kept))
    if hasattr(modules[parent], "intermediate_size"):
        modules[parent].intermediate_size = len(kept)  # type: ignore[assignment]


def _cut_heads(
    model: PreTrainedModel, modules: dict[str, nn.Module], group: SmoothingGroup, keep: float
) -> None:
    parent = group.source.rpartition(".")[0]
    config: Any = model.config.get_text_config()
    names = [f"{parent}.{name}_proj" for name in "qkvo"]
    if any(name not in modules for name in names) or not hasattr(config, "num_key_value_heads"):
        raise UserError(f"no heads of a {type(model).__name__} could be pruned: {_FAMILIES}")
    q, k, v, o = (_linear(modules, name) for name in names)
    # the rows of a query head follow each other, and so do the heads of a KV head
    per_head = o.weight.norm(dim=0).view(-1, group.repeats * group.head_dim).norm(dim=1)
    importance = per_head * v.weight.norm(dim=1).view(-1, group.head_dim).norm(dim=1)
    kept = _largest(importance, keep)

    def channels(width: int) -> Tensor:
        return (kept[:, None] * width + torch.arange(width, device=kept.device)).flatten()

    queries = channels(group.repeats * group.head_dim)
    _keep_outputs(q, queries)
    _keep_inputs(o, queries)
    for linear in (k, v):
        _keep_outputs(linear, channels(group.head_dim))
    config.head_dim = group.head_dim  # not hidden_size / heads any longer
    config.num_key_value_heads = len(kept)
    config.num_attention_heads = len(kept) * group.repeats


def _largest(importance: Tensor, keep: float) -> Tensor:
    """The indices of the most important, in their old order."""
    count = max(1, round(keep * len(importance)))
    return importance.float().topk(count).indices.sort().values


def _linear(modules: dict[str, nn.Module], name: str) -> nn.Linear:
    linear = modules[name]
    if not isinstance(linear, nn.Linear):
        raise UserError(f"{name} is a {type(linear).__name__}: {_FAMILIES}")
    return linear


def _keep_outputs(linear: nn.Linear, kept: Tensor) -> None:
    linear.weight = nn.Parameter(linear.weight[kept].contiguous(), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[kept].contiguous(), requires_grad=False)
    linear.out_features = len(kept)


def _keep_inputs(linear: nn.Linear, kept: Tensor) -> None:
    linear.weight = nn.Parameter(linear.weight[:, kept].contiguous(), requires_grad=False)
    linear.in_features = len(kept)
