"""Ours -> checkpoint -> transformers, and LLM Compressor's checkpoints -> ours."""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import compressed_tensors.quantization.lifecycle.forward as emulation
import pandas as pd
import pytest
import torch
import yaml
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig as FormatConfig
from compressed_tensors.quantization import apply_quantization_config
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_folder
from tiny_models import FAMILIES
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from quasar_lab import (
    QuantizationConfig,
    UserError,
    calibrate,
    export_compressed_tensors,
    load,
    load_compressed_tensors,
    quantize,
)
from quasar_lab import export as export_module
from quasar_lab.cli import main
from quasar_lab.fidelity import compare_logits
from quasar_lab.import_checkpoint import checkpoint_table
from quasar_lab.quantization import quantization_report
from quasar_lab.quantized_linear import W8A8Linear

EXPORTABLE = [family for family in FAMILIES if family != "gpt2"]


def token_ids(model: nn.Module, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (1, 24), generator=generator)


def unsmoothed() -> QuantizationConfig:
    return QuantizationConfig(smoothing="none")


def quantized_of(model: nn.Module, **settings) -> nn.Module:
    config = QuantizationConfig(**settings)
    return quantize(model, calibrate(model, [token_ids(model, seed=1)]), config)


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits[0]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture
def engine_step(monkeypatch) -> None:
    """Let compressed-tensors round activations as engines and the lab do, by absmax / 127."""

    def scales(value, args, module, global_scale=None):
        scale = value.abs().amax(-1, keepdim=True) / 127
        return torch.where(scale > 0, scale, 1.0), None

    monkeypatch.setattr(emulation, "compute_dynamic_scales_and_zp", scales)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "tiny-base"
    return load(write_folder(folder, max_position_embeddings=4096))


@pytest.fixture(scope="module")
def default_w8a8(real_model, tmp_path_factory) -> tuple[nn.Module, Path]:
    """(the default model in W8A8, its checkpoint)"""
    quantized = quantize(real_model.model, config=unsmoothed())
    folder = tmp_path_factory.mktemp("default") / "w8a8"
    return quantized, export_compressed_tensors(quantized, folder)


def simulating(quantized: nn.Module) -> nn.Module:
    """A copy that computes as `QuantizationConfig(simulated=True)` makes it."""
    copied = copy.deepcopy(quantized)
    for module in copied.modules():
        if isinstance(module, W8A8Linear):
            module.simulated = True
    return copied


