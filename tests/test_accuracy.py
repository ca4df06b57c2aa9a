"""Right answers, paired; likelihoods and answers as lm-eval asks for them; perplexity."""

import json
import math
import sys
from importlib.util import find_spec

import pytest
import torch

from quasar_lab import QuantizationConfig, UserError, cli, generate, quantize
from quasar_lab.accuracy import compare_accuracy, local_task, paired
from quasar_lab.perplexity import perplexity, token_log_likelihoods

# installed with the extra "test"; a user may be without it
needs_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval (extra accuracy) is not installed"
)


@pytest.fixture(scope="module")
def quantized(tiny_language_model):
    return quantize(tiny_language_model.model, config=QuantizationConfig(smoothing="none"))


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "choices.jsonl"
    rows = [
        {"question": f"{n} + {n}?", "choices": [f"{2 * n}", "no", "a lot"], "answer": n % 3}
        for n in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


# --- the paired test ------------------------------------------------------------------------


def test_mcnemar_counts_only_the_questions_that_tell_them_apart() -> None:
    """10 against 2 discordant questions: p = 2 * P(X <= 2), X ~ Binomial(12, 1/2) = 158 / 4096."""
    full = [1] * 10 + [0] * 2 + [1] * 50 + [0] * 38
    int8 = [0] * 10 + [1] * 2 + [1] * 50 + [0] * 38
    result = paired(full, int8)
    assert (result["only_full"], result["only_int8"]) == (10, 2)
    assert result["p_value"] == pytest.approx(158 / 4096)
    assert result["full"] == 0.6 and result["int8"] == 0.52
    assert result["difference"] == pytest.approx(-0.08)
    assert result["difference_low"] < -0.08 < result["difference_high"]


def test_the_same_answers_are_no_difference() -> None:
    result = paired([1, 0, 1], [1, 0, 1])
    assert result["p_value"] == 1.0 and result["difference_low"] == result["difference_high"] == 0


@pytest.mark.parametrize("scores", [([1], [1, 0]), ([], [])])
def test_scores_of_different_questions_are_refused(scores) -> None:
    with pytest.raises(UserError, match="one of each model for each question"):
        paired(*scores)


# --- through lm-eval ------------------------------------------------------------------------


@needs_lm_eval
def test_a_local_task_is_scored_by_likelihood(tiny_language_model, quantized, choices) -> None:
    """Against the likeliest choice computed by hand, for both models."""
    table = compare_accuracy(tiny_language_model, quantized, questions={"sums": choices})
    row = table.iloc[0]
    assert (row["task"], row["metric"], row["questions"]) == ("sums", "acc", 12)
    for name, model in (("full", tiny_language_model.model), ("int8", quantized)):
        right = 0
        for line in choices.read_text().splitlines():
            question = json.loads(line)
            head = tiny_language_model.tokenizer(f"Question: {question['question']}\nAnswer:")
            likelihoods = []
            for choice in question["choices"]:
                tail = tiny_language_model.tokenizer(f" {choice}")["input_ids"]
                ids = torch.tensor(head["input_ids"] + tail)
                likelihoods.append(float(token_log_likelihoods(model, ids)[-len(tail) :].sum()))
            right += likelihoods.index(max(likelihoods)) == question["answer"]
        assert row[name] == pytest.approx(right / 12), name


@needs_lm_eval
def test_answers_are_the_models_own_up_to_the_stop_string(tiny_language_model) -> None:
    """Drafted answers must be the text that plain greedy decoding gives."""
    from lm_eval.api.instance import Instance

    from quasar_lab.harness_model import HarnessModel

    ids = torch.tensor(tiny_language_model.tokenizer("abc abc")["input_ids"])
    plain = generate(tiny_language_model, ids, max_new_tokens=24)
    text = plain.text(tiny_language_model.tokenizer)
    stop = text[len(text) // 2 :][:3]
    requests = [
        Instance("generate_until", {}, ("abc abc", {"until": until, "max_gen_toks": 24}), 0)
        for until in ([], [stop])
    ]
    whole, cut = HarnessModel(tiny_language_model).generate_until(requests)
    assert whole == text and cut == text[: text.index(stop)]


@needs_lm_eval
def test_generated_answers_are_matched(tiny_language_model, tmp_path) -> None:
    ids = torch.tensor(tiny_language_model.tokenizer("Question: abc?\nAnswer:")["input_ids"])
    answer = generate(tiny_language_model, ids, max_new_tokens=64).text(
        tiny_language_model.tokenizer
    )
    path = tmp_path / "answers.jsonl"
    rows = [
        {"question": "abc?", "answer": answer.split("\n")[0]},
        {"question": "x", "answer": "zq"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    table = compare_accuracy(
        tiny_language_model, tiny_language_model.model, questions={"mine": path}
    )
    assert table.iloc[0][["questions", "full", "int8", "p_value"]].tolist() == [2, 0.5, 0.5, 1.0]


@needs_lm_eval
def test_the_callers_generators_are_left_alone(tiny_language_model, quantized, choices) -> None:
    """lm-eval seeds the global generators unless it is told not to."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    compare_accuracy(tiny_language_model, quantized, questions={"s": choices}, limit=1)
    assert torch.equal(torch.rand(3), expected)


@needs_lm_eval
def test_an_unknown_task_is_one_line(tiny_language_model, quantized, monkeypatch) -> None:
    from lm_eval.tasks import TaskManager

    # lm-eval's own index of thousands of tasks takes seconds to read
    monkeypatch.setattr(
        "quasar_lab.accuracy._task_manager", lambda tasks: TaskManager(include_defaults=False)
    )
    with pytest.raises(UserError, match="lm-eval could not run no_such_task") as error:
        compare_accuracy(tiny_language_model, quantized, ["no_such_task"])
    assert "\n" not in str(error.value)


@needs_lm_eval
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "holds no question"),
        ("{", ":1: not JSON"),
        ("[1]", ':1: must be a JSON object with a text "question"'),
        ('{"question": "a", "answer": 3}', "answer is 3: without choices"),
        ('{"question": "a", "choices": ["x", "y"], "answer": 2}', "the index of a choice, 0 to 1"),
        ('{"question": "a", "choices": "xy", "answer": 0}', "a list of texts"),
        ('{"question": "a", "answer": "b"}\n{"question": "a", "choices": ["b"], "answer": 0}',
         ":2: choices in every line or in none"),
    ],
)  # fmt: skip
def test_a_bad_question_is_named_with_its_line(tmp_path, line: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=message):
        local_task("mine", path)


def test_without_lm_eval_one_line_says_how_to_get_it(
    tiny_language_model, quantized, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r'pip install "quasar-lab\[accuracy\]"'):
        compare_accuracy(tiny_language_model, quantized, ["gsm8k"])


# --- perplexity -----------------------------------------------------------------------------

IDS = torch.arange(3, 90) * 7 % 200


def test_perplexity_is_the_exponential_of_the_cross_entropy(tiny_language_model) -> None:
    model = tiny_language_model.model
    with torch.no_grad():
        loss = model(IDS[None], labels=IDS[None]).loss
    result = perplexity(model, IDS)
    assert result.tokens == len(IDS) - 1
    # the loss is a float32 mean
    assert result.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-4)


@pytest.mark.parametrize(("window", "stride"), [(16, None), (16, 1), (16, 15), (87, 40), (2, 1)])
def test_windows_predict_every_token_once(tiny_language_model, window: int, stride) -> None:
    """Each with at least window - stride tokens before it, or all there are."""
    model = tiny_language_model.model
    found = token_log_likelihoods(model, IDS, window=window, stride=stride)
    assert len(found) == len(IDS) - 1
    done, step = window, stride or window // 2
    for position in range(1, len(IDS)):
        if position >= done:
            done = min(len(IDS), done + step)
        with torch.no_grad():
            logits = model(IDS[None, max(0, done - window) : position]).logits[0, -1]
        expected = torch.log_softmax(logits.double(), -1)[IDS[position]]
        assert float(found[position - 1]) == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 1}, "window is 1"), ({"window": 10**6}, "window is 1000000"),
     ({"window": 8, "stride": 8}, "stride is 8"), ({"stride": 0}, "stride is 0")],
)  # fmt: skip
def test_impossible_windows_are_one_line(tiny_language_model, options, message) -> None:
    with pytest.raises(UserError, match=message):
        perplexity(tiny_language_model.model, IDS, **options)
    with pytest.raises(UserError, match=r"1 token\(s\)"):
        perplexity(tiny_language_model.model, IDS[:1])


# --- the commands ---------------------------------------------------------------------------


def test_commands_print_tables_and_json(tiny_folder, tmp_path, choices, capsys) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a text that is not too short to be read twice " * 3)
    assert cli.main(["perplexity", str(file), "--model", str(tiny_folder), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["full"] > 1 and result["int8"] != result["full"] and result["tokens"] > 100


@needs_lm_eval
def test_the_accuracy_command(tiny_folder, choices, capsys) -> None:
    arguments = ["accuracy", "--model", str(tiny_folder), "--questions", f"sums={choices}"]
    assert cli.main([*arguments, "--limit", "4", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["task"] == "sums" and row["questions"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["perplexity", "absent.txt"], "cannot read absent.txt"),
        (["accuracy", "--questions", "mine"], "NAME=FILE"),
        pytest.param(["accuracy", "--questions", "m=absent"], "cannot read", marks=needs_lm_eval),
        (["accuracy", "--model", "nothing-like-it"], "nothing-like-it"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, capsys) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err.strip()
    assert code == 2 and message in error and "\n" not in error
