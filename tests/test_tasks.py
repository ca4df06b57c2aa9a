"""Prompts: the built-in ones are right, foreign files are read whole, bad input is told."""

import doctest
import fnmatch
import json
import re
import sys
import tomllib
import types
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quasar_lab import tasks
from quasar_lab.errors import UserError
from quasar_lab.hub_tasks import load_hub_task
from quasar_lab.tasks import TASKS, Prompt, conversation, load_calibration_texts, load_task

ROOT = Path(__file__).parents[1]


def write_lines(path, *lines):
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines) + b"\n")
    return path


def question(question_id=1, turns=("Hello?",), **fields):
    return json.dumps({"question_id": question_id, "turns": list(turns), **fields})


def one_line(error):
    text = str(error.value)
    assert text and "\n" not in text
    return text


# --- the built-in prompts -------------------------------------------------------------------


def test_every_family_has_at_least_eight_prompts_with_ids_unique_over_all():
    prompts = [prompt for name in TASKS for prompt in load_task(name)]
    assert list(TASKS) == ["mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm"]
    assert all(len(load_task(name)) >= 8 for name in TASKS)
    assert len({prompt.question_id for prompt in prompts}) == len(prompts)
    assert len({prompt.turns for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("name", TASKS)
def test_each_turn_has_a_reference_and_the_fields_have_the_published_layout(name):
    for line in (ROOT / "data" / "questions" / f"{name}.jsonl").read_text("utf-8").splitlines():
        assert list(json.loads(line)) == ["question_id", "category", "turns", "reference"]
    for prompt in load_task(name):
        assert len(prompt.turns) == len(prompt.reference) == (2 if name == "mt_bench" else 1)
        assert prompt.category and all(text.strip() for text in prompt.reference)


@pytest.mark.parametrize("prompt", load_task("humaneval"), ids=lambda p: str(p.question_id))
def test_code_references_pass_the_examples_of_their_docstrings(prompt):
    # guards against a reference solution that was never run
    source = prompt.turns[0].split("\n\n", 1)[1] + prompt.reference[0]
    namespace: dict = {}
    exec(source, namespace)
    function = namespace[re.match(r"def (\w+)", source)[1]]
    (examples,) = doctest.DocTestFinder(recurse=False).find(function, globs=namespace)
    result = doctest.DocTestRunner(verbose=False).run(examples)
    assert result.attempted >= 2 and result.failed == 0


@pytest.mark.parametrize("prompt", load_task("gsm8k"), ids=lambda p: str(p.question_id))
def test_arithmetic_of_the_maths_references(prompt):
    # guards against a worked solution with a slip, or one that ends in another number
    *steps, last = prompt.reference[0].split("\n")
    equations = re.findall(r"([\d.]+(?: [-+*/] \(?[\d.]+\)?)+) = ([\d.]*\d)", "\n".join(steps))
    assert len(equations) >= 4
    assert len(equations) == prompt.reference[0].count("=")
    for expression, value in equations:
        assert eval(expression) == pytest.approx(float(value), rel=1e-12), expression
    assert last == f"#### {equations[-1][1]}"


@pytest.mark.parametrize("prompt", load_task("cnn_dm"), ids=lambda p: str(p.question_id))
def test_passages_to_summarise_have_the_length_of_a_short_report(prompt):
    request, passage = prompt.turns[0].split("\n\n", 1)
    assert request.startswith("Summarise")
    assert 180 <= len(passage.split()) <= 350
    assert len(prompt.reference[0].split()) <= len(passage.split()) / 3


def test_calibration_texts_are_varied_and_share_nothing_with_the_prompts():
    # guards against tuning scales on the text that they are later tested on
    texts = load_calibration_texts()
    assert len(texts) == len(set(texts)) == 32
    assert all(60 <= len(text.split()) <= 200 for text in texts)

    def phrases(text):
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 7]) for i in range(len(words) - 6)}

    prompts = [p for name in TASKS for p in load_task(name)]
    seen = set().union(*(phrases(t) for p in prompts for t in (*p.turns, *p.reference)))
    assert not seen & set().union(*map(phrases, texts))
    lines = (ROOT / "data" / "calibration.jsonl").read_text("utf-8").splitlines()
    first_kinds = {json.loads(line)["category"] for line in lines[:6]}
    assert len(first_kinds) == 6
    assert load_calibration_texts(limit=3) == texts[:3]


def test_the_wheel_carries_every_file_of_data():
    # guards against prompts that exist in the checkout only: pip install would find none
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setup["package-dir"]["quasar_lab.data"] == "data"
    assert "quasar_lab.data" in setup["packages"]
    globs = setup["package-data"]["quasar_lab.data"]
    files = [f.relative_to(ROOT / "data") for f in (ROOT / "data").rglob("*") if f.is_file()]
    assert files
    for file in files:
        assert any(
            fnmatch.fnmatch(file.as_posix(), g) and g.count("/") == file.as_posix().count("/")
            for g in globs
        ), file


