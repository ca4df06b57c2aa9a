"""How large a decoder is: the few numbers from which bytes and operations follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quasar_lab.errors import UserError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated feed-forward block (Llama, Qwen, ...)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} is {value!r}: a shape has whole numbers from 1 on")

    @classmethod
    def of(cls, model: Any) -> "ModelShape":
        """The shape of a Hugging Face config, of a model that has one, or of what `load` returned.

        Raises UserError for a config without these numbers, and for a mixture of experts.
        """
        if isinstance(model, ModelShape):
            return model
        if not hasattr(model, "config"):
            model = getattr(model, "model", model)  # what `load` returned; else a config itself
        config = getattr(model, "config", model)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        kind = getattr(config, "model_type", type(config).__name__)
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts")):
            raise UserError(f"{kind} is a mixture of experts: how many a step reads is not known")
        try:
            heads = config.num_attention_heads
            return cls(
                layers=config.num_hidden_layers,
                hidden=config.hidden_size,
                heads=heads,
                kv_heads=getattr(config, "num_key_value_heads", None) or heads,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
                intermediate=config.intermediate_size,
                vocab=config.vocab_size,
            )
        except AttributeError as error:
            raise UserError(f"{kind} has no known shape ({error}): pass a ModelShape") from error

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of one layer's linears, those with a common input as one."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "o": (self.hidden, q),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def layer_weights(self) -> int:
        """Weights in the linears of all layers."""
        return self.layers * sum(n * k for n, k in self.linears.values())

    @property
    def layer_rows(self) -> int:
        """Output channels of these linears: in W8A8 each has a scale."""
        return self.layers * sum(n for n, _ in self.linears.values())

    @property
    def head_weights(self) -> int:
        """Weights in the output layer."""
        return self.vocab * self.hidden


# From the models' config.json.
SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49152),
        "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072, 151936),
        "qwen3-1.7b": ModelShape(28, 2048, 16, 8, 128, 6144, 151936),
        "qwen3-4b": ModelShape(36, 2560, 32, 8, 128, 9728, 151936),
        "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288, 151936),
        "openpangu-7b": ModelShape(34, 4096, 32, 8, 128, 12800, 153376),
    }
)
