"""Results that survive: one JSON line a measurement, written as it comes in.

A run that was killed leaves every finished line; the next run with the same settings goes on
where it stopped. Lines of another run (other settings) are refused rather than mixed.
"""

import json
import os
import reprlib
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Protocol,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from quasar_lab.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_as(kind: Any, data: Any) -> Any:
    """What `json` read, as a value of a type: dataclasses, tuples, unions and plain types.

    Raises TypeError or KeyError where the data are of another shape; a list is a tuple in JSON.
    """
    if is_dataclass(kind) and isinstance(data, dict):
        types = get_type_hints(kind)
        if data.keys() - types.keys():
            raise KeyError(*(data.keys() - types.keys()))
        build: Any = kind
        return build(**{name: read_as(types[name], value) for name, value in data.items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(data, list):
        kinds = inner[:1] * len(data) if inner[-1] is ... else inner
        return tuple(read_as(each, value) for each, value in zip(kinds, data, strict=True))
    if origin in (Union, UnionType):
        kind = NoneType if data is None else next(each for each in inner if each is not NoneType)
        return read_as(kind, data)
    if kind is Any or type(data) is kind or (kind is float and type(data) is int):
        return data
    raise TypeError(f"{data!r} is no {kind}")


def read_results(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings and the rows of a result file, which may be unfinished; it is not changed.

    Raises UserError for a file that cannot be read or is none of quasar-lab's.
    """
    try:
        _, _, settings, rows = _parse(Path(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return settings, rows


def _parse(path: Path) -> tuple[str, str, dict[str, Any], list[dict[str, Any]]]:
    """The text, its complete lines, and what they hold."""
    try:
        text = path.read_text(encoding="utf-8")
        # a run killed while it wrote leaves a last line without its end: leave it out
        complete = text[: text.rfind("\n") + 1]
        head, *rows = [dict(json.loads(line)) for line in complete.splitlines()]
        return text, complete, dict(head["settings"]), rows
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no result file of quasar-lab: choose another") from error


@runtime_checkable
class RowStore(Protocol):
    """What a benchmark reads finished rows from and adds new ones to."""

    rows: list[dict[str, Any]]

    def append(self, row: dict[str, Any]) -> None: ...


class ResultFile:
    """A JSON-lines file: the first line holds the settings, each further one a row.

    path None keeps the rows in memory only. Raises UserError when the file belongs to a run with
    other settings or cannot be read or written.
    """

    def __init__(self, path: str | Path | None, settings: dict[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.rows: list[dict[str, Any]] = []
        if self.path is None:
            return
        try:
            if self.path.exists():
                self._resume(self.path, settings)
            else:
                write_atomically(self.path, json.dumps({"settings": settings}) + "\n")
        except OSError as error:
            raise UserError(f"cannot use the result file {path}: {error.strerror}") from error

    def _resume(self, path: Path, settings: dict[str, Any]) -> None:
        text, complete, found, lines = _parse(path)
        wanted = json.loads(json.dumps(settings))
        different = [key for key in {*found, *wanted} if found.get(key) != wanted.get(key)]
        if different:
            key = sorted(different)[0]
            raise UserError(
                f"{path} holds a run with {key} = {reprlib.repr(found.get(key))}, this one has "
                f"{reprlib.repr(wanted.get(key))}: delete the file or choose another"
            )
        self.rows = lines
        if complete != text:
            write_atomically(path, complete)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row and put it on the disk."""
        self.rows.append(row)
        if self.path is not None:
            try:
                with self.path.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
                    stream.flush()
                    os.fsync(stream.fileno())
            except OSError as error:
                raise UserError(f"cannot write {self.path}: {error.strerror}") from error
