"""The trace, and what it predicts about other settings without the model."""

import json
import math

import pandas as pd
import pytest
import torch
from tiny_models import tiny_model

from quasar_lab.decoding import Generation, generate
from quasar_lab.draft import Draft
from quasar_lab.drafting import (
    AdaptiveDrafter,
    LayerSkipDrafter,
    ModelDrafter,
    NGramDrafter,
    SuffixDrafter,
)
from quasar_lab.errors import UserError
from quasar_lab.repricing import (
    NoDrafts,
    measured_step_cost,
    memory_step_cost,
    reprice,
    split_speedup,
)
from quasar_lab.sampling import SamplingConfig
from quasar_lab.trace import Step, Trace
from quasar_lab.verification import Verification

PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def greedy(tiny_llama):
    """A text that ends with its budget, drafted by n-grams."""
    return generate(tiny_llama, PROMPT, drafter=NGramDrafter(), max_new_tokens=50, eos_token_id=[])


@pytest.fixture(scope="module")
def sampled(tiny_llama):
    """Drafted by a part of the model: accepted and rejected with all kinds of p and q."""
    return generate(
        tiny_llama,
        PROMPT,
        drafter=LayerSkipDrafter(tiny_llama, 2, 4),
        sampling=SamplingConfig(temperature=1.0, seed=2),
        max_new_tokens=40,
        eos_token_id=[],
    )


def a_step(num_drafted: int, num_accepted: int, seconds: float, num_emitted: int | None = None):
    """A step with made-up tokens and times."""
    verification = Verification(
        num_accepted, 0, 1.0, (0.5,) * num_drafted, (1.0,) * num_drafted, ()
    )
    return Step(
        draft_tokens=(0,) * num_drafted,
        verification=verification,
        tokens=(0,) * (num_accepted + 1 if num_emitted is None else num_emitted),
        kv_length=0,
        num_fed=num_drafted + 1,
        draft_seconds=0.0,
        verify_seconds=seconds,
    )


def a_generation(*steps: Step) -> Generation:
    trace = Trace((1,), steps, SamplingConfig(), 99, (), "length", 0.0)
    return Generation.from_trace(trace)


# ---------------------------------------------------------------- the record


def test_the_trace_holds_every_decision(sampled):
    """Each accepted draft had u < p / q, each rejected one u >= p / q, nothing is missing."""
    table = sampled.trace.to_dataframe()
    assert set(table["kind"]) <= {
        "accepted", "rejected", "untested", "replacement", "bonus", "cut"
    }  # fmt: skip
    assert {"accepted", "rejected", "untested", "replacement"} <= set(table["kind"])
    accepted, rejected = (table[table["kind"] == kind] for kind in ("accepted", "rejected"))
    assert (accepted["uniform"] < accepted["p"] / accepted["q"]).all()
    assert (rejected["uniform"] >= rejected["p"] / rejected["q"]).all()
    assert (table["acceptance"].dropna() <= 1).all()
    assert table[table["kind"] == "untested"]["uniform"].isna().all()
    assert table[table["kind"].isin(["replacement", "bonus"])]["uniform"].notna().all()
    assert (table[table["kind"] == "rejected"]["residual_mass"] > 0).all()

    emitted = table[table["kind"].isin(["accepted", "replacement", "bonus"])]
    assert emitted["token"].tolist() == sampled.tokens
    first = len(PROMPT)
    assert emitted["position"].tolist() == list(range(first, first + len(sampled.tokens)))


def test_one_row_a_step(sampled):
    """The sums of the table are the figures of the report."""
    table = sampled.trace.to_dataframe(per="step")
    assert len(table) == len(sampled.steps)
    assert table["num_accepted"].tolist() == sampled.acceptance_counts
    assert table["num_emitted"].sum() == len(sampled.tokens)
    assert table["num_emitted"].mean() == pytest.approx(sampled.mean_acceptance_length)
    assert (table["num_fed"] == table["num_drafted"] + 1).all()
    assert table["seconds"].sum() == pytest.approx(sampled.decode_seconds)
    # the cache lags the text by one token
    assert (table["kv_length"] == len(PROMPT) + table["num_emitted"].cumsum() - 1).all()
    with pytest.raises(UserError, match="per is 'word'"):
        sampled.trace.to_dataframe(per="word")


