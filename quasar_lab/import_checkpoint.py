"""A compressed-tensors checkpoint, LLM Compressor's or our own, as a quantised model of the lab.

The INT8 weights are taken as they are, so that what is measured here is the model that is served
elsewhere, not one quantised anew.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from quasar_lab.checkpoints.build import parse_device, parse_dtype, quiet_transformers
from quasar_lab.checkpoints.compressed_tensors import W8A8Layout, read_layout
from quasar_lab.checkpoints.folder import check_config, check_files, one_line, weight_files
from quasar_lab.checkpoints.names import resolve
from quasar_lab.checks import check_flag
from quasar_lab.errors import UserError
from quasar_lab.folding import Fold
from quasar_lab.loading import LanguageModel
from quasar_lab.quantization import QuantizationConfig
from quasar_lab.quantization_report import QuantizationRecord, report_table
from quasar_lab.quantized_linear import W8A8Linear
from quasar_lab.structure import linear_layers, parameter, weight_matrix


def load_compressed_tensors(
    directory: str | Path,
    *,
    device: object = "auto",
    dtype: object = None,
    simulated: Any = False,
) -> LanguageModel:
    """Load a W8A8 checkpoint: its linears become `W8A8Linear`, the rest is loaded as `load` does.

    directory: a local folder (int8 weights with a scale a channel, dynamic activations a token).
    device, dtype: as for `load`; dtype is that of everything but the INT8 weights and their scales.
    simulated: as in `QuantizationConfig`: compute as transformers would, not as vLLM and the lab.

    Raises UserError for another kind of quantisation, damaged or missing files, and weights that
    do not fit the model.
    """
    source = resolve(directory)
    if source.kind != "folder":
        raise UserError(f"{directory!r}: give the local folder of a compressed-tensors checkpoint")
    check_flag("simulated", simulated)
    folder, place = Path(source.place), parse_device(device)
    wanted = parse_dtype(dtype, place)
    settings = check_config(folder, source.label, trust_remote_code=False, quantized=True)
    layout = read_layout(settings, source.label)
    check_files(folder, source.label)
    try:
        model, tokenizer = _build(folder, layout, wanted, simulated, source.label)
        model = model.to(place).eval().requires_grad_(False)
    except UserError:
        raise
    # transformers, tokenizers and safetensors raise errors of any kind for what a file may hold
    except Exception as error:
        raise UserError(f"{source.label} cannot be loaded: {one_line(error)}") from error
    return LanguageModel(model, tokenizer, source.name)


def _build(
    folder: Path, layout: W8A8Layout, dtype: torch.dtype | None, simulated: bool, label: str
) -> tuple[Any, Any]:
    with quiet_transformers():
        config: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        del config.quantization_config
        with init_empty_weights():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(folder))
    _fill_(model, layout, dict(_tensors(folder, label)), simulated, label)
    model.config._name_or_path = str(folder)
    return model, tokenizer


def checkpoint_table(directory: str | Path) -> pd.DataFrame:
    """What a folder's safetensors hold, from their headers: name, dtype, shape, bytes, file."""
    folder = Path(directory)
    records = []
    for path in weight_files(folder, str(directory)):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(name)
                kind, shape = part.get_dtype(), part.get_shape()
                size = math.prod(shape) * int(kind.lstrip("BFIU")) // 8
                records.append(
                    {"name": name, "dtype": kind, "shape": shape, "bytes": size, "file": path.name}
                )
    return pd.DataFrame(records)


def _tensors(folder: Path, label: str) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder, label):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)


def _fill_(
    model: Any, layout: W8A8Layout, tensors: Mapping[str, Tensor], simulated: bool, label: str
) -> None:
    """Give a model without storage its weights; covered linears become `W8A8Linear`."""
    linears = linear_layers(model)
    covered = {n: m for n, m in linears.items() if layout.covers(n, type(m).__name__)}
    ignored = dict.fromkeys(linears.keys() - covered.keys(), "ignore")
    report = report_table(model, ignored, {}, dict.fromkeys(covered, "imported as it is"), None)
    for name, linear in covered.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _empty_w8a8(linear, simulated))
    config = QuantizationConfig(smoothing="none", skip=(), simulated=simulated)
    state = dict(_named_as_ours(tensors, covered, model.dtype, label))
    try:
        _, unexpected = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        raise UserError(f"{label} does not fit its own config: {_last_line(error)}") from error
    model.tie_weights()
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if missing or unexpected:
        what = f"lacks {missing[0]}" if missing else f"has {unexpected[0]} too many"
        raise UserError(f"{label} {what}: its weights do not fit a {type(model).__name__}")
    model._quantization = QuantizationRecord(config, Fold(), report)


def _empty_w8a8(linear: nn.Module, simulated: bool) -> W8A8Linear:
    matrix = weight_matrix(linear).detach()
    scale = torch.empty(len(matrix), device="meta")
    bias = parameter(linear, "bias")
    return W8A8Linear(matrix.to(torch.int8), scale, bias, simulated=simulated)


def _named_as_ours(
    tensors: Mapping[str, Tensor], covered: Mapping[str, nn.Module], dtype: torch.dtype, label: str
) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition(".")
        if name in covered and kind == "weight":
            if tensor.dtype != torch.int8:
                raise UserError(f"{label}: {key} is {tensor.dtype}, not int8: it is not compressed")
            yield f"{name}.qweight", tensor
        elif name in covered and kind == "weight_scale":
            if not tensor.is_floating_point() or not (tensor >= 0).all() or tensor.isinf().any():
                raise UserError(f"{label}: {key} holds what is no scale: copy or fetch it again")
            yield key, tensor.float().flatten()
        else:
            yield key, tensor.to(dtype)


def _last_line(error: RuntimeError) -> str:
    """torch lists what does not fit under a headline."""
    return str(error).strip().splitlines()[-1].strip()
