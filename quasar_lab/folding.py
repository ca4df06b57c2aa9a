"""Fold smoothing scales into the weights: the float model computes the same as before.

`smoothing_scales` chooses s for every group of a model; a `Fold` then says, module by module, what
its inputs' columns are multiplied by and what its outputs are divided by. Quantisation applies it
one linear at a time; `fold_model` applies it to a float copy, for study.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quasar_lab.activation_stats import ActivationStats
from quasar_lab.alpha_search import search_alpha
from quasar_lab.architectures import SmoothingGroup
from quasar_lab.errors import UserError
from quasar_lab.smoothing import m2_scale, smoothquant_scale, weight_absmax
from quasar_lab.structure import linear_layers, norm_weight, parameter, weight_matrix

METHODS = ("m2", "smoothquant", "none")


@dataclass(frozen=True, slots=True)
class GroupScale:
    """The chosen scale of one group, Tensor[width] in source channels, and how it was chosen."""

    group: SmoothingGroup
    scale: Float[Tensor, "width"]
    method: str


def group_scale(
    model: nn.Module,
    stats: Mapping[str, ActivationStats],
    group: SmoothingGroup,
    method: str = "m2",
    alpha: float | str = 0.5,
    *,
    num_candidates: int = 100,
) -> GroupScale:
    """Choose s for one group from the statistics of its readers' common input.

    method: "m2" or "smoothquant"; alpha (SmoothQuant only): a number, or "auto" for the one whose
    W8A8 output is nearest to the float output on the calibration sample.
    """
    modules = [model.get_submodule(name) for name in group.readers]
    observed = next((name for name in group.readers if name in stats), None)
    if observed is None:
        raise UserError(f"no statistics for {group.readers[0]}: calibrate this very model")
    statistics = pooled_stats(stats[observed], group, group.readers[0])
    channels = len(statistics.absmax)
    weights = [weight_matrix(module, channels).detach() for module in modules]
    biases = [parameter(module, "bias") for module in modules]
    w = group.expand(group.pool(weight_absmax(weights)))
    if method == "m2":
        scale = m2_scale(statistics, weights[:3], biases[:3], num_candidates, absmax=w)
        label = "m2"
    elif alpha == "auto":
        chosen, scale = search_alpha(statistics, w, weights)
        label = "unsmoothed is best" if chosen is None else f"alpha {chosen:g} (auto)"
    else:
        scale = smoothquant_scale(statistics.absmax, w, float(alpha))
        label = f"alpha {alpha:g}"
    return GroupScale(group, group.pool(scale), label)


def pooled_stats(stats: ActivationStats, group: SmoothingGroup, name: str) -> ActivationStats:
    """With grouped-query attention, the range that a KV head's channel spans over its copies."""
    if len(stats.absmax) != group.width * group.repeats:
        raise UserError(
            f"the statistics of {name} have {len(stats.absmax)} channels, the model "
            f"{group.width * group.repeats}: calibrate this very model"
        )
    if group.repeats == 1:
        return stats
    return replace(
        stats,
        min=-group.expand(group.pool(-stats.min)),
        max=group.expand(group.pool(stats.max)),
    )


@dataclass(slots=True)
class Fold:
    """What each module is scaled by: `multiply` its input columns, `divide` its last outputs."""

    multiply: dict[str, Tensor] = field(default_factory=dict)
    divide: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def add(self, model: nn.Module, chosen: GroupScale) -> None:
        """Take one group's scale in."""
        group, s = chosen.group, chosen.scale
        source = model.get_submodule(group.source)
        if group.source in linear_layers(model):
            self.divide[group.source] = s
        else:
            weight, bias, s = _folded_norm(source, s)
            self.norms[group.source] = (weight, bias)
        for reader in group.readers:
            self.multiply[reader] = group.expand(s)

    def linear(
        self, name: str, module: nn.Module, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "N K"], Tensor | None]:
        """(weight [N, K], bias [N] or None) of a linear after folding, new tensors."""
        return self.rows(name, module, 0, len(weight_matrix(module)), dtype)

    def rows(
        self, name: str, module: nn.Module, first: int, last: int, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "rows K"], Tensor | None]:
        """The outputs `first` to `last` of `linear`: (weight [rows, K], bias [rows] or None)."""
        matrix = weight_matrix(module).detach()
        weight = matrix[first:last].to(dtype, copy=True)
        bias = parameter(module, "bias")
        bias = None if bias is None else bias.detach()[first:last].to(dtype, copy=True)
        if name in self.multiply:
            weight *= self.multiply[name].to(weight)
        if name in self.divide:
            # s belongs to the last outputs; of these rows, to those from `start` on
            s = self.divide[name].to(weight)
            offset = len(matrix) - len(s)
            start = max(offset - first, 0)
            s = s[max(first - offset, 0) : max(last - offset, 0)]
            weight[start:] /= s[:, None]
            if bias is not None:
                bias[start:] /= s
        return weight, bias

    @torch.no_grad()
    def apply_(self, name: str, module: nn.Module) -> None:
        """Fold into the float module `name`, in place."""
        if name in self.norms:
            weight, bias = self.norms[name]
            norm_weight(module).copy_(weight)
        elif isinstance(module, (nn.Linear, Conv1D)):
            matrix = weight_matrix(module)
            weight, bias = self.linear(name, module, _exact(matrix.dtype))
            matrix.copy_(weight)
        else:
            s = self.multiply[name]
            matrix, bias = weight_matrix(module, len(s)), None
            matrix.mul_(s.to(matrix))
        old_bias = parameter(module, "bias")
        if bias is not None and old_bias is not None:
            old_bias.copy_(bias)

    def touches(self, name: str) -> bool:
        return name in self.norms or name in self.multiply or name in self.divide


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _folded_norm(norm: nn.Module, s: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """(weight / s, bias / s, the s that this realises) in the norm's own dtype.

    Rounding weight / s to bfloat16 is off by up to 0.4 %. The readers are multiplied by the ratio
    that the rounded weight really gives, so that the product is unchanged all the same.
    """
    stored = norm_weight(norm).detach()
    offset = norm_offset(norm)
    old = stored.to(_exact(stored.dtype)) + offset
    weight = (old / s.to(old) - offset).to(stored.dtype)
    new = weight.to(old) + offset
    realised = torch.where((old != 0) & (new != 0), old / new, s.to(old))
    bias = parameter(norm, "bias")
    if bias is not None:
        bias = (bias.detach().to(old) / realised).to(bias.dtype)
    return weight, bias, realised


def norm_offset(norm: nn.Module) -> float:
    """1 for norms that multiply by (1 + weight), as Gemma's do, and 0 for the others.

    Found by asking the norm: with a zero weight (and bias) only the former lets anything through.
    """
    probe = copy.deepcopy(norm)
    for value in probe.parameters():
        value.data.zero_()
    x = torch.linspace(-1, 2, norm_weight(norm).numel()).to(norm_weight(norm))
    with torch.no_grad():
        return float(probe(x[None, None]).abs().max() > 0)


def fold_model(model: nn.Module, chosen: Sequence[GroupScale]) -> nn.Module:
    """A float copy of `model` with the scales folded in; it computes the same function."""
    fold = Fold()
    for scale in chosen:
        fold.add(model, scale)
    folded = copy.deepcopy(model)
    for name, module in folded.named_modules():
        if fold.touches(name):
            fold.apply_(name, module)
    return folded
