"""A cell that is run again, and a run that is started again, leave nothing behind.

Each widget is made ten times under one key, as by ten runs of its cell, and used each time.
"""

import contextlib
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from ipywidgets.widgets import widget as ipywidgets_registry
from tiny_models import tiny_model

from quasar_lab import NGramDrafter, QuantizationConfig, calibrate, generate, quantize
from quasar_lab.widgets.cost_calculator import CostCalculator
from quasar_lab.widgets.fidelity_explorer import FidelityExplorer
from quasar_lab.widgets.outlier_explorer import OutlierExplorer
from quasar_lab.widgets.panel import Panel
from quasar_lab.widgets.pruning_explorer import PruningExplorer
from quasar_lab.widgets.race_panel import RacePanel
from quasar_lab.widgets.replayer import Replayer
from quasar_lab.widgets.what_if_panel import WhatIfPanel

RUNS = 10


class Letters:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Runner(Panel):
    """A panel whose run holds a large array, as a race holds its decoders."""

    def __init__(self) -> None:
        super().__init__("runner", [])

    def use(self) -> None:
        self.held = np.ones(4_000_000)  # 32 MB
        started = threading.Event()

        def run(stop: threading.Event) -> None:
            started.set()
            stop.wait(20)

        assert self.start(run) and started.wait(10)
        assert not self.start(run)  # started twice: the second does nothing


def outlier_explorer(_lab) -> Callable[[], Panel]:
    model = tiny_model("llama", dtype=torch.float32)
    stats = calibrate(model, [torch.arange(1, 40)])

    def make() -> Panel:
        panel = OutlierExplorer(model, stats)
        panel.layer.value = (panel.layer.value + 1) % 3
        panel.flush()
        return panel

    return make


def fidelity_explorer(_lab) -> Callable[[], Panel]:
    frame = pd.DataFrame(
        [
            {"variant": "m2", "text": text, "label": "chat", "temperature": temperature,
             "kl": 0.01 * row, "reverse_kl": 0.01, "js": 0.002, "tv": 0.1, "top1_match": True}
            for text in (0, 1) for temperature in (0.5, 1.0) for row in range(20)
        ]
    )  # fmt: skip

    def make() -> Panel:
        panel = FidelityExplorer(frame)
        panel.metric.value = "tv"
        panel.flush()
        return panel

    return make


def replayer(_lab) -> Callable[[], Panel]:
    generation = generate(
        tiny_model("llama"), [5, 6, 7, 5, 6], drafter=NGramDrafter(), max_new_tokens=12,
        eos_token_id=[],
    )  # fmt: skip

    def make() -> Panel:
        panel = Replayer(generation, Letters())
        panel.slider.value = 2
        panel.flush()
        return panel

    return make


def cost_calculator(_lab) -> Callable[[], Panel]:
    def make() -> Panel:
        panel = CostCalculator()
        panel.acceptance.value = 0.6
        panel.flush()
        return panel

    return make


def what_if(_lab) -> Callable[[], Panel]:
    def make() -> Panel:
        panel = WhatIfPanel()
        panel.acceptance.value = 0.6
        panel.flush()
        return panel

    return make


def pruning_explorer(_lab) -> Callable[[], Panel]:
    table = pd.DataFrame(
        [
            {"strategy": "uniform", "keep": keep, "layers": round(30 * keep), "kl": 1 / keep - 0.9,
             "tv": 1 - keep, "top1": keep, "text": "a text"}
            for keep in (1.0, 0.75, 0.5)
        ]
    )  # fmt: skip

    def make() -> Panel:
        panel = PruningExplorer(table)
        panel.keep.value = 0.75
        panel.flush()
        return panel

    return make


def race(lab) -> Callable[[], Panel]:
    int8 = quantize(lab.model, config=QuantizationConfig(smoothing="none"))

    def make() -> Panel:
        panel = RacePanel(lab, int8, max_new_tokens=4, first_tokens=2)
        assert panel.start_race()
        panel.stop()
        return panel

    return make


def runner(_lab) -> Callable[[], Panel]:
    def make() -> Panel:
        panel = Runner()
        panel.use()
        return panel

    return make


def measured() -> tuple[int, int, int]:
    """(threads, widgets alive, bytes) of this process."""
    gc.collect()
    # what glibc keeps for the next allocation of a thread that has ended is not held by anyone
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    widgets_alive = len(ipywidgets_registry._instances)
    return threading.active_count(), widgets_alive, psutil.Process().memory_info().rss


WIDGETS = [
    outlier_explorer, fidelity_explorer, replayer, cost_calculator, what_if, pruning_explorer, race,
    runner,
]  # fmt: skip


@pytest.mark.parametrize("widget", WIDGETS)
def test_ten_runs_leave_no_more_than_one(widget, tiny_language_model) -> None:
    """Memory after ten runs of a cell within 5 % of after one; no thread, no widget more."""
    make = widget(tiny_language_model)
    panel = make()
    threads, alive, memory = measured()
    former = []
    for _ in range(RUNS - 1):
        former.append(weakref.ref(panel))
        panel = make()
    after = measured()
    assert after[0] == threads
    assert after[1] == alive
    assert after[2] <= 1.05 * memory
    assert [each() for each in former] == [None] * len(former)  # nor what they hold
    panel.close()
    gc.collect()
    assert threading.active_count() <= threads


def test_ten_starts_and_stops_leave_no_more_than_one() -> None:
    panel = Runner()
    panel.use()
    panel.stop()
    panel.join(10)
    before = measured()
    for _ in range(RUNS - 1):
        panel.use()
        panel.stop()
        panel.join(10)
        assert "stopped" in panel.state.value
    after = measured()
    assert after[:2] == before[:2] and after[2] <= 1.05 * before[2]
    panel.close()
