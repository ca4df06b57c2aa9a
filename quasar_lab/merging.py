"""Join the results that several machines wrote, each its shard of one experiment."""

import json
from pathlib import Path
from typing import Any

from quasar_lab.errors import UserError
from quasar_lab.results import read_results, write_atomically

# what shards of one experiment may differ in: each machine is its own
_OF_A_SHARD = ("shard", "runs", "processor", "threads", "gpu", "torch", "merged")


def merge_results(paths: list[Path], output: Path) -> int:
    """Write the rows of all shards to `output`, shard by shard; returns how many there are.

    Raises UserError, before anything is written, for files of different experiments, a shard that
    is missing, unfinished or there twice, and models of the same name that differ.
    """
    if len(paths) < 2:
        raise UserError("there is nothing to merge: name the result files of all shards")
    if len(set(paths)) < len(paths):
        raise UserError("a file is named twice: name one for each shard")
    shards = {path: read_results(path) for path in paths}
    first = paths[0]
    expected = shards[first][0]
    places: dict[int, Path] = {}
    hashes: dict[str, tuple[str, Path]] = {}
    for path, (settings, rows) in shards.items():
        _check_same_experiment(first, expected, path, settings)
        index, count = settings["shard"]
        if index in places:
            raise UserError(f"shard {index}/{count} is there twice: {places[index]} and {path}")
        places[index] = path
        if len(rows) != settings["runs"]:
            raise UserError(
                f"{path} is not finished ({len(rows)} of {settings['runs']} runs): continue it "
                "with the command that began it"
            )
        for row in rows:
            known, where = hashes.setdefault(row["model"], (row["model_hash"], path))
            if row["model_hash"] != known:
                raise UserError(
                    f"{row['model']} is not the same model in {where} and {path} (hashes {known} "
                    f"and {row['model_hash']})"
                )
    count = expected["shard"][1]
    missing = [f"{index}/{count}" for index in range(1, count + 1) if index not in places]
    if missing:
        raise UserError(f"shard {', '.join(missing)} is missing: name the files of all {count}")
    ordered = [shards[places[index]] for index in sorted(places)]
    rows = [row for _, rows in ordered for row in rows]
    settings = {name: value for name, value in expected.items() if name not in _OF_A_SHARD}
    settings |= {"shard": [1, 1], "runs": len(rows), "merged": [head for head, _ in ordered]}
    lines = [json.dumps({"settings": settings}), *map(json.dumps, rows)]
    write_atomically(output, "\n".join(lines) + "\n")
    return len(rows)


def _check_same_experiment(
    first: Path, expected: dict[str, Any], path: Path, settings: dict[str, Any]
) -> None:
    if not settings.get("shard") or "merged" in settings:
        raise UserError(f"{path} is no shard: name files that quasar-lab bench --shard wrote")
    pairs = {**expected, **settings}
    for name in pairs:
        if name in _OF_A_SHARD:
            continue
        if settings.get(name) != expected.get(name):
            raise UserError(
                f"{path} belongs to another experiment than {first}: {name} is "
                f"{settings.get(name)!r} there and {expected.get(name)!r} here"
            )
    if settings["shard"][1] != expected["shard"][1]:
        raise UserError(
            f"{path} is one of {settings['shard'][1]} shards, {first} one of "
            f"{expected['shard'][1]}: merge shards of one split"
        )
