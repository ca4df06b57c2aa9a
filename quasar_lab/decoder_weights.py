"""From a loaded Hugging Face model to what the decoder multiplies with, without a second copy.

Linears that share an input (q, k, v; gate, up) become one matrix. The model's own modules are
turned into views of the fused matrices: the values stay, the memory is not doubled, and the model
goes on working beside the decoder. `torch.save`, `save_pretrained` and `copy.deepcopy` cope with
such views; a parameter that is *replaced* afterwards no longer reaches the decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from quasar_lab.context_length import rope_limit
from quasar_lab.errors import UserError
from quasar_lab.int8_gemm import w8a8_linear
from quasar_lab.int8_gemm.simulated import simulated_linear
from quasar_lab.placement import is_placed, reserve
from quasar_lab.quantized_linear import W8A8Linear

# model_type of the families that are this one architecture; others with the same module names
# scale their embeddings, move their norms or cap their logits.
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "PanguEmbedded")


@dataclass(frozen=True, slots=True)
class Matrix:
    """y = x Wᵀ + bias. A scale (float32 [N]) marks W8A8: the weight is int8 then."""

    weight: Tensor  # [N, K]
    bias: Tensor | None = None  # [N]
    scale: Tensor | None = None  # [N]
    backend: str = "auto"  # of the INT8 product
    simulated: bool = False  # as W8A8Linear

    def __call__(self, x: Float[Tensor, "tokens K"]) -> Float[Tensor, "tokens N"]:
        if self.scale is None:
            return nn.functional.linear(x, self.weight, self.bias)
        if self.simulated:
            return simulated_linear(x, self.weight, self.scale, self.bias)
        return w8a8_linear(x, self.weight, self.scale, self.bias, backend=self.backend)


@dataclass(frozen=True, slots=True)
class Projection:
    """Linears with the same input: one fused matrix, or one each where only some are W8A8."""

    matrices: tuple[Matrix, ...]

    def __call__(self, x: Float[Tensor, "tokens K"]) -> Float[Tensor, "tokens N"]:
        outputs = [matrix(x) for matrix in self.matrices]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer block. q_norm and k_norm are Qwen3's; window counts tokens."""

    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model, sharing the memory of the model that it was taken from."""

    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    attention_scale: float  # multiplies q kᵀ
    softmax_dtype: torch.dtype
    rope_frequency: Float32[Tensor, "half_head_dim"]  # radians a token
    rope_factor: float  # multiplies cos and sin (yarn)
    rope_limit: int | None  # tokens up to which the frequencies hold, None: any


def join_rows(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensors stacked along their first dimension, if memory holds them so; else None."""
    first = parts[0]
    rows, offset = 0, first.storage_offset()
    for part in parts:
        follows = (
            part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and part.storage_offset() == offset
            and part.is_contiguous()
        )
        if not follows:
            return None
        rows, offset = rows + part.shape[0], offset + part.numel()
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _move(tensors: Sequence[Tensor], place: Tensor) -> None:
    """Copy the tensors into `place`, one after the other, and make them views of it."""
    torch.cat([tensor.detach() for tensor in tensors], out=place)
    for tensor, view in zip(tensors, place.split([len(t) for t in tensors]), strict=True):
        tensor.data = view


def _attributes(linears: Sequence[nn.Module], name: str) -> list[Tensor]:
    return [each for linear in linears if (each := getattr(linear, name, None)) is not None]


