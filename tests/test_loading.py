"""`load` and its relatives: names, folders, the Hub, devices, dtypes, prompts in and text out."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stub_hub import stub_hub
from tiny_checkpoints import write_folder
from transformers import BertConfig, T5Config, dynamic_module_utils

from quasar_lab.checkpoints import build
from quasar_lab.errors import UserError
from quasar_lab.loading import PRESETS, LanguageModel, fetch, is_cached, load


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("checkpoint") / "tiny-llama")


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "tiny-llama"))


@pytest.fixture(scope="module")
def language_model(pristine) -> LanguageModel:
    return load(pristine)


def change_json(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refusal(*arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        load(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- a folder ----------------------------------------------------------------------------------


def test_folder_gives_model_tokenizer_and_name(pristine, language_model):
    assert language_model.name == "tiny-llama"
    assert not language_model.model.training
    assert not any(parameter.requires_grad for parameter in language_model.model.parameters())
    assert language_model.model.dtype == torch.float32
    assert load(str(pristine)).name == "tiny-llama"
    assert load(f"{pristine}/").name == "tiny-llama"


def test_weights_arrive_unchanged(pristine, language_model):
    from safetensors.torch import load_file

    state = language_model.model.state_dict()
    for name, tensor in load_file(pristine / "model.safetensors").items():
        assert torch.equal(state[name], tensor)


def test_sharded_weights(pristine, language_model, tmp_path):
    sharded = tmp_path / "sharded"
    language_model.model.save_pretrained(sharded, max_shard_size="50KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pristine / name, sharded)
    with pytest.warns(UserWarning, match="no chat template"):
        again = load(sharded)
    ids = torch.arange(8)[None]
    assert torch.equal(again.model(ids).logits, language_model.model(ids).logits)

    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    shard.unlink()
    assert f"lacks 1 of 3 weight files ({shard.name})" in refusal(sharded)


@pytest.mark.parametrize("family", ["qwen3", "opt", "gpt2", "gemma", "mistral"])
def test_families_load(family, tmp_path):
    assert load(write_folder(tmp_path / family, family)).model.config.model_type == family


def test_the_callers_random_generator_is_not_drawn_from(pristine):
    before = torch.random.get_rng_state()
    load(pristine)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_no_line_on_stderr_where_nobody_watches(pristine, capfd):
    """Guards against transformers' bars and reports in log files and notebooks' outputs."""
    load(pristine)
    assert capfd.readouterr() == ("", "")


def test_base_model_without_tied_head_is_refused(folder):
    """Guards against a randomly initialised weight that only shows as odd text."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of the model's weights (model.layers.1.mlp.up_proj" in refusal(folder)


def test_weights_of_another_shape_are_refused(folder):
    change_json(folder / "config.json", intermediate_size=50)
    assert "cannot be loaded" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -100, -1])