def test_a_step_tells_its_draft_and_its_residual(sampled):
    """What a rejected draft was replaced from: the likeliest tokens of the residual."""
    table = sampled.trace.to_dataframe(per="step")
    for step, row in zip(sampled.steps, table.itertuples(), strict=True):
        assert (row.draft_tokens, row.tokens) == (step.draft_tokens, step.tokens)
        assert row.residual_top == step.verification.residual_top
        rejected = row.outcome == "replacement"
        assert rejected == (len(row.residual_top) > 0) == (row.residual_mass > 0)
    assert set(table["tier"]) == {"target"}
    tokens = sampled.trace.to_dataframe()
    assert (tokens["residual_top"].map(len) > 0).sum() > 0


def test_the_first_tier_is_in_the_table(tiny_llama):
    """Lossless mode: what the first tier wrote stands beside what was made of it."""
    result = generate(
        tiny_model("llama", seed=1),
        PROMPT,
        drafter=NGramDrafter(),
        confirm_with=tiny_llama,
        confirm_every=4,
        max_new_tokens=20,
        eos_token_id=[],
    )
    per_step = result.trace.to_dataframe(per="step").groupby("tier")["num_emitted"]
    assert per_step.size().to_dict() == {
        "target": len(result.steps),
        "first": len(result.trace.first_tier_steps),
    }
    assert per_step.sum()["target"] == len(result.tokens)
    table = result.trace.to_dataframe()
    emitted = table[table["kind"].isin(["accepted", "replacement", "bonus"])]
    text = PROMPT + result.tokens
    drafted = dict()
    for step, kv in zip(result.steps, [4, *(s.kv_length for s in result.steps)], strict=False):
        drafted |= {kv + 1 + i: [] for i in range(len(step.draft_tokens))}
    target = emitted[emitted["tier"] == "target"]
    assert [text[i] for i in target["position"]] == target["token"].tolist() == result.tokens
    first = emitted[emitted["tier"] == "first"]
    assert set(first["position"]) <= set(drafted), "the first tier wrote where a draft stood"


@pytest.mark.parametrize("per", ["token", "step"])
def test_a_table_without_steps_has_its_columns(tiny_llama, greedy, per):
    """table["kind"] must not be a KeyError because nothing was generated."""
    empty = generate(tiny_llama, PROMPT, max_new_tokens=0).trace.to_dataframe(per=per)
    assert len(empty) == 0
    assert list(empty.columns) == list(greedy.trace.to_dataframe(per=per).columns)


def test_a_greedy_trace_draws_nothing(greedy):
    """At temperature 0 p is one-hot and no number is drawn."""
    table = greedy.trace.to_dataframe()
    assert table["uniform"].isna().all()
    assert set(table[table["kind"] == "accepted"]["p"]) == {1.0}
    assert set(table[table["kind"] == "rejected"]["p"]) == {0.0}


def test_drafts_after_the_end_are_marked_as_cut():
    """A rejected draft beyond the end decided nothing."""
    kinds = [row["kind"] for row in a_step(4, 3, 1.0, num_emitted=2).rows()]
    assert kinds == ["accepted", "accepted", "cut", "cut"]
    kinds = [row["kind"] for row in a_step(3, 1, 1.0).rows()]
    assert kinds == ["accepted", "rejected", "untested", "replacement"]
    assert [row["kind"] for row in a_step(1, 1, 1.0).rows()] == ["accepted", "bonus"]