def test_installed_data_is_preferred_to_a_folder_that_happens_to_be_beside_it(
    tmp_path, monkeypatch
):
    # guards against reading site-packages/data of some other package
    (tmp_path / "quasar_lab" / "data" / "questions").mkdir(parents=True)
    (tmp_path / "data" / "questions").mkdir(parents=True)
    inside = tmp_path / "quasar_lab" / "data" / "questions" / "gsm8k.jsonl"
    write_lines(inside, question(7))
    monkeypatch.setattr(tasks, "__file__", str(tmp_path / "quasar_lab" / "tasks.py"))
    assert [prompt.question_id for prompt in load_task("gsm8k")] == [7]


# --- choosing -------------------------------------------------------------------------------


def test_limit_takes_the_first_prompts_and_more_than_there_are_takes_all():
    everything = load_task("alpaca")
    assert load_task("alpaca", limit=3) == everything[:3] == load_task("alpaca", 3)
    assert load_task("alpaca", limit=10_000) == everything


@pytest.mark.parametrize("limit", [0, -1, 2.5, "3", True, [1]])
def test_a_limit_that_is_no_positive_whole_number_is_refused(limit):
    # guards against limit=0 or -1 slicing to nothing or to all but the last
    for load in (lambda: load_task("gsm8k", limit=limit), lambda: load_calibration_texts(limit)):
        with pytest.raises(UserError, match="limit must be a whole number of at least 1") as error:
            load()
        assert str(limit) in one_line(error)


@pytest.mark.parametrize("name", ["gsm9k", "", None, ["gsm8k"], "../calibration"])
def test_an_unknown_task_names_the_known_ones(name):
    with pytest.raises(UserError, match="unknown task") as error:
        load_task(name)
    assert all(known in one_line(error) for known in TASKS)


# --- question.jsonl files -------------------------------------------------------------------