def test_cut_off_weights_are_refused(folder, keep):
    """Guards against reading past a file whose copy was interrupted."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is damaged or cut off" in refusal(folder)
    assert not is_cached(folder)


def test_git_lfs_pointer_is_named(folder):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / "model.safetensors").write_text(text)
    assert "git lfs pull" in refusal(folder)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["pytorch_model.bin"], "pickle files, which can run code"),
        (["model.Q4.gguf"], "gguf_file=name"),
        ([], "has no model.safetensors"),
    ],
)
def test_folder_without_safetensors(folder, files, expected):
    (folder / "model.safetensors").unlink()
    for name in files:
        (folder / name).write_bytes(b"")
    assert expected in refusal(folder)
    assert not is_cached(folder)


def test_pickle_beside_safetensors_is_never_read(folder):
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")
    load(folder)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is no JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
        (lambda f: change_json(f / "config.json", hidden_size="x"), "cannot be loaded"),
        (lambda f: change_json(f / "config.json", model_type="strange"), "does not know"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (
            lambda f: (f / "model.safetensors").rename(f / "model.safetensors.index.json"),
            "model.safetensors.index.json cannot be read",
        ),
        (
            lambda f: change_json(f / "config.json", quantization_config={"quant_method": "gptq"}),
            "already quantised (gptq)",
        ),
    ],
)
def test_damaged_folder_is_named(folder, damage, expected):
    damage(folder)
    assert expected in refusal(folder)


def test_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "LoRA adapter" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("config", "architecture", "expected"),
    [
        (BertConfig(), "BertForMaskedLM", "no causal language model (BertForMaskedLM)"),
        (T5Config(), "T5ForConditionalGeneration", "encoder-decoder model"),
    ],
)
def test_other_kinds_of_model_are_refused(folder, config, architecture, expected):
    config.architectures = [architecture]
    config.save_pretrained(folder)
    assert expected in refusal(folder)


def test_classifier_of_a_causal_family_is_refused(folder):
    change_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "no causal language model (LlamaForSequenceClassification)" in refusal(folder)


def test_config_without_architectures_is_accepted(folder):
    change_json(folder / "config.json", architectures=None)
    load(folder)


# --- a model's own code ------------------------------------------------------------------------

_OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig
(Path({folder!r}) / "ran").touch()
class StrangeConfig(LlamaConfig):
    model_type = "strange"
"""


def test_own_code_needs_consent(folder, tmp_path, monkeypatch):
    """Guards against running a stranger's Python because a name was typed."""
    change_json(
        folder / "config.json",
        model_type="strange",
        auto_map={
            "AutoConfig": "configuration_strange.StrangeConfig",
            "AutoModelForCausalLM": "modeling_strange.StrangeForCausalLM",
        },
        architectures=["StrangeForCausalLM"],
    )
    (folder / "configuration_strange.py").write_text(_OWN_CODE.format(folder=str(folder)))
    (folder / "modeling_strange.py").write_text(
        "from transformers import LlamaForCausalLM\n"
        "from .configuration_strange import StrangeConfig\n"
        "class StrangeForCausalLM(LlamaForCausalLM):\n    config_class = StrangeConfig\n"
    )
    for attempt in (load, fetch):
        with pytest.raises(UserError, match="pass trust_remote_code=True"):
            attempt(folder)
    assert not (folder / "ran").exists()

    # transformers copies the code to a folder of its own before it runs it
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    chat = load(folder, trust_remote_code=True)
    assert (folder / "ran").exists()
    assert type(chat.model).__name__ == "StrangeForCausalLM"


def test_own_code_of_a_known_type_is_not_run(folder):
    change_json(folder / "config.json", auto_map={"AutoConfig": "configuration_strange.X"})
    (folder / "configuration_strange.py").write_text(_OWN_CODE.format(folder=str(folder)))
    load(folder)
    assert not (folder / "ran").exists()


def test_tokenizer_with_own_code_needs_consent(folder):
    change_json(
        folder / "tokenizer_config.json",
        tokenizer_class="StrangeTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_strange.StrangeTokenizer", None]},
    )
    (folder / "tokenization_strange.py").write_text(_OWN_CODE.format(folder=str(folder)))
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert "trust_remote_code=True" in refusal(folder)
    assert not (folder / "ran").exists()


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-8", "did you mean 'qwen3-8b'?"),
        ("smollm", "did you mean 'smollm2-135m'?"),
        ("no model at all", "a Hub id like org/name"),
        ("a/b/c", "a Hub id like org/name"),
        ("", "names no model"),
        ("   ", "names no model"),
        (None, "names no model"),
        (5, "names no model"),
        ("./nowhere", "there is no folder './nowhere'"),
        ("/nowhere/at/all", "there is no folder"),
        ("~/nowhere/at/all", "there is no folder"),
        (Path("nowhere"), "there is no folder 'nowhere'"),
        (__file__, "is a file"),
        ("x" * 5000, "unknown model"),
        ("nul\0", "unknown model"),
    ],
)
def test_unknown_name_says_what_is_allowed(name, expected):
    assert expected in refusal(name)


