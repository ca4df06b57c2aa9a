"""`quasar-lab fetch`: a model ahead of its use, and the list of presets."""

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    fetch = commands.add_parser(
        "fetch",
        help="fetch a model ahead of its use",
        description="Fetch a model into the cache and print its folder.",
    )
    fetch.add_argument(
        "model", nargs="?", default=None, help="a preset or a Hub id (default: smollm2-135m)"
    )
    fetch.add_argument("--list", action="store_true", help="list the presets")
    fetch.add_argument("--json", action="store_true", help="print JSON")
    fetch.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from quasar_lab.loading import DEFAULT_MODEL, PRESETS, fetch, is_cached

    if arguments.list:
        rows = [
            {
                "name": name,
                "id": preset.id,
                "licence": preset.licence,
                "gigabytes": preset.gigabytes,
                "here": is_cached(name),
                "note": preset.note,
            }
            for name, preset in PRESETS.items()
        ]
        if arguments.json:
            print(json.dumps(rows))
            return
        for row in rows:
            state = "here" if row["here"] else f"{row['gigabytes']:.1f} GB"
            print(f"{row['name']:14} {state:8} {row['licence']}; {row['note']}")
        return
    folder = fetch(arguments.model or DEFAULT_MODEL)
    print(json.dumps({"folder": str(folder)}) if arguments.json else folder)
