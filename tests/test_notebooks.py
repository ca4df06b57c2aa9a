"""The notebooks as files: clean, complete, and built on the library."""

import ast
import json
import re
from pathlib import Path

import pytest

from quasar_lab import exercises
from quasar_lab.course import LESSONS, START_PAGE, navigation

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ALL = [*NOTEBOOKS, *sorted((FOLDER / "solutions").glob("*.ipynb"))]
LESSON_FILES = [path for path in NOTEBOOKS if path.stem != START_PAGE]
MAX_LINES = 25  # a cell that fits on a screen
MAX_WIDTH = 105  # and on a page of the site, without scrolling
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


def checked(path: Path) -> list[str]:
    """The exercises that a notebook checks."""
    return re.findall(r"""\bcheck\(\s*["'](\w+)["']""", "\n".join(code(path)))


def test_there_are_notebooks() -> None:
    assert LESSON_FILES


def test_the_map_names_every_notebook() -> None:
    start = markdown(FOLDER / f"{START_PAGE}.ipynb")
    stems = [lesson.stem for lesson in LESSONS]
    assert [path.stem for path in LESSON_FILES] == stems
    for lesson in LESSONS:
        row = f"| {lesson.number} | [{lesson.title}]({lesson.stem}.ipynb) | {lesson.shows} |"
        assert f"{row} {lesson.minutes} min |" in start
        assert f"(notebooks/{lesson.stem}.ipynb)" in (FOLDER.parent / "README.md").read_text()


def test_every_exercise_belongs_to_one_notebook() -> None:
    asked = [name for path in LESSON_FILES for name in checked(path)]
    assert len(asked) == len(set(asked))


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
            assert max(map(len, text.splitlines())) <= MAX_WIDTH, text

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


@pytest.mark.parametrize("path", LESSON_FILES, ids=lambda path: path.stem)
class TestCourse:
    def test_has_the_title_and_the_time_of_the_map(self, path: Path) -> None:
        [lesson] = [each for each in LESSONS if each.stem == path.stem]
        text = markdown(path)
        assert text.startswith(f"# {lesson.number} · {lesson.title}"), text.split("\n")[0]
        assert re.search(rf"\b{lesson.minutes} minutes", text)

    def test_the_contents_list_every_section(self, path: Path) -> None:
        """An anchor is the heading with dashes for spaces, in JupyterLab and on the site."""
        first = source(cells(path)[0])
        headings = re.findall(r"^## (.+)$", markdown(path), flags=re.M)
        listed = re.findall(r"^\d+\. \[.+\]\(#(.+)\)$", first, flags=re.M)
        assert "**Contents**" in first
        assert listed == [heading.replace(" ", "-") for heading in headings]

    def test_begins_and_ends_with_the_same_links(self, path: Path) -> None:
        for cell in (cells(path)[0], cells(path)[-1]):
            assert source(cell).splitlines()[-1] == navigation(path.stem)

    def test_has_two_or_three_exercises_that_are_solved(self, path: Path) -> None:
        asked = checked(path)
        assert 2 <= len(asked) <= 3 and set(asked) <= set(exercises.names())
        solution = FOLDER / "solutions" / path.name
        assert checked(solution) == asked
        assert "\n".join(code(solution)).count('state == "right"') == len(asked)
        assert f"solutions/{path.name}" in markdown(path)


@pytest.mark.parametrize("path", LESSON_FILES, ids=lambda path: path.stem)
class TestLesson:
    def test_has_one_title_objectives_time_and_needs(self, path: Path) -> None:
        text = markdown(path)
        assert len(re.findall(r"^# ", text, flags=re.M)) == 1
        for heading in ("What you will learn", "Time", "Needs"):
            assert f"\n\n**{heading}**" in text, heading  # a paragraph of its own

    def test_every_figure_has_alternative_text(self, path: Path) -> None:
        for text in code(path):
            assert text.count("show(") <= text.count("alt="), text

    def test_a_sentence_on_what_to_see_follows_every_figure(self, path: Path) -> None:
        """The next text begins with words about the figure, not with the next section."""
        found = cells(path)
        for i, cell in enumerate(found):
            if cell["cell_type"] == "code" and re.search(r"\bshow\(|_surface\(", source(cell)):
                [text, *_] = [source(c) for c in found[i:] if c["cell_type"] == "markdown"]
                assert not text.startswith("#"), source(cell)
