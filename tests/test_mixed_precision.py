"""Mixed precision: sensitivity measured right, and the budget met with few linears."""

import copy

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, tiny_model
from torch import nn

from quasar_lab import QuantizationConfig, UserError, W8A8Linear, calibrate, quantize
from quasar_lab.mixed_precision import mean_kl, sensitivity
from quasar_lab.quantization import quantization_report
from quasar_lab.quantization_report import quantization_record

TEXTS = [
    torch.randint(3, VOCAB, (20,), generator=torch.Generator().manual_seed(seed))
    for seed in range(4)
]
CONFIG = QuantizationConfig("smoothquant", groups=("norms", "v_o", "up_down"))


def with_only(model: nn.Module, quantized: nn.Module, name: str) -> nn.Module:
    """`quantized` with every linear but `name` in (folded) full precision."""
    keep = [n for n, m in quantized.named_modules() if isinstance(m, W8A8Linear) and n != name]
    mixed = copy.deepcopy(quantized)
    fold = quantization_record(quantized).fold
    for other in keep:
        weight, bias = fold.linear(other, model.get_submodule(other))
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        linear.weight.data, linear.bias = weight, None if bias is None else nn.Parameter(bias)
        parent, _, child = other.rpartition(".")
        setattr(mixed.get_submodule(parent), child, linear.requires_grad_(False))
    return mixed


@pytest.mark.parametrize("family", FAMILIES)
def test_sensitivity_against_brute_force(family):
    """Guards the shortcuts (cached layers, scales undone by hooks): the same KL as a real model
    with that one linear in W8A8, for a linear of each layer; nothing stays behind."""
    model = tiny_model(family, dtype=torch.float32)
    quantized = quantize(model, calibrate(model, TEXTS), CONFIG)
    table = sensitivity(model, quantized, TEXTS, num_tokens=50).set_index("name")
    assert len(table) == sum(isinstance(m, W8A8Linear) for m in quantized.modules())
    assert table.kl.is_monotonic_decreasing and table.share.sum() == pytest.approx(1)
    first = [TEXTS[0], TEXTS[1], TEXTS[2][:10]]
    for name in list(table.index)[:: max(1, len(table) // 4)]:
        expected = mean_kl(model, with_only(model, quantized, name), first)
        # float32 logits: a KL of 1e-4 is good to 1e-7
        assert table.kl[name] == pytest.approx(expected, rel=0.02, abs=2e-7), name
    assert not any(m._forward_hooks or "forward" in m.__dict__ for m in model.modules())


def test_the_sum_of_the_parts():
    """Guards the units: the KLs of single linears add up to about that of all together."""
    model = tiny_model("llama", dtype=torch.float32)
    quantized = quantize(model, calibrate(model, TEXTS), CONFIG)
    table = sensitivity(model, quantized, TEXTS, num_tokens=80)
    assert table.kl.sum() == pytest.approx(mean_kl(model, quantized, TEXTS), rel=0.5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "pangu"])
def test_the_budget_is_met(family):
    """Guards budget_kl: measured KL within the budget, no linear more than needed is kept."""
    model = tiny_model(family, dtype=torch.float32)
    stats = calibrate(model, TEXTS)
    everything = mean_kl(model, quantize(model, stats, CONFIG), TEXTS)
    budget = everything / 2
    mixed = quantize(model, stats, CONFIG, budget_kl=budget)
    assert mean_kl(model, mixed, TEXTS) <= budget
    report = quantization_report(mixed)
    kept = report.name[report.reason.str.contains("kept in full precision")].tolist()
    assert 0 < len(kept) < 12
    assert [n for n, m in mixed.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    order = quantization_record(mixed).sensitivity.name.tolist()
    assert set(kept) == set(order[: len(kept)])
    # with one linear fewer the budget is missed
    worst_of_kept = order[len(kept) - 1]
    fewer = copy.deepcopy(mixed)
    rounded = quantize(model, stats, CONFIG).get_submodule(worst_of_kept)
    parent, _, child = worst_of_kept.rpartition(".")
    setattr(fewer.get_submodule(parent), child, rounded)
    assert mean_kl(model, fewer, TEXTS) > budget


def test_generous_and_impossible_budgets():
    """Guards the ends: nothing is kept when all is well, everything at a budget of 0."""
    model = tiny_model("llama", dtype=torch.float32)
    stats = calibrate(model, TEXTS)
    free = quantize(model, stats, CONFIG, budget_kl=1.0)
    assert quantization_record(free).sensitivity is None
    assert (quantization_report(free).precision == "W8A8").sum() == 21
    exact = quantize(model, stats, CONFIG, budget_kl=0.0)
    assert not any(isinstance(m, W8A8Linear) for m in exact.modules())
    ids = TEXTS[0][None]
    torch.testing.assert_close(exact(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_kept_linears_keep_the_models_dtype():
    """Guards bf16 models: a linear that is put back is bf16 again, and the source unchanged."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    mixed = quantize(model, calibrate(model, TEXTS), CONFIG, budget_kl=0.0)
    assert {p.dtype for p in mixed.parameters()} == {torch.bfloat16}
    assert all(torch.equal(model.state_dict()[n], t) for n, t in before.items())


def test_what_the_budget_is_measured_on():
    """Guards the input: own texts can be given; without any, or with a bad budget, one line."""
    model = tiny_model("llama", dtype=torch.float32)
    quantize(model, None, QuantizationConfig("none"), budget_kl=0.002, evaluation=TEXTS)
    with pytest.raises(UserError, match="budget_kl needs token ids"):
        quantize(model, None, QuantizationConfig("none"), budget_kl=0.002)
    with pytest.raises(UserError, match="budget_kl is -1"):
        quantize(model, None, QuantizationConfig("none"), budget_kl=-1, evaluation=TEXTS)
    with pytest.raises(UserError, match="budget_kl is 'x'"):
        quantize(model, None, QuantizationConfig("none"), budget_kl="x", evaluation=TEXTS)
    with pytest.raises(UserError, match="config is None"):
        quantize(model, None, None)
    once = (ids for ids in TEXTS)  # it is read several times
    quantize(model, None, QuantizationConfig("none"), budget_kl=1e-4, evaluation=once)
