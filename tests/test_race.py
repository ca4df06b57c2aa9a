"""The race: turns by the lanes' own clocks, each lane's own text, a panel that starts and stops."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from quasar_lab import FastDecoder, UserError, generate, load_task
from quasar_lab.benchmark import quantize_for_benchmark
from quasar_lab.decoding import GenerationRun
from quasar_lab.methods import FOUR_CELLS, METHODS
from quasar_lab.race import DRAFTERS, Lane, Race, RaceSettings, race_table, run_race
from quasar_lab.tasks import conversation
from quasar_lab.widgets.race_panel import RacePanel, lanes_html

SETTINGS = RaceSettings(task="cnn_dm", max_new_tokens=24)


@pytest.fixture(scope="module")
def quantized(tiny_language_model):
    return quantize_for_benchmark(tiny_language_model)


@pytest.fixture(scope="module")
def race(tiny_language_model, quantized) -> Race:
    return Race(tiny_language_model, quantized)


@pytest.fixture
def panel(tiny_language_model, quantized):
    made = RacePanel(tiny_language_model, quantized, max_new_tokens=40, first_tokens=6)
    yield made
    made.close()


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_every_lane_writes_its_own_models_text(
    race, tiny_language_model, quantized, drafter: str
) -> None:
    """Guards against lanes that share a KV cache: their turns would mix the texts."""
    lanes = race.lanes(RaceSettings(task="cnn_dm", max_new_tokens=24, drafter=drafter))
    run_race(lanes)
    prompt = tiny_language_model.encode_chat(conversation(load_task("cnn_dm", 1)[0]))
    models = {"full": tiny_language_model.model, "int8": quantized}
    for name, lane in zip(FOUR_CELLS, lanes, strict=True):
        target = FastDecoder.from_model(models[METHODS[name].precision], max_length=2048)
        alone = generate(target, prompt, max_new_tokens=24)
        assert lane.run.tokens == alone.tokens, lane.label
        text = alone.text(tiny_language_model.tokenizer)
        shown = "".join(piece for piece, _ in lane.pieces)
        assert shown == text.rstrip("\N{REPLACEMENT CHARACTER}")
        assert lane.drafted == 0 or METHODS[name].make_drafter is not None
    assert sum(lane.drafted for lane in lanes) > 0
    assert ("(Quasar)" in lanes[-1].label) == (drafter == "n-gram")


class SteadyLane(Lane):
    """Finishes after `steps` steps of `seconds` each."""

    def __init__(self, seconds: float, steps: int) -> None:
        self.step_seconds, self.left, self.seconds = seconds, steps, 0.0
        self.run = SimpleNamespace(finish_reason="", stop=self._stop)

    def _stop(self) -> None:
        self.run.finish_reason = "stopped"

    def advance(self) -> None:
        self.seconds += self.step_seconds
        self.left -= 1
        if self.left == 0:
            self.run.finish_reason = "length"


def test_the_lane_whose_clock_is_behind_goes_next() -> None:
    slow, fast = SteadyLane(1.0, 3), SteadyLane(0.3, 20)
    order = []
    run_race([slow, fast], lambda lane: order.append("slow" if lane is slow else "fast"))
    assert order[:9] == ["slow", *["fast"] * 4, "slow", *["fast"] * 3]
    assert order.count("slow") == 3 and order.count("fast") == 20


def test_a_stopped_race_ends_within_a_step() -> None:
    lanes, seen = [SteadyLane(1.0, 50), SteadyLane(1.0, 50)], []
    run_race(lanes, seen.append, lambda: len(seen) == 3)
    assert len(seen) == 3
    assert [lane.run.finish_reason for lane in lanes] == ["stopped", "stopped"]


def test_the_table_counts_as_the_benchmark_does(race) -> None:
    lanes = race.lanes(SETTINGS)
    run_race(lanes)
    table = race_table(lanes)
    for lane in lanes:
        generation = lane.run.generation()
        row = table.loc[lane.label]
        assert row["tokens/s"] == pytest.approx(generation.tokens_per_second)
        assert row["L"] == generation.mean_acceptance_length
        if lane.drafted:
            assert row["drafts accepted"] == sum(generation.acceptance_counts) / lane.drafted
    assert table["times plain"].iloc[0] == 1


def test_accepted_drafts_are_underlined_and_text_is_escaped(race) -> None:
    lane = race.lanes(SETTINGS)[3]
    lane.pieces = [("<b>", False), ("copied", True)]
    page = lanes_html([lane])
    assert "&lt;b&gt;" in page and ">copied</u>" in page and "<b><" not in page


def test_the_first_race_is_there_without_a_front_end(panel) -> None:
    page = panel.fallback_html()
    assert "data:image/png" in page and "times plain" in page and "alt=" in page
    assert "ready" in panel.state.value and not panel.start_button.disabled
    assert all(len(lane.run.tokens) <= 6 for lane in panel.lanes)


def test_start_runs_in_the_background_with_the_settings(panel) -> None:
    panel.task.value, panel.length.value = "gsm8k", 3
    panel.temperature.value, panel.drafter.value = 0.8, "suffix"
    threads = threading.active_count()
    panel.start_button.click()
    assert panel.start_race() is False or "done" in panel.state.value
    panel.join(60)
    assert "done" in panel.state.value, panel.state.value
    assert (
        panel.lanes[1].label == "suffix"
        and panel.lanes[0].run.generation().trace.sampling.temperature == 0.8
    )
    assert max(len(step.draft_tokens) for lane in panel.lanes for step in lane.run.steps) <= 3
    assert threading.active_count() == threads
    assert panel.stop_button.disabled and not panel.start_button.disabled


def test_stop_ends_the_race_and_start_works_again(panel, monkeypatch) -> None:
    advance = Lane.advance
    monkeypatch.setattr(Lane, "advance", lambda lane: (time.sleep(0.02), advance(lane))[1])
    panel.start_button.click()
    time.sleep(0.1)
    panel.stop_button.click()
    panel.join(10)
    assert "stopped" in panel.state.value
    assert any(lane.run.finish_reason == "stopped" for lane in panel.lanes)
    monkeypatch.setattr(Lane, "advance", advance)
    panel.start_button.click()
    panel.join(60)
    assert "done" in panel.state.value
    assert all(lane.run.finish_reason in ("length", "eos") for lane in panel.lanes)


def test_a_rerun_cell_leaves_no_thread_and_no_decoder(tiny_language_model, quantized) -> None:
    first = RacePanel(tiny_language_model, quantized, max_new_tokens=500, first_tokens=2)
    decoder = weakref.ref(next(iter(first._race._targets.values())))
    first.start_race()
    second = RacePanel(tiny_language_model, quantized, max_new_tokens=4, first_tokens=2)
    try:
        assert not first._worker.is_alive() and first.start_race() is False
        gc.collect()
        assert decoder() is None
    finally:
        second.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"drafter": "eagle"}, "'eagle'"), ({"task": "poems"}, "poems"),
     ({"temperature": -1.0}, "temperature"), ({"num_draft_tokens": 0}, "num_draft_tokens")],
)  # fmt: skip
def test_wrong_settings_are_one_line(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RaceSettings(**options)


def test_a_run_taken_by_steps_is_generate(tiny_language_model) -> None:
    prompt = tiny_language_model.encode_chat("one two one two")
    run = GenerationRun(tiny_language_model.model, prompt, max_new_tokens=5)
    while not run.finish_reason:
        run.step()
    whole = generate(tiny_language_model.model, prompt, max_new_tokens=5)
    assert run.tokens == whole.tokens and run.generation().finish_reason == whole.finish_reason
