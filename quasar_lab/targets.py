"""The model that verifies, as three operations: feed tokens, know how many, forget the last ones.

Speculative decoding feeds K + 1 tokens in one forward and then forgets the rejected ones. With a
cache that grows by concatenation that costs a copy of the whole cache a step; here the cache is
allocated ahead, so that forgetting is the change of a number and never moves memory.
"""

import inspect
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from quasar_lab.context_length import context_length
from quasar_lab.errors import UserError

_GROWTH = 256  # tokens: the cache's capacity is a multiple of this


@runtime_checkable
class Target(Protocol):
    """What `generate` needs of a model.

    It also uses, where they exist: `max_length` (tokens that fit), `vocab_size`, `eos_token_ids`,
    `reserve(num_tokens)` (make room ahead) and `forward(ids, num_logits=k)` (only the last k rows
    of logits are computed and returned).
    """

    @property
    def length(self) -> int:
        """The number of tokens in the KV cache."""
        ...

    def forward(self, ids: Tensor) -> Tensor:
        """Append ids, LongTensor [M], to the cache; return logits [M, V] of what follows each."""
        ...

    def rollback(self, n: int) -> None:
        """Forget the last n tokens."""
        ...


class HuggingFaceTarget:
    """Any Hugging Face causal language model with attention layers as a Target.

    Sliding-window layers keep the whole context in the cache and are limited by the attention
    mask alone: they cost memory, and a rollback past the window stays exact.

    Args:
        model: in eval mode; its weights are shared, nothing about it is changed.
        max_length: tokens that fit; None: the model's own limit, see `context_length`.

    Raises:
        UserError: an encoder-decoder, a model without a language head, a recurrent or otherwise
            unusual cache, a model in training mode with dropout; a max_length below 1 or beyond
            what the model's positions allow.
    """

    def __init__(self, model: PreTrainedModel, *, max_length: Any = None) -> None:
        _refuse_unsupported(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.config.vocab_size
        self.max_length = context_length(model, self.config, max_length)
        self.eos_token_ids = _eos_token_ids(model)
        self.cache = RollbackCache(layer_indices(model))
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed `past_key_values` to `cache`; models from the Hub lag behind
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._can_limit_logits = "logits_to_keep" in parameters

    @property
    def length(self) -> int:
        """The number of tokens in the KV cache."""
        return self.cache.length

    @torch.no_grad()
    def forward(self, ids: Tensor, num_logits: int | None = None) -> Float[Tensor, "rows vocab"]:
        """Append ids [M] to the cache; logits [M, V], or of the last num_logits tokens only."""
        ids = ids.reshape(1, -1).to(self.model.device)
        if self.max_length is not None and self.length + ids.shape[1] > self.max_length:
            raise UserError(
                f"{self.length + ids.shape[1]} tokens do not fit into the model's context of "
                f"{self.max_length}: shorten the prompt or max_new_tokens"
            )
        arguments: dict[str, Any] = {self._cache_argument: self.cache, "use_cache": True}
        if num_logits is not None and self._can_limit_logits:
            arguments["logits_to_keep"] = num_logits
        length = self.length
        try:
            logits = self.model(ids, **arguments).logits[0]
        except BaseException:  # an interrupt between two layers must not leave them out of step
            self.cache.set_length(length)
            raise
        return logits if num_logits is None else logits[-num_logits:]

    def rollback(self, n: int) -> None:
        """Forget the last n tokens. The storage stays where it is."""
        if not 0 <= n <= self.length:
            raise UserError(
                f"cannot roll back {n} tokens: it must lie between 0 and the {self.length} cached"
            )
        self.cache.set_length(self.length - n)

    def reserve(self, num_tokens: int) -> None:
        """Make room for num_tokens in all, so that no step has to move the cache."""
        self.cache.reserve(num_tokens)


class RollbackCache(Cache):
    """A KV cache of preallocated layers that all hold the same number of tokens.

    layers: the indices under which the model's layers write into it. A model with layers left out
        has gaps.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self._own = {index: PreallocatedLayer() for index in sorted(set(layers))}
        # Models ask slot 0 for the length: an unused slot answers with the first used layer.
        first = next(iter(self._own.values()))
        super().__init__(layers=[self._own.get(i, first) for i in range(max(self._own) + 1)])

    @property
    def length(self) -> int:
        """Tokens held."""
        return next(iter(self._own.values())).length

    def set_length(self, length: int) -> None:
        """Keep the first `length` tokens of every layer."""
        for layer in self._own.values():
            layer.set_length(length)

    def crop(self, tokens_to_remove: int) -> None:
        """transformers' spelling of a rollback: a negative number of tokens."""
        self.set_length(self.length - abs(tokens_to_remove))

    def reserve(self, num_tokens: int) -> None:
        """Make room for num_tokens in every layer."""
        for layer in self._own.values():
            layer.reserve(num_tokens)


class PreallocatedLayer(DynamicLayer):
    """Keys and values [1, heads, capacity, head_dim]; what is read are views of the used part."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.capacity = 0
        self._storage: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [1, heads, M, head_dim] and return all that is held."""
        start, end = self.length, self.length + key_states.shape[-2]
        if not self._storage:
            self._storage = [key_states.new_empty(0), value_states.new_empty(0)]
            self.is_initialized = True
        if end > self.capacity or self._storage[0].ndim == 1:
            self._grow(max(end, self.capacity), [key_states, value_states])
        for storage, new in zip(self._storage, (key_states, value_states), strict=True):
            storage[:, :, start:end] = new
        self.set_length(end)
        return self.keys, self.values  # type: ignore[return-value]

    def reserve(self, num_tokens: int) -> None:
        """Make room for num_tokens in all."""
        if self._storage and num_tokens > self.capacity:
            self._grow(num_tokens, self._storage)
            self.set_length(self.length)
        self.capacity = max(self.capacity, num_tokens)

    def _grow(self, num_tokens: int, like: list[Tensor]) -> None:
        # doubling keeps the copies linear in the tokens even if nobody reserved
        wanted = max(num_tokens, 2 * self.length)
        self.capacity = -(-wanted // _GROWTH) * _GROWTH
        for i, example in enumerate(like):
            batch, heads, _, head_dim = example.shape
            grown = example.new_empty(batch, heads, self.capacity, head_dim)
            if self.length:
                grown[:, :, : self.length] = self._storage[i][:, :, : self.length]
            self._storage[i] = grown

    def set_length(self, length: int) -> None:
        """Keep the first `length` tokens; the storage is not touched."""
        self.length = length
        if self._storage and self._storage[0].ndim > 1:
            self.keys, self.values = (storage[:, :, :length] for storage in self._storage)

    def get_seq_length(self) -> int:
        """Tokens held (transformers asks for it under this name)."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """transformers' spelling of a rollback: a negative number of tokens."""
        self.set_length(self.length - abs(tokens_to_remove))


def layer_indices(model: PreTrainedModel) -> set[int]:
    """The cache slots that the model's attention modules write to."""
    found = {getattr(module, "layer_idx", None) for module in model.modules()} - {None}
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return {index for index in found if isinstance(index, int)} or set(range(num_layers))


def as_target(model: object) -> Target:
    """A Target as it is; a Hugging Face model, or a LanguageModel, wrapped.

    Raises UserError for anything else.
    """
    if isinstance(model, PreTrainedModel):
        return HuggingFaceTarget(model)
    if all(hasattr(model, name) for name in ("forward", "length", "rollback")):
        return model  # type: ignore[return-value]
    inner = getattr(model, "model", None)
    if isinstance(inner, PreTrainedModel):
        return HuggingFaceTarget(inner)
    raise UserError(
        f"a {type(model).__name__} cannot be decoded from: pass a Hugging Face causal language "
        "model, what load() returned, or an object with forward(ids), length and rollback(n)"
    )


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder: pass a decoder-only (causal) model")
    if model.get_output_embeddings() is None:
        raise UserError(f"{name} has no language-model head: load it with AutoModelForCausalLM")
    if model.training and any(
        isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()
    ):
        raise UserError(f"{name} is in training mode and has dropout: call model.eval() first")
    parameters = inspect.signature(model.forward).parameters
    layers = DynamicCache(config=model.config).layers
    supported = (DynamicLayer, DynamicSlidingWindowLayer)
    other = {type(layer).__name__ for layer in layers if type(layer) not in supported}
    if other or not {"cache", "past_key_values"} & set(parameters):
        kinds = ", ".join(sorted(other)) or "no key/value cache"
        raise UserError(
            f"{name} has layers whose state cannot be rolled back exactly ({kinds}): pass a model "
            "with plain or sliding-window attention only"
        )


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation_config = getattr(model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config(decoder=True).eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
