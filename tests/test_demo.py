"""The demo on a tiny model: table, JSON and page; and the command line around it."""

import json
import subprocess
import sys

import pytest

from quasar_lab import cli
from quasar_lab.demo import run_demo
from quasar_lab.demo_result import DemoSettings
from quasar_lab.report import demo_page


@pytest.fixture(scope="module")
def result(tiny_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("reports")
    settings = DemoSettings(model=str(tiny_folder), limit=1, max_new_tokens=8)
    return run_demo(settings, output), output


def test_the_table_has_a_row_a_method_and_its_terms_multiply(result) -> None:
    table = result[0].table()
    assert list(table.index) == ["plain", "n-gram", "plain, INT8", "n-gram, INT8 (Quasar)"]
    assert table.loc["plain", "vs plain"] == "1.00x" and table.loc["plain", "L"] == "1.00"


def test_json_is_plain_and_complete(result) -> None:
    text = (result[1] / "demo.json").read_text()
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [row["method"] for row in data["methods"]] == ["plain", "ngram", "int8", "quasar"]
    gain = data["quasar_over_ngram"]
    assert gain["speedup"] == pytest.approx(gain["length_term"] * gain["step_term"])
    assert data["fidelity"]["tokens"] == sum(
        row["new_tokens"] for row in data["rows"] if row["method"] == "plain"
    )
    assert data["machine"]["torch"] and data["verdict"].startswith("On this machine")


def test_page_stands_alone_and_describes_its_pictures(result) -> None:
    page = (result[1] / "demo.html").read_text()
    assert page.count("<img") == 4 == page.count('alt="')
    assert "http" not in page.replace("http-equiv", "")  # nothing is loaded from elsewhere
    assert result[0].verdict.split(":")[0] in page


def test_page_escapes_the_model_name(result) -> None:
    import dataclasses

    settings = dataclasses.replace(result[0].settings, model="<script>alert(1)</script>")
    page = demo_page(dataclasses.replace(result[0], settings=settings))
    assert "<script>" not in page


def test_command_prints_only_json_on_stdout(tiny_folder, tmp_path, capsys) -> None:
    code = cli.main(
        ["demo", "--model", str(tiny_folder), "--tasks", "alpaca", "--limit", "1", "--json",
         "--max-new-tokens", "4", "--temperature", "0.8", "--seed", "3", "--ngram", "1:2",
         "--draft-tokens", "3", "--output", str(tmp_path)]
    )  # fmt: skip
    assert code == 0
    data = json.loads(capsys.readouterr().out)
    assert data["settings"]["temperature"] == 0.8
    draft = data["settings"]["draft"]
    assert (draft["num_draft_tokens"], draft["max_ngram"], draft["min_ngram"]) == (3, 2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.html", "demo.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--model", "nothing-like-it"], "nothing-like-it"),
        (["demo", "--tasks", "poems"], "poems"),
        (["demo", "--tasks", ","], "task"),
        (["demo", "--limit", "0"], "limit"),
        (["demo", "--limit", "two"], "two"),
        (["demo", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["demo", "--draft-tokens", "0"], "num_draft_tokens is 0"),
        (["demo", "--ngram", "3:1"], "ngram"),
        (["demo", "--ngram", "a"], "MIN:MAX"),
        (["demo", "--temperature", "-1"], "temperature is -1"),
        (["demo", "--temperature", "nan"], "temperature is nan"),
        (["demo", "--seed", "-1"], "seed is -1"),
        (["fetch", "no-such-model"], "no-such-model"),
        (["dance"], "dance"),
        ([], "COMMAND"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, capsys) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert message in error and "\n" not in error and "Traceback" not in error


def test_an_unwritable_report_folder_is_found_before_the_work(tiny_folder, tmp_path, capsys):
    """Minutes of measuring must not be lost to a folder that was never writable."""
    file = tmp_path / "file"
    file.write_text("")
    assert cli.main(["demo", "--model", str(tiny_folder), "--output", str(file)]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and str(file) in error


def test_presets_are_listed(capsys) -> None:
    assert cli.main(["fetch", "--list", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert names[0] == "smollm2-135m" and "qwen3-8b" in names
    assert cli.main(["fetch", "--list"]) == 0
    assert "Apache-2.0" in capsys.readouterr().out


def test_a_closed_pipe_is_no_error() -> None:
    """`quasar-lab fetch --list | head -0` must not print a traceback."""
    script = f"{sys.executable} -m quasar_lab.cli fetch --list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
