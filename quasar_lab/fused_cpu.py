"""The decoder's step on the CPU, compiled (fused/step.py): what it needs in memory, and the call.

Weights are read where the decoder has them, INT8 and float ones by the same tile, both as fast as
memory gives them: so that the comparison between INT8 and full
precision is a fair one. Nothing is allocated in a step but its logits.
"""

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from quasar_lab.decoder_weights import DecoderWeights, LayerWeights, Projection
from quasar_lab.fused.barrier import BARRIER_BYTES
from quasar_lab.fused.step import LAYER, STEP, compiled_step
from quasar_lab.int8_gemm import openmp
from quasar_lab.tiles.instruction_sets import best_instruction_set
from quasar_lab.tiles.linear_tile import FORMATS, best_float_format

# The most tokens that go through the layers together. A prompt goes in pieces of this size: beyond
# it nothing is gained, for arithmetic is the limit then, and the pieces leave the caches.
MAX_TOKENS = 32

# Added to the length of scratch rows (float32 numbers): lengths that are powers of two would make
# all rows compete for the same lines of the first-level cache.
_SKEW = 16


def unsupported(weights: DecoderWeights) -> str | None:
    """Why the compiled step cannot run these weights; None: it can."""
    if weights.embed.device.type != "cpu":
        return f"it runs on the CPU, not on {weights.embed.device}"
    kind = weights.embed.dtype
    if kind not in (torch.float32, torch.bfloat16):
        return f"it reads float32 and bfloat16, not {str(kind).removeprefix('torch.')}"
    for projection in _projections(weights):
        for matrix in projection.matrices:
            if matrix.scale is None and matrix.weight.dtype != kind:
                return f"it needs one type of float weights, not {kind} and {matrix.weight.dtype}"
            if matrix.scale is not None and matrix.backend not in ("auto", "cpu"):
                return f"its INT8 backend is 'cpu', not {matrix.backend!r}"
            if matrix.simulated:
                return "it multiplies in INT8, and these linears simulate that"
    return None


def _projections(weights: DecoderWeights) -> list[Projection]:
    layers = weights.layers
    return [
        weights.head,
        *(p for each in layers for p in (each.qkv, each.o, each.gate_up, each.down)),
    ]


