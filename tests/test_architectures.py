"""Groups and folding: every family's float model computes the same after smoothing."""

import copy

import pytest
import torch
import transformers
from tiny_models import FAMILIES, HIDDEN, VOCAB, tiny_model
from torch import nn

from quasar_lab import ActivationStats, QuantizationConfig, UserError, calibrate, quantize
from quasar_lab.architectures import (
    Architecture,
    SmoothingGroup,
    find_groups,
    register_architecture,
    registered_architectures,
)
from quasar_lab.folding import GroupScale, fold_model, group_scale, norm_offset, pooled_stats
from quasar_lab.group_check import virtual_scales, wrong_groups
from quasar_lab.structure import decoder_layers, linear_layers, matches

IDS = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


def random_scales(model: nn.Module, seed: int = 0, **kwargs) -> list[GroupScale]:
    """Scales between 1/8 and 8 for every group, never powers of two."""
    generator = torch.Generator().manual_seed(seed)
    return [
        GroupScale(g, torch.empty(g.width).uniform_(-3, 3, generator=generator).exp2(), "random")
        for g in find_groups(model, **kwargs)
    ]


@pytest.fixture
def float64_norms(monkeypatch):
    """RMS norms compute in float32 even in a float64 model: make them exact, to test at 1e-9."""

    def forward(self, x):
        epsilon = getattr(self, "eps", None) or getattr(self, "variance_epsilon", None)
        normalised = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return normalised * (self.weight + (1 if "Gemma" in type(self).__name__ else 0))

    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma"):
        for module in tiny_model(family).modules():
            if type(module).__name__.endswith("RMSNorm"):
                monkeypatch.setattr(type(module), "forward", forward)


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_changes_nothing(family, float64_norms):
    """Guards every fold rule (biases, Conv1D, 1 + gamma, q/k norms): < 1e-9 in float64."""
    model = tiny_model(family)
    before = copy.deepcopy(model.state_dict())
    folded = fold_model(model, random_scales(model))
    assert (folded(IDS).logits - model(IDS).logits).abs().max() < 1e-9
    changed = sum(not torch.equal(folded.state_dict()[n], t) for n, t in before.items())
    assert changed >= 3 * 7 if family != "gpt2" else changed >= 3 * 6
    assert all(torch.equal(model.state_dict()[n], t) for n, t in before.items())


