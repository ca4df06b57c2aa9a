"""The compressed-tensors form of W8A8: what a checkpoint's config.json says about its linears.

The format of LLM Compressor, read by vLLM and (with the package `compressed-tensors`) by
transformers. One kind of it is the lab's own: INT8 weights with a symmetric scale an output
channel, activations rounded on the fly with a symmetric scale a token. A linear's float weight is
replaced by `weight` int8[N, K] and `weight_scale` [N, 1].
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quasar_lab.errors import UserError

METHOD = "compressed-tensors"
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_WEIGHTS = {**_INT8, "strategy": "channel", "dynamic": False}
_ACTIVATIONS = {**_INT8, "strategy": "token", "dynamic": True}


@dataclass(frozen=True, slots=True)
class W8A8Layout:
    """Which linears of a checkpoint are W8A8.

    targets, ignore: entries as the format has them: a module's name, a class name such as "Linear",
    or "re:" and a regular expression that a module's name begins with. ignore goes first.
    """

    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()

    def covers(self, name: str, class_name: str) -> bool:
        """Whether the linear of this name and class has INT8 weights."""

        def named(entries: Sequence[str]) -> bool:
            return any(
                re.match(entry[3:], name)
                if entry.startswith("re:")
                else entry in (name, class_name)
                for entry in entries
            )

        return named(self.targets) and not named(self.ignore)

    def as_json(self) -> dict[str, Any]:
        """The entry "quantization_config" of config.json."""
        return {
            "quant_method": METHOD,
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": list(self.targets),
                    "weights": _WEIGHTS,
                    "input_activations": _ACTIVATIONS,
                }
            },
            "ignore": list(self.ignore),
        }


def read_layout(config: Mapping[str, Any], label: str) -> W8A8Layout:
    """The layout that config.json describes; `label` is how the user named the model.

    Raises UserError for a model that is not quantised and for every other kind of quantisation.
    """
    found = config.get("quantization_config") or {}
    if found.get("quant_method") != METHOD:
        kind = found.get("quant_method", "not quantised")
        raise UserError(f"{label} is no compressed-tensors checkpoint ({kind}): use load() for it")
    groups = found.get("config_groups") or {}
    targets: list[str] = []
    for group in groups.values():
        for part, wanted in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
            settings = group.get(part) or {}
            for key, value in wanted.items():
                if settings.get(key) != value:
                    raise _refused(label, f"its {part} have {key} = {settings.get(key)!r}")
        if group.get("output_activations"):
            raise _refused(label, "it rounds the outputs of its linears as well")
        targets += group.get("targets", [])
    if found.get("quantization_status") != "compressed" or not groups:
        raise _refused(label, f"its status is {found.get('quantization_status')!r}")
    if (found.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refused(label, "it is sparse")
    for extra in ("kv_cache_scheme", "transform_config"):
        if found.get(extra):
            raise _refused(label, f"it has a {extra}")
    return W8A8Layout(tuple(targets), tuple(found.get("ignore") or ()))


def _refused(label: str, why: str) -> UserError:
    return UserError(
        f"{label}: {why}; the lab imports W8A8 only (int8 weights a channel, dynamic int8 "
        "activations a token, symmetric), LLM Compressor's scheme W8A8"
    )
