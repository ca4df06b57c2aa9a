"""Where progress is written: a pipe, a terminal and a notebook want it in different places."""

import sys
from types import SimpleNamespace

from quasar_lab.progress import ProgressBar, say


class ZMQInteractiveShell:
    """A kernel is known by the name of its shell's class."""


def test_a_command_speaks_on_stderr(capsys) -> None:
    say("measuring")
    with ProgressBar(2, "fetching") as bar:
        bar.step("one")
    assert capsys.readouterr() == ("", "quasar-lab: measuring\nquasar-lab: fetching\n")


def test_a_notebook_shows_no_red_box(capsys, monkeypatch) -> None:
    """Jupyter draws whatever comes on stderr as if it were an error."""
    shell = SimpleNamespace(get_ipython=ZMQInteractiveShell)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    say("measuring")
    assert capsys.readouterr() == ("quasar-lab: measuring\n", "")
