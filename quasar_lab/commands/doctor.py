"""`quasar-lab doctor`: what this machine has, what will work, what to install for the rest."""

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has and which notebooks will work",
        description="Look at Python, packages, processor, GPU, models and disk; say which INT8 "
        "backends and notebooks will work and what to install for the rest. Changes nothing.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of the text")
    doctor.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from quasar_lab.doctor import as_json, as_text, examine

    findings = examine()
    print(json.dumps(as_json(findings)) if arguments.json else as_text(findings))
