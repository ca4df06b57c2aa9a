"""A lean decoder: the transformer on one page, with a KV cache whose rollback is a number.

Speculative decoding asks three things of a target: run M new tokens, say what it expects after
each, and forget those that were rejected. Here the keys and values go into storage allocated once,
and `length` says how much of it counts: to forget n tokens is `length -= n`.

Llama, Mistral, Qwen2, Qwen3 and openPangu-Embedded are one architecture with switches (biases,
norms on q and k, grouped-query attention, a sliding window, a tied head):

    x = embed[ids]
    for each layer:
        q, k, v = W_qkv norm(x);   cache += k, v;   x += W_o softmax(q kᵀ / sqrt(d)) v
        gate, up = W_gate_up norm(x);               x += W_down (silu(gate) * up)
    logits = W_head norm(x)

Sources: RMSNorm (arXiv 1910.07467), rotary positions (2104.09864), grouped-query attention
(2305.13245), SwiGLU (2002.05202).
"""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from quasar_lab import gpu_attention
from quasar_lab.cuda_graphs import MAX_TOKENS, GraphedSteps
from quasar_lab.decoder_weights import DecoderWeights, LayerWeights, read_weights
from quasar_lab.errors import UserError
from quasar_lab.layer_inputs import norm_linear, rms_norm, swiglu_linear
from quasar_lab.placement import reserve

if TYPE_CHECKING:
    from quasar_lab.fused_cpu import FusedStep

# A longer prompt goes through in pieces, so that its attention scores stay small.
PREFILL_CHUNK = 1024

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# The KV cache takes its memory at once: without a wish, no more than this many tokens.
DEFAULT_MAX_LENGTH = 4096


