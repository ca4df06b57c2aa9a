"""Progress for a person: a bar on a terminal or in a notebook, one plain line in a log file."""

import sys
from typing import Any

from tqdm.auto import tqdm


def say(line: str) -> None:
    """Print one line to stderr, where it does not disturb a command's output; in a notebook to
    stdout, for Jupyter shows stderr as if it were an error."""
    stream = sys.stdout if _in_notebook() else sys.stderr
    print(f"quasar-lab: {line}", file=stream, flush=True)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # Colab's shell is one of a class of its own, made from this one
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


def someone_watches() -> bool:
    """True on a terminal and in a Jupyter notebook, where a moving bar can be drawn."""
    return sys.stderr.isatty() or _in_notebook()


class ProgressBar:
    """A bar of `total` units; `advance_to` and `step` never run past the end."""

    def __init__(self, total: int, description: str, **tqdm_settings: Any):
        if not someone_watches():
            say(description)
        self._bar: Any = tqdm(
            total=total,
            desc=description,
            disable=not someone_watches(),
            # bound now: a caller may redirect stderr while the bar is up
            file=sys.stderr,
            **tqdm_settings,
        )

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance_to(self, value: int) -> None:
        self._bar.update(max(0, min(value, self._bar.total) - self._bar.n))

    def step(self, description: str) -> None:
        """One unit is done; `description` says what comes next."""
        self._bar.set_description(description)
        self._bar.update(1)
