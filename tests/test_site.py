"""The site: alive without a network, and no link that leads nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from quasar_lab.course import LESSONS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "website"))

import build_site  # noqa: E402
import pages  # noqa: E402

FIGURE = {
    "data": [{"type": "scatter", "y": [1, 2], "name": "</script>"}],
    "layout": {"meta": {"alt": "Two points & a line"}},
}


def notebook_with(*outputs) -> nbformat.NotebookNode:
    return new_notebook(cells=[new_code_cell("1", outputs=list(outputs))])


def test_every_notebook_and_document_has_a_page() -> None:
    found = {page.source for page in build_site.sources()}
    assert set((ROOT / "notebooks").rglob("[0-9s]*.ipynb")) <= found
    assert set((ROOT / "docs").glob("*.md")) <= found
    targets = [page.target for page in build_site.sources()]
    assert len(targets) == len(set(targets))
    assert sum(target.startswith("notebooks/") for target in targets) >= len(LESSONS)


def test_a_plotly_figure_is_drawn_by_the_page() -> None:
    """nbconvert knows no plotly: its pages showed nothing in the figure's place."""
    page = pages.notebook_html(notebook_with(new_output("display_data", {pages.PLOTLY: FIGURE})))
    assert "Plotly.newPlot" in page and 'class="plotly-figure"' in page
    assert 'aria-label="Two points &amp; a line"' in page
    assert page.count("</script>") == 1  # a name in the data must not end the script


def test_formulas_need_no_script() -> None:
    text = pages.with_mathml(r"so $s_j$ and $$\frac{a}{b}$$, not `$x$` or $5 a $ or US$3")
    assert text.count("<math") == 2 and 'display="block"' in text
    assert "`$x$`" in text and "US$3" in text


def test_a_widget_without_a_stand_in_is_refused() -> None:
    widget = new_output("display_data", {pages.WIDGET: {}, "text/plain": "VBox(...)"})
    picture = new_output("display_data", {"text/html": "<img alt='the picture'>"})
    bar = new_output("display_data", {pages.WIDGET: {}, "text/plain": "Loading:  10%|#"})
    assert "the picture" in pages.notebook_html(notebook_with(widget, picture))
    assert "Loading" not in pages.notebook_html(notebook_with(bar))
    with pytest.raises(ValueError, match="no picture"):
        pages.notebook_html(notebook_with(widget))


@pytest.fixture
def small_site(tmp_path) -> Path:
    """Two notebooks that link to each other, one with a figure."""
    first, second, site = tmp_path / "a.ipynb", tmp_path / "sub" / "b.ipynb", tmp_path / "site"
    listed = [pages.Page(first, "index.html", "A"), pages.Page(second, "sub/b.html", "B")]
    figure = new_output("display_data", {pages.PLOTLY: FIGURE})
    first_notebook = notebook_with(figure)
    first_notebook.cells.insert(0, new_markdown_cell("# A\n\n[two](sub/b.ipynb#2.-Two-things)"))
    second_notebook = new_notebook(
        cells=[new_markdown_cell("# B\n\n[back](../a.ipynb)\n\n## 2. Two things\n\n$x^2$")]
    )
    site.mkdir()
    build_site.copy_assets(site)
    for page, notebook in zip(listed, (first_notebook, second_notebook), strict=True):
        pages.write_page(site, page, pages.notebook_html(notebook), listed)
    return site


def test_an_address_is_refused() -> None:
    shown = new_output("execute_result", {"text/plain": "<torch._C.Generator at 0x7f7b804f94f0>"})
    with pytest.raises(ValueError, match="says nothing to a reader"):
        pages.notebook_html(notebook_with(shown))


def test_links_between_pages_are_set_right(small_site) -> None:
    assert pages.check_links(small_site) == []
    text = (small_site / "index.html").read_text()
    assert 'href="sub/b.html#2.-Two-things"' in text and 'rel="next"' in text


@pytest.mark.parametrize(
    ("addition", "fault"),
    [
        ('<a href="nothing.html">x</a>', "nothing.html is not there"),
        ('<a href="sub/b.html#no">x</a>', "names no heading"),
        ('<script src="https://cdn.example/x.js"></script>', "from the network"),
        ('<img src="gone.png">', "gone.png is not there"),
    ],
)
def test_faults_are_found(small_site, addition: str, fault: str) -> None:
    page = small_site / "index.html"
    page.write_text(page.read_text().replace("</main>", addition + "</main>"))
    [found] = pages.check_links(small_site)
    assert fault in found


def test_links_of_the_api_reference_lead_somewhere(tmp_path) -> None:
    """Guards `make site`: it failed at its end over names that pdoc links but does not show."""
    code = "import sys, pathlib, build_site; build_site.write_reference(pathlib.Path(sys.argv[1]))"
    place = os.pathsep.join([str(ROOT), str(ROOT / "docs" / "website")])
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "api")], check=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": place},
    )  # fmt: skip
    (tmp_path / "index.html").touch()
    assert pages.check_links(tmp_path) == []


@pytest.mark.browser
def test_a_figure_is_alive_in_a_browser(small_site, browser) -> None:
    page = browser.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda r: faults.append(r.url) if not r.url.startswith("file:") else None)
    page.goto((small_site / "index.html").as_uri())
    page.locator(".plotly-figure .main-svg").first.wait_for()
    page.get_by_role("link", name="B →").click()
    page.locator("math").wait_for()
    page.close()
    assert not faults