def rotate(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens head_dim"],
    sin: Float[Tensor, "tokens head_dim"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Turn the pairs (x_i, x_{i + d/2}) of each head by angles that grow with the position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def attend(
    q: Float[Tensor, "tokens heads head_dim"],
    keys: Float[Tensor, "kv_heads context head_dim"],
    values: Float[Tensor, "kv_heads context head_dim"],
    visible: Bool[Tensor, "tokens context"],
    scale: float,
    softmax_dtype: torch.dtype,
) -> Float[Tensor, "tokens channels"]:
    """softmax(q kᵀ scale) v; the query heads that share a KV head are rows of one product."""
    tokens, heads, head_dim = q.shape
    kv_heads, context, _ = keys.shape
    q = q.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = (q @ keys.mT * scale).view(kv_heads, -1, tokens, context)
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1, dtype=softmax_dtype).to(q.dtype).view(kv_heads, -1, context)
    mixed = (weights @ values).view(kv_heads, -1, tokens, head_dim)
    return mixed.permute(2, 0, 1, 3).reshape(tokens, heads * head_dim)


def visibility(
    positions: Int64[Tensor, "tokens"], context: int, window: int | None
) -> Bool[Tensor, "tokens context"]:
    """Which of the first `context` cache positions each of the new tokens sees."""
    query, key = positions[:, None], torch.arange(context, device=positions.device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


class FastDecoder:
    """A `Target`: forward appends tokens to the KV cache, rollback forgets the last of them.

    Build it with `FastDecoder.from_model`. Attributes: `length` (tokens in the cache),
    `max_length`, `vocab_size`, `eos_token_ids`, `dtype`, `device`; `engine` says what runs the
    steps, "torch", "fused" or, on a GPU, "graphs"; `keys` and `values` are the cache, [layers,
    kv_heads, max_length, head_dim].
    """

    def __init__(
        self,
        weights: DecoderWeights,
        max_length: int,
        eos_token_ids: tuple[int, ...] = (),
        engine: str = "auto",
    ) -> None:
        self.weights = weights
        self.max_length = max_length
        self.eos_token_ids = eos_token_ids
        self.length = 0
        self.vocab_size = weights.embed.shape[0]
        self.dtype, self.device = weights.embed.dtype, weights.embed.device
        shape = (len(weights.layers), weights.num_kv_heads, max_length, weights.head_dim)
        if self.device.type == "cpu":
            self.keys, self.values = reserve((shape, self.dtype), (shape, self.dtype))
        else:
            # not empty: a graph reads beyond the text, and 0 * NaN would reach the sum
            self.keys, self.values = torch.zeros(2, *shape, dtype=self.dtype, device=self.device)
        position = torch.arange(max_length, dtype=torch.float32, device=self.device)
        angle = position[:, None] * weights.rope_frequency.to(self.device)
        angle = torch.cat((angle, angle), dim=-1)
        self.cos = (angle.cos() * weights.rope_factor).to(self.dtype)
        self.sin = (angle.sin() * weights.rope_factor).to(self.dtype)
        self._fused = self._fused_step(engine)
        self._graphs: GraphedSteps | None = None
        if self.device.type == "cuda" and engine == "auto":
            self._graphs = GraphedSteps(self._static_step, max_length, self.device)

    @property
    def engine(self) -> str:
        if self._fused is not None:
            return "fused"
        return "torch" if self._graphs is None or self._graphs.reason else "graphs"

    @classmethod
    def from_model(
        cls, model: Any, max_length: object = None, *, engine: str = "auto"
    ) -> "FastDecoder":
        """Take over a loaded Hugging Face model (full precision or W8A8), or what `load` gives.

        The model's q, k, v and gate, up weights become views of fused matrices: no second copy,
        and the model itself keeps working. max_length (tokens) sizes the KV cache; the default is
        the model's own limit, at most 4,096. engine: "torch" operators, "fused" for a step as one
        compiled function (on the CPU, float32 or bfloat16 weights), "auto": fused where it works.
        Raises UserError for an architecture it does not know; `HuggingFaceTarget` runs those.
        """
        inner = getattr(model, "model", None)
        if isinstance(inner, PreTrainedModel) and not isinstance(model, PreTrainedModel):
            model = inner  # what `load` returned
        weights = read_weights(model)
        limit = weights.rope_limit
        if max_length is None:
            max_length = min(limit or model.config.max_position_embeddings, DEFAULT_MAX_LENGTH)
        if not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 1:
            raise UserError(f"max_length={max_length!r}: a whole number of tokens, 1 or more")
        if limit is not None and max_length > limit:
            raise UserError(
                f"max_length={max_length}: this model's rotary scaling changes after {limit} tokens"
                ", where cached keys stop being right; ask for no more"
            )
        generation = getattr(model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = model.config.eos_token_id
        eos = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        return cls(weights, max_length, eos, engine)

    def forward(
        self, ids: object, num_logits: int | None = None
    ) -> Float[Tensor, "num_logits vocab"]:
        """Append M tokens to the cache; the logits after each of them, [M, vocab].

        ids: LongTensor[M], one sequence. num_logits: only the last so many rows (0 to M), the
        others are never computed. A wrong input raises UserError and leaves the cache as it was.
        """
        tokens = self._checked(ids)
        count = len(tokens) if num_logits is None else num_logits
        if not 0 <= count <= len(tokens):
            raise UserError(f"num_logits={num_logits}: from 0 to the {len(tokens)} tokens given")
        if self._fused is not None:
            logits = self._fused.run(tokens.contiguous(), self.length, count)
        elif self._graphs is not None and len(tokens) <= MAX_TOKENS:
            logits = self._graphs.run(tokens, self.length, count)
        else:
            logits = self._run(tokens.to(self.device), count)
        self.length += len(tokens)
        return logits

    def rollback(self, n: int) -> None:
        """Forget the last n tokens (0 to `length`). Nothing is moved or freed."""
        if not 0 <= n <= self.length:
            raise UserError(f"rollback({n}): the cache holds {self.length} tokens to forget")
        self.length -= n

    def _checked(self, ids: object) -> Tensor:
        try:
            tokens = torch.as_tensor(ids)  # checked where they are: a GPU would have to be awaited
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"ids are a {type(ids).__name__}: expected [M] whole numbers") from None
        if tokens.ndim == 2:
            raise UserError(
                f"a batch of {tokens.shape[0]} sequences: the decoder runs one, ids of shape [M]"
            )
        if tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype not in _WHOLE:
            shape, dtype = list(tokens.shape), str(tokens.dtype).removeprefix("torch.")
            raise UserError(f"ids of shape {shape} and type {dtype}: expected [M] whole numbers")
        total = self.length + len(tokens)
        if total > self.max_length:
            raise UserError(
                f"{self.length} tokens in the cache and {len(tokens)} new ones exceed max_length="
                f"{self.max_length}; build the decoder with max_length={total} or more"
            )
        low, high = tokens.aminmax()
        if low < 0 or high >= self.vocab_size:
            wrong = int(low if low < 0 else high)
            raise UserError(f"token id {wrong}: the vocabulary is 0 to {self.vocab_size - 1}")
        return tokens.long()

    def _fused_step(self, engine: str) -> "FusedStep | None":
        if engine not in ("auto", "torch", "fused"):
            raise UserError(f"engine={engine!r}: 'auto', 'torch' or 'fused'")
        if engine == "torch" or (engine == "auto" and self.device.type != "cpu"):
            return None
        from quasar_lab import fused_cpu  # not above: it loads the compiler

        reason = fused_cpu.unsupported(self.weights)
        if reason is None:
            return fused_cpu.FusedStep(self.weights, self.keys, self.values, self.cos, self.sin)
        if engine == "fused":
            raise UserError(f"engine='fused' does not work here: {reason}; use 'auto' or 'torch'")
        return None

    @torch.no_grad()
    def _run(self, tokens: Tensor, num_logits: int) -> Float[Tensor, "num_logits vocab"]:
        hidden, start = [], self.length
        for chunk in tokens.split(PREFILL_CHUNK):
            end = start + len(chunk)
            positions = torch.arange(start, end, device=self.device)
            hidden.append(self._layers(chunk, slice(start, end), positions, end))
            start = end
        return self._head(torch.cat(hidden), num_logits)

    @torch.no_grad()
    def _static_step(
        self, ids: Tensor, positions: Tensor, context: int, num_logits: int
    ) -> Float[Tensor, "num_logits vocab"]:
        """The same step without a number that changes: all it does follows from the tensors."""
        return self._head(self._layers(ids, positions, positions, context), num_logits)

    def _head(self, hidden: Tensor, num_logits: int) -> Float[Tensor, "num_logits vocab"]:
        last = hidden[len(hidden) - num_logits :]
        return self.weights.head(rms_norm(last, self.weights.norm, self.weights.eps))

    def _layers(
        self, tokens: Tensor, where: slice | Tensor, positions: Tensor, context: int
    ) -> Float[Tensor, "tokens hidden"]:
        """where: the new tokens' places in the cache, of which the first `context` are read."""
        cos, sin = self.cos[where], self.sin[where]
        visible = {
            window: visibility(positions, context, window)
            for window in {layer.window for layer in self.weights.layers}
        }
        x = self.weights.embed[tokens]
        for index, layer in enumerate(self.weights.layers):
            seen = visible[layer.window]
            x = x + self._attention(x, index, layer, where, positions, context, cos, sin, seen)
            gate_up = norm_linear(layer.gate_up, x, layer.post_norm, self.weights.eps)
            x = x + swiglu_linear(layer.down, gate_up)
        return x

    def _attention(
        self,
        x: Float[Tensor, "tokens hidden"],
        index: int,
        layer: LayerWeights,
        where: slice | Tensor,
        positions: Tensor,
        context: int,
        cos: Tensor,
        sin: Tensor,
        visible: Tensor,
    ) -> Float[Tensor, "tokens hidden"]:
        weights = self.weights
        heads, kv_heads = weights.num_heads, weights.num_kv_heads
        keys, values = self.keys[index], self.values[index]
        qkv = norm_linear(layer.qkv, x, layer.input_norm, weights.eps)
        if gpu_attention.fits(qkv, weights):
            return layer.o(
                gpu_attention.cached_attention(
                    qkv, layer, weights, self.cos, self.sin, positions, keys, values, context
                )
            )
        q, k, v = qkv.view(len(x), -1, weights.head_dim).split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, weights.eps)
            k = rms_norm(k, layer.k_norm, weights.eps)
        keys[:, where] = rotate(k, cos, sin).transpose(0, 1)
        values[:, where] = v.transpose(0, 1)
        mixed = attend(
            rotate(q, cos, sin),
            keys[:, :context],
            values[:, :context],
            visible,
            weights.attention_scale,
            weights.softmax_dtype,
        )
        return layer.o(mixed)