def test_existing_folder_wins_over_a_hub_id(folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    assert load(f"{folder.parent.name}/{folder.name}").name == "tiny-llama"
    monkeypatch.chdir(folder.parent)
    assert load("tiny-llama").name == "tiny-llama"


def test_presets_tell_id_and_licence():
    assert list(PRESETS) == ["smollm2-135m", "qwen3-0.6b", "qwen3-8b", "openpangu-7b"]
    assert PRESETS["qwen3-8b"].id == "Qwen/Qwen3-8B"
    assert all(preset.licence and preset.note and preset.gigabytes for preset in PRESETS.values())


def test_revision_is_for_hub_models_only(pristine):
    assert "revision='v1' is for Hub models" in refusal(pristine, revision="v1")


def test_fetch_and_is_cached_of_a_folder(pristine):
    assert fetch(pristine) == pristine
    assert is_cached(pristine)


# --- device and dtype --------------------------------------------------------------------------


def test_dtypes(folder):
    assert load(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert load(folder, dtype="float64").model.dtype == torch.float64
    change_json(folder / "config.json", dtype="bfloat16")
    assert load(folder, dtype="auto").model.dtype == torch.bfloat16
    assert load(folder).model.dtype == torch.float32


def test_own_dtype_on_a_gpu():
    assert build.parse_dtype(None, torch.device("cuda")) is None
    assert build.parse_dtype(None, torch.device("cpu")) is torch.float32


@pytest.mark.parametrize("dtype", ["int8", torch.int8, torch.float8_e4m3fn, 32, "fp32"])
def test_wrong_dtype_is_named(pristine, dtype):
    assert f"dtype={dtype!r}" in refusal(pristine, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", 3.5, "", "cpu:x"])
def test_wrong_device_is_named(pristine, device):
    assert f"device={device!r}" in refusal(pristine, device=device)


def test_device_may_be_a_torch_device(pristine):
    assert load(pristine, device=torch.device("cpu")).model.device.type == "cpu"
    assert load(pristine, device="cpu").model.device.type == "cpu"


def test_model_larger_than_the_memory_is_refused(pristine, monkeypatch):
    """Guards against the system killing the process in the middle of a load."""
    memory = type("Memory", (), {"total": 100_000})
    monkeypatch.setattr(build.psutil, "virtual_memory", lambda: memory)
    assert "pass dtype=torch.bfloat16 or take a smaller model" in refusal(pristine)
    load(pristine, dtype=torch.bfloat16)  # 64 kB


# --- prompts and text --------------------------------------------------------------------------


def test_chat_template_with_generation_prompt(language_model):
    ids = language_model.encode_chat("What is  2?")
    assert ids.dtype == torch.int64
    assert ids.ndim == 1
    expected = "<|im_start|>user\nWhat is  2?<|im_end|>\n<|im_start|>assistant\n"
    assert language_model.decode(ids, skip_special_tokens=False) == expected
    assert ids[:2].tolist() == [1, language_model.tokenizer.convert_tokens_to_ids("u")]
    assert torch.equal(
        ids, language_model.encode_chat([{"role": "user", "content": "What is  2?"}])
    )


def test_beginning_token_comes_once(folder):
    """Guards against a second one when both the template and the tokenizer write it."""
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, text],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    change_json(folder / "tokenizer.json", post_processor=template)
    (folder / "chat_template.jinja").write_text("<|endoftext|>{{ messages[0]['content'] }}")
    chat = load(folder)
    assert chat.encode_chat("a").tolist() == chat.tokenizer("a")["input_ids"]
    (folder / "chat_template.jinja").unlink()
    with pytest.warns(UserWarning, match="no chat template"):
        base = load(folder)
    assert torch.equal(base.encode_chat("a"), chat.encode_chat("a"))
    assert chat.encode_chat("a")[0] == 0


def test_conversation_keeps_its_turns(language_model):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    text = language_model.decode(language_model.encode_chat(messages), skip_special_tokens=False)
    assert text.count("<|im_start|>") == 5
    assert text.endswith("Bye<|im_end|>\n<|im_start|>assistant\n")


def test_template_options_reach_the_template(folder):
    (folder / "chat_template.jinja").write_text("{{ 'yes' if enable_thinking else 'no' }}")
    chat = load(folder)
    assert chat.decode(chat.encode_chat("x", enable_thinking=True)) == "yes"
    assert chat.decode(chat.encode_chat("x", enable_thinking=False)) == "no"


def test_template_that_refuses_is_a_clear_error(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="refuses these messages: roles must alternate"):
        load(folder).encode_chat("x")


def test_without_template_the_text_itself(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.warns(UserWarning, match="no chat template"):
        base = load(folder)
    assert base.decode(base.encode_chat("Once upon")) == "Once upon"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    assert base.decode(base.encode_chat(messages)) == "User: Hi\n\nAssistant: Yes?\n\nAssistant:"
    with pytest.raises(UserError, match="gives no token"):
        base.encode_chat("")


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [], ["text"], [{"role": "user"}], [{"role": "user", "content": 5}], {"role": "user"}],
)
def test_wrong_prompt_is_named(language_model, prompt):
    with pytest.raises(UserError, match='"role": "user"'):
        language_model.encode_chat(prompt)


def test_tokenizer_of_another_model_is_noticed(folder):
    """Guards against an index error deep inside the embedding."""
    write_folder(folder.parent / "small", vocab_size=50)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder.parent / "small" / name, folder)
    with pytest.raises(UserError, match="the model knows 50 only"):
        load(folder).encode_chat("text")