def test_the_layouts_in_use_are_all_read(tmp_path):
    path = write_lines(
        tmp_path / "question.jsonl",
        b"\xef\xbb\xbf" + question(81, ["First?", "Second?"], category="writing").encode(),
        "",
        question("HumanEval/0", ["Code?"], category="code", reference=["    return 1\n"]) + "\r",
        "   \t",
        question(3, ["Maths?"], category="", reference="#### 4"),
        question(4, ["Number?"], reference=[4, 2.5], category=None, extra={"a": 1}),
        question(0, ["No reference."], reference=None),
        json.dumps({"question_id": 6, "turns": ["a\u2028b ü"]}, ensure_ascii=False),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompts = load_task("mt_bench", path=path)
    assert prompts == [
        Prompt(81, "writing", ("First?", "Second?"), ()),
        Prompt("HumanEval/0", "code", ("Code?",), ("    return 1\n",)),
        Prompt(3, "", ("Maths?",), ("#### 4",)),
        Prompt(4, "", ("Number?",), ("4", "2.5")),
        Prompt(0, "", ("No reference.",), ()),
        # U+2028 inside a string ends no line
        Prompt(6, "", ("a\u2028b ü",), ()),
    ]
    assert load_task("my own name", limit=2, path=str(path)) == prompts[:2]


BAD_LINES = [
    ('{"question_id": 1, "turns": ["cut off', "not JSON"),
    ("[1, 2]", "must be a JSON object"),
    ('"text"', "must be a JSON object"),
    ("null", "must be a JSON object"),
    ('{"turns": ["no id"]}', "'question_id' is missing"),
    ('{"question_id": 1}', "'turns' is missing"),
    ('{"question_id": 1, "turns": []}', "at least one string"),
    ('{"question_id": 1, "turns": "a string is not a list"}', "turns must be a list"),
    ('{"question_id": 1, "turns": ["fine", 2]}', "turn 2 must be a string"),
    ('{"question_id": 1, "turns": ["  "]}', "turn 1 must be a string with text"),
    ('{"question_id": 1.5, "turns": ["a"]}', "question_id must be"),
    ('{"question_id": true, "turns": ["a"]}', "question_id must be"),
    ('{"question_id": null, "turns": ["a"]}', "question_id must be"),
    ('{"question_id": 1, "turns": ["a"], "category": 3}', "category must be a string"),
    ('{"question_id": 1, "turns": ["a"], "reference": [{}]}', "reference must be"),
    ('{"question_id": 1, "turns": ["half a pair \\ud83d"]}', "lone surrogate"),
    ('{"question_id": 1, "turns": ' + "[" * 100_000, "not readable as JSON"),
    ('{"question_id": ' + "1" * 5_000 + ', "turns": ["a"]}', "not readable as JSON"),
    (b'{"question_id": 1, "turns": ["caf\xe9"]}', "not UTF-8"),
    ('{"question_id": "10", "turns": ["same id as line 1"]}', "already used on line 1"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_reported_with_its_number_and_the_good_ones_are_kept(tmp_path, bad, reason):
    path = write_lines(tmp_path / "q.jsonl", question(10), "", bad, question(12))
    with pytest.warns(UserWarning) as caught:
        prompts = load_task("gsm8k", path=path)
    assert [prompt.question_id for prompt in prompts] == [10, 12]
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"{path}:3: ") and reason in message
    assert "\n" not in message and len(message) < len(str(path)) + 200


def test_a_file_without_a_good_line_is_an_error_that_says_what_is_wrong(tmp_path):
    path = write_lines(tmp_path / "q.jsonl", "id,question", "1,What?")
    with warnings.catch_warnings(), pytest.raises(UserError, match="no usable question") as error:
        warnings.simplefilter("error")  # the error tells enough: no flood of warnings before it
        load_task("gsm8k", path=path)
    assert f"{path}:1: not JSON" in one_line(error)


@pytest.mark.parametrize("content", [b"", b"\n \r\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match="the file is empty") as error:
        load_task("gsm8k", path=path)
    one_line(error)


def test_a_path_that_cannot_be_read_is_an_error_of_one_line(tmp_path):
    for path, reason in [
        (tmp_path / "missing.jsonl", "no file"),
        (tmp_path, "is a folder"),
        ("", "folder"),
        (5, "cannot read"),
        ("a\0b", "cannot read"),
        (write_lines(tmp_path / "file", "x") / "below", "cannot read"),
    ]:
        with pytest.raises(UserError, match=reason) as error:
            load_task("gsm8k", path=path)
        assert "question.jsonl" in one_line(error)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
RECORDS = st.fixed_dictionaries(
    {
        "question_id": st.integers() | TEXT,
        "category": st.text(st.characters(exclude_categories=["Cs"])),
        "turns": st.lists(TEXT, min_size=1, max_size=4),
        "reference": st.lists(TEXT, max_size=3),
    }
)


@given(
    records=st.lists(RECORDS, min_size=1, max_size=6, unique_by=lambda r: str(r["question_id"])),
    line_end=st.sampled_from(["\n", "\r\n", "\n\n", "\r\n \r\n"]),
    ascii_only=st.booleans(),
    mark=st.booleans(),
    last_line_ends=st.booleans(),
)
def test_whatever_is_written_is_read_back(
    tmp_path_factory, records, line_end, ascii_only, mark, last_line_ends
):
    lines = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    text = line_end.join(lines) + line_end * last_line_ends
    path = tmp_path_factory.mktemp("q") / "question.jsonl"
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_task("mt_bench", path=path) == [Prompt(**record) for record in records]


@given(garbage=st.lists(st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"")), max_size=6))
def test_garbage_between_good_lines_costs_no_good_line(tmp_path_factory, garbage):
    path = tmp_path_factory.mktemp("q") / "question.jsonl"
    lines = [question(0)]
    for number, junk in enumerate(garbage, 1):
        lines += [junk, question(number)]
    write_lines(path, *lines)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prompts = load_task("mt_bench", path=path)
    assert [prompt.question_id for prompt in prompts] == list(range(len(garbage) + 1))
    # byte order marks are white space here: files were concatenated
    assert len(caught) == sum(bool(j.removeprefix(b"\xef\xbb\xbf").strip()) for j in garbage)


# --- prompts and conversations --------------------------------------------------------------


def test_a_prompt_is_immutable_and_hashable_even_when_built_from_lists():
    prompt = Prompt(1, "chat", ["a", "b"], "answer")
    assert prompt.turns == ("a", "b") and prompt.reference == ("answer",)
    assert hash(prompt) == hash(Prompt(1, "chat", ("a", "b"), ("answer",)))
    with pytest.raises(AttributeError):
        prompt.turns = ()


def test_the_models_own_answer_becomes_the_context_of_the_next_turn():
    # guards against asking turn 2 without turn 1, or with the reference in place of the answer
    prompt = Prompt(1, "chat", ("first", "second"), ("reference",))
    assert conversation(prompt) == [{"role": "user", "content": "first"}]
    assert conversation(prompt, ["mine"]) == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "mine"},
        {"role": "user", "content": "second"},
    ]
    assert conversation(prompt, [""])[1] == {"role": "assistant", "content": ""}