@pytest.mark.parametrize("method", ["m2", "smoothquant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_folding_chosen_scales_changes_nothing(family, method, float64_norms):
    """Guards the way from statistics to scales: the chosen ones are as exact as random ones."""
    model = tiny_model(family)
    stats = calibrate(model, [IDS])
    chosen = [group_scale(model, stats, group, method) for group in find_groups(model)]
    assert (fold_model(model, chosen)(IDS).logits - model(IDS).logits).abs().max() < 1e-9


def test_grouped_query_value_output(float64_norms):
    """Case 26: 4 query heads on 2 KV heads; each KV head's channels share one scale."""
    model = tiny_model("llama")
    scales = random_scales(model, kinds=("v_o",))
    assert [len(s.scale) for s in scales] == [16] * 3  # 2 KV heads of 8
    group = scales[0].group
    wide = group.expand(torch.arange(16.0)).view(4, 8)
    assert torch.equal(wide[0], wide[1]) and torch.equal(wide[2], wide[3])
    assert wide[0].tolist() == list(range(8)) and wide[2].tolist() == list(range(8, 16))
    channels = torch.arange(32.0)
    assert torch.equal(group.pool(channels), channels.view(2, 2, 8)[:, 1].flatten())
    folded = fold_model(model, scales)
    assert (folded(IDS).logits - model(IDS).logits).abs().max() < 1e-9
    o_proj = "model.layers.0.self_attn.o_proj.weight"
    assert not torch.equal(folded.state_dict()[o_proj], model.state_dict()[o_proj])


def test_grouped_query_statistics():
    """Guards the range of a shared channel: it spans all query heads that read the KV head."""
    group = SmoothingGroup("v_o", "v", ("o",), 2, repeats=2, head_dim=1)
    stats = ActivationStats.from_batches([torch.tensor([[-4.0, -1, 0, 3], [1, 2, -5, 4]])])
    pooled = pooled_stats(stats, group, "o")
    assert pooled.min.tolist() == [-4, -4, -5, -5]
    assert pooled.max.tolist() == [2, 2, 4, 4]
    assert torch.equal(pooled.sample, stats.sample)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_mixtures_of_experts(family, float64_norms):
    """Guards the router: it reads the norm as the experts do and must be scaled with them."""
    model = tiny_mixture(family)
    groups = find_groups(model, ("norms",))
    assert any(name.endswith("mlp.gate") for name in groups[1].readers)
    folded = fold_model(model, random_scales(model, kinds=("norms", "v_o")))
    # their norms compute in float32
    difference = (folded(IDS).logits - model(IDS).logits).abs().max()
    assert difference < 1e-9 + 1e-4 * float(model(IDS).logits.abs().max())


def tiny_mixture(family: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        max_position_embeddings=64,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return model.double().eval().requires_grad_(False)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_tied_embeddings_are_untouched(family):
    """Case 29: final norm and embedding are in no group, so tied weights stay bit for bit."""
    model = tiny_model(family)
    folded = fold_model(model, random_scales(model))
    assert torch.equal(folded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert folded.lm_head.weight is folded.get_input_embeddings().weight
    assert torch.equal(folded.model.norm.weight, model.model.norm.weight)


def test_norms_that_add_one():
    """Guards the offset: Gemma multiplies by 1 + weight, Llama by weight; a bias is no offset."""
    assert norm_offset(tiny_model("gemma").model.norm) == 1
    assert norm_offset(tiny_model("llama").model.norm) == 0
    assert norm_offset(tiny_model("opt").model.decoder.final_layer_norm) == 0


def test_bf16_norms_round_without_harm():
    """Guards the rounding of weight / s to bf16: readers get the ratio that it really gives."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    folded = fold_model(model.float(), [])  # bf16 values, computed in float32
    model = tiny_model("llama", dtype=torch.bfloat16)
    smooth = fold_model(model, random_scales(model, kinds=("norms",)))
    old, new = model.model.layers[0].input_layernorm, smooth.model.layers[0].input_layernorm
    q = smooth.model.layers[0].self_attn.q_proj.weight.float()
    product = q * new.weight.float()
    expected = folded.model.layers[0].self_attn.q_proj.weight.float() * old.weight.float()
    # one rounding of the weight to 8 bits of mantissa, none of the norm's
    torch.testing.assert_close(product, expected, rtol=2**-8, atol=0)


# --- finding the groups ------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_group_is_right(family):
    """Guards the tables of names: by powers of two, which must not move a bit of the logits."""
    model = tiny_model(family)
    groups = find_groups(model)
    assert wrong_groups(model, groups) == []
    counts = {kind: sum(g.kind == kind for g in groups) for kind in ("norms", "v_o", "up_down")}
    assert counts == {"norms": 6, "v_o": 3, "up_down": 0 if family == "gpt2" else 3}
    assert (
        list(decoder_layers(model)) == sorted(decoder_layers(model))
        and len(decoder_layers(model)) == 3
    )


def test_a_quantised_model_has_its_decoder_layers():
    """Guards against layers that hold no parameter of two dimensions, only INT8 buffers."""
    model = tiny_model("llama")
    quantized = quantize(model, None, QuantizationConfig(smoothing="none"))
    assert list(decoder_layers(quantized)) == list(decoder_layers(model))


def test_a_missing_reader_is_found_out():
    """Guards against trusting names: a group that forgets v_proj, or crosses a GELU, is wrong."""
    model = tiny_model("llama")
    groups = find_groups(model, ("norms",))
    forgetful = SmoothingGroup("norms", groups[2].source, groups[2].readers[:2], HIDDEN)
    assert wrong_groups(model, [groups[0], forgetful, *groups[3:]]) == [forgetful]
    opt = tiny_model("opt", activation_function="gelu")
    assert [g.kind for g in wrong_groups(opt, find_groups(opt))] == ["up_down"] * 3
    # a norm after the residual sum: its output runs on to the next layer as well
    post_norm = tiny_model("opt", do_layer_norm_before=False)
    assert {g.kind for g in wrong_groups(post_norm, find_groups(post_norm))} >= {"norms"}


def test_virtual_scales_leave_no_hook():
    """Guards the check itself: it works on the user's model and must leave nothing behind."""
    model = tiny_model("llama")
    scales = [(s.group, s.scale) for s in random_scales(model)]
    with pytest.raises(RuntimeError), virtual_scales(model, scales):
        raise RuntimeError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class OddBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_in = nn.LayerNorm(8)
        self.mixer = nn.Linear(8, 8)
        self.ln_out = nn.LayerNorm(8)
        self.widen = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.mixer(self.ln_in(x))
        return x + self.narrow(nn.functional.gelu(self.widen(self.ln_out(x))))


class OddModel(nn.Module):
    """An architecture that the lab has never seen."""

    def __init__(self):
        super().__init__()
        self.config = transformers.LlamaConfig(vocab_size=11, hidden_size=8, num_attention_heads=2)
        self.config.model_type = "odd"
        self.wte = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids, use_cache=False):
        x = self.wte(input_ids)
        for block in self.blocks:
            x = block(x)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.head(x))

    def get_output_embeddings(self):
        return self.head


ODD = dict(norms={"ln_in": [("mixer",)], "ln_out": [("widen",)]}, unsmoothed=("narrow",))


@pytest.fixture
def registry():
    """Registered architectures, put back after the test."""
    from quasar_lab import architectures

    saved = list(architectures._REGISTRY)
    yield
    architectures._REGISTRY[:] = saved


def test_an_unknown_architecture_says_what_it_could_not_place():
    """Guards the error: it names modules, and what to do about them."""
    with pytest.raises(UserError, match=r"unknown architecture OddModel.*blocks\.0\.mixer"):
        find_groups(OddModel())


def test_a_user_can_register_an_architecture(registry):
    """Guards the registry: one description of a layer makes an unknown model work."""
    torch.manual_seed(0)
    model = OddModel().double().eval()
    register_architecture(Architecture("odd", **ODD))
    assert registered_architectures()[0].name == "odd"
    groups = find_groups(model)
    assert [g.source for g in groups[:2]] == ["blocks.0.ln_in", "blocks.0.ln_out"]
    folded = fold_model(model, random_scales(model))
    ids = torch.arange(7)[None]
    assert (folded(ids).logits - model(ids).logits).abs().max() < 1e-9


def test_a_pattern_that_matches_nothing(registry):
    """Case 27: a misspelt name in an architecture for this model type is an error, not a no-op."""
    wrong = {**ODD, "norms": {"ln_in": [("mixxer",)], "ln_out": [("widen",)]}}
    register_architecture(Architecture("odd", **wrong, model_types=("odd",)))
    with pytest.raises(UserError, match=r"'blocks\.0\.mixxer' matches no module"):
        find_groups(OddModel())
    with pytest.raises(UserError, match="unknown kind of group 'norm'"):
        find_groups(tiny_model("llama"), ("norm",))


def test_patterns():
    """Guards the meaning of a pattern: whole parts of a name, so that layers.1 is not layers.11."""
    name = "model.layers.11.mlp.down_proj"
    for pattern in ("down_proj", "layers.11", "model.layers.*.mlp", "*down*", "layers.1?", "*"):
        assert matches(name, pattern), pattern
    for pattern in ("layers.1", "down", "lm_head", "proj"):
        assert not matches(name, pattern), pattern


def test_linears_of_each_kind():
    """Guards the list of linears: GPT-2's Conv1D counts, norms and embeddings do not."""
    assert len(linear_layers(tiny_model("gpt2"))) == 3 * 4 + 1
    assert len(linear_layers(tiny_model("llama"))) == 3 * 7 + 1