def test_save_and_load(greedy, sampled, tiny_llama, tmp_path):
    """What is read equals what was written, to the last bit of every probability."""
    lossless = generate(
        tiny_llama,
        PROMPT,
        drafter=NGramDrafter(),
        confirm_with=tiny_llama,
        sampling=SamplingConfig(temperature=0.7, top_k=9, seed=1),
        max_new_tokens=12,
    )
    for index, generation in enumerate((greedy, sampled, lossless)):
        path = tmp_path / "deeper" / f"{index}.json"
        generation.save(path)
        again = Generation.load(path)
        assert again == generation
        pd.testing.assert_frame_equal(again.trace.to_dataframe(), generation.trace.to_dataframe())
    assert len(lossless.trace.first_tier_steps) > 0
    names = sorted(path.name for path in (tmp_path / "deeper").iterdir())
    assert names == ["0.json", "1.json", "2.json"], "nothing temporary is left"


def test_a_save_that_fails_leaves_the_old_file(greedy, tmp_path, monkeypatch):
    """A disk that fills up must not take the last good trace with it."""
    path = tmp_path / "trace.json"
    greedy.save(path)
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(UserError, match=r"cannot write .*No space"):
        greedy.save(path)
    assert path.read_text() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": "quasar-lab trace 1"}',
        '{"format": "other"}',
        "\x00",
        "[" * 100_000,
    ],
    ids=lambda text: text[:9],
)
def test_another_file_is_refused_in_one_line(tmp_path, text):
    """A truncated or foreign file: told, without a traceback from inside."""
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UserError, match="no trace that quasar-lab saved") as error:
        Trace.load(path)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="cannot read"):
        Trace.load(tmp_path / "missing.json")


def test_a_half_written_trace_is_refused(greedy, tmp_path):
    """Fields that are gone or of another type."""
    path = tmp_path / "trace.json"
    greedy.save(path)
    data = json.loads(path.read_text())
    steps = data["steps"]
    verification = steps[0]["verification"]

    def first(**changes):
        return {"steps": [{**steps[0], **changes}, *steps[1:]]}

    def inside(**changes):
        return first(verification={**verification, **changes})

    for change in (
        {"steps": [{}]},
        {"steps": 5},
        {"sampling": {"temperature": -1}},
        {"extra": 1},
        {"token_budget": "many"},
        {"token_budget": True},
        {"prompt_ids": "abc"},
        {"prompt_ids": ["a"]},
        {"prompt_ids": []},
        {"eos_token_ids": 2},
        {"finish_reason": None},
        first(tokens=["x"]),
        first(tokens=[]),
        first(tokens=[96, 95]),
        first(draft_tokens=[1] * 9),
        first(kv_length=1.5),
        first(verify_seconds="fast"),
        inside(p_draft=[1.0] * 9),
        inside(q_draft=[0.0] * len(steps[0]["draft_tokens"]) or [0.5]),
        inside(num_accepted=99),
        inside(residual_top=[[1]]),
    ):
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(UserError, match="no trace"):
            Trace.load(path)
    path.write_text(json.dumps(data))
    assert Trace.load(path) == greedy.trace


# ---------------------------------------------------------------- other settings


