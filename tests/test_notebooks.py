"""The notebooks as files: clean, complete, and built on the library."""

import ast
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ALL = [*NOTEBOOKS, *sorted((FOLDER / "solutions").glob("*.ipynb"))]
MAX_LINES = 25  # a cell that fits on a screen
ALLOWED = {
    "quasar_lab", "torch", "numpy", "pandas", "plotly", "seaborn", "IPython", "math", "os", "time",
}  # fmt: skip


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text())["cells"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def code(path: Path) -> list[str]:
    return [source(cell) for cell in cells(path) if cell["cell_type"] == "code"]


def markdown(path: Path) -> str:
    return "\n".join(source(cell) for cell in cells(path) if cell["cell_type"] == "markdown")


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
class TestNotebook:
    def test_has_no_outputs(self, path: Path) -> None:
        for cell in cells(path):
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [] and cell["execution_count"] is None

    def test_has_the_plain_python_kernel(self, path: Path) -> None:
        kernel = json.loads(path.read_text())["metadata"]["kernelspec"]
        assert kernel["name"] == "python3"

    def test_cells_fit_on_a_screen(self, path: Path) -> None:
        for text in code(path):
            assert len(text.splitlines()) <= MAX_LINES, text

    def test_imports_come_from_the_library(self, path: Path) -> None:
        for text in code(path):
            for node in ast.walk(ast.parse(re.sub(r"^[%!].*$", "", text, flags=re.M))):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                else:
                    continue
                assert {name.split(".")[0] for name in modules} <= ALLOWED, modules

    def test_links_resolve(self, path: Path) -> None:
        for link in re.findall(r"\]\(([^)#\s]+)", markdown(path)):
            if not link.startswith("http"):
                assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestLesson:
    def test_has_one_title_objectives_time_and_needs(self, path: Path) -> None:
        text = markdown(path)
        assert len(re.findall(r"^# ", text, flags=re.M)) == 1
        for heading in ("What you will learn", "Time", "Needs"):
            assert heading in text, heading

    def test_every_figure_has_alternative_text(self, path: Path) -> None:
        for text in code(path):
            assert text.count("show(") <= text.count("alt="), text
