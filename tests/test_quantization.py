"""`quantize`: a new W8A8 model that is close, the source unchanged, a report of what was done."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, tiny_model
from torch import nn
from torch.profiler import ProfilerActivity, profile

from quasar_lab import (
    QuantizationConfig,
    UserError,
    W8A8Linear,
    calibrate,
    compare_logits,
    quantize,
    quantize_weight,
)
from quasar_lab.architectures import GROUP_KINDS, SmoothingGroup
from quasar_lab.int8_gemm import quantize_activation
from quasar_lab.quantization import quantization_report
from quasar_lab.structure import linear_layers

IDS = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
DOWN_PROJ = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def stats(model):
    return calibrate(model, [IDS])


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def mean_kl(model: nn.Module, other: nn.Module) -> float:
    return float(compare_logits(model(IDS).logits[0], other(IDS).logits[0]).kl.mean())


# --- the result --------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", ["none", "m2", "smoothquant", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, smoothing):
    """Guards each family: every linear but the head in W8A8, little KL, the source untouched."""
    model = tiny_model(family)
    before = state(model)
    stats = calibrate(model, [IDS])
    method, alpha = ("smoothquant", "auto") if smoothing == "auto" else (smoothing, 0.5)
    quantized = quantize(model, stats, QuantizationConfig(method, alpha, groups=GROUP_KINDS))
    for name in linear_layers(model):
        expected = type(model.get_submodule(name)) if name == "lm_head" else W8A8Linear
        assert type(quantized.get_submodule(name)) is expected, name
    # 8 bits of weight and activation cost about 1e-3; a wrong fold or a transposed weight, > 1
    assert mean_kl(model, quantized) < 0.02
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert type(quantized) is type(model) and quantized.config == model.config


def test_a_linear_by_hand(model):
    """Guards the wiring of one linear: the formula of W8A8, spelled out."""
    quantized = quantize(model, config=QuantizationConfig("none"))
    source, linear = model.get_submodule(DOWN_PROJ), quantized.get_submodule(DOWN_PROJ)
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1))
    qx, sx = quantize_activation(x)
    qw, sw = quantize_weight(source.weight)
    expected = (qx.double() @ qw.double().T).float() * sx * sw
    torch.testing.assert_close(linear(x), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(linear.qweight, qw) and torch.equal(linear.weight_scale, sw)
    assert (linear.in_features, linear.out_features) == (48, 32)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_source_and_result_are_independent(family):
    """Guards shared storage: changing either model afterwards must not reach the other."""
    model = tiny_model(family)
    quantized = quantize(model, calibrate(model, [IDS]))
    expected = quantized(IDS).logits
    mine = {value.data_ptr() for value in model.state_dict().values()}
    assert not mine & {value.data_ptr() for value in quantized.state_dict().values()}
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(quantized(IDS).logits, expected)


def test_tied_embeddings(model, stats):
    """Case 29: embed_tokens is unchanged bit for bit, and still tied to the head."""
    quantized = quantize(model, stats, QuantizationConfig(groups=GROUP_KINDS))
    assert torch.equal(quantized.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert quantized.lm_head.weight is quantized.model.embed_tokens.weight
    # with the head in W8A8 as well the embedding stays what it was
    everything = quantize(model, stats, QuantizationConfig(skip=()))
    assert isinstance(everything.lm_head, W8A8Linear)
    assert torch.equal(everything.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert mean_kl(model, everything) < 0.02


def test_dead_channels_and_rows(model):
    """Case 23: a channel that is never used and a zero weight row or column give no NaN."""
    model = copy.deepcopy(model)
    layer = model.model.layers[1]
    layer.input_layernorm.weight[3] = 0  # a dead input channel of q, k and v
    layer.self_attn.q_proj.weight[:, 2] = 0
    layer.mlp.up_proj.weight[5] = 0  # a dead channel of down_proj's input
    for smoothing, alpha in (("m2", 0.5), ("smoothquant", 0.5), ("smoothquant", "auto")):
        config = QuantizationConfig(smoothing, alpha, groups=GROUP_KINDS)
        quantized = quantize(model, calibrate(model, [IDS]), config)
        assert mean_kl(model, quantized) < 0.02
        assert quantized.model.layers[1].mlp.up_proj.weight_scale[5] == 0
        assert all(torch.isfinite(v).all() for v in quantized.state_dict().values())


def test_smoothing_helps_where_it_should(model):
    """Guards the point of it all: with strong outlier channels smoothing wins over none."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.input_layernorm.weight[::11] *= 60
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight[:, ::11] /= 60
    stats = calibrate(model, [IDS])
    plain = mean_kl(model, quantize(model, stats, QuantizationConfig("none")))
    smooth = mean_kl(model, quantize(model, stats, QuantizationConfig("smoothquant")))
    assert smooth < plain / 3


