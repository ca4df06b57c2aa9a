"""What a step reads, and how long it takes."""

import pytest
import torch
from tiny_models import tiny_model

from quasar_lab import HuggingFaceTarget, QuantizationConfig, UserError, quantize
from quasar_lab.memory_wall import bytes_per_step, time_steps


def test_bytes_of_full_precision_are_those_of_all_weights_but_the_embedding(tiny_llama) -> None:
    """An embedding that is only looked up must not count; tied to the output it counts once."""
    weights = sum(p.numel() for p in tiny_llama.parameters())  # a tied tensor is listed once
    buffers = sum(b.numel() * b.element_size() for b in tiny_llama.buffers())
    read = bytes_per_step(tiny_llama)
    assert (read.quantized, read.kv_cache) == (0, 0)
    assert read.high_precision == weights * 8 + buffers and read.total == read.high_precision
    untied = tiny_model("llama_untied")
    embedding = untied.get_input_embeddings().weight.numel()
    rest = sum(p.numel() for p in untied.parameters()) - embedding
    assert bytes_per_step(untied).high_precision == rest * 8 + buffers


def test_bytes_of_int8_linears_are_one_a_weight_and_four_a_row(tiny_llama) -> None:
    quantized = quantize(tiny_llama, config=QuantizationConfig(smoothing="none"))
    linears = [
        module
        for name, module in tiny_llama.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    expected = sum(linear.weight.numel() + 4 * linear.out_features for linear in linears)
    read, full = bytes_per_step(quantized), bytes_per_step(tiny_llama)
    assert read.quantized == expected
    saved = sum(linear.weight.numel() * 8 for linear in linears)
    assert read.high_precision == full.high_precision - saved


def test_the_kv_cache_counts_keys_and_values_of_every_layer(tiny_llama) -> None:
    config = tiny_llama.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * 8 * 8  # head_dim, bytes
    assert bytes_per_step(tiny_llama, context=10).kv_cache == 10 * per_token
    with pytest.raises(UserError, match="context is -1"):
        bytes_per_step(tiny_llama, context=-1)


def test_steps_are_timed_for_each_target_and_leave_the_prompt_in_the_cache(tiny_llama) -> None:
    targets = {"one": HuggingFaceTarget(tiny_llama), "two": HuggingFaceTarget(tiny_llama)}
    targets["two"].forward(torch.tensor([9]))  # something from before
    times = time_steps(targets, [5, 6, 7], (1, 4), repeats=2)
    assert list(times["target"]) == ["one", "two", "one", "two"]
    assert list(times["tokens"]) == [1, 1, 4, 4]
    assert (times["low"] <= times["median"]).all() and (times["median"] <= times["high"]).all()
    assert all(target.length == 3 for target in targets.values())
    with pytest.raises(UserError, match="at least one token"):
        time_steps(targets, [5], (0, 1))
