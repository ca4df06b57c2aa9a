"""What every notebook uses: the fast switch, and pictures that also speak to a screen reader."""

import atexit
import base64
import html
import io
import os
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

# QUASAR_LAB_FAST=1 runs a notebook on less data, in CI for example.
FAST = os.environ.get("QUASAR_LAB_FAST", "0") == "1"


class Picture:
    """A figure as a PNG with alternative text; the last line of a cell shows it."""

    def __init__(self, figure: Figure, alt: str) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        self.png = buffer.getvalue()
        self.alt = alt

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.png).decode()
        alt = html.escape(self.alt)
        return f'<img src="data:image/png;base64,{data}" alt="{alt}" style="max-width: 100%">'

    def __repr__(self) -> str:
        return f"[picture] {self.alt}"


def show(figure: Figure, alt: str) -> Picture:
    """The figure for display; `alt` says in a sentence what it shows."""
    return Picture(figure, alt)


def scratch_folder() -> Path:
    """An empty folder that is gone when the kernel ends."""
    folder = tempfile.TemporaryDirectory(prefix="quasar-lab-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