# --- dtype, device, state dict -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_stay_float32(dtype):
    """Case 33: casting the model moves biases and norms, never the scales or the int8 weights."""
    model = tiny_model("opt", dtype=torch.float32)
    quantized = quantize(model, calibrate(model, [IDS]))
    linear = quantized.model.decoder.layers[0].fc1
    weight, scale = linear.qweight.clone(), linear.weight_scale.clone()
    quantized.to(dtype)
    assert linear.weight_scale.dtype == torch.float32 and torch.equal(linear.weight_scale, scale)
    assert linear.qweight.dtype == torch.int8 and torch.equal(linear.qweight, weight)
    assert linear.bias.dtype == dtype
    assert quantized(IDS).logits.dtype == dtype
    # not even when the tensors of a state dict are taken as they are
    cast = {
        n: t.to(dtype) if t.is_floating_point() else t for n, t in quantized.state_dict().items()
    }
    quantized.load_state_dict(cast, assign=True)
    linear = quantized.model.decoder.layers[0].fc1
    assert linear.weight_scale.dtype == torch.float32 and linear.bias.dtype == dtype
    assert quantized(IDS).logits.dtype == dtype
    # and a model that was in this dtype from the start has float32 scales as well
    low = tiny_model("opt", dtype=dtype)
    again = quantize(low, calibrate(low, [IDS])).model.decoder.layers[0].fc1
    assert (again.weight_scale.dtype, again.bias.dtype) == (torch.float32, dtype)
    assert again(torch.ones(1, 32, dtype=dtype)).dtype == dtype


def test_state_dict_round_trip(model, stats):
    """Guards saving: the state restores the very same model, after a trip through a file too."""
    quantized = quantize(model, stats)
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    other = quantize(
        tiny_model("llama", dtype=torch.float32, seed=1), config=QuantizationConfig("none")
    )
    assert not torch.equal(other(IDS).logits, quantized(IDS).logits)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(IDS).logits, quantized(IDS).logits)
    names = {name.rpartition(".")[2] for name in quantized.state_dict() if DOWN_PROJ in name}
    assert names == {"qweight", "weight_scale"}


def test_moving_between_devices(model, stats):
    """Guards `.to(device)` and deepcopy: the meta device takes all buffers, a copy is a copy."""
    quantized = quantize(model, stats)
    twin = copy.deepcopy(quantized)
    assert torch.equal(twin(IDS).logits, quantized(IDS).logits)
    linear = twin.to("meta").get_submodule(DOWN_PROJ)
    assert linear.qweight.is_meta and linear.weight_scale.is_meta
    assert not quantized.get_submodule(DOWN_PROJ).qweight.is_meta


def test_repr_tells_the_scheme(stats, model):
    """Guards the printed model: scheme, shape, backend and smoothing can be read off."""
    config = QuantizationConfig("smoothquant", 0.7, groups="norms", backend="reference")
    quantized = quantize(model, stats, config)
    text = repr(quantized.get_submodule("model.layers.0.mlp.gate_proj"))
    for part in ("W8A8", "in_features=32, out_features=48", "backend=reference", "alpha 0.7"):
        assert part in text
    assert "smoothing=none" in repr(quantized.get_submodule(DOWN_PROJ))
    simulated = quantize(model, stats, QuantizationConfig(simulated=True))
    with pytest.raises(UserError, match="their last dimensions"):
        simulated.get_submodule(DOWN_PROJ)(torch.ones(1, 5))
    assert "simulated in floating point" in repr(simulated.get_submodule(DOWN_PROJ))


def test_the_backend_can_be_chosen(model, stats):
    """Guards `backend`: every linear gets it, and the reference gives the same model."""
    quantized = quantize(model, stats)
    reference = quantize(model, stats, QuantizationConfig(backend="reference"))
    assert {m.backend for m in reference.modules() if isinstance(m, W8A8Linear)} == {"reference"}
    torch.testing.assert_close(reference(IDS).logits, quantized(IDS).logits, rtol=1e-3, atol=1e-3)
    with pytest.raises(UserError, match="nonsense"):
        QuantizationConfig(backend="nonsense")


# --- choosing what to quantise -----------------------------------------------------------------


