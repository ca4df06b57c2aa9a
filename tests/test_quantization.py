"""`quantize`: a new W8A8 model, the source unchanged."""

import copy

import torch

from quasar_lab import W8A8Linear, calibrate, compare_logits, quantize


def test_the_source_is_unchanged_and_the_result_close(tiny_llama):
    """Guards against in-place folding: the float model must stay what it was, bit for bit."""
    before = copy.deepcopy(tiny_llama.state_dict())
    ids = torch.arange(1, 25)
    quantized = quantize(tiny_llama, calibrate(tiny_llama, [ids]))
    assert all(torch.equal(tiny_llama.state_dict()[n], t) for n, t in before.items())
    assert isinstance(quantized.model.layers[0].mlp.down_proj, W8A8Linear)
    frame = compare_logits(tiny_llama(ids[None]).logits[0], quantized(ids[None]).logits[0])
    assert frame.kl.mean() < 0.05