class TestRoundTrip:
    """Two W8A8 models agree in their logits if they round alike. transformers simulates INT8 in
    floats, which the lab does as well when told to.
    """

    # compressed-tensors gives OPT's input to fc1, [tokens, channels], one scale for all tokens
    @pytest.mark.parametrize("family", [family for family in EXPORTABLE if family != "opt"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_transformers_has_the_simulated_logits(self, family, dtype, tmp_path) -> None:
        lab = load(write_folder(tmp_path / "base", family), dtype=dtype)
        quantized = quantized_of(lab.model, simulated=True)
        folder = export_compressed_tensors(quantized, tmp_path / "w8a8")
        served, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
        assert not report["missing_keys"] and not report["unexpected_keys"]
        ids = token_ids(lab.model)
        assert torch.equal(logits(served, ids), logits(quantized, ids))
        assert relative(logits(lab.model, ids), logits(quantized, ids)) > 1e-2  # it says something

    @pytest.mark.parametrize("family", EXPORTABLE)
    def test_transformers_with_our_steps_computes_the_same(
        self, family, tmp_path, engine_step
    ) -> None:
        lab = load(write_folder(tmp_path / "base", family))
        quantized = quantized_of(lab.model)
        folder = export_compressed_tensors(quantized, tmp_path / "w8a8")
        ids = token_ids(lab.model)
        served = AutoModelForCausalLM.from_pretrained(folder)
        # a value that lies on a rounding boundary may go either way; it moves few tokens
        assert relative(logits(served, ids), logits(quantized, ids)) < 1e-2

    @pytest.mark.parametrize("family", EXPORTABLE)
    def test_our_own_import_is_the_same_bit_for_bit(self, family, tmp_path) -> None:
        lab = load(write_folder(tmp_path / "base", family))
        quantized = quantized_of(lab.model)
        imported = load_compressed_tensors(export_compressed_tensors(quantized, tmp_path / "w8a8"))
        ids = token_ids(lab.model)
        assert torch.equal(logits(imported.model, ids), logits(quantized, ids))
        assert imported.encode_chat("hello").equal(lab.encode_chat("hello"))
        report = quantization_report(imported.model)
        assert list(report.precision) == list(quantization_report(quantized).precision)

    @pytest.mark.parametrize(
        "settings",
        [
            {"smoothing": "m2", "groups": ("norms",)},
            {"smoothing": "smoothquant", "groups": ("norms", "v_o", "up_down")},
            {"smoothing": "none"},
            {"skip": ("lm_head", "down_proj", "layers.1")},
        ],
        ids=["m2", "smoothquant", "none", "mixed"],
    )
    def test_every_recipe_goes(self, settings, tiny, tmp_path) -> None:
        quantized = quantized_of(tiny.model, simulated=True, **settings)
        folder = export_compressed_tensors(quantized, tmp_path / "w8a8")
        ids = token_ids(tiny.model)
        served = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(logits(served, ids), logits(quantized, ids))
        imported = load_compressed_tensors(folder, simulated=True).model
        assert torch.equal(logits(imported, ids), logits(quantized, ids))

    def test_bfloat16_keeps_float32_scales(self, tmp_path) -> None:
        """Scales rounded to bfloat16 would be off by up to 0.4 %."""
        lab = load(write_folder(tmp_path / "base"), dtype=torch.bfloat16)
        quantized = quantized_of(lab.model)
        folder = export_compressed_tensors(quantized, tmp_path / "w8a8")
        tensors = load_file(folder / "model.safetensors")
        assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float32
        assert tensors["model.norm.weight"].dtype == torch.bfloat16
        imported = load_compressed_tensors(folder, dtype="auto").model
        ids = token_ids(lab.model)
        assert torch.equal(logits(imported, ids), logits(quantized, ids))

    @pytest.mark.real_model
    def test_the_default_model(self, real_model, default_w8a8) -> None:
        quantized, folder = default_w8a8
        served = AutoModelForCausalLM.from_pretrained(folder)
        ids = real_model.encode_chat("Explain rain in two sentences.")[None]
        expected = logits(simulating(quantized), ids)
        assert torch.equal(logits(served, ids), expected)
        assert relative(logits(real_model.model, ids), expected) > 1e-2
        imported = load_compressed_tensors(folder, simulated=True).model
        assert torch.equal(logits(imported, ids), expected)

    @pytest.mark.real_model
    def test_the_default_model_in_float64(self, real_model, default_w8a8, engine_step) -> None:
        """The lab's INT8 against floats. In float32 the last bit moves values across rounding
        boundaries, and 30 layers make a tenth of the logits of it; in float64 no value of these
        lies that close to one.
        """
        quantized, folder = default_w8a8
        served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        ids = real_model.encode_chat("Explain rain in two sentences.")[None]
        ours = logits(copy.deepcopy(quantized).double(), ids)
        assert relative(logits(served, ids), ours) < 1e-6

    @pytest.mark.real_model
    def test_every_linear_of_the_default_model(self, real_model, default_w8a8, engine_step) -> None:
        """The lab's own kernels, linear by linear on the same inputs, in float32."""
        quantized, folder = default_w8a8
        served = AutoModelForCausalLM.from_pretrained(folder)
        ids = real_model.encode_chat("Explain rain in two sentences.")[None]
        logits(served, ids)  # decompresses its weights
        worst = 0.0

        def compare(name):
            def hook(module, args, output):
                nonlocal worst
                worst = max(worst, relative(served.get_submodule(name)(args[0]), output))

            return hook

        handles = [
            module.register_forward_hook(compare(name))
            for name, module in quantized.named_modules()
            if isinstance(module, W8A8Linear)
        ]
        logits(quantized, ids)
        for handle in handles:
            handle.remove()
        assert len(handles) == 210
        assert worst < 1e-5  # float32 sums of up to 1,536 products against exact ones


class TestCommand:
    def test_it_writes_a_checkpoint_with_its_fidelity(self, tiny, tmp_path, capsys) -> None:
        folder = tmp_path / "w8a8"
        command = ["export", str(folder), "--model", tiny.model.config._name_or_path, "--json"]
        assert main([*command, "--licence", "MIT"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["folder"] == str(folder) and 0 < printed["fidelity"]["kl"] < 1
        card = (folder / "README.md").read_text()
        assert "license: mit" in card and "the built-in texts of quasar-lab, 32 batches" in card
        assert f"mean KL {printed['fidelity']['kl']:.4f}" in card
        assert main(command) == 2
        assert capsys.readouterr().err.endswith("choose a new folder, or remove it first\n")


class TestFolder:
    def test_config_and_tensors(self, tiny, tmp_path) -> None:
        folder = export_compressed_tensors(quantized_of(tiny.model), tmp_path / "new" / "w8a8")
        entry = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert entry["ignore"] == ["lm_head"] and entry["format"] == "int-quantized"
        tensors = load_file(folder / "model.safetensors")
        weight = tensors["model.layers.0.self_attn.q_proj.weight"]
        assert weight.dtype == torch.int8
        assert tensors["model.layers.0.self_attn.q_proj.weight_scale"].shape == (len(weight), 1)
        assert "lm_head.weight" not in tensors  # tied
        assert (folder / "generation_config.json").is_file()
        assert not hasattr(tiny.model.config, "quantization_config")

    def test_what_is_in_it(self, tiny, tmp_path) -> None:
        quantized = quantized_of(tiny.model)
        folder = export_compressed_tensors(quantized, tmp_path / "w8a8", max_shard_size="20KB")
        table = checkpoint_table(folder).set_index("name")
        tensors = {
            name: tensor
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        assert set(table.index) == set(tensors)
        for name, tensor in tensors.items():
            assert table.loc[name, "shape"] == list(tensor.shape)
            assert table.loc[name, "bytes"] == tensor.numel() * tensor.element_size()
        assert table.loc["model.layers.0.mlp.up_proj.weight", "dtype"] == "I8"

    def test_large_models_are_sharded(self, tiny, tmp_path) -> None:
        quantized = quantized_of(tiny.model)
        folder = export_compressed_tensors(quantized, tmp_path / "w8a8", max_shard_size="20KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 2
        ids = token_ids(tiny.model)
        imported = load_compressed_tensors(folder).model
        assert torch.equal(logits(imported, ids), logits(quantized, ids))

    def test_linears_that_engines_fuse_share_their_precision(self, tiny, tmp_path) -> None:
        """vLLM refuses q, k and v of different precision."""
        quantized = quantized_of(tiny.model, skip=("lm_head", "layers.0.self_attn.q_proj"))
        with pytest.warns(UserWarning, match=r"k_proj, model\.layers\.0\.self_attn\.v_proj$"):
            folder = export_compressed_tensors(quantized, tmp_path / "w8a8")
        entry = json.loads((folder / "config.json").read_text())["quantization_config"]
        attention = "model.layers.0.self_attn"
        expected = {f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj")}
        assert set(entry["ignore"]) == {*expected, "lm_head"}
        linear = quantized.get_submodule(f"{attention}.k_proj")
        weight = load_file(folder / "model.safetensors")[f"{attention}.k_proj.weight"]
        assert torch.equal(weight, linear.qweight * linear.weight_scale[:, None])

    def test_card_states_recipe_data_fidelity_and_licence(self, tiny, tmp_path) -> None:
        quantized = quantized_of(tiny.model, smoothing="m2", groups=("norms",))
        ids = token_ids(tiny.model)
        table = compare_logits(logits(tiny.model, ids), logits(quantized, ids))
        folder = export_compressed_tensors(
            quantized, tmp_path / "w8a8", base_model="qwen3-0.6b", fidelity=table,
            calibration_data="one made-up text",
        )  # fmt: skip
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nbase_model: Qwen/Qwen3-0.6B\n")
        assert "license: apache-2.0\n" in card and "smoothing='m2'" in card
        assert "15 m2, 6 none" in card and "In full precision: lm_head" in card
        assert "one made-up text, 1 batches, 24 tokens" in card
        assert f"mean KL {table.kl.mean():.4f} nats" in card
        assert str(tmp_path) not in card

    def test_unknown_facts_are_called_unknown(self, tiny, tmp_path) -> None:
        folder = export_compressed_tensors(quantized_of(tiny.model), tmp_path / "w8a8")
        card = (folder / "README.md").read_text()
        assert "Not measured" in card and "it was not recorded here" in card
        assert "base_model: tiny-base" in card and "license" not in card.split("---")[1]

    def test_nothing_is_overwritten_and_nothing_left_half_done(
        self, tiny, tmp_path, monkeypatch
    ) -> None:
        quantized = quantized_of(tiny.model)
        (tmp_path / "taken").mkdir()
        with pytest.raises(UserError, match="exists already"):
            export_compressed_tensors(quantized, tmp_path / "taken")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        with pytest.raises(UserError, match="exists already"):
            export_compressed_tensors(quantized, tmp_path / "link")
        (tmp_path / "link").unlink()

        def fails(folder) -> None:
            raise OSError("the cable is out")

        with pytest.raises(UserError, match=r"cannot write .*the cable is out"):
            tokenizer = SimpleNamespace(save_pretrained=fails)
            export_compressed_tensors(quantized, tmp_path / "new", tokenizer=tokenizer)
        usage = SimpleNamespace(free=1000)
        monkeypatch.setattr(export_module.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(UserError, match="are free"):
            export_compressed_tensors(quantized, tmp_path / "new")
        assert [path.name for path in tmp_path.iterdir()] == ["taken"]

    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"tokenizer": "gpt2"}, "'gpt2' is no tokenizer"),
            ({"max_shard_size": "abc"}, "cannot write .*'abc'"),
            ({"licence": "a\nb"}, "licence is .*one line"),
            ({"fidelity": pd.DataFrame({"loss": [1.0]})}, "lacks columns kl"),
        ],
    )
    def test_wrong_settings(self, settings, message, tiny, tmp_path) -> None:
        with pytest.raises(UserError, match=message):
            export_compressed_tensors(quantized_of(tiny.model), tmp_path / "new", **settings)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("directory", ["x" * 300, "file/new"], ids=["long", "in a file"])
    def test_where_no_folder_can_be_made(self, directory, tiny, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="cannot write"):
            export_compressed_tensors(quantized_of(tiny.model), directory)

    def test_a_place_is_checked_before_the_work(self, tmp_path, capsys) -> None:
        (tmp_path / "file").touch()
        # the model is not asked for: there is none
        assert main(["export", str(tmp_path / "file" / "new"), "--model", "/none"]) == 2
        assert "cannot write" in capsys.readouterr().err

    def test_a_card_is_yaml_whatever_the_name(self, tiny, tmp_path) -> None:
        folder = export_compressed_tensors(
            quantized_of(tiny.model), tmp_path / "w8a8", base_model="a: b", licence="own: c"
        )
        header = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
        assert (header["base_model"], header["license_name"]) == ("a: b", "own: c")

    def test_what_engines_cannot_load_is_refused(self, tiny, tmp_path) -> None:
        with pytest.raises(UserError, match="does not come from quantize"):
            export_compressed_tensors(tiny, tmp_path / "w8a8")
        with pytest.raises(UserError, match="output layer is INT8"):
            export_compressed_tensors(quantized_of(tiny.model, skip=()), tmp_path / "w8a8")
        gpt2 = load(write_folder(tmp_path / "base", "gpt2"))
        with pytest.raises(UserError, match="Conv1D"):
            export_compressed_tensors(quantized_of(gpt2.model), tmp_path / "w8a8")
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        config = Qwen3MoeConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, **experts)
        mixture = quantize(AutoModelForCausalLM.from_config(config), None, unsmoothed())
        with pytest.raises(UserError, match="mixture of experts"):
            export_compressed_tensors(mixture, tmp_path / "w8a8")

    def test_a_model_from_nowhere_needs_a_tokenizer(self, tiny_llama, tmp_path) -> None:
        with pytest.raises(UserError, match="pass tokenizer="):
            export_compressed_tensors(quantize(tiny_llama, None, unsmoothed()), tmp_path / "w8a8")


# as LLM Compressor 0.14 writes it for QuantizationModifier(scheme="W8A8", ignore=["lm_head"])
_COMMON = dict(
    actorder=None, block_structure=None, group_size=None, num_bits=8, scale_dtype=None,
    symmetric=True, type="int", zp_dtype=None, observer_kwargs={},
)  # fmt: skip
LLM_COMPRESSOR = {
    "config_groups": {
        "group_0": {
            "format": "int-quantized",
            "input_activations": {
                **_COMMON, "dynamic": True, "strategy": "token", "observer": None,
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                **_COMMON, "dynamic": False, "strategy": "channel", "observer": "memoryless_minmax",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head", "re:.*layers.1.mlp.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.19.0",
}  # fmt: skip


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> tuple[nn.Module, Path]:
    """(the model as compressed-tensors runs it, its checkpoint), made by its own compressor."""
    base = write_folder(tmp_path_factory.mktemp("foreign") / "base")
    model = load(base).model
    settings = {k: v for k, v in LLM_COMPRESSOR.items() if k not in ("sparsity_config", "version")}
    settings["quantization_status"] = "frozen"
    apply_quantization_config(model, FormatConfig.model_validate(settings))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            # its step is absmax / 127.5, so that -128 occurs
            module.weight_scale.data = module.weight.abs().amax(1, keepdim=True) / 127.5
    folder = base.parent / "w8a8"
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    for file in base.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = LLM_COMPRESSOR
    (folder / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(folder), folder


class TestImport:
    def test_a_foreign_checkpoint_gives_the_same_logits(self, foreign) -> None:
        theirs, folder = foreign
        ours = load_compressed_tensors(folder, simulated=True).model
        linear = ours.model.layers[0].mlp.up_proj
        assert isinstance(linear, W8A8Linear) and linear.qweight.min() == -128
        assert isinstance(ours.model.layers[1].mlp.up_proj, nn.Linear)
        ids = token_ids(ours)
        assert torch.equal(logits(ours, ids), logits(theirs, ids))

    def test_how_it_computes_is_asked_for(self, foreign) -> None:
        with pytest.raises(UserError, match="simulated is 'yes': it must be True or False"):
            load_compressed_tensors(foreign[1], simulated="yes")

    @pytest.mark.parametrize(
        "path, value, message",
        [
            (["quant_method"], "gptq", "no compressed-tensors checkpoint"),
            (["config_groups", "group_0", "weights", "num_bits"], 4, "num_bits = 4"),
            (["config_groups", "group_0", "weights", "strategy"], "group", "strategy = 'group'"),
            (["config_groups", "group_0", "input_activations"], None, "num_bits = None"),
            (["config_groups", "group_0", "input_activations", "dynamic"], False, "dynamic"),
            (["config_groups", "group_0", "output_activations"], {"num_bits": 8}, "outputs"),
            (["config_groups"], {}, "status"),
            (["quantization_status"], "frozen", "status is 'frozen'"),
            (["sparsity_config"], {"format": "sparse-24-bitmask"}, "sparse"),
            (["kv_cache_scheme"], {"num_bits": 8}, "kv_cache_scheme"),
            (["transform_config"], {"config_groups": {}}, "transform_config"),
            (["ignore"], ["lm_head"], "is torch.float32, not int8"),
        ],
        ids=lambda value: value[-1] if isinstance(value, list) and value else None,
    )
    def test_another_kind_is_refused(self, path, value, message, foreign, tmp_path) -> None:
        folder = tmp_path / "other"
        folder.mkdir()
        for file in foreign[1].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        entry = config["quantization_config"]
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = value
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            load_compressed_tensors(folder)

    @pytest.mark.parametrize(
        "name, text",
        [
            ("tokenizer.json", "{"),
            ("tokenizer.json", "{}"),
            ("tokenizer_config.json", "{"),
            ("generation_config.json", "{"),
            ("config.json", {"hidden_size": "many"}),
            ("config.json", {"num_attention_heads": 0}),
            ("config.json", {"dtype": "float3"}),
            ("config.json", {"quantization_config": "x"}),
        ],
    )
    def test_what_a_file_may_not_hold(self, name, text, foreign, tmp_path) -> None:
        folder = shutil.copytree(foreign[1], tmp_path / "other")
        if isinstance(text, dict):
            text = json.dumps({**json.loads((folder / name).read_text()), **text})
        (folder / name).write_text(text)
        with pytest.raises(UserError) as raised:
            load_compressed_tensors(folder)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
    def test_a_scale_that_is_none(self, value, foreign, tmp_path) -> None:
        folder = shutil.copytree(foreign[1], tmp_path / "other")
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight_scale"][3] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match="weight_scale holds what is no scale"):
            load_compressed_tensors(folder)

    def test_load_says_what_to_call(self, foreign, tiny) -> None:
        with pytest.raises(UserError, match="load_compressed_tensors takes it"):
            load(foreign[1])
        with pytest.raises(UserError, match="not quantised"):
            load_compressed_tensors(tiny.model.config._name_or_path)
        with pytest.raises(UserError, match="local folder"):
            load_compressed_tensors("org/model")
