"""A decoder of any shape with random weights: what a step costs does not depend on their values.

No checkpoint, no Hugging Face model and no second copy: a shape of four billion weights takes its
four gigabytes and no more.
"""

import torch
from torch import Tensor

from quasar_lab.decoder import FastDecoder
from quasar_lab.decoder_weights import DecoderWeights, LayerWeights, Matrix, Projection
from quasar_lab.model_shapes import ModelShape
from quasar_lab.placement import reserve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Random numbers to fill weights with, over and over: drawing billions would take minutes.
_PERIOD = 1 << 20


def _place(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return reserve((shape, dtype))[0]


def _fill(tensor: Tensor, values: Tensor) -> Tensor:
    for part in tensor.view(-1).split(len(values)):
        part.copy_(values[: len(part)])
    return tensor


def random_decoder(
    shape: ModelShape,
    layers: str = "INT8",
    floats: str = "bf16",
    *,
    max_length: int = 1024,
    head_norms: bool = False,
    device: str | torch.device = "cpu",
    backend: str = "auto",
    engine: str = "auto",
) -> FastDecoder:
    """A `FastDecoder` of this shape, its output layer tied to the embedding.

    layers: format of the layers' linears, "INT8", "bf16" or "fp32"; floats: of all else. Formats of
    the layers other than INT8 must equal `floats`. head_norms: norms on q and k, as Qwen3 has.
    backend: of the INT8 product; engine: see `FastDecoder.from_model`.
    """
    device, dtype = torch.device(device), DTYPES[floats]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(_PERIOD, generator=generator).to(device, dtype)
    integers = torch.randint(-127, 128, (_PERIOD,), dtype=torch.int8, generator=generator)
    integers = integers.to(device)

    def weight(n: int, k: int) -> Tensor:
        return _fill(_place((n, k), dtype, device), numbers / k**0.5)

    def projection(n: int, k: int) -> Projection:
        if layers != "INT8":
            return Projection((Matrix(weight(n, k)),))
        scale = torch.full((n,), 1 / (73 * k**0.5), device=device)  # the integers' deviation is 73
        filled = _fill(_place((n, k), torch.int8, device), integers)
        return Projection((Matrix(filled, None, scale, backend),))

    ones = torch.ones(shape.hidden, dtype=dtype, device=device)
    head_ones = torch.ones(shape.head_dim, dtype=dtype, device=device) if head_norms else None
    embed = weight(shape.vocab, shape.hidden)
    half = torch.arange(shape.head_dim // 2, dtype=torch.float32)
    weights = DecoderWeights(
        embed=embed,
        layers=tuple(
            LayerWeights(
                input_norm=ones,
                q_norm=head_ones,
                k_norm=head_ones,
                post_norm=ones,
                window=None,
                **{name: projection(n, k) for name, (n, k) in shape.linears.items()},
            )
            for _ in range(shape.layers)
        ),
        norm=ones,
        head=Projection((Matrix(embed),)),
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        eps=1e-6,
        attention_scale=shape.head_dim**-0.5,
        softmax_dtype=torch.float32,
        rope_frequency=1e4 ** (-2 * half / shape.head_dim),
        rope_factor=1.0,
        rope_limit=None,
    )
    return FastDecoder(weights, max_length, engine=engine)
