"""The default model itself: speculation must not change a token, and the whole demo must run."""

import functools

import pytest
import torch

from quasar_lab import generate, load_task
from quasar_lab.benchmark import quantize_for_benchmark
from quasar_lab.engines import build_target, engine_name
from quasar_lab.methods import DraftSettings
from quasar_lab.tasks import TASKS, conversation

pytestmark = pytest.mark.real_model

# long enough for drafts to be accepted, rejected and cut in every prompt
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def targets(real_model):
    """The full-precision and the INT8 verifier on the engine that the demo uses."""
    models = {"full": real_model.model, "int8": quantize_for_benchmark(real_model)}
    return {name: build_target(model) for name, model in models.items()}


@pytest.fixture(scope="module")
def plain(targets):
    """The greedy text without drafts after token ids, each made once."""
    return functools.cache(
        lambda precision, ids: (
            generate(targets[precision], torch.tensor(ids), max_new_tokens=NEW_TOKENS).tokens
        )
    )


@pytest.mark.parametrize("precision", ["full", "int8"])
@pytest.mark.parametrize("task", list(TASKS))
def test_greedy_speculative_equals_greedy_plain_on_every_prompt(
    real_model, targets, plain, task: str, precision: str
) -> None:
    """Case 7 on the real model: the same target gives the same text with and without drafts."""
    target, drafter = targets[precision], DraftSettings().ngram_drafter()
    drafted = 0
    for prompt in load_task(task):
        ids = real_model.encode_chat(conversation(prompt))
        speculative = generate(target, ids, drafter=drafter, max_new_tokens=NEW_TOKENS)
        assert speculative.tokens == plain(precision, tuple(ids.tolist())), prompt.question_id
        drafted += sum(len(step.draft_tokens) for step in speculative.steps)
    assert drafted > 0


def test_lossless_greedy_is_the_full_precision_text_on_every_prompt(
    real_model, targets, plain
) -> None:
    """INT8 verifies the drafts, full precision confirms: its own text, token for token. The step's
    rows are bits that do not depend on the rows beside them, so not even a near-tie may differ."""
    drafter, overruled = DraftSettings().ngram_drafter(), 0
    for task in TASKS:
        for prompt in load_task(task):
            ids = real_model.encode_chat(conversation(prompt))
            lossless = generate(
                targets["int8"],
                ids,
                drafter=drafter,
                confirm_with=targets["full"],
                max_new_tokens=NEW_TOKENS,
            )
            assert lossless.tokens == plain("full", tuple(ids.tolist())), prompt.question_id
            overruled += lossless.overruled
    # else the second tier was not needed, and nothing was shown; on one kind of text alone the two
    # models may agree, and the last bits of a calibration decide
    assert overruled > 0


def test_the_lean_decoder_runs_the_default_model(targets) -> None:
    assert engine_name(targets["int8"]) == "quasar-lab decoder"


def test_a_step_of_one_and_of_six_tokens_give_the_same_bits(real_model, targets) -> None:
    """A verify step's rows must be what plain decoding would compute, bit for bit: INT8 rounding
    would turn the last bit of a float into a whole step."""
    target = targets["int8"]
    ids = real_model.encode_chat("Count from one to twenty in words, please.")
    target.rollback(target.length)
    target.forward(ids[:-6])
    together = target.forward(ids[-6:])
    target.rollback(6)
    one_by_one = torch.cat([target.forward(token[None]) for token in ids[-6:]])
    assert torch.equal(together, one_by_one)