def test_a_turn_that_does_not_exist_is_refused():
    prompt = Prompt("q7", "chat", ("first", "second"))
    with pytest.raises(UserError, match=r"'q7' has 2 turn.*got 2") as error:
        conversation(prompt, ["a", "b"])
    one_line(error)
    with pytest.raises(UserError, match="list of strings"):
        conversation(prompt, "a")


# --- the Hub, with a stand-in for the package -----------------------------------------------

HUB_ROWS = {
    "openai/gsm8k": ("main", "test", {"question": "1 + 1?", "answer": "2\n#### 2"}),
    "openai/openai_humaneval": (
        None,
        "test",
        {
            "task_id": "HumanEval/0",
            "prompt": "def f():\n",
            "canonical_solution": "    return 1\n",
            "test": "",
            "entry_point": "f",
        },
    ),
    "abisee/cnn_dailymail": (
        "3.0.0",
        "test",
        {"article": "Long.", "highlights": "Short.", "id": "a1"},
    ),
    "tatsu-lab/alpaca": (
        None,
        "train",
        {"instruction": "Sort.", "input": "b a", "output": "a b", "text": "all of it"},
    ),
    "HuggingFaceH4/mt_bench_prompts": (
        None,
        "train",
        {"prompt": ["One?", "Two?"], "reference": [], "category": "writing", "prompt_id": 64},
    ),
}


@pytest.fixture
def fake_hub(monkeypatch):
    """A `datasets` that knows the five data sets; rows can be replaced."""
    rows_of = {name: [row, row, row] for name, (_, _, row) in HUB_ROWS.items()}

    def load_dataset(path, name=None, *, split, streaming=False):
        assert (name, split) == HUB_ROWS[path][:2]
        return iter(rows_of[path]) if streaming else rows_of[path]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return rows_of


def test_the_public_benchmarks_become_prompts(fake_hub):
    first = {name: load_hub_task(name, limit=1)[0] for name in TASKS}
    assert first == {
        "mt_bench": Prompt(64, "writing", ("One?", "Two?")),
        "humaneval": Prompt(
            "HumanEval/0",
            "code",
            ("Complete the following Python function.\n\ndef f():\n",),
            ("    return 1\n",),
        ),
        "gsm8k": Prompt(0, "math", ("1 + 1?",), ("2\n#### 2",)),
        "alpaca": Prompt(0, "instruction", ("Sort.\n\nb a",), ("a b",)),
        "cnn_dm": Prompt(
            "a1",
            "summarization",
            ("Summarise the following report in two or three sentences.\n\nLong.",),
            ("Short.",),
        ),
    }
    assert [prompt.question_id for prompt in load_hub_task("gsm8k", limit=2)] == [0, 1]
    assert len(load_hub_task("gsm8k")) == len(load_hub_task("gsm8k", streaming=True)) == 3


def test_built_in_and_public_prompts_ask_in_the_same_words(fake_hub):
    for name in ("humaneval", "cnn_dm"):
        public = load_hub_task(name, limit=1)[0].turns[0].split("\n\n")[0]
        assert {p.turns[0].split("\n\n")[0] for p in load_task(name)} == {public}


def test_an_instruction_without_input_stands_alone(fake_hub):
    fake_hub["tatsu-lab/alpaca"][0] = {"instruction": "Sing.", "input": "", "output": "La."}
    assert load_hub_task("alpaca", limit=1)[0].turns == ("Sing.",)


def test_an_empty_row_of_a_data_set_is_reported_and_left_out(fake_hub):
    fake_hub["openai/gsm8k"][1] = {"question": " ", "answer": ""}
    with pytest.warns(UserWarning, match="openai/gsm8k row 1: turn 1"):
        assert [prompt.question_id for prompt in load_hub_task("gsm8k", limit=2)] == [0, 2]


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'pip install "quasar-lab\[hub\]"') as error:
        load_hub_task("gsm8k")
    one_line(error)
    assert len(load_task("gsm8k")) >= 8  # the built-in prompts need nothing


def test_a_failed_fetch_and_changed_columns_are_errors_of_one_line(fake_hub, monkeypatch):
    fake_hub["openai/gsm8k"][0] = {"problem": "renamed"}
    with pytest.raises(UserError, match="has no column 'question'") as error:
        load_hub_task("gsm8k")
    one_line(error)

    def no_network(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\n(a page of details)")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", no_network)
    with pytest.raises(UserError, match="check the network") as error:
        load_hub_task("gsm8k")
    assert "Couldn't reach the Hub" in one_line(error)
    with pytest.raises(UserError, match="unknown task"):
        load_hub_task("mmlu")
    with pytest.raises(UserError, match="limit"):
        load_hub_task("gsm8k", limit=0)