@pytest.mark.parametrize(
    "drafter",
    [
        NGramDrafter(num_draft_tokens=1),
        NGramDrafter(num_draft_tokens=8),
        NGramDrafter(2, 2, 3),
        NGramDrafter(5, 1, 5, match="first"),
        SuffixDrafter(),
        SuffixDrafter(3, length_factor=1.0),
        AdaptiveDrafter(NGramDrafter(num_draft_tokens=9), step_cost=lambda fed: 1 + 0.1 * fed),
        NoDrafts(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("end", ["budget", "eos"])
def test_the_predicted_steps_are_those_of_a_real_run(tiny_llama, greedy, drafter, end):
    """One recorded text tells every other deterministic drafter's steps exactly."""
    eos = [] if end == "budget" else [greedy.tokens[33]]
    arguments = dict(max_new_tokens=50, eos_token_id=eos)
    recorded = generate(tiny_llama, PROMPT, drafter=NGramDrafter(), **arguments)
    real = generate(tiny_llama, PROMPT, drafter=drafter, **arguments)
    predicted = reprice(recorded, drafter)
    assert predicted.acceptance_counts == real.acceptance_counts
    assert predicted.mean_acceptance_length == real.mean_acceptance_length
    assert [s.num_fed for s in predicted.steps] == [s.num_fed for s in real.steps]
    assert [s.tokens for s in predicted.steps] == [s.tokens for s in real.steps]
    assert [s.kv_length for s in predicted.steps] == [s.kv_length for s in real.steps]
    assert real.finish_reason == ("length" if end == "budget" else "eos")


def test_sampled_text_predicts_lookup_drafters_in_distribution():
    """Drawing first and comparing is accepting with probability p: L within 4 standard errors."""
    model = tiny_model("llama")
    drafter = NGramDrafter(1, 1, 3)

    def run(seed, used):
        sampling = SamplingConfig(temperature=0.3, seed=seed)
        return generate(
            model, PROMPT, drafter=used, sampling=sampling, max_new_tokens=60, eos_token_id=[]
        )

    real = torch.tensor([run(seed, drafter).mean_acceptance_length for seed in range(8)])
    predicted = torch.tensor(
        [reprice(run(seed + 100, None), drafter).mean_acceptance_length for seed in range(8)]
    )
    error = math.sqrt(float(real.var() + predicted.var()) / 8)
    assert abs(float(real.mean() - predicted.mean())) < 4 * error
    assert float(real.mean()) > 1.05


def test_predicted_times_are_those_of_a_real_run(tiny_llama, monkeypatch):
    """With a clock that the model's size alone moves, prediction and run agree to rounding."""
    clock = [0.0]
    monkeypatch.setattr("quasar_lab.sequence.time.perf_counter", lambda: clock[0])
    from quasar_lab.targets import HuggingFaceTarget

    class Timed(HuggingFaceTarget):
        def forward(self, ids, num_logits=None):
            clock[0] += 10.0 + 0.5 * len(ids)
            return super().forward(ids, num_logits)

    def run(drafter):
        return generate(
            Timed(tiny_llama), PROMPT, drafter=drafter, max_new_tokens=50, eos_token_id=[]
        )

    recorded = run(NGramDrafter())
    cost = measured_step_cost([recorded])
    for drafter in (NGramDrafter(num_draft_tokens=9), SuffixDrafter(), NoDrafts()):
        predicted = reprice(recorded, drafter, step_cost=cost)
        assert predicted.tokens_per_second == pytest.approx(run(drafter).tokens_per_second)


def test_the_recorded_drafts_at_another_price(greedy):
    """Without a drafter the steps stay and only their cost changes: bytes over bandwidth."""
    cost = memory_step_cost(2e9, 1e10, kv_bytes_per_token=1e6, seconds_per_token=0.01)
    assert cost(1, 99) == pytest.approx(0.2 + 0.01 + 0.01)
    repriced = reprice(greedy, step_cost=cost, draft_seconds=0.001)
    assert repriced.acceptance_counts == greedy.acceptance_counts
    drafting = sum(bool(step.draft_tokens) for step in greedy.steps)
    expected = sum(
        0.2 + 1e-4 * (step.kv_length - len(step.tokens) + step.num_fed) + 0.01 * step.num_fed
        for step in greedy.steps
    )
    assert repriced.decode_seconds == pytest.approx(expected + 0.001 * drafting)
    half = reprice(greedy, step_cost=memory_step_cost(1e9, 1e10))
    full = reprice(greedy, step_cost=memory_step_cost(2e9, 1e10))
    assert half.tokens_per_second == pytest.approx(2 * full.tokens_per_second)


def test_a_cost_measured_at_some_sizes_is_drawn_out_to_others():
    """Medians at the sizes seen, straight lines between and beyond."""
    steps = [a_step(0, 0, s) for s in (1.0, 9.0, 1.0)] + [a_step(4, 0, 3.0), a_step(5, 0, 4.0)]
    cost = measured_step_cost([a_generation(*steps)])
    assert [cost(fed, 0) for fed in (1, 3, 5, 6, 8)] == [1.0, 2.0, 3.0, 4.0, 6.0]
    assert measured_step_cost([a_generation(a_step(2, 0, 5.0))])(1, 0) == 5.0
    with pytest.raises(UserError, match="no steps"):
        measured_step_cost([])


def test_what_cannot_be_predicted_is_refused(tiny_llama, greedy, sampled):
    """Drafts that were sampled depend on more than the text; times need a cost."""
    with pytest.raises(UserError, match=r"ModelDrafter.*drafts by sampling"):
        reprice(sampled, ModelDrafter(tiny_llama, 2))
    assert math.isnan(reprice(greedy, NGramDrafter()).tokens_per_second)
    with pytest.raises(UserError, match=r"nan seconds.*step_cost"):
        reprice(greedy, AdaptiveDrafter(NGramDrafter()))
    reprice(greedy, AdaptiveDrafter(NGramDrafter()), step_cost=memory_step_cost(1e9, 1e9))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(generation=[1, 2]), "generation is .*Trace"),
        (dict(drafter="ngram"), "drafter is str"),
        (dict(drafter=NGramDrafter), "drafter is the class NGramDrafter"),
        (dict(draft_seconds=-1), "draft_seconds is -1"),
        (dict(draft_seconds=math.nan), "draft_seconds is nan"),
        (dict(step_cost=0.5), "step_cost is 0.5.*function"),
        (dict(step_cost=lambda fed, cached: -1.0), "step_cost is -1.0.*above 0"),
    ],
)
def test_likely_slips_in_reprice_are_told(greedy, arguments, message):
    """Each gave a wrong prediction without a word, or a traceback from inside."""
    with pytest.raises(UserError, match=message) as error:
        reprice(arguments.pop("generation", greedy), **arguments)
    assert "\n" not in str(error.value)


