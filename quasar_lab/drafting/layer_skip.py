"""Self-speculation: the target with some of its layers left out drafts for the whole.

No second model and no second copy of the weights (Zhang et al. 2023, "Draft & Verify", arXiv
2309.08168, skips any layers; Elhoushi et al. 2024, "LayerSkip", arXiv 2404.16710, keeps the first
ones). The drafter has a KV cache of its own for the layers it keeps.
"""

import copy
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from quasar_lab.checks import check_whole
from quasar_lab.drafting.model import ModelDrafter
from quasar_lab.errors import UserError
from quasar_lab.structure import decoder_layers
from quasar_lab.targets import HuggingFaceTarget, Target


class LayerSkipDrafter(ModelDrafter):
    """Draft with a subset of the target's layers, sharing its weights.

    Args:
        model: the Hugging Face model that is the target, a HuggingFaceTarget of it, or what
            `load` returned.
        layers: the first so many layers (an int), a share of them (a float up to 1, rounded, at
            least one), or the indices of the layers to keep, in ascending order.
        num_draft_tokens: so many tokens are proposed at most.
        engine: makes a Target of the model with fewer layers; `FastDecoder.from_model` is another.

    Raises UserError for layers that do not exist.
    """

    def __init__(
        self,
        model: Any,
        layers: Any = 0.5,
        num_draft_tokens: Any = 5,
        *,
        engine: Callable[[PreTrainedModel], Target] = HuggingFaceTarget,
    ) -> None:
        check_whole("num_draft_tokens", num_draft_tokens)
        model = model if isinstance(model, PreTrainedModel) else getattr(model, "model", model)
        if not isinstance(model, PreTrainedModel):
            raise UserError(
                f"a {type(model).__name__} has no layers to skip: pass the Hugging Face model"
            )
        self.layers = chosen_layers(layers, len(decoder_layers(model)))
        super().__init__(engine(with_layers(model, self.layers)), num_draft_tokens)

    def __repr__(self) -> str:
        return f"LayerSkipDrafter(layers={self.layers}, num_draft_tokens={self.num_draft_tokens})"


def chosen_layers(layers: Any, num_layers: int) -> tuple[int, ...]:
    """The indices of the layers to keep, ascending; UserError for an impossible choice."""
    allowed = f"a count from 1 to {num_layers}, a share up to 1.0, or indices below {num_layers}"
    if isinstance(layers, bool):
        raise UserError(f"layers is {layers!r}: it must be {allowed}")
    if isinstance(layers, numbers.Real) and not isinstance(layers, numbers.Integral):
        if not 0 < float(layers) <= 1:
            raise UserError(f"layers is {layers!r}: it must be {allowed}")
        layers = max(1, round(float(layers) * num_layers))
    if isinstance(layers, numbers.Integral):
        if not 1 <= int(layers) <= num_layers:
            raise UserError(f"layers is {layers!r}: it must be {allowed}")
        return tuple(range(int(layers)))
    if not isinstance(layers, Iterable) or isinstance(layers, str):
        raise UserError(f"layers is {layers!r}: it must be {allowed}")
    indices = tuple(layers)
    whole = all(isinstance(index, numbers.Integral) for index in indices)
    if not indices or not whole or not all(0 <= index < num_layers for index in indices):
        raise UserError(f"layers is {indices!r}: it must be {allowed}")
    if list(indices) != sorted(set(indices)):
        raise UserError(f"layers is {indices!r}: each layer once, in ascending order")
    return tuple(map(int, indices))


def with_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """A view of the model that has only these layers; every weight is shared, none is copied.

    The modules from the model down to its list of layers are shallow copies, so that the model
    itself keeps all its layers. The layers keep their numbers in the KV cache, which transformers'
    own cache does not expect: run the view in a HuggingFaceTarget, or with use_cache=False.
    """
    path = next(iter(decoder_layers(model))).split(".")[:-1]
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None)
    text_config.num_hidden_layers = len(layers)
    if layer_types is not None:
        text_config.layer_types = [layer_types[index] for index in layers]

    def shallow_copy(module: Any) -> Any:
        view = copy.copy(module)
        # some rotary scalings change their frequencies while a text grows: each view has its own
        view._modules = {
            name: copy.deepcopy(child) if hasattr(child, "rope_type") else child
            for name, child in module._modules.items()
        }
        if getattr(module, "config", None) is model.config:
            view.config = config
        elif getattr(module, "config", None) is model.config.get_text_config(decoder=True):
            view.config = text_config
        return view

    view = module = shallow_copy(model)
    for name in path[:-1]:
        module._modules[name] = module = shallow_copy(module._modules[name])
    kept = module._modules[path[-1]]
    module._modules[path[-1]] = chosen = nn.ModuleList([kept[index] for index in layers])
    chosen.training = kept.training
    return view