def test_skip_patterns(model, stats):
    """Guards skip: whole name parts; a skipped linear of a smoothed group is folded, not left."""
    config = QuantizationConfig(skip=("lm_head", "down_proj", "layers.0.self_attn.q_proj"))
    quantized = quantize(model, stats, config)
    kept = {name for name, m in quantized.named_modules() if type(m) is nn.Linear}
    downs = {f"model.layers.{i}.mlp.down_proj" for i in range(3)}
    assert kept == {"lm_head", "model.layers.0.self_attn.q_proj", *downs}
    q_proj = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(
        quantized.get_submodule(q_proj).weight, model.get_submodule(q_proj).weight
    )
    assert mean_kl(model, quantized) < 0.02
    with pytest.raises(UserError, match="skip pattern 'down_prj' matches no linear"):
        quantize(model, stats, QuantizationConfig(skip=("down_prj",)))
    # everything skipped: the model computes what it did
    same = quantize(model, stats, QuantizationConfig(skip=("*",), groups=GROUP_KINDS))
    assert torch.equal(same(IDS).logits, model(IDS).logits)


def test_the_head_is_found_by_its_role():
    """Guards models whose output layer has another name: "lm_head" means the output layer."""
    model = tiny_model("llama", dtype=torch.float32, tie_word_embeddings=False)
    model.embed_out = model.lm_head
    del model.lm_head
    model.get_output_embeddings = lambda: model.embed_out
    quantized = quantize(model, config=QuantizationConfig("none"))
    assert type(quantized.embed_out) is nn.Linear


def test_the_report(model, stats):
    """Guards the report: each linear is smoothed, not smoothed or skipped, and why."""
    report = quantization_report(quantize(model, stats, QuantizationConfig("m2")))
    report = report.set_index("name")
    assert len(report) == 22
    gate = report.loc["model.layers.0.mlp.gate_proj"]
    assert (gate.precision, gate.smoothing, gate.reason) == ("W8A8", "m2", "")
    down = report.loc[DOWN_PROJ]
    assert down.smoothing == "none" and down.reason == "not smoothed: in no smoothed group"
    head = report.loc["lm_head"]
    assert (head.precision, head.reason) == ("full", "skipped: matches 'lm_head'")
    with pytest.raises(UserError, match=r"does not come from quantize\(\)"):
        quantization_report(model)


def test_the_default_recipe():
    """Guards the defaults: alpha searched in every kind of group; m2 as the paper has it."""
    default = QuantizationConfig()
    assert (default.smoothing, default.alpha) == ("smoothquant", "auto")
    assert default.groups == GROUP_KINDS and default.skip == ("lm_head",)
    assert QuantizationConfig("m2").groups == ("norms",)
    assert QuantizationConfig("m2", groups="v_o").groups == ("v_o",)


def test_an_outlier_is_flagged(model):
    """Case 24: a channel of 1e3 at down_proj's input is flagged in the report, and only that."""
    model = copy.deepcopy(model)
    model.get_submodule("model.layers.1.mlp.up_proj").weight[7] *= 1e3
    model.get_submodule(DOWN_PROJ).weight[:, 7] /= 1e3
    report = quantization_report(quantize(model, calibrate(model, [IDS])))
    assert report.name[report.outlier].tolist() == [DOWN_PROJ]
    assert float(report.outlier_ratio[report.outlier].iloc[0]) > 300


def test_explicit_groups(model, stats):
    """Guards user-given groups: they are used, checked, and a wrong one is refused."""
    norm, mlp = "model.layers.2.post_attention_layernorm", "model.layers.2.mlp."
    group = SmoothingGroup("norms", norm, (mlp + "gate_proj", mlp + "up_proj"), 32)
    report = quantization_report(quantize(model, stats, QuantizationConfig("m2", groups=(group,))))
    assert set(report.name[report.smoothing == "m2"]) == {mlp + "gate_proj", mlp + "up_proj"}
    half = SmoothingGroup("norms", norm, (mlp + "gate_proj",), 32)
    with pytest.raises(UserError, match="not exact: more than the listed modules read"):
        quantize(model, stats, QuantizationConfig(groups=(half,)))


def test_groups_that_do_not_fit_are_left_out():
    """Guards an OPT with GELU: fc1 -> fc2 does not commute with a scale, so it is not smoothed."""
    model = tiny_model("opt", activation_function="gelu")
    config = QuantizationConfig("m2", groups=GROUP_KINDS)
    quantized = quantize(model, calibrate(model, [IDS]), config)
    report = quantization_report(quantized).set_index("name")
    assert "not exact" in report.reason["model.decoder.layers.0.fc2"]
    assert report.smoothing["model.decoder.layers.0.self_attn.out_proj"] == "m2"
    assert mean_kl(model, quantized) < 0.02


