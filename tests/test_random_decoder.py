"""Decoders of random weights: finite, the same on every engine, of the shape that was asked for."""

import pytest
import torch

from quasar_lab.model_shapes import ModelShape
from quasar_lab.random_decoder import random_decoder

SHAPE = ModelShape(2, 64, 4, 2, 16, 96, 80)


@pytest.mark.parametrize(("layers", "floats"), [("INT8", "fp32"), ("fp32", "fp32")])
@pytest.mark.parametrize("head_norms", [False, True])
def test_both_engines_run_it(layers: str, floats: str, head_norms: bool) -> None:
    fused, plain = (
        random_decoder(SHAPE, layers, floats, max_length=16, head_norms=head_norms, engine=engine)
        for engine in ("fused", "torch")
    )
    ids = torch.tensor([3, 1, 4, 1, 5])
    logits = fused.forward(ids)
    assert logits.shape == (5, 80) and logits.isfinite().all()
    # two orders of the same float32 sums; an activation may fall to either side of a rounding
    difference = (logits - plain.forward(ids)).abs().max()
    assert difference < (0.05 if layers == "INT8" else 1e-4) * logits.abs().max()


def test_it_has_the_shape_and_the_formats() -> None:
    decoder = random_decoder(SHAPE, "INT8", "bf16", max_length=8)
    weights = decoder.weights
    assert weights.embed.dtype == torch.bfloat16 and len(weights.layers) == 2
    sizes = {name: tuple(getattr(weights.layers[0], name).matrices[0].weight.shape)
             for name in SHAPE.linears}  # fmt: skip
    assert sizes == SHAPE.linears
    assert weights.layers[0].down.matrices[0].weight.dtype == torch.int8
    assert weights.head.matrices[0].weight is weights.embed
