"""The cost model: bytes as a model has them, times that follow from rates, and break-evens."""

import math

import pandas as pd
import pytest
import torch
from tiny_models import tiny_model

from quasar_lab import QuantizationConfig, UserError, machine_probe, quantize
from quasar_lab.cost_model import (
    Machine,
    break_even_acceptance,
    break_even_draft_length,
    expected_tokens,
    own_machine,
    predict_speedups,
    predict_step,
    step_work,
    together,
)
from quasar_lab.data_sheets import DATA_SHEETS
from quasar_lab.memory_wall import bytes_per_step
from quasar_lab.model_shapes import SHAPES, ModelShape

MACHINE = own_machine(100, {"INT8": 2, "bf16": 1}, name="round numbers")


def vectors(model) -> int:
    """Bytes of norms, biases and rotary tables: what the cost model leaves out."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(
        t.numel() * t.element_size() for t in tensors if t.ndim == 1 and t.is_floating_point()
    )


@pytest.mark.parametrize("family", ["llama", "llama_untied", "mistral", "qwen3"])
def test_bytes_from_a_config_are_those_of_the_model(family: str) -> None:
    model = tiny_model(family, dtype=torch.float32)
    counted = bytes_per_step(model, context=10)
    work = step_work(model.config, "fp32", "fp32", context=10)
    assert work.bytes.kv_cache == counted.kv_cache
    assert work.bytes.total == counted.total - vectors(model)


@pytest.mark.parametrize("skip", [("lm_head",), ()])
def test_bytes_of_an_int8_model_count_its_scales(skip: tuple[str, ...]) -> None:
    quantized = quantize(
        tiny_model("llama_untied", dtype=torch.float32),
        config=QuantizationConfig(smoothing="none", skip=skip),
    )
    work = step_work(quantized, "INT8", "fp32" if skip else "INT8", "fp32")
    counted = bytes_per_step(quantized)
    assert work.bytes.quantized == counted.quantized
    scales = sum(m.weight_scale.numel() * 4 for m in quantized.modules() if hasattr(m, "qweight"))
    assert work.bytes.total == counted.total - (vectors(quantized) - scales)


def test_named_shapes_have_the_sizes_that_their_names_say() -> None:
    """Guards the table against a slip: weights of layers and tied or untied output layer."""
    sizes = {"smollm2-135m": 0.135, "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02}
    for name, billions in (sizes | {"qwen3-8b": 7.57, "openpangu-7b": 7.43}).items():
        shape = SHAPES[name]
        total = shape.layer_weights + shape.head_weights
        assert total / 1e9 == pytest.approx(billions, rel=0.02), name


def test_a_step_waits_for_memory_then_for_arithmetic() -> None:
    work = step_work(SHAPES["qwen3-8b"], "bf16", "bf16")
    reading = work.bytes.total / 100e9
    assert predict_step(work, MACHINE) == pytest.approx(reading, rel=0.01)
    weights = work.shape.layer_weights + work.shape.head_weights
    computing = 2 * 1000 * weights / 1e12
    assert predict_step(work, MACHINE, 1000) == pytest.approx(computing, rel=0.01)
    assert together(1.0, 1.0) == pytest.approx(2 ** (1 / 3)) and together(1.0, 0.0) == 1.0


def test_overhead_counts_each_layer_and_context_its_cache() -> None:
    shape = SHAPES["smollm2-135m"]
    lean = Machine("lean", MACHINE.read_rate, MACHINE.operation_rate)
    busy = Machine("busy", MACHINE.read_rate, MACHINE.operation_rate, layer_seconds=1e-5)
    empty, full = (step_work(shape, context=context) for context in (0, 4096))
    extra = predict_step(empty, busy) - predict_step(empty, lean)
    assert extra == pytest.approx(30 * 1e-5)
    longer = predict_step(full, lean) - predict_step(empty, lean)
    assert longer == pytest.approx(full.cache_bytes / 100e9, rel=0.01)
    slow = Machine("slow", MACHINE.read_rate, MACHINE.operation_rate, attention_rate=1e9)
    assert predict_step(full, slow, 8) > 8 * full.attention_operations / 1e9


def test_half_the_bytes_take_half_the_time_on_a_chip() -> None:
    """An INT8 step of few tokens against bf16, both limited by memory; the head is bf16 in both."""
    shape = SHAPES["qwen3-8b"]
    for name, chip in DATA_SHEETS.items():
        int8, bf16 = (predict_step(step_work(shape, kind), chip, 2) for kind in ("INT8", "bf16"))
        assert 1.7 < bf16 / int8 < 2, name


def test_expected_tokens_is_the_geometric_sum() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(1.0, 5) == 6 and expected_tokens(0.0, 5) == expected_tokens(0.9, 0) == 1
    with pytest.raises(UserError, match=r"acceptance is 1\.5"):
        expected_tokens(1.5, 2)


def test_break_even_acceptance_is_where_drafting_pays_its_step() -> None:
    for ratio, k in ((1.2, 5), (2.5, 3), (4.0, 3)):
        assert expected_tokens(break_even_acceptance(ratio, k), k) == pytest.approx(ratio, rel=1e-6)
    assert break_even_acceptance(0.9, 3) == 0 and math.isnan(break_even_acceptance(4.5, 3))


def test_speedups_are_l_over_r_and_none_without_drafts() -> None:
    work = step_work(SHAPES["qwen3-8b"], "bf16")
    table = predict_speedups(work, work, MACHINE, 0.5, range(9))
    assert table.loc[0, "speedup"] == 1
    assert (table["speedup"] == table["L"] / table["r"]).all()
    # memory is the limit up to about 10 tokens here: drafts cost little, and 0.5 pays for five
    assert table.loc[5, "break_even_acceptance"] < 0.5 < table.loc[5, "speedup"]
    paid = predict_speedups(work, work, MACHINE, 0.5, range(9), draft_seconds=1.0)
    assert break_even_draft_length(paid) == 0
    steep = pd.DataFrame({"speedup": [1.0, 1.2, 1.0, 0.9]})
    assert break_even_draft_length(steep) == 2


def test_a_probe_reproduces_the_times_it_is_made_from() -> None:
    """Guards the algebra: the machine found from times predicts those times."""
    many = machine_probe._MANY
    times = {f"{kind} 1": s for kind, s in (("fp32", 0.02), ("bf16", 0.01), ("INT8", 0.006))}
    times |= {f"{kind} {many}": s for kind, s in (("fp32", 0.04), ("bf16", 0.03), ("INT8", 0.009))}
    times |= {"thin 1": 1e-4, f"thin {many}": 3e-4, f"deep in text {many}": 5e-3}
    machine = machine_probe.rates_from_times(times)
    for kind in ("fp32", "bf16"):
        work = step_work(machine_probe.WIDE, kind, kind)
        for tokens in (1, many):
            # one token computes a little as well
            assert predict_step(work, machine, tokens) == pytest.approx(
                times[f"{kind} {tokens}"], rel=0.02
            )


def test_the_probe_measures_every_rate(monkeypatch) -> None:
    small = ModelShape(2, 64, 2, 1, 32, 96, 64)
    monkeypatch.setattr(machine_probe, "WIDE", small)
    monkeypatch.setattr(machine_probe, "THIN", small)
    monkeypatch.setattr(machine_probe, "_CONTEXT", 32)
    machine = machine_probe.probe_machine(repeats=2)
    assert set(machine.read_rate) == set(machine.operation_rate) == {"INT8", "bf16", "fp32"}
    assert predict_step(step_work(small, "INT8", "fp32"), machine, 4) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: own_machine(0, {"bf16": 1}), "read_rate of bf16 is 0"),
        (lambda: own_machine(10, {"fp4": 1}), "format 'fp4'"),
        (lambda: Machine("x", {}, {}, layer_seconds=-1.0), "layer_seconds is -1"),
        (lambda: step_work(SHAPES["qwen3-8b"], "int4"), "layers is 'int4'"),
        (lambda: step_work(SHAPES["qwen3-8b"], context=-1), "context is -1"),
        (lambda: step_work(object()), "no known shape"),
        (lambda: ModelShape(0, 1, 1, 1, 1, 1, 1), "layers is 0"),
        (lambda: predict_step(step_work(SHAPES["qwen3-8b"], head="fp32"), MACHINE), "for fp32"),
        (lambda: predict_step(step_work(SHAPES["qwen3-8b"]), MACHINE, 0), "tokens is 0"),
    ],
)
def test_wrong_values_are_one_line(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
