"""Find one's way in a Hugging Face model: its linears, their weights and its decoder layers."""

import copy
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quasar_lab.errors import UserError
from quasar_lab.quantized_linear import W8A8Linear


def describe(value: object) -> str:
    """A value in a few words, for error messages."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def as_module(model: object) -> nn.Module:
    """The torch module behind `model`: itself, or that of what `load` returned."""
    if not isinstance(model, nn.Module):
        model = getattr(model, "model", model)
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {describe(model)}: pass a torch module or what load() returned")
    return model


def in_bfloat16(model: nn.Module) -> nn.Module:
    """A copy of a full-precision model with bfloat16 parameters; tied ones stay tied.

    Buffers stay as they are: `model.bfloat16()` rounds the rotary frequencies as well, and a
    position times an error of 0.4 % is another position. (Their cosines may be rounded.)
    """
    return copy_with(
        model,
        {
            own: nn.Parameter(own.detach().to(torch.bfloat16, copy=True), own.requires_grad)
            for own in model.parameters()
        },
    )


def copy_with(model: nn.Module, replacements: Mapping[Any, Any]) -> nn.Module:
    """A copy of the model with these modules or parameters in place of its own, which are not
    copied first."""
    # deepcopy takes from its memo what it would have to copy, and adds to it what keeps it alive
    return copy.deepcopy(model, {id(own): new for own, new in replacements.items()})


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of every linear: `nn.Linear` and GPT-2's `Conv1D`."""
    return {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}


def weight_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of all that multiplies by a weight: linears, routers, packed experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(p.ndim in (2, 3) for p in module.parameters(recurse=False))
        and not isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd))
    }


def parameter(module: nn.Module, name: str) -> Tensor | None:
    """The parameter `name` of `module`, or None: without an optional bias, or one never made."""
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def norm_weight(norm: nn.Module) -> Tensor:
    """The weight vector of a norm."""
    weight = parameter(norm, "weight")
    if weight is None or weight.ndim != 1:
        raise UserError(f"a {type(norm).__name__} has no weight vector to fold a scale into")
    return weight


def weight_matrix(module: nn.Module, channels: int | None = None) -> Float[Tensor, "N K"]:
    """The weight as [outputs, inputs], a view: `Conv1D` stores it transposed.

    Packed experts (3-D, [experts, outputs, inputs]) come out as one tall matrix of the parameter
    that reads `channels` inputs first.
    """
    if isinstance(module, Conv1D):
        return module.weight.T
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 2 or (parameter.ndim == 3 and parameter.shape[-1] == channels):
            return parameter.flatten(0, -2)
    raise UserError(f"a {type(module).__name__} has no weight that reads {channels} channels")


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of the decoder layers: the largest `ModuleList` that holds linears.

    Those of a quantised model count as well.
    """
    best: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(best):
            layers = {f"{name}.{i}": layer for i, layer in enumerate(module)}
            # the experts of one layer are a ModuleList as well
            nested = any(name.startswith(f"{outer}.") for outer in best)
            if not nested and all(_multiplies(layer) for layer in layers.values()):
                best = layers
    if not best:
        raise UserError(f"found no decoder layers (a ModuleList) in a {type(model).__name__}")
    return best


def _multiplies(layer: nn.Module) -> bool:
    quantized = any(isinstance(module, W8A8Linear) for module in layer.modules())
    return quantized or bool(weight_modules(layer))


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` is a run of whole parts of the dotted `name` (wildcards allowed)."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")
