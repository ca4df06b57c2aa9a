"""The model card of an exported checkpoint: what was done to which model, and how much it cost."""

import json
import re
from collections.abc import Sequence

import pandas as pd

from quasar_lab import __version__
from quasar_lab.checkpoints.names import PRESETS
from quasar_lab.quantization_report import QuantizationRecord

# names that a card's header may give as `license`; every other one is "other" with its name
_KNOWN_LICENCES = ("apache-2.0", "mit", "bsd-3-clause", "llama3.1", "llama3.2", "llama3.3", "gemma")


def model_card(
    record: QuantizationRecord,
    in_full_precision: Sequence[str],
    base_model: str,
    licence: str | None = None,
    calibration_data: str | None = None,
    fidelity: pd.DataFrame | None = None,
) -> str:
    """The card (README.md with its header) of a checkpoint.

    record: of the quantised model; in_full_precision: names of the linears that are not INT8;
    base_model: a preset's name, a Hub id or any name; fidelity: rows of `compare_logits`.
    """
    preset = PRESETS.get(base_model)
    licence = licence or (preset.licence if preset else None)
    base = preset.id if preset else base_model
    return "\n".join(
        [
            *_header(base, licence),
            f"# {base}, W8A8",
            "",
            f"INT8 weights (one scale an output channel) and INT8 activations (one scale a token, "
            f"computed on the fly) made from {base} by quasar-lab {__version__}. It is meant to "
            "verify drafts of speculative decoding, and serves as any other model.",
            "",
            "## Recipe",
            "",
            *_recipe(record, in_full_precision),
            f"- Calibration data: {_calibration(record, calibration_data)}",
            "",
            "## Fidelity",
            "",
            _fidelity(fidelity),
            "",
            "## Use",
            "",
            "    quasar-lab serve-command FOLDER    # prints the vLLM command",
            "",
            "vLLM multiplies in INT8. transformers (with the package compressed-tensors) emulates "
            "it in floating point and rounds activations in steps of absmax / 127.5 instead of "
            "127: its logits differ from vLLM's by about as much as rounding itself changes them, "
            "and are those of quasar-lab's `load_compressed_tensors(FOLDER, simulated=True)` (but "
            "OPT's).",
            "",
            "## Licence",
            "",
            f"That of the base model: {licence or 'see the base model, it was not recorded here'}.",
            "",
        ]
    )


def _header(base: str, licence: str | None) -> list[str]:
    lines = ["---", f"base_model: {_yaml(base)}", "base_model_relation: quantized"]
    known = (licence or "").lower()
    if known in _KNOWN_LICENCES:
        lines.append(f"license: {known}")
    elif licence:
        lines += ["license: other", f"license_name: {_yaml(licence)}"]
    return [*lines, "library_name: transformers", "tags: [compressed-tensors, int8, w8a8]", "---"]


def _yaml(text: str) -> str:
    """A text as a YAML value; in double quotes where a plain one could mean something else."""
    return text if re.fullmatch(r"[A-Za-z][\w./-]*", text) else json.dumps(text)


def _recipe(record: QuantizationRecord, in_full_precision: Sequence[str]) -> list[str]:
    report = record.report
    w8a8 = report[~report.name.isin(in_full_precision)]
    counts = w8a8.smoothing.value_counts()
    smoothing = ", ".join(f"{count} {name}" for name, count in counts.items())
    return [
        f"- Settings: `{record.config!r}`",
        f"- W8A8 linears: {len(w8a8)} (smoothing: {smoothing}; folded into norms and weights)",
        f"- In full precision: {', '.join(in_full_precision) or 'none'}",
    ]


def _calibration(record: QuantizationRecord, named: str | None) -> str:
    parts = [part for part in (named, record.calibration) if part]
    return ", ".join(parts) or "none (nothing was smoothed, or it was not recorded)"


def _fidelity(rows: pd.DataFrame | None) -> str:
    if rows is None:
        return "Not measured when this was written."
    return (
        f"Against full precision on {len(rows)} tokens, same prefixes: mean KL "
        f"{rows['kl'].mean():.4f} nats, mean total variation {rows['tv'].mean():.3f}, the most "
        f"likely token agrees on {rows['top1_match'].mean():.1%}."
    )
