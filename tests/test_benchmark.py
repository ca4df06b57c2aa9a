"""The benchmark: every method on every prompt, resumable, with the same target's own output."""

import json

import pandas as pd
import pytest
import torch

from quasar_lab import Prompt, UserError, calibrate, run_benchmark
from quasar_lab import runners as runners_module
from quasar_lab.benchmark import calibration_batches, verifiers
from quasar_lab.engines import build_target
from quasar_lab.methods import (
    BF16,
    FOUR_CELLS,
    FULL,
    INT8,
    INT8_BF16,
    INT8_HEAD,
    METHODS,
    PRUNED,
    DraftSettings,
)
from quasar_lab.quantized_linear import W8A8Linear
from quasar_lab.structure import in_bfloat16

TASKS = {
    "chat": [Prompt(1, "chat", ("one two one two", "and again")), Prompt(2, "chat", ("abcabc",))],
    "code": [Prompt(3, "code", ("x = x + 1; x = x +",))],
}
OPTIONS = dict(tasks=TASKS, max_new_tokens=12)


@pytest.fixture(scope="module")
def rows(tiny_language_model) -> pd.DataFrame:
    draft = DraftSettings(confirm_every=3)
    return run_benchmark(tiny_language_model, METHODS, draft=draft, **OPTIONS)


def test_every_method_runs_on_every_turn(rows) -> None:
    assert len(rows) == 4 * len(METHODS)  # 3 prompts, one of them with two turns
    assert set(rows.groupby("method").size()) == {4}
    assert (rows["new_tokens"] == rows["tokens"].map(len)).all()
    assert set(rows["engine"]) == {"quasar-lab decoder"}


def test_same_target_same_greedy_text(rows) -> None:
    """Speculation must not change what its own target says."""
    for _, group in rows.groupby(["question_id", "turn"]):
        tokens = dict(zip(group["method"], group["tokens"], strict=True))
        for method in METHODS.values():
            if method.precision in PRUNED:
                continue  # a model of its own, which has no plain method: see test_pruning
            exact = FULL in (method.precision, method.confirm)
            says = "plain" if exact else method.precision  # each has a plain method of its name
            assert tokens[method.name] == tokens[says], method.name


def test_calibration_texts_end_where_the_model_does(tiny_language_model, monkeypatch) -> None:
    """A text longer than the context of a small model ended the benchmark and the export."""
    config = tiny_language_model.model.config
    assert max(len(ids) for ids in calibration_batches(tiny_language_model, 8)) > 100
    monkeypatch.setattr(config, "max_position_embeddings", 100)
    batches = calibration_batches(tiny_language_model, 8)
    assert max(len(ids) for ids in batches) == 100
    calibrate(tiny_language_model.model, batches)


def test_every_speculative_method_drafts(rows) -> None:
    """A drafter that is built but never asked would pass every comparison of texts."""
    drafted = rows.groupby("method")["drafted"].sum()
    plain = [name for name, method in METHODS.items() if method.make_drafter is None]
    assert (drafted.drop(plain) > 0).all() and (drafted[plain] == 0).all()
    lossless = rows[rows["method"] == "lossless"]
    assert (lossless["drafted"] <= 3 * lossless["steps"]).all()  # blocks of confirm_every


def test_the_precisions_are_what_their_names_say(tiny_language_model) -> None:
    """Guards the rotary frequencies, which `model.bfloat16()` would round, and the tied output."""
    full = tiny_language_model.model
    models = verifiers(tiny_language_model, [FULL, BF16, INT8, INT8_BF16, INT8_HEAD])
    assert models[FULL] is full and next(full.parameters()).dtype == torch.float32
    for name, floats in ((BF16, torch.bfloat16), (INT8_BF16, torch.bfloat16),
                         (INT8, torch.float32), (INT8_HEAD, torch.float32)):  # fmt: skip
        model = models[name]
        assert {parameter.dtype for parameter in model.parameters()} == {floats}, name
        assert torch.equal(model.model.rotary_emb.inv_freq, full.model.rotary_emb.inv_freq)
        layers = {type(module) for module in model.model.layers.modules()}
        assert (W8A8Linear in layers) == (torch.nn.Linear not in layers) == (name != BF16)
        assert isinstance(model.lm_head, W8A8Linear) == (name == INT8_HEAD)
        tied = full.lm_head.weight is full.model.embed_tokens.weight
        if name != INT8_HEAD:
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    logits = {name: build_target(model).forward(torch.arange(9)) for name, model in models.items()}
    distance = {name: (each - logits[FULL]).abs().mean() for name, each in logits.items()}
    assert 0 < distance[BF16] < distance[INT8]  # 8 bits for each number, not 7 for a row's largest


