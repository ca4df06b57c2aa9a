"""Is this folder a causal language model that can be loaded? If not, say in one line why.

Everything is judged from small files and headers, before any weight is read: what is wrong with a
folder shows within milliseconds, not after a long load or as wrong text.
"""

import json
import math
from pathlib import Path
from typing import Any

from quasar_lab.errors import UserError

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# any one of these makes a tokenizer; which one depends on the model family
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_LFS_POINTER = b"version https://git-lfs"


def check_config(
    folder: Path, label: str, *, trust_remote_code: bool, quantized: bool = False
) -> dict[str, Any]:
    """The folder's config.json as a dictionary, if it is of a causal language model.

    `label` is how the user named the model; quantized: whether it may be quantised already.
    Raises UserError otherwise.
    """
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"{label} holds a LoRA adapter, not a model: merge it into its base model first "
                "(peft: merge_and_unload, save_pretrained) and load that folder"
            )
        raise UserError(
            f"{label} is no model: it has no config.json; give the folder that holds config.json, "
            f"{WEIGHTS} and the tokenizer files"
        )
    config = _read_json(folder / "config.json", label)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{label}: config.json names no model_type, so it is no transformers model")
    _check_architecture(config, model_type, label, trust_remote_code)
    entry = config.get("quantization_config") or {}
    if not isinstance(entry, dict):
        raise UserError(f"{label}: quantization_config is {entry!r} in config.json, no JSON object")
    method = entry.get("quant_method")
    if method and not quantized:
        hint = "; load_compressed_tensors takes it as it is" * (method == "compressed-tensors")
        raise UserError(
            f"{label} is already quantised ({method}): the lab quantises by itself and needs the "
            f"float checkpoint that this one was made from{hint}"
        )
    return config


def _check_architecture(
    config: dict[str, Any], model_type: str, label: str, trust_remote_code: bool
) -> None:
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        if not config.get("auto_map"):
            raise UserError(
                f"{label} is of type {model_type!r}, which transformers {__version__} does not "
                "know: update transformers, or pick another model"
            )
        if not trust_remote_code:
            raise consent_needed(label)
        return
    architectures = config.get("architectures") or []
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    named = ", ".join(map(str, architectures)) or model_type
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{label} is an encoder-decoder model ({named}): the lab needs a decoder-only "
            "(causal) language model"
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (
        architectures and not causal.intersection(architectures)
    ):
        raise UserError(
            f"{label} is no causal language model ({named}): the lab needs one that predicts the "
            "next token, such as LlamaForCausalLM"
        )


def consent_needed(label: str) -> UserError:
    """The error of a model that brings its own Python code, when the user has not agreed to it."""
    return UserError(
        f"{label} runs Python code that comes with the model: read that code, and if you trust it "
        "pass trust_remote_code=True"
    )


def check_files(folder: Path, label: str) -> int:
    """The number of parameters in the folder's safetensors, if they and a tokenizer are complete.

    Reads headers only. Raises UserError otherwise.
    """
    number = sum(_count_parameters(path, label) for path in weight_files(folder, label))
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(
            f"{label} has no tokenizer ({' or '.join(_TOKENIZERS[:3])}): copy the tokenizer files "
            "of the same model into it"
        )
    return number


def weight_files(folder: Path, label: str) -> list[Path]:
    """The safetensors files of a model, all present; UserError if there are none or too few."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / WEIGHTS_INDEX).is_file():
        raise _no_weights(folder, label)
    weight_map = _read_json(folder / WEIGHTS_INDEX, label).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{label}: {WEIGHTS_INDEX} lists no weights: copy the folder again")
    names = sorted(set(map(str, weight_map.values())))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{label} lacks {len(missing)} of {len(names)} weight files ({missing[0]}): "
            "copy or fetch the rest"
        )
    return [folder / name for name in names]


def _no_weights(folder: Path, label: str) -> UserError:
    suffixes = {path.suffix for path in folder.iterdir()}
    if suffixes & {".bin", ".pt", ".pth", ".ckpt"}:
        return UserError(
            f"{label} has its weights as pickle files, which can run code when they are read: only "
            "safetensors are loaded; if you trust them, convert once with "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    if ".gguf" in suffixes:
        return UserError(
            f"{label} holds GGUF files: convert once with AutoModelForCausalLM.from_pretrained("
            "folder, gguf_file=name) and save_pretrained, or take the original checkpoint"
        )
    return UserError(
        f"{label} has no {WEIGHTS} and no {WEIGHTS_INDEX}: give a folder or Hub id that has them "
        "(pickle files, .bin, are not read: they can run code)"
    )


def _count_parameters(path: Path, label: str) -> int:
    """Number of elements in a safetensors file, by its header, which must match the file's size.

    Format: 8 bytes little-endian header length, a JSON header, the tensors back to back.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise UserError(f"{label}: {path.name} is a git-lfs pointer: run `git lfs pull` there")
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        header = file.read(length) if length <= size else b""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        number = sum(math.prod(entry["shape"]) for entry in tensors.values())
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        end, number = -1, 0
    if 8 + length + end != size:
        raise UserError(
            f"{label}: {path.name} is damaged or cut off ({size} bytes): copy or fetch it again"
        )
    return number


def _read_json(path: Path, label: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{label}: {path.name} cannot be read ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{label}: {path.name} is no JSON object: copy or fetch it again")
    return content


def one_line(error: BaseException, limit: int = 200) -> str:
    """The first line with text of an error message, cut to `limit` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
