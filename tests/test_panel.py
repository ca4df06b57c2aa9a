"""Widgets: debounced, stoppable, and nothing left behind when a cell is run again."""

import threading
import time

import ipywidgets as widgets
import pytest

from quasar_lab import UserError
from quasar_lab.widgets.panel import Panel


@pytest.fixture
def panel():
    slider = widgets.IntSlider()
    panel = Panel("test", [slider])
    yield panel, slider
    panel.close()


def test_five_quick_changes_give_one_result(panel) -> None:
    """Case 36: one final output for the last value, none stacked."""
    panel, slider = panel
    seen = []
    panel.observe(lambda: seen.append(slider.value), slider)
    for value in (1, 2, 3, 4, 5):
        slider.value = value
    panel.flush()
    assert seen == [5]


def test_an_update_shows_that_it_is_running_and_that_it_is_done(panel) -> None:
    """Half a second without a sign reads as a broken slider."""
    panel, slider = panel
    seen = []
    panel.observe(lambda: seen.append(panel.state.value), slider)
    slider.value = 1
    panel.flush()
    assert "running" in seen[0] and "done" in panel.state.value


def test_who_sees_the_end_of_a_run_may_start_the_next(panel) -> None:
    """Guards Start: pressed as soon as "done" was on the page it could be swallowed, for the
    thread of the run was still alive."""
    panel, _ = panel
    pressed, started = threading.Event(), []

    def press_start(change) -> None:
        if "done" in change["new"] and not pressed.is_set():
            pressed.set()
            started.append(panel.start(lambda stop: None))

    panel.state.observe(press_start, names="value")
    assert panel.start(lambda stop: None)
    panel.join(timeout=10)
    panel.join(timeout=10)  # of the second run
    assert started == [True] and "done" in panel.state.value


def test_stop_ends_a_run_and_the_next_start_works(panel) -> None:
    """Case 37."""
    panel, _ = panel
    steps = []

    def run(stop: threading.Event) -> None:
        while not stop.is_set():
            steps.append(1)
            time.sleep(0.001)

    assert panel.start(run)
    assert not panel.start(run)  # one run at a time
    panel.stop()
    panel.join(timeout=10)
    assert "stopped" in panel.state.value
    count = len(steps)
    assert panel.start(lambda stop: None)
    panel.join(timeout=10)
    assert "done" in panel.state.value and len(steps) == count


@pytest.mark.parametrize("error", [UserError("layer 99: choose 0 to 29"), KeyError("boom")])
def test_an_error_is_shown_and_escaped(panel, error: Exception) -> None:
    panel, _ = panel

    def update() -> None:
        raise error

    panel.refresh(update)
    assert "error" in panel.state.value and "<b>" not in panel.state.value
    panel.set_state("error", "<b>x</b>")
    assert "&lt;b&gt;" in panel.state.value


def test_running_the_cell_again_leaves_nothing_behind() -> None:
    """A re-executed cell must not leave a thread that writes into the old picture."""
    started = threading.Event()

    def run(stop: threading.Event) -> None:
        started.set()
        stop.wait(20)

    before = threading.active_count()
    first = Panel("again", [])
    first.start(run)
    assert started.wait(10)
    second = Panel("again", [])
    assert threading.active_count() == before
    assert not first.start(run)
    second.close()
    assert Panel._open.get("again") is None
