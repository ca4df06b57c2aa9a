"""`make site`: the notebooks, executed, with the documents and the API reference, as one website.

It needs no network to build or to read: formulas become MathML, plotly's script is copied from the
installed package, and a widget is replaced by the picture that its cell puts out besides. An
executed notebook is kept in build/notebooks until it or the library changes, so that an
interrupted build goes on where it was. At the end every link and anchor is checked.
"""

import argparse
import hashlib
import importlib.util
import os
import pkgutil
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pdoc
import pdoc.render
from nbclient import NotebookClient
from pages import Page, check_links, document_html, notebook_html, write_page

import quasar_lab
from quasar_lab.course import LESSONS, START_PAGE

ROOT = Path(__file__).parents[2]
EXECUTED = ROOT / "build" / "notebooks"
CELL_SECONDS = 1800
STARTUP_SECONDS = 600  # a busy machine is no reason to begin again
DOCUMENTS = {
    "own_model": "Your own model",
    "teaching": "Teaching with it",
    "glossary": "Glossary",
    "measurements": "Measurements",
    "limits": "Limits",
    "in_the_cloud": "Without installing",
}
REFERENCE = Page(ROOT / "quasar_lab", "api.html", "API reference")


def sources() -> Iterator[Page]:
    """Everything that becomes a page, in the order of the navigation."""
    notebooks = ROOT / "notebooks"
    yield Page(notebooks / f"{START_PAGE}.ipynb", "index.html", "Start")
    for lesson in LESSONS:
        title = f"{lesson.number} · {lesson.title}"
        yield Page(notebooks / f"{lesson.stem}.ipynb", f"notebooks/{lesson.stem}.html", title)
    for stem, title in DOCUMENTS.items():
        yield Page(ROOT / "docs" / f"{stem}.md", f"docs/{stem}.html", title)
    yield REFERENCE
    for path in sorted((notebooks / "solutions").glob("*.ipynb")):
        target = f"notebooks/solutions/{path.stem}.html"
        yield Page(path, target, f"Solutions {path.stem[:2]}", listed=False)


def executed(path: Path) -> Any:
    """The notebook with its outputs, from the last build if nothing has changed since."""
    digest = hashlib.sha256(path.read_bytes())
    for module in sorted((ROOT / "quasar_lab").rglob("*.py")):
        digest.update(module.read_bytes())
    digest.update(os.environ.get("QUASAR_LAB_FAST", "0").encode())
    kept = EXECUTED / f"{path.parent.name}-{path.stem}-{digest.hexdigest()[:16]}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    print(f"running {path.relative_to(ROOT)}", flush=True)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=CELL_SECONDS, startup_timeout=STARTUP_SECONDS, kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()  # fmt: skip
    EXECUTED.mkdir(parents=True, exist_ok=True)
    for old in EXECUTED.glob(f"{path.parent.name}-{path.stem}-*.ipynb"):
        old.unlink()
    temporary = kept.with_suffix(".part")
    nbformat.write(notebook, temporary)
    temporary.replace(kept)
    return notebook


def modules() -> list[str]:
    """The package and all its modules; Triton's only where it is installed."""
    found = pkgutil.walk_packages(quasar_lab.__path__, "quasar_lab.")
    names = ["quasar_lab", *sorted(module.name for module in found)]
    has_triton = importlib.util.find_spec("triton") is not None
    return [name for name in names if has_triton or "triton" not in name]


def module_list() -> str:
    """Markdown: each module with the first line of its docstring."""
    lines = [
        "# API reference",
        "",
        "The public names are in `quasar_lab`.",
        "",
        "| | |",
        "|---|---|",
    ]
    for name in modules():
        first = (importlib.import_module(name).__doc__ or "").strip().split("\n")[0]
        lines.append(f"| [{name}](api/{name.replace('.', '/')}.html) | {first} |")
    return "\n".join(lines)


def write_reference(folder: Path) -> None:
    """The docstrings as pages."""
    for name in quasar_lab.__all__:  # lazy names: pdoc looks into the module's own dictionary
        setattr(quasar_lab, name, getattr(quasar_lab, name))
    templates = Path(__file__).with_name("pdoc")
    pdoc.render.configure(docformat="google", show_source=False, template_directory=templates)
    with warnings.catch_warnings():
        # a package without __all__ brings its modules along
        warnings.filterwarnings("ignore", ".*has already been added")
        pdoc.pdoc(*modules(), output_directory=folder)


def copy_assets(site: Path) -> None:
    """What all pages load: plotly's script (from the installed package) and the style."""
    import plotly

    shutil.copy(Path(plotly.__file__).parent / "package_data" / "plotly.min.js", site)
    shutil.copy(Path(__file__).with_name("site.css"), site)


def build(site: Path, pages: list[Page]) -> None:
    """Write the site into an empty folder."""
    copy_assets(site)
    shutil.copytree(ROOT / "docs" / "images", site / "docs" / "images")
    for page in pages:
        if page is REFERENCE:
            body = document_html(module_list())
        elif page.source.suffix == ".ipynb":
            body = notebook_html(executed(page.source))
        else:
            body = document_html(page.source.read_text())
        write_page(site, page, body, pages)
    print("reading the docstrings", flush=True)
    write_reference(site / "api")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site")
    output = parser.parse_args().output.absolute()
    pages = list(sources())
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        site = Path(folder) / "site"
        site.mkdir()
        build(site, pages)
        if faults := check_links(site):
            sys.exit("\n".join(faults))
        shutil.rmtree(output, ignore_errors=True)
        site.rename(output)
    print(f"{len(pages)} pages: open {output / 'index.html'}")


if __name__ == "__main__":
    main()