def test_likely_slips_in_costs_are_told(greedy):
    """NaN compares as nothing: a check of the form x < 0 lets it through."""
    for wrong in (None, math.nan, 0, -1, "1e9", math.inf, True):
        for name in ("weight_bytes", "bandwidth"):
            with pytest.raises(UserError, match=f"{name} is {wrong!r}"):
                memory_step_cost(**{"weight_bytes": 1e9, "bandwidth": 1e9, name: wrong})
        if wrong != 0:
            with pytest.raises(UserError, match=f"kv_bytes_per_token is {wrong!r}"):
                memory_step_cost(1e9, 1e9, kv_bytes_per_token=wrong)
    assert measured_step_cost(greedy)(1, 0) == measured_step_cost([greedy])(1, 0) > 0
    for wrong in ([1], "runs", None):
        with pytest.raises(UserError, match="generation is"):
            measured_step_cost(wrong)
    with pytest.raises(UserError, match=r"other is .*Generation"):
        split_speedup(greedy, None)


def test_a_line_through_measured_times_stays_above_zero():
    """Noise may make the larger step the faster one: far out the line would cross zero."""
    cost = measured_step_cost(a_generation(a_step(0, 0, 1.0), a_step(1, 0, 0.5)))
    assert cost(2, 0) == 0.5 and cost(9, 0) == 0.05