class FusedStep:
    """The compiled step for one set of weights and one KV cache.

    keys, values: [layers, kv_heads, max_length, head_dim], contiguous and of the weights' type,
    float32 or bfloat16; cos, sin: [max_length, head_dim]. The step writes the new keys and values
    into the cache; what is between the matrices is float32, as are the logits.
    floats, int8: names of tiles.linear_tile.FORMATS; None: the best of this processor. The first
    step of its kind on a machine takes ten seconds to compile.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        floats: str | None = None,
        int8: str | None = None,
    ) -> None:
        self._formats = (
            floats or best_float_format(weights.embed.dtype),
            int8 or best_instruction_set(),
        )
        self._kernel = compiled_step(*self._formats)
        self._vocab = weights.embed.shape[0]
        self._threads = 0
        self._kept: list[object] = [weights, keys, values, cos, sin]
        hidden, ffn = weights.embed.shape[1], weights.layers[0].down.matrices[0].weight.shape[1]
        head_dim, capacity = weights.head_dim, keys.shape[2]
        inputs = [p.matrices[0].weight.shape[1] for p in _projections(weights)]

        self._layers = np.zeros(len(weights.layers), dtype=LAYER)
        self._record = np.zeros(1, dtype=STEP)
        self.step = step = self._record[0]
        for name, value in dict(
            layers=self._layers.ctypes.data,
            num_layers=len(self._layers),
            embed=self._address(weights.embed, weights.embed.dtype),
            norm=self._address(weights.norm),
            cos=self._address(cos),
            sin=self._address(sin),
            hidden=hidden,
            heads=weights.num_heads,
            kv_heads=weights.num_kv_heads,
            head_dim=head_dim,
            ffn=ffn,
            capacity=capacity,
            eps=weights.eps,
            attention_scale=weights.attention_scale,
            x=self._scratch(MAX_TOKENS * hidden),
            added=self._scratch(MAX_TOKENS * hidden),
            h=self._scratch(MAX_TOKENS * (max(inputs) + _SKEW)),
            h_bytes=4 * (max(inputs) + _SKEW),
            integers=self._scratch(MAX_TOKENS * (max(inputs) + _SKEW)),
            scales=self._scratch(MAX_TOKENS),
            shifts=self._scratch(MAX_TOKENS),
            queries=self._scratch(MAX_TOKENS * weights.num_heads * head_dim),
            score_bytes=4 * (capacity + _SKEW),
            barrier=self._scratch(BARRIER_BYTES // 4),
        ).items():
            step[name] = value
        widest = max(
            sum(len(matrix.weight) for matrix in projection.matrices)
            for layer in weights.layers
            for projection in (layer.qkv, layer.gate_up)
        )
        self._outputs = self._scratch(MAX_TOKENS * widest)
        self._fill(step["head"], weights.head, 0)
        for record, layer, key, value in zip(
            self._layers, weights.layers, keys, values, strict=True
        ):
            self._fill_layer(record, weights, layer)
            record["keys"], record["values"] = key.data_ptr(), value.data_ptr()

    def run(
        self, ids: Int64[Tensor, "tokens"], start: int, num_logits: int
    ) -> Float[Tensor, "num_logits vocab"]:
        """Run tokens at positions start, start + 1, ...; the logits after the last num_logits.

        ids must be valid and contiguous, and fit the cache: the decoder has checked them.
        """
        if self._threads != torch.get_num_threads():
            self._make_room_for_threads(torch.get_num_threads())
        logits = torch.empty(num_logits, self._vocab)
        unread, step = len(ids) - num_logits, self.step
        for first in range(0, len(ids), MAX_TOKENS):
            last = min(first + MAX_TOKENS, len(ids))
            read = max(first, unread)
            step["ids"], step["num_tokens"] = ids[first:].data_ptr(), last - first
            step["start"], step["num_logits"] = start + first, max(last - read, 0)
            step["head"]["matrices"]["out"][0] = logits[read - unread :].data_ptr()
            openmp.run(self._kernel, [self._record.ctypes.data])
        return logits

    def _make_room_for_threads(self, threads: int) -> None:
        step, rows = self.step, FORMATS[self._formats[0]].max_rows
        step["scores"] = self._scratch(threads * rows * int(step["score_bytes"]) // 4)
        step["mixed"] = self._scratch(threads * rows * int(step["head_dim"]))
        self._threads = threads

    def _address(self, tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int:
        """Where the tensor is (0 for none), made float32 and contiguous if it is not."""
        if tensor is None:
            return 0
        tensor = tensor.to(dtype).contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _scratch(self, numbers: int) -> int:
        """Room for so many float32 numbers, aligned to a cache line."""
        memory = torch.zeros(4 * numbers + 64, dtype=torch.uint8)
        self._kept.append(memory)
        return -(-memory.data_ptr() // 64) * 64

    def _fill(self, record: np.void, projection: Projection, out: int) -> list[int]:
        """Describe a projection; returns where each of its matrices writes [tokens, n]."""
        record["k"] = projection.matrices[0].weight.shape[1]
        record["quantized"] = any(matrix.scale is not None for matrix in projection.matrices)
        places = []
        for place, matrix in zip(record["matrices"], projection.matrices, strict=False):
            place["weight"] = self._address(matrix.weight, matrix.weight.dtype)
            place["scale"] = self._address(matrix.scale)
            place["bias"] = self._address(matrix.bias)
            place["n"], place["out"] = len(matrix.weight), out
            places.append(out)
            out += 4 * MAX_TOKENS * len(matrix.weight)
        return places

    def _fill_layer(self, record: np.void, weights: DecoderWeights, layer: LayerWeights) -> None:
        for name in ("input_norm", "q_norm", "k_norm", "post_norm"):
            record[name] = self._address(getattr(layer, name))
        record["window"] = layer.window or 0
        self._fill(record["o"], layer.o, int(self.step["added"]))
        self._fill(record["down"], layer.down, int(self.step["added"]))
        q, kv = weights.num_heads * weights.head_dim, weights.num_kv_heads * weights.head_dim
        ffn = int(self.step["ffn"])
        for projection, name, parts in (
            (layer.qkv, "qkv", (("q", q), ("k", kv), ("v", kv))),
            (layer.gate_up, "gate_up", (("gate", ffn), ("up", ffn))),
        ):
            places = self._fill(record[name], projection, self._outputs)
            offset = 0
            for index, (part, width) in enumerate(parts):
                fused = len(places) == 1
                record[part]["at"] = places[0] + 4 * offset if fused else places[index]
                record[part]["stride"] = len(projection.matrices[0 if fused else index].weight)
                offset += width
