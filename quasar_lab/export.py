"""Out of the lab: the quantised model as a checkpoint that serving engines load unchanged.

`export_compressed_tensors` writes what `quantize` made in the compressed-tensors format, which vLLM
and transformers read. Smoothing is folded into norms and weights by then: the engine finds an
ordinary model with INT8 linears and has nothing to undo. `import_checkpoint` is the way back.

vLLM multiplies in INT8 as the lab does. transformers simulates INT8 in floating point and rounds
otherwise (`int8_gemm.simulated`): its logits differ from the lab's by several per cent, and are the
same bits as those of `load_compressed_tensors(folder, simulated=True)`. So an export can be checked
exactly. (But OPT: there transformers gives all tokens of fc1's input one scale. A model in memory
with `QuantizationConfig(simulated=True)` may differ in the last bits for a single token: where its
tensors lie decides which product the BLAS picks.)
"""

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from quasar_lab.checkpoints.build import quiet_transformers
from quasar_lab.checkpoints.compressed_tensors import W8A8Layout
from quasar_lab.checkpoints.folder import one_line
from quasar_lab.errors import UserError
from quasar_lab.model_card import model_card
from quasar_lab.quantization_report import quantization_record
from quasar_lab.quantized_linear import W8A8Linear
from quasar_lab.structure import as_module

# vLLM multiplies these as one matrix, and refuses it when its parts differ in precision.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def export_compressed_tensors(
    model: object,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    base_model: str | None = None,
    licence: str | None = None,
    calibration_data: str | None = None,
    fidelity: pd.DataFrame | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a quantised model as a compressed-tensors checkpoint; returns its folder.

    model: from `quantize` or `load_compressed_tensors`, alone or in a `LanguageModel`.
    directory: a new folder, which appears under its name only when it is complete.
    tokenizer: default: the one beside the checkpoint that the model came from.
    base_model, licence, calibration_data, fidelity (a table of `compare_logits` against full
        precision): for the model card; a preset's licence is known.
    max_shard_size: of one safetensors file.

    Linears in full precision are listed as `ignore`. Where only some of q, k and v (or of gate and
    up) are, the others are written in full precision as well, with a warning: engines multiply
    them as one. Raises UserError for a model that is not quantised, for what engines cannot load
    (an INT8 output layer, GPT-2's transposed linears, packed experts), and when the folder exists
    or cannot be written.
    """
    quantized = as_module(model)
    record = quantization_record(quantized)
    if not isinstance(quantized, PreTrainedModel):
        raise UserError(f"a {type(quantized).__name__} is no Hugging Face model: it has no config")
    target = new_folder(directory)
    _check_card(base_model, licence, calibration_data, fidelity)
    rounded = {n: m for n, m in quantized.named_modules() if isinstance(m, W8A8Linear)}
    _check_loadable(quantized, rounded, record.report.set_index("name")["shape"].to_dict())
    widened = _widened(rounded)
    if widened:
        warnings.warn(
            f"written in full precision, like linears that engines multiply together with them: "
            f"{', '.join(widened)}",
            stacklevel=2,
        )
    tokenizer = tokenizer or getattr(model, "tokenizer", None) or _tokenizer_of(quantized)
    if not hasattr(tokenizer, "save_pretrained"):
        raise UserError(f"tokenizer={tokenizer!r} is no tokenizer: pass one of transformers")
    source = base_model or getattr(model, "name", None) or Path(quantized.config._name_or_path).name
    in_full = [*record.report.name[record.report.precision == "full"], *widened]
    card = model_card(record, in_full, source, licence, calibration_data, fidelity)
    tensors = _tensors(quantized, rounded, widened)
    with _appearing(target, tensors) as folder, quiet_transformers():
        quantized.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = W8A8Layout(ignore=tuple(in_full)).as_json()
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card, encoding="utf-8")
    return target


def new_folder(directory: str | Path) -> Path:
    """The path of a folder that does not exist and can be made.

    Asked before long work as well. Raises UserError.
    """
    target = Path(os.path.expanduser(directory))
    if os.path.lexists(target):
        raise UserError(f"{target} exists already: choose a new folder, or remove it first")
    place = next(parent for parent in target.absolute().parents if os.path.lexists(parent))
    try:
        probe = _temporary(place / target.name)
        probe.mkdir()
        probe.rmdir()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {target}: {one_line(error)}") from error
    return target


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")


def _check_card(
    base_model: str | None,
    licence: str | None,
    calibration_data: str | None,
    fidelity: pd.DataFrame | None,
) -> None:
    named = {"base_model": base_model, "licence": licence, "calibration_data": calibration_data}
    for name, text in named.items():
        if text is not None and not text.isprintable():
            raise UserError(f"{name} is {text!r}: give a text of one line")
    measured = {"kl", "tv", "top1_match"}
    if fidelity is not None and not measured <= set(fidelity):
        raise UserError("fidelity lacks columns kl, tv, top1_match: pass what compare_logits gives")


def _check_loadable(
    model: PreTrainedModel,
    rounded: Mapping[str, W8A8Linear],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    if isinstance(model.get_output_embeddings(), W8A8Linear):
        raise UserError(
            "the output layer is INT8, and engines keep it in full precision: quantise with "
            'skip=("lm_head",)'
        )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            raise UserError(f"{name} holds packed experts: no mixture of experts can be exported")
    for name, linear in rounded.items():
        # GPT-2's Conv1D holds [inputs, outputs]
        if tuple(shapes[name]) != tuple(linear.qweight.shape):
            raise UserError(
                f"{name} is stored transposed (a Conv1D), which compressed-tensors cannot hold: "
                f"{type(model).__name__} cannot be exported"
            )


def _widened(rounded: Mapping[str, W8A8Linear]) -> list[str]:
    """W8A8 linears of which a fused sibling is in full precision."""
    siblings = {name: group for group in _FUSED for name in group}
    found = []
    for name in rounded:
        parent, _, own = name.rpartition(".")
        group = siblings.get(own, ())
        present = [f"{parent}.{other}" for other in group if f"{parent}.{other}" in rounded]
        if len(present) < len(group):
            found.append(name)
    return found


def _tensors(
    model: PreTrainedModel, rounded: Mapping[str, W8A8Linear], widened: list[str]
) -> dict[str, Tensor]:
    """The state dict with the names and shapes of the format."""
    tensors = {}
    for key, tensor in model.state_dict().items():
        name, _, kind = key.rpartition(".")
        if name not in rounded or kind == "bias":
            tensors[key] = tensor
        elif kind == "qweight":
            if name in widened:
                tensor = (tensor * rounded[name].weight_scale[:, None]).to(model.dtype)
            tensors[f"{name}.weight"] = tensor
        elif name not in widened:
            tensors[key] = tensor[:, None]
    return tensors


def _tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer in the folder that the model was loaded from."""
    folder = Path(model.config._name_or_path or ".")
    try:
        if model.config._name_or_path and folder.is_dir():
            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer in {folder} ({one_line(error)}): pass tokenizer=") from error
    raise UserError("the model does not say which folder it came from: pass tokenizer=")


@contextmanager
def _appearing(target: Path, tensors: Mapping[str, Tensor]) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when all went well."""
    folder = _temporary(target)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(
                f"the checkpoint needs {needed / 1e9:.2g} GB, {free / 1e9:.2g} GB are free in "
                f"{target.parent}: make room or choose another folder"
            )
        yield folder
        folder.rename(target)
    # ValueError: what transformers makes of a wrong max_shard_size
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"cannot write {target}: {one_line(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