def _fuse(linears: Sequence[nn.Module], name: str) -> Any:
    """The attribute `name` of all linears as one tensor, theirs becoming views; None: absent."""
    tensors = _attributes(linears, name)
    if not tensors:
        return None
    if len(tensors) < len(linears):
        raise UserError(
            f"only {len(tensors)} of {len(linears)} linears that share an input have a {name}; "
            f"{_ADVICE}"
        )
    joined = join_rows([tensor.detach() for tensor in tensors])
    if joined is None:
        shape = (sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
        joined = tensors[0].new_empty(shape, requires_grad=False)
        _move(tensors, joined)
    return joined


def _uniform(linears: Sequence[nn.Module]) -> list[Sequence[nn.Module]]:
    """Linears that share an input, cut to what can be fused: all W8A8 of one kind, or none."""
    for linear in linears:
        if not (type(linear) is nn.Linear or isinstance(linear, W8A8Linear)):
            raise UserError(
                "the fast decoder multiplies with torch.nn.Linear and quasar_lab's W8A8Linear, "
                f"not with {type(linear).__name__}; {_ADVICE}"
            )
    kinds = {
        (linear.backend, linear.simulated) if isinstance(linear, W8A8Linear) else None
        for linear in linears
    }
    return [linears] if len(kinds) == 1 else [[linear] for linear in linears]


def projections(*groups: Sequence[nn.Module]) -> list[Projection]:
    """One projection for each group of linears that share an input.

    On the CPU their weights come to lie one behind the other in large pages, in this order. The
    second decoder of a model finds them so, and moves nothing.
    """
    parts = [_uniform(group) for group in groups]
    weights = [
        _attributes(linears, "qweight" if isinstance(linears[0], W8A8Linear) else "weight")
        for part in parts
        for linears in part
    ]
    moving = [
        each
        for each in weights
        if each[0].device.type == "cpu" and not (is_placed(each[0]) and join_rows(each) is not None)
    ]
    shapes = [((sum(map(len, each)), *each[0].shape[1:]), each[0].dtype) for each in moving]
    for each, place in zip(moving, reserve(*shapes), strict=True):
        _move(each, place)
    return [Projection(tuple(_matrix(linears) for linears in part)) for part in parts]


def _matrix(linears: Sequence[nn.Module]) -> Matrix:
    bias = _fuse(linears, "bias")
    if not isinstance(linears[0], W8A8Linear):
        return Matrix(_fuse(linears, "weight"), bias)
    scale = _fuse(linears, "weight_scale")
    qweight = _fuse(linears, "qweight")
    return Matrix(qweight, bias, scale, linears[0].backend, linears[0].simulated)


_ADVICE = "use quasar_lab.targets.HuggingFaceTarget(model), which runs any causal language model"


def _check(model: Any) -> None:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in SUPPORTED:
        raise UserError(f"the fast decoder knows {', '.join(SUPPORTED)}, not {kind!r}; {_ADVICE}")
    act = getattr(model.config, "hidden_act", "silu")
    if act != "silu":
        raise UserError(f"the fast decoder knows hidden_act 'silu', not {act!r}; {_ADVICE}")
    devices = sorted({str(tensor.device) for tensor in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        where = ", ".join(devices)
        raise UserError(f"the fast decoder needs all weights on one device, not {where}; {_ADVICE}")


def _window(config: Any, index: int) -> int | None:
    """How many tokens, itself included, a token of this layer attends to; None: all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        slides = config.model_type == "mistral"
    else:
        slides = layer_types[index] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def read_weights(model: Any) -> DecoderWeights:
    """The weights of a Hugging Face causal language model of a supported family.

    Raises UserError for another architecture, activation, linear type or rotary scaling, and for a
    model that is spread over devices; the message names the generic target, which runs them.
    """
    _check(model)
    config, body = model.config, model.model
    attention, rope = body.layers[0].self_attn, body.rotary_emb
    head_dim = attention.head_dim
    # `original_inv_freq` does not change with the texts that the model has seen
    frequency = getattr(rope, "original_inv_freq", rope.inv_freq).float()
    if 2 * len(frequency) != head_dim:
        raise UserError(
            f"the fast decoder rotates whole heads, not {2 * len(frequency)} of {head_dim} "
            f"channels; {_ADVICE}"
        )
    layers = []
    for index, block in enumerate(body.layers):
        attend, mlp = block.self_attn, block.mlp
        qkv, o, gate_up, down = projections(
            (attend.q_proj, attend.k_proj, attend.v_proj),
            (attend.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
        layers.append(
            LayerWeights(
                input_norm=block.input_layernorm.weight.detach(),
                qkv=qkv,
                q_norm=attend.q_norm.weight.detach() if hasattr(attend, "q_norm") else None,
                k_norm=attend.k_norm.weight.detach() if hasattr(attend, "k_norm") else None,
                o=o,
                post_norm=block.post_attention_layernorm.weight.detach(),
                gate_up=gate_up,
                down=down,
                window=_window(config, index),
            )
        )
    (head,) = projections((model.lm_head,))
    embed = body.embed_tokens.weight.detach()  # after the head, with which it may be tied
    # As the model does: "eager" attention takes the softmax in float32 even in a float64 model.
    eager = getattr(config, "_attn_implementation", None) == "eager"
    double = embed.dtype == torch.float64 and not eager
    return DecoderWeights(
        embed=embed,
        layers=tuple(layers),
        norm=body.norm.weight.detach(),
        head=head,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        attention_scale=getattr(attention, "scaling", head_dim**-0.5),
        softmax_dtype=torch.float64 if double else torch.float32,
        rope_frequency=frequency,
        rope_factor=float(getattr(rope, "attention_scaling", 1.0)),
        rope_limit=rope_limit(body),
    )