def test_a_model_drafter_is_predicted_at_temperature_0(tiny_llama, greedy):
    """A greedy drafter is deterministic: only the verifier need not run again."""
    drafter = LayerSkipDrafter(tiny_llama, 2, 4)
    real = generate(tiny_llama, PROMPT, drafter=drafter, max_new_tokens=50, eos_token_id=[])
    assert reprice(greedy, LayerSkipDrafter(tiny_llama, 2, 4)).acceptance_counts == (
        real.acceptance_counts
    )


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_model_drafter_is_told_how_the_text_was_made(tiny_llama, penalty):
    """It drafts no further than an end token and under the same penalty, as it does in a run."""
    sampling = SamplingConfig(repetition_penalty=penalty)
    arguments = dict(sampling=sampling, max_new_tokens=50)
    text = generate(tiny_llama, PROMPT, eos_token_id=[], **arguments).tokens

    def drafter():
        return ModelDrafter(tiny_llama, 8)

    shorter = 0
    for eos in text[4:40:3]:
        recorded = generate(tiny_llama, PROMPT, eos_token_id=eos, **arguments)
        real = generate(tiny_llama, PROMPT, eos_token_id=eos, drafter=drafter(), **arguments)
        predicted = reprice(recorded, drafter())
        assert [s.draft_tokens for s in predicted.steps] == [s.draft_tokens for s in real.steps]
        shorter += len(real.steps[-1].draft_tokens) < 8
    assert shorter > 0, "some drafts must end at the end token"


def test_a_first_tier_stays_with_its_own_drafts(tiny_llama):
    """Another drafter has no first tier: its rejected drafts are no blocks overruled."""
    lossless = generate(
        tiny_model("llama", seed=1),
        PROMPT,
        confirm_with=tiny_llama,
        max_new_tokens=20,
        eos_token_id=[],
    )
    assert lossless.overruled > 0 and lossless.overrule_rate > 0
    cost = memory_step_cost(1e9, 1e9)
    same = reprice(lossless, step_cost=cost)
    assert same.trace.first_tier_steps == lossless.trace.first_tier_steps
    assert same.overruled == lossless.overruled
    other = reprice(lossless, NGramDrafter(), step_cost=cost)
    assert other.trace.first_tier_steps == () and other.overruled == 0
    assert math.isnan(other.overrule_rate)


def test_an_ordinary_run_overrules_nothing(greedy):
    """A rejected n-gram is no token of a first tier that full precision replaced."""
    assert any(step.outcome == "replacement" for step in greedy.steps)
    assert greedy.overruled == 0 and math.isnan(greedy.overrule_rate)


def test_drafts_beyond_the_budget_are_not_counted():
    """A drafter that ignores max_tokens is cut in the prediction as it is in the run."""

    class TooMany(NoDrafts):
        def propose(self, max_tokens):
            return Draft([0] * 50)

    steps = reprice(a_generation(a_step(0, 0, 1.0), a_step(0, 0, 1.0)), TooMany()).steps
    assert [len(step.draft_tokens) for step in steps] == [50]
    tight = Trace((1,), (a_step(2, 2, 1.0),), SamplingConfig(), 3, (), "length", 0.0)
    assert [len(step.draft_tokens) for step in reprice(tight, TooMany()).steps] == [2]


# ---------------------------------------------------------------- the two terms of a gain


def test_case_21_a_run_against_itself_is_one():
    """Case 21: plain against plain: 1.00 in speed and in both terms."""
    plain = a_generation(*[a_step(0, 0, 0.25)] * 8)
    split = split_speedup(plain, plain)
    assert (split.speedup, split.length_term, split.step_term) == (1.0, 1.0, 1.0)


def test_case_22_a_longer_text_per_step_at_a_slower_step():
    """Case 22: L doubles, a step takes 1.6 times as long: 1.25x, and both terms are told."""
    plain = a_generation(*[a_step(0, 0, 0.25)] * 8)
    speculative = a_generation(a_step(3, 0, 0.4), a_step(3, 2, 0.4), a_step(3, 1, 0.4))
    split = split_speedup(plain, speculative)
    assert split.length_term == pytest.approx(2.0)
    assert split.step_term == pytest.approx(1.6)
    assert split.speedup == pytest.approx(1.25)
    assert split.speedup == pytest.approx(speculative.tokens_per_second / plain.tokens_per_second)
    with pytest.raises(UserError, match="reference has no steps"):
        split_speedup(a_generation(), plain)
