"""Pruning: whole layers, heads and neurons; keeping everything changes nothing, bit for bit."""

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from quasar_lab import (
    FastDecoder,
    LayerSkipDrafter,
    NGramDrafter,
    QuantizationConfig,
    UserError,
    generate,
    quantize,
)
from quasar_lab.pruning import STRATEGIES, block_influence, kept_layers, prune_layers
from quasar_lab.pruning_width import PARTS, prune_width
from quasar_lab.structure import decoder_layers

IDS = torch.tensor([[1, 5, 9, 4, 5, 9, 7, 8]])
BATCHES = [torch.arange(3, 40), torch.arange(40, 60)]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_layers_are_the_full_model_bit_for_bit(family: str, strategy: str) -> None:
    """Case 11."""
    model = tiny_model(family)
    pruned = prune_layers(model, 1.0, strategy, batches=BATCHES)
    assert torch.equal(logits(pruned), logits(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_model_is_the_model_with_those_layers(family: str) -> None:
    """Also with a KV cache, whose layers are numbered anew."""
    model = tiny_model(family)
    before = logits(model)
    pruned = prune_layers(model, [0, 2])
    assert len(decoder_layers(pruned)) == 2 == pruned.config.num_hidden_layers
    expected = [list(decoder_layers(model).values())[index] for index in (0, 2)]
    for layer, source in zip(decoder_layers(pruned).values(), expected, strict=True):
        for mine, theirs in zip(layer.parameters(), source.parameters(), strict=True):
            assert torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr()
    step_by_step = generate(pruned, IDS[0], max_new_tokens=6, eos_token_id=[]).tokens
    text = IDS[0].tolist()
    for token in step_by_step:
        with torch.no_grad():
            last = pruned(torch.tensor([text]), use_cache=False).logits[0, -1]
        assert int(last.argmax()) == token
        text.append(token)
    assert torch.equal(logits(model), before)
    assert model.config.num_hidden_layers == 3


def test_changing_the_pruned_model_leaves_the_model_alone(tiny_llama) -> None:
    pruned = prune_layers(tiny_llama, 1)
    before = logits(tiny_llama)
    pruned.to(torch.float32)
    for parameter in pruned.parameters():
        parameter.data.zero_()
    assert torch.equal(logits(tiny_llama), before)


def test_a_quantised_model_can_lose_layers_too(tiny_llama) -> None:
    quantized = quantize(tiny_llama, config=QuantizationConfig(smoothing="none"))
    assert torch.equal(logits(prune_layers(quantized, 1.0)), logits(quantized))
    fewer_first = quantize(prune_layers(tiny_llama, 2), config=QuantizationConfig(smoothing="none"))
    assert torch.equal(logits(prune_layers(quantized, (0, 2))), logits(fewer_first))


def test_which_layers_stay() -> None:
    model = tiny_model(num_hidden_layers=8)
    assert kept_layers(model, 0.5, "uniform") == (0, 2, 5, 7)
    assert kept_layers(model, 0.75, "last") == (0, 1, 2, 3, 4, 5)
    assert kept_layers(model, 3, "uniform") == (0, 4, 7)
    assert kept_layers(model, [1, 6], "uniform") == (1, 6)
    assert kept_layers(model, 0.01) == (0,)  # at least one


def test_block_influence_finds_the_layer_that_does_nothing(tiny_llama) -> None:
    """A layer that adds nothing to the residual stream has influence 0 and goes first."""
    import copy

    model = copy.deepcopy(tiny_llama)
    idle = model.model.layers[1]
    idle.self_attn.o_proj.weight.data.zero_()
    idle.mlp.down_proj.weight.data.zero_()
    influence = block_influence(model, BATCHES)
    assert influence[1] == pytest.approx(0, abs=1e-12)
    assert min(influence[0], influence[2]) > 0.01
    assert kept_layers(model, 2, "block_influence", batches=BATCHES) == (0, 2)
    assert torch.equal(
        logits(prune_layers(model, 2, "block_influence", batches=BATCHES)), logits(model)
    )
    assert not any(layer._forward_hooks for layer in model.modules())


def test_block_influence_is_the_mean_over_tokens_not_over_batches(tiny_llama) -> None:
    long, short = (block_influence(tiny_llama, [batch]) for batch in BATCHES)
    both = block_influence(tiny_llama, BATCHES)
    expected = [(37 * a + 20 * b) / 57 for a, b in zip(long, short, strict=True)]
    assert both == pytest.approx(expected)


def test_a_pruned_model_runs_on_the_lean_decoder(tiny_llama) -> None:
    pruned = prune_layers(tiny_llama, 2)
    plain = generate(pruned, IDS[0], max_new_tokens=20, eos_token_id=[]).tokens
    lean = FastDecoder.from_model(pruned)
    drafted = generate(lean, IDS[0], drafter=NGramDrafter(), max_new_tokens=20, eos_token_id=[])
    assert drafted.tokens == plain


def test_pruned_and_skipped_layers_say_the_same(tiny_llama) -> None:
    """The pruned drafter shares weights with its target, the pruned verifier has its own."""
    drafter = LayerSkipDrafter(tiny_llama, layers=(0, 2))
    drafter.reset(IDS[0].tolist())
    pruned = prune_layers(tiny_llama, (0, 2))
    expected = generate(pruned, IDS[0], max_new_tokens=5, eos_token_id=[]).tokens
    assert drafter.propose(5).tokens.tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.0}, "layers is 0.0"),
        ({"keep": 4}, "layers is 4"),
        ({"keep": [2, 1]}, "ascending"),
        ({"keep": [7]}, "indices below 3"),
        ({"strategy": "random"}, "strategy 'random'"),
        ({"strategy": "block_influence"}, "pass batches"),
        ({"strategy": "block_influence", "batches": []}, "no batches"),
    ],
)
def test_impossible_choices_are_one_line(tiny_llama, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prune_layers(tiny_llama, **options)


# --- heads and neurons ----------------------------------------------------------------------

LLAMA_LIKE = ("llama", "llama_untied", "pangu", "mistral", "qwen2", "qwen3", "gemma")


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.parametrize("part", PARTS)
def test_the_whole_width_is_the_full_model_bit_for_bit(family: str, part: str) -> None:
    model = tiny_model(family)
    assert torch.equal(logits(prune_width(model, 1.0, part)), logits(model))


@pytest.mark.parametrize("family", [*LLAMA_LIKE, "opt"])
def test_a_narrow_mlp_is_the_mlp_without_those_neurons(family: str) -> None:
    """Cutting a neuron out is the same as zeroing what it adds to the residual stream."""
    model = tiny_model(family)
    pruned = prune_width(model, 0.5, "mlp")
    zeroed = tiny_model(family)
    fewer = {name: p for name, p in pruned.named_parameters()}
    for name, weight in zeroed.named_parameters():
        if name.endswith(("down_proj.weight", "fc2.weight")):
            assert fewer[name].shape == (32, 24)
            stays = (weight.T[:, None] == fewer[name].T[None]).all(-1).any(-1)
            weight.data[:, ~stays] = 0
    torch.testing.assert_close(logits(pruned), logits(zeroed), rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_fewer_heads_are_the_model_without_those_heads(family: str) -> None:
    model = tiny_model(family)
    pruned = prune_width(model, 0.5, "heads")
    assert pruned.config.num_key_value_heads == 1 and pruned.config.num_attention_heads == 2
    zeroed = tiny_model(family)
    fewer = dict(pruned.named_parameters())
    for name, weight in zeroed.named_parameters():
        if name.endswith("o_proj.weight"):
            stays = (weight.T[:, None] == fewer[name].T[None]).all(-1).any(-1)
            assert int(stays.sum()) == weight.shape[1] // 2
            weight.data[:, ~stays] = 0
    torch.testing.assert_close(logits(pruned), logits(zeroed), rtol=0, atol=1e-10)


@pytest.mark.parametrize("part", PARTS)
def test_a_narrow_model_runs_on_both_engines_and_survives_a_save(part: str, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    pruned = prune_width(tiny_model(dtype=torch.float32), 0.5, part)
    plain = generate(pruned, IDS[0], max_new_tokens=12, eos_token_id=[]).tokens
    lean = FastDecoder.from_model(pruned)
    assert generate(lean, IDS[0], max_new_tokens=12, eos_token_id=[]).tokens == plain
    pruned.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(logits(again), logits(pruned))


def test_width_of_what_has_no_such_parts_is_refused(tiny_llama) -> None:
    for model, part, message in (
        (tiny_model("gpt2"), "mlp", "no mlp of a GPT2"),
        (tiny_model("opt"), "heads", "no heads of a OPT"),
        (quantize(tiny_llama, config=QuantizationConfig(smoothing="none")), "mlp", "prune first"),
        (tiny_llama, "norms", "part 'norms'"),
    ):
        with pytest.raises(UserError, match=message):
            prune_width(model, 0.5, part)
    for keep in (0.0, 1.5, True, "half"):
        with pytest.raises(UserError, match="keep is"):
            prune_width(tiny_llama, keep)
