"""The notebooks as a person meets them: JupyterLab in a real browser, driven through its pages.

Each test runs one notebook in fast mode, uses its widget with mouse or keyboard, and leaves a
screenshot in reports/browser. A script error in the page, or a request to any other host than
this machine, fails it.
"""

import contextlib
import re
import time
from collections.abc import Iterator

import jupyter_lab
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.real_model, pytest.mark.timeout(600)]

SCREENSHOTS = jupyter_lab.ROOT / "reports" / "browser"
SECOND = 1000  # playwright counts milliseconds
PATIENCE = 300 * SECOND  # for a notebook on a busy machine; nothing waits longer than it must
_KERNEL_IS_IDLE = """name => {
    const current = window.jupyterapp?.shell.currentWidget;
    return current?.context?.path?.endsWith(name)
        && current.sessionContext?.session?.kernel?.status === 'idle';
}"""
_ALL_CELLS_RAN = """() => window.jupyterapp.shell.currentWidget.content.widgets
    .filter(cell => cell.model.type === 'code')
    .every(cell => cell.model.executionCount !== null && cell.model.executionState !== 'running')
"""
_FIRST_ERROR = """() => window.jupyterapp.shell.currentWidget.content.widgets
    .filter(cell => cell.model.type === 'code')
    .flatMap(cell => cell.model.outputs.toJSON())
    .filter(output => output.output_type === 'error')
    .map(output => `${output.ename}: ${output.evalue}`)[0] ?? null
"""


@pytest.fixture(scope="module")
def lab(browser, real_model, tmp_path_factory) -> Iterator[tuple[str, str]]:
    """A running JupyterLab: (address, token). The model is fetched before the clock runs."""
    with jupyter_lab.running(tmp_path_factory.mktemp("lab")) as (address, token):
        yield address, token


@pytest.fixture
def page(browser, lab) -> Iterator:
    """A fresh page that remembers script errors and requests to other hosts."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(PATIENCE)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"script error: {error}"))
    page.on("console", lambda m: faults.append(f"console: {m.text}") if m.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            faults.append(f"request: {request.url}")
            if not request.url.startswith((lab[0], lab[0].replace("http", "ws"), "data:", "blob:"))
            else None
        ),
    )
    yield page
    page.close()
    jupyter_lab.shut_kernels_down(*lab)
    assert not faults


def open_notebook(page, lab: tuple[str, str], stem: str) -> None:
    """In a clean workspace: JupyterLab would open what the page before had open, and run that."""
    address, token = lab
    page.goto(f"{address}/lab/tree/notebooks/{stem}.ipynb?token={token}&reset")
    wait_for_kernel(page, stem)


def wait_for_kernel(page, stem: str) -> None:
    page.wait_for_function(_KERNEL_IS_IDLE, arg=f"{stem}.ipynb")


def run_all(page) -> None:
    """Through the menu, like a person; no cell may end with an error."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(_ALL_CELLS_RAN)
    assert page.evaluate(_FIRST_ERROR) is None


def keep_screenshot(view, name: str) -> None:
    """Of the page, or of a part of it."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    view.screenshot(path=SCREENSHOTS / f"{name}.png")


def eventually(locator, pattern: str) -> re.Match[str]:
    """Wait until the text of a part of the page matches; the match.

    Whoever needs a part of that text takes it from here: the page may show another a moment later.
    """
    end = time.monotonic() + PATIENCE / SECOND
    while True:
        # textContent, as innerText is empty while JupyterLab has the cell out of sight
        text = locator.first.text_content() or ""
        if found := re.search(pattern, text):
            return found
        assert time.monotonic() < end, f"{pattern!r} did not come, the page shows {text!r}"
        locator.page.wait_for_timeout(50)


def test_from_the_start_page_to_a_moved_slider(page, lab) -> None:
    """The path of a first-time reader: the map, a notebook, Run All, the slider."""
    open_notebook(page, lab, "start")
    keep_screenshot(page, "start")
    page.get_by_role("link", name="Outliers and smoothing").click()
    wait_for_kernel(page, "02_outliers_and_smoothing")
    run_all(page)
    surface = page.locator(".js-plotly-plot").first  # plotly comes from this machine as well
    surface.scroll_into_view_if_needed()
    surface.locator("canvas").first.wait_for()
    keep_screenshot(surface, "02_surface")
    panel = page.locator(".jp-OutputArea-output .widget-vbox").last
    panel.scroll_into_view_if_needed()
    state = panel.locator("[role=status]")
    picture = panel.locator("img")
    layer = int(eventually(state, r"^done: layer (\d+)").group(1))
    before = picture.get_attribute("src")
    handle = panel.locator(".widget-slider").first.locator(".noUi-handle")
    handle.focus()
    handle.press("ArrowRight")
    eventually(state, rf"^done: layer {layer + 1}\b")
    assert picture.get_attribute("src") != before
    assert picture.get_attribute("alt")
    # the copy for pages without a kernel must not stand below the live one
    assert not page.locator(".quasar-lab-fallback-outlier-explorer").first.is_visible()
    keep_screenshot(page, "02_outlier_explorer")


def test_the_replayer_steps_with_the_keyboard(page, lab) -> None:
    open_notebook(page, lab, "04_speculative_decoding")
    run_all(page)
    panel = page.locator(".jp-OutputArea-output .widget-vbox").last
    panel.scroll_into_view_if_needed()
    state = panel.locator("[role=status]")
    last = eventually(state, r"step 1 of (\d+)").group(1)
    handle = panel.locator(".noUi-handle")
    handle.focus()
    for step in (2, 3):
        handle.press("ArrowRight")
        eventually(state, f"step {step} of")
    eventually(panel, r"Step 3 of \d+\.")
    panel.get_by_role("button", name="Last").press("Enter")
    eventually(state, f"step {last} of {last}")
    keep_screenshot(page, "04_replayer")


def test_the_race_starts_and_stops(page, lab) -> None:
    from playwright.sync_api import TimeoutError as PlaywrightTimeoutError  # there, as `page` is

    open_notebook(page, lab, "08_live_throughput")
    run_all(page)
    panel = page.locator(".jp-OutputArea-output .widget-vbox").last
    panel.scroll_into_view_if_needed()
    state = panel.locator("[role=status]")
    eventually(state, "^ready")
    start = panel.get_by_role("button", name="Start")
    stop = panel.get_by_role("button", name="Stop")
    for _ in range(5):  # a page on a busy machine may show a race only when it is over
        start.click()
        with contextlib.suppress(PlaywrightTimeoutError):
            stop.click(timeout=20 * SECOND)
        ended = eventually(state, "^(stopped|done)").group(1)
        if ended == "stopped":
            break
    assert ended == "stopped"
    start.click()
    eventually(state, "^done")
    assert panel.locator("img").get_attribute("alt")
    keep_screenshot(page, "08_race")
