"""The command line: `quasar-lab demo` and its companions. Wrong input: one line, exit code 2."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from quasar_lab import __version__
from quasar_lab.commands import accuracy, bench, demo, doctor, export, fetch, serve_command
from quasar_lab.errors import UserError

# in the order in which --help lists them; heavy imports wait until a command runs
COMMANDS = (demo, bench, accuracy, export, serve_command, fetch, doctor)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="quasar-lab", description="Quantised verification for speculative decoding"
    )
    parser.add_argument("--version", action="version", version=f"quasar-lab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


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