def test_without_statistics(model):
    """Guards quantize(model): it works, does not smooth, and says so."""
    with pytest.warns(UserWarning, match="nothing is smoothed"):
        quantized = quantize(model)
    report = quantization_report(quantized)
    assert (report.smoothing == "none").all()
    assert report.reason.str.contains("no calibration statistics").sum() == 21
    assert mean_kl(model, quantized) < 0.02


# --- what can go wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(smoothing="m3"), "smoothing is 'm3': choose from m2, smoothquant, none"),
        (dict(alpha=1.5), "alpha is 1.5"),
        (dict(alpha="best"), "alpha is 'best'"),
        (dict(alpha=True), "alpha is True"),
        (dict(groups=("norm",)), "group 'norm': choose from norms, v_o, up_down"),
        (dict(num_candidates=1), "num_candidates is 1"),
        (dict(num_candidates="x"), "num_candidates is 'x'"),
        (dict(skip=None), "skip is None"),
        (dict(groups=3), "groups is 3"),
        (dict(simulated=1), "simulated is 1: it must be True or False"),
    ],
)
def test_bad_configurations(settings, message):
    """Guards typing slips: refused when the configuration is made, with what is allowed."""
    with pytest.raises(UserError, match=message):
        QuantizationConfig(**settings)


def test_a_single_pattern_is_not_a_list_of_letters():
    """Guards skip="lm_head", groups="norms" and lists."""
    assert QuantizationConfig(skip=["lm_head"]).skip == ("lm_head",)
    config = QuantizationConfig(skip="lm_head", groups="norms")
    assert config.skip == ("lm_head",) and config.groups == ("norms",)


def test_nan_weights_name_the_linear(model, stats):
    """Guards against an INT8 model of garbage: the linear is named."""
    broken = copy.deepcopy(model)
    broken.get_submodule(DOWN_PROJ).weight[0, 0] = torch.nan
    for config in (QuantizationConfig("none"), QuantizationConfig(groups=GROUP_KINDS)):
        with pytest.raises(UserError, match=rf"{DOWN_PROJ}: NaN or Inf"):
            quantize(broken, stats, config)


def test_statistics_of_another_model(model):
    """Guards against statistics that do not belong: too few names, or other shapes."""
    stats = calibrate(tiny_model("opt"), [IDS])
    with pytest.raises(UserError, match=r"no statistics for .*q_proj: calibrate this very model"):
        quantize(model, stats)
    wide = tiny_model("llama", hidden_size=64)
    with pytest.raises(UserError, match="have 64 channels, the model 32"):
        quantize(model, calibrate(wide, [IDS]))


def test_a_model_without_linears():
    """Guards a wrong argument: one line."""
    with pytest.raises(UserError, match="has no linears to quantise"):
        quantize(nn.Embedding(3, 4))
    with pytest.raises(UserError, match="model is a str"):
        quantize("smollm2-135m")


def test_a_quantised_model_is_not_quantised_again() -> None:
    """Its layers would have been passed over in silence, and the smoothing failed on them."""
    once = quantize(tiny_model("llama"), config=QuantizationConfig(smoothing="none"))
    with pytest.raises(UserError, match=r"layers\.0\..* is quantised already: pass the full"):
        quantize(once)


def most_held(make: Callable[[], nn.Module]) -> tuple[int, nn.Module]:
    """The most bytes of tensors at any time while `make` runs, and what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = make()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [None, 0.0])
def test_peak_memory(dtype, budget):
    """Guards the 8B case: beyond the result at most one layer's weights are ever held, also while
    a budget is met, whose trials would keep every linear twice and the logits of a whole text."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128}
    if budget is not None:  # a layer must outweigh the activations of a text, as in any real model
        sizes = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 1000}
    model = tiny_model("llama", dtype=dtype, **sizes)
    stats = calibrate(model, [IDS], max_sample_tokens=8)
    config = QuantizationConfig("smoothquant", groups=GROUP_KINDS)
    quantize(model, stats, config)  # what is made once and kept, such as compiled kernels
    peak, quantized = most_held(lambda: quantize(model, stats, config, budget_kl=budget))
    # a budget of 0 puts every linear back, and must free its INT8 weights
    assert any(isinstance(m, W8A8Linear) for m in quantized.modules()) == (budget is None)
    result = {id(t): t.nbytes for t in [*quantized.parameters(), *quantized.buffers()]}
    one_layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert peak > sum(result.values()) / 2  # the profiler did see the allocations
    assert peak <= sum(result.values()) + one_layer