def test_only_the_wanted_verifiers_are_kept(tiny_language_model) -> None:
    """Of a large model, one more that nobody runs may be what does not fit."""
    assert list(verifiers(tiny_language_model, [INT8_BF16])) == [INT8_BF16]


def test_the_bfloat16_model_is_a_copy(tiny_language_model) -> None:
    """Of a model that is bfloat16 already, too."""
    half = in_bfloat16(tiny_language_model.model)
    again = in_bfloat16(half)
    own = {parameter.data_ptr() for parameter in half.parameters()}
    assert not own & {parameter.data_ptr() for parameter in again.parameters()}


def test_the_four_cells_are_what_runs_by_default(tiny_language_model) -> None:
    tasks = {"code": TASKS["code"]}
    rows = run_benchmark(tiny_language_model, tasks=tasks, max_new_tokens=2)
    assert tuple(rows["method"]) == FOUR_CELLS


def test_plain_decoding_takes_one_step_a_token(rows) -> None:
    plain = rows[rows["method"].isin(["plain", "int8"])]
    assert (plain["steps"] == plain["new_tokens"]).all() and (plain["drafted"] == 0).all()


def test_every_method_continues_the_same_conversation(rows) -> None:
    """The second turn follows the baseline's answer, whatever the method's own was."""
    second = rows[(rows["question_id"] == 1) & (rows["turn"] == 1)]
    assert second["prompt_tokens"].nunique() == 1


def test_a_killed_run_continues_without_loss_or_repetition(tiny_language_model, tmp_path,
                                                           monkeypatch) -> None:  # fmt: skip
    path = tmp_path / "rows.jsonl"
    real, calls = runners_module.generate, []

    def dies_after(count: int):
        def generate(*args, **kwargs):
            # the warm-up's calls have no sampling argument
            if "sampling" in kwargs:
                calls.append(1)
                if len(calls) > count:
                    raise KeyboardInterrupt
            return real(*args, **kwargs)

        return generate

    for count in (3, 8):
        monkeypatch.setattr(runners_module, "generate", dies_after(count))
        with pytest.raises(KeyboardInterrupt):
            run_benchmark(tiny_language_model, results=path, **OPTIONS)
        calls.clear()
    monkeypatch.setattr(runners_module, "generate", real)
    rows = run_benchmark(tiny_language_model, results=path, **OPTIONS)
    keys = ["task", "question_id", "turn", "method"]
    assert len(rows) == 16 and not rows.duplicated(keys).any()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 1 + 16
    assert rows[[*keys, "tokens"]].equals(
        run_benchmark(tiny_language_model, results=path, **OPTIONS)[[*keys, "tokens"]]
    )


def test_sampled_runs_take_each_seed_and_greedy_ones_only_the_first(tiny_language_model) -> None:
    rows = run_benchmark(
        tiny_language_model, ["plain"], {"c": TASKS["code"]}, (0.0, 1.0), seeds=(1, 2),
        max_new_tokens=6,
    )  # fmt: skip
    assert rows[["temperature", "seed"]].to_numpy().tolist() == [[0, 1], [1, 1], [1, 2]]
    assert rows["tokens"][1] != rows["tokens"][2]


def test_the_transformers_engine_says_the_same(tiny_language_model, rows) -> None:
    other = run_benchmark(tiny_language_model, ["ngram"], engine="transformers", **OPTIONS)
    assert set(other["engine"]) == {"transformers"}
    mine = rows[rows["method"] == "ngram"]["tokens"].tolist()
    assert other[other["method"] == "ngram"]["tokens"].tolist() == mine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["eagle"]}, "unknown method 'eagle'"),
        ({"methods": []}, "unknown method ''"),
        ({"tasks": {}}, "no prompts"),
        ({"tasks": ["poems"]}, "poems"),
        ({"temperatures": []}, "must not be empty"),
        ({"temperatures": [-1.0]}, "temperature is -1"),
        ({"engine": "vllm"}, "engine 'vllm'"),
    ],
)
def test_wrong_settings_are_one_line(tiny_language_model, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_benchmark(tiny_language_model, **{**OPTIONS, **options})


def test_draft_settings_are_checked_when_they_are_made() -> None:
    with pytest.raises(UserError, match="num_draft_tokens"):
        DraftSettings(0)
    with pytest.raises(UserError):
        DraftSettings(max_ngram=1, min_ngram=2)
    for wrong in ({"kept_layers": 0.0}, {"confirm_every": 0}, {"max_adaptive_tokens": -1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            DraftSettings(**wrong)
