"""The command line: `quasar-lab demo` and its companions. Wrong input: one line, exit code 2."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from quasar_lab import __version__
from quasar_lab.errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _ngram(text: str) -> tuple[int, int]:
    """ "1:3" -> (1, 3); "3" -> (1, 3)."""
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r}: give MIN:MAX, e.g. 1:3, or MAX alone")
    return (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def _parser() -> _Parser:
    parser = _Parser(
        prog="quasar-lab", description="Quantised verification for speculative decoding"
    )
    parser.add_argument("--version", action="version", version=f"quasar-lab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="measure Quasar against its baselines on this machine",
        description="Calibrate and quantise a model, run {full precision, INT8} x {plain, n-gram "
        "speculative} over the built-in prompts, print the table and write a report.",
    )
    demo.add_argument(
        "--model", help="a preset, a Hub id or a local folder (default: smollm2-135m)"
    )
    demo.add_argument(
        "--tasks",
        type=_names,
        help="comma-separated, of mt_bench, humaneval, gsm8k, alpaca, cnn_dm (default: all)",
    )
    demo.add_argument("--limit", type=int, help="prompts a task (default: 2)")
    demo.add_argument("--max-new-tokens", type=int, help="tokens a generation (default: 96)")
    demo.add_argument("--draft-tokens", type=int, default=5, help="tokens a draft (default: 5)")
    demo.add_argument("--ngram", type=_ngram, default=(1, 3), metavar="MIN:MAX",
                      help="lengths of the n-grams looked up (default: 1:3)")  # fmt: skip
    demo.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    demo.add_argument("--seed", type=int, default=0, help="of sampled runs (default: 0)")
    demo.add_argument("--quick", action="store_true", help="shorter texts: about a minute")
    demo.add_argument("--output", type=Path, default=Path("reports"), metavar="FOLDER",
                      help="where demo.html and demo.json go (default: reports)")  # fmt: skip
    demo.add_argument("--json", action="store_true", help="print JSON instead of the table")
    demo.set_defaults(run=_demo)

    fetch = commands.add_parser("fetch", help="fetch a model ahead of its use")
    fetch.add_argument("model", nargs="?", default=None, help="a preset or a Hub id")
    fetch.add_argument("--list", action="store_true", help="list the presets")
    fetch.add_argument("--json", action="store_true", help="print JSON")
    fetch.set_defaults(run=_fetch)
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    from quasar_lab.demo import QUICK, DemoSettings, run_demo
    from quasar_lab.methods import DraftSettings

    chosen: dict[str, Any] = dict(QUICK) if arguments.quick else {}
    for name in ("model", "tasks", "limit", "max_new_tokens"):
        if getattr(arguments, name) is not None:
            chosen[name] = getattr(arguments, name)
    low, high = arguments.ngram
    settings = DemoSettings(
        **chosen,
        draft=DraftSettings(arguments.draft_tokens, max_ngram=high, min_ngram=low),
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    result = run_demo(settings, arguments.output)
    if arguments.json:
        print(json.dumps(result.as_json()))
        return
    print(result.table().to_string())
    print(f"\n{result.verdict}\n\nreport: {arguments.output / 'demo.html'}")


def _fetch(arguments: argparse.Namespace) -> None:
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


def _quiet_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (0, 2 for wrong input, 130 when interrupted)."""
    _quiet_libraries()
    try:
        parsed = _parser().parse_args(arguments)
        parsed.run(parsed)
        sys.stdout.flush()
    except UserError as error:
        print(f"quasar-lab: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quasar-lab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader (head, less) has gone; say nothing, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