def test_decode_takes_what_models_give(language_model):
    ids = language_model.tokenizer("héllo")["input_ids"]
    for form in (ids, tuple(ids), torch.tensor(ids), torch.tensor([ids])):
        assert language_model.decode(form) == "héllo"
    assert language_model.decode(ids[0]) == "h"
    assert language_model.decode(torch.tensor(ids[0])) == "h"
    assert language_model.decode([]) == ""
    assert language_model.decode([2, *ids, 2]) == "héllo"
    # a model's vocabulary is often padded beyond the tokenizer's
    assert language_model.decode([100_000]) == ""


@pytest.mark.parametrize("ids", [None, "text", [-1], [1.5], torch.zeros(2, 2, dtype=torch.long)])
def test_decode_refuses_what_is_no_row_of_ids(language_model, ids):
    with pytest.raises(UserError, match="cannot decode"):
        language_model.decode(ids)


# --- the Hub -----------------------------------------------------------------------------------

# Runs where HF_ENDPOINT points to the stub: huggingface_hub reads it once, when it is imported.
_HUB_SESSION = """
import json, sys, time
time.sleep = lambda seconds: None  # huggingface_hub waits before it tries again
import huggingface_hub
from quasar_lab.loading import fetch, is_cached, load

def attempt(name, **options):
    try:
        return {"name": load(name, **options).name}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}

results = {}
for name in sys.argv[2:]:
    results[name] = {"cached before": is_cached(name), **attempt(name)}
    results[name]["cached after"] = is_cached(name)
results["revision"] = attempt("org/good", revision="nope")
results["commit"] = attempt("org/good", revision="0123456789abcdef0123456789abcdef01234567")
results["fetch"] = str(fetch("org/good", cache_dir=sys.argv[1]))
results["cached there"] = is_cached("org/good", cache_dir=sys.argv[1])
huggingface_hub.constants.HF_HUB_OFFLINE = True
results["offline"] = attempt("org/good")
results["offline, unknown"] = attempt("org/unknown")
results["offline, half"] = attempt("org/cut")
huggingface_hub.constants.HF_HUB_OFFLINE = False
# from here on nothing listens where the Hub was
huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE = "http://127.0.0.1:9/{repo_id}/{filename}"
results["unreachable"] = attempt("org/far")
results["unreachable, cached"] = attempt("org/good")
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def hub(pristine, tmp_path_factory):
    """(what each name gave, which paths were asked for) of one session with the stub Hub."""
    root = tmp_path_factory.mktemp("hub")
    good = Path(shutil.copytree(pristine, root / "repositories/org/good"))
    (good / "original").mkdir()
    for name in ("original/params.json", "pytorch_model.bin", "consolidated.safetensors"):
        (good / name).write_bytes(b"must not be fetched")
    (good / "modeling_good.py").write_text("raise SystemExit('must not be fetched')")

    def variant(name: str) -> Path:
        return Path(shutil.copytree(good, root / "repositories/org" / name))

    variant("cut")
    (variant("pickle") / "model.safetensors").unlink()
    (variant("nothing") / "config.json").unlink()
    encoder = variant("encoder") / "config.json"
    change_json(encoder, model_type="bert", architectures=["BertForMaskedLM"])
    own_code = variant("own-code") / "config.json"
    change_json(own_code, model_type="strange", auto_map={"AutoConfig": "modeling_good.X"})

    names = ["none", "private", "gated", "broken", "good", "cut", "pickle", "nothing", "encoder"]
    names += ["own-code", "bad name"]
    with stub_hub(root / "repositories") as server:
        environment = {
            **os.environ,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(root / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        command = [sys.executable, "-c", _HUB_SESSION, str(root / "elsewhere")]
        command += [f"org/{name}" for name in names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), server.requests


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", "there is no model org/none on the Hub, or it is private"),
        ("private", "the Hub refuses org/private to you"),
        ("gated", "accept its terms"),
        ("broken", "the Hub cannot be reached (Server error '500"),
        ("cut", "run again to go on where it stopped"),
        ("pickle", "has no model.safetensors"),
        ("nothing", "has no config.json"),
        ("encoder", "no causal language model (BertForMaskedLM)"),
        ("own-code", "pass trust_remote_code=True"),
        ("bad name", "is no Hub id"),
    ],
)
def test_hub_trouble_is_one_clear_line(hub, name, expected):
    result = hub[0][f"org/{name}"]
    assert result["error"] == "UserError"
    assert expected in result["message"]
    assert "\n" not in result["message"]
    assert not result["cached after"]


def test_hub_model_is_fetched_once_then_found(hub):
    results = hub[0]
    assert results["org/good"] == {
        "cached before": False,
        "name": "org/good",
        "cached after": True,
    }
    assert results["commit"] == {"name": "org/good"}
    assert results["offline"] == {"name": "org/good"}
    assert "org/good has no revision 'nope'" in results["revision"]["message"]
    assert "HF_HUB_OFFLINE is set" in results["offline, unknown"]["message"]
    # the config of org/cut is here, its weights are not
    assert "HF_HUB_OFFLINE is set" in results["offline, half"]["message"]


def test_cache_dir_holds_hub_models_too(hub):
    assert "elsewhere" in hub[0]["fetch"]
    assert hub[0]["cached there"]


def test_only_what_is_needed_is_fetched(hub):
    """Guards against pickles, a model's code and duplicate weights coming along."""
    asked = [path for path in hub[1] if "/resolve/" in path]
    assert any(path.endswith("/model.safetensors") for path in asked)
    for unwanted in ("original/", "pytorch_model.bin", "consolidated", ".py"):
        assert not [path for path in asked if unwanted in path]
    # refused by their config, before any weight
    for name in ("encoder", "own-code"):
        assert {path.split("/")[-1] for path in asked if f"org/{name}/" in path} == {"config.json"}


def test_unreachable_hub(hub):
    message = hub[0]["unreachable"]["message"]
    assert "org/far is not on this machine and the Hub cannot be reached" in message
    assert hub[0]["unreachable, cached"] == {"name": "org/good"}


def test_hub_trouble_on_disk_is_named(monkeypatch):
    import huggingface_hub

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    assert "cannot keep org/x on disk (No space left on device)" in refusal("org/x")
