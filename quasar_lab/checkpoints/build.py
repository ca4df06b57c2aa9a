"""From a folder with a checkpoint to a model in memory, on the right device."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from quasar_lab.checkpoints.folder import check_config, check_files, consent_needed, one_line
from quasar_lab.errors import UserError
from quasar_lab.progress import someone_watches

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def build(
    folder: Path,
    label: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a checkpoint folder; the model in eval mode, without gradients.

    dtype None is the checkpoint's own. `label` is how the user named the model. Raises UserError
    for whatever is wrong with the folder or does not fit into memory.
    """
    config = check_config(folder, label, trust_remote_code=trust_remote_code)
    _check_memory(check_files(folder, label), dtype or _own_dtype(config), device, label)
    # Everything is here, so nothing needs the network, except code kept in another repository.
    options = {"trust_remote_code": trust_remote_code, "local_files_only": not trust_remote_code}
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype or "auto",
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        model, report = loaded
        model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{label} does not fit into the free memory of {device}: pass dtype=torch.bfloat16, "
            'device="cpu", or a smaller model'
        ) from error
    # transformers, tokenizers, safetensors and a model's own code raise errors of any kind
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise consent_needed(label) from error
        raise UserError(f"{label} cannot be loaded: {one_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{label} lacks {len(missing)} of the model's weights ({missing[0]}): they would be "
            "random; take the complete checkpoint"
        )
    return model.eval().requires_grad_(False), tokenizer


def parse_device(device: object) -> torch.device:
    """The torch device for "auto" (cuda if there is one, else cpu) or what torch.device takes."""
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = 'use "auto", "cpu", "cuda" or "cuda:0"'
    try:
        place = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device={device!r} is no torch device: {wanted}") from error
    if place.type == "cpu":
        return place
    backend: Any = getattr(torch, place.type, None)
    count = backend.device_count() if hasattr(backend, "device_count") else 0
    if (place.index or 0) >= count:
        raise UserError(f"device={device!r} is not here ({count} {place.type} devices): {wanted}")
    return place


def parse_dtype(dtype: object, device: torch.device) -> torch.dtype | None:
    """The torch dtype to load with; None means the checkpoint's own."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else None
    if isinstance(dtype, str):
        if dtype == "auto":
            return None
        dtype = _DTYPES.get(dtype, dtype)
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
        raise UserError(f'dtype={dtype!r}: use None, "auto", {", ".join(_DTYPES)}')
    return dtype


def _own_dtype(config: Mapping[str, Any]) -> torch.dtype:
    named = config.get("dtype") or config.get("torch_dtype")
    return _DTYPES.get(str(named), torch.float32)


def _check_memory(parameters: int, dtype: torch.dtype, device: torch.device, label: str) -> None:
    """Refuse what cannot fit at all: the system would kill the process without a word."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = psutil.virtual_memory().total
    needed = parameters * dtype.itemsize
    if needed > total:
        raise UserError(
            f"{label} needs {needed / 1e9:.0f} GB as {str(dtype).removeprefix('torch.')}, {device} "
            f"has {total / 1e9:.0f} GB: pass dtype=torch.bfloat16 or take a smaller model"
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep reports of transformers to itself, and its bars where nobody watches."""
    level = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not someone_watches():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if had_bars:
            transformers_logging.enable_progress_bar()
