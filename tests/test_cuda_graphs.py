"""Steps as graphs, as far as a CPU can tell: static shapes, a recording a shape, the fall-back."""

import pytest
import torch
from test_decoder import VOCAB
from tiny_models import tiny_model

from quasar_lab import FastDecoder
from quasar_lab.cuda_graphs import MAX_TOKENS, GraphedSteps

# (tokens, rolled back): a long prompt first, then drafts of several lengths
STEPS = [(MAX_TOKENS + 9, 0), (1, 0), (6, 4), (3, 3), (6, 1), (1, 1), (8, 0), (6, 6)]


def record(run):
    """What a graph does: it repeats the work on the same places and writes to the same result."""
    result = run()
    return lambda: result.copy_(run()), result


def run_steps(decoder, max_logits: int | None = None) -> torch.Tensor:
    generator, logits = torch.Generator().manual_seed(0), []
    for count, back in STEPS:
        ids = torch.randint(0, VOCAB, (count,), generator=generator)
        logits.append(decoder.forward(ids, max_logits and min(count, max_logits)))
        decoder.rollback(back)
    return torch.cat(logits)


def graphed(model, capture=record, **options) -> FastDecoder:
    decoder = FastDecoder.from_model(model, engine="torch", **options)
    decoder._graphs = GraphedSteps(
        decoder._static_step, decoder.max_length, decoder.device, capture=capture
    )
    return decoder


@pytest.mark.parametrize("max_length", [64, 512, 700])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_sliding"])
def test_static_steps_give_what_steps_give(family: str, max_length: int) -> None:
    """A mask, a position or a cache row that stayed behind in the recording shows at once.

    float64; the attention sums over more rows, whose weights are exactly zero.
    """
    model = tiny_model(family)
    expected = run_steps(FastDecoder.from_model(model, max_length, engine="torch"))
    found = run_steps(graphed(model, max_length=max_length))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_shape_is_recorded_once(tiny_llama) -> None:
    recordings = []

    def capture(run):
        recordings.append(1)
        return record(run)

    decoder = graphed(tiny_llama, capture)
    assert decoder.engine == "graphs"
    run_steps(decoder)
    assert len(recordings) == len({count for count, _ in STEPS if count <= MAX_TOKENS})
    run_steps(decoder, max_logits=1)  # other shapes: one row of logits
    assert len(recordings) == 7  # of the four lengths, M = 1 has one row anyway


def test_a_result_outlives_the_next_step(tiny_llama) -> None:
    """The graph writes into the same place again: what was returned must not change."""
    decoder = graphed(tiny_llama)
    first = decoder.forward(torch.tensor([5, 6]))
    kept = first.clone()
    decoder.forward(torch.tensor([7, 8]))
    assert torch.equal(first, kept)


def test_a_capture_that_fails_falls_back_and_tells_why(tiny_llama) -> None:
    tried = []

    def refuse(run):
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    decoder = graphed(tiny_llama, refuse)
    expected = run_steps(FastDecoder.from_model(tiny_llama, engine="torch"))
    torch.testing.assert_close(run_steps(decoder), expected, rtol=0, atol=1e-12)
    assert len(tried) == 1 and decoder.engine == "torch"
    assert decoder._graphs.reason == (
        "RuntimeError: operation not permitted when stream is capturing"
    )
