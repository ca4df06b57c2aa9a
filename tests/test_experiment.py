"""`quasar-lab bench`: one file that survives a kill, shards that fit together or are refused."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quasar_lab import UserError, cli
from quasar_lab.experiment import ExperimentSettings, Shard, model_hash, run_experiment
from quasar_lab.merging import merge_results
from quasar_lab.methods import METHODS, DraftSettings
from quasar_lab.results import read_results

KEYS = ["model", "task", "question_id", "turn", "temperature", "seed", "method", "num_draft_tokens"]


def settings(folder: Path, **more) -> ExperimentSettings:
    chosen = dict(
        models=(str(folder),), methods=("ngram",), tasks=("gsm8k", "alpaca"), limit=2,
        temperatures=(0.0, 1.0), max_new_tokens=3, engine="transformers",
    )  # fmt: skip
    return ExperimentSettings(**{**chosen, **more})


@pytest.fixture(scope="module")
def finished(tiny_folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "bench.jsonl"
    run_experiment(settings(tiny_folder), path)
    return path


def test_each_row_says_where_it_comes_from(finished, tiny_folder, tiny_language_model) -> None:
    _, rows = read_results(finished)
    assert len(rows) == 2 * 2 * 2 * 2  # tasks, prompts, temperatures, methods
    for row in rows:
        assert row["model"] == str(tiny_folder)
        assert row["model_hash"] == model_hash(tiny_language_model.model)
        assert row["config"]["quantization"]["smoothing"] and row["config"]["dtype"] == "float32"
        assert row["machine"]["torch"] and row["machine"]["processor"]


def test_the_hash_is_of_the_values(tiny_language_model) -> None:
    import copy

    other = copy.deepcopy(tiny_language_model.model)
    assert model_hash(other) == model_hash(tiny_language_model.model)
    other.model.norm.weight.data[0] += 1
    assert model_hash(other) != model_hash(tiny_language_model.model)
    assert len(model_hash(other.bfloat16())) == 16


def test_a_finished_file_is_read_back_without_loading_the_model(
    finished, tiny_folder, monkeypatch
) -> None:
    monkeypatch.setattr("quasar_lab.experiment.load", lambda name: pytest.fail("loaded again"))
    before = finished.read_bytes()
    rows = run_experiment(settings(tiny_folder), finished)
    assert len(rows) == 16 and finished.read_bytes() == before


def test_sigkill_loses_and_doubles_nothing(tiny_folder, tmp_path) -> None:
    """The process is killed as it measures, and the last line ends in the middle."""
    path = tmp_path / "bench.jsonl"
    command = [
        sys.executable, "-m", "quasar_lab.cli", "bench", "--models", str(tiny_folder),
        "--methods", "ngram", "--tasks", "alpaca", "--max-new-tokens", "16",
        "--temperatures", "0,1", "--engine", "transformers", "--output", str(path),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") > 5):
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL  # it had not finished
    with path.open("ab") as stream:
        stream.write(b'{"model": "torn')
    rows = run_experiment(
        settings(tiny_folder, tasks=("alpaca",), limit=None, max_new_tokens=16), path
    )
    assert len(rows) == 10 * 2 * 2 and not rows.duplicated(KEYS).any()
    assert path.read_bytes().count(b"\n") == 1 + len(rows)


def test_two_processes_cannot_write_to_one_file(tiny_folder, tmp_path) -> None:
    from filelock import FileLock

    path = tmp_path / "bench.jsonl"
    with (
        FileLock(tmp_path / ".bench.jsonl.lock"),
        pytest.raises(UserError, match="another run is writing"),
    ):
        run_experiment(settings(tiny_folder), path)
    assert not path.exists()


def test_another_model_of_the_same_name_is_refused(finished, tiny_folder, tmp_path) -> None:
    """Weights that changed under the same name would be mixed without a word."""
    path = tmp_path / "bench.jsonl"
    lines = finished.read_text().splitlines(keepends=True)
    row = {**json.loads(lines[1]), "model_hash": "0" * 16}
    path.write_text(lines[0] + json.dumps(row) + "\n")
    with pytest.raises(UserError, match="measured with another"):
        run_experiment(settings(tiny_folder), path)


def test_several_drafts_run_only_where_something_is_drafted(tiny_folder) -> None:
    drafts = (DraftSettings(2), DraftSettings(4), DraftSettings(4))
    rows = run_experiment(
        settings(tiny_folder, tasks=("gsm8k",), limit=1, drafts=drafts, temperatures=(0.0,))
    )
    assert rows["method"].tolist() == ["plain", "ngram", "ngram"]
    assert rows["num_draft_tokens"].tolist()[1:] == [2, 4]


# --- shards ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tiny_folder, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    paths = [folder / f"{index}.jsonl" for index in (1, 2, 3)]
    for index, path in enumerate(paths, 1):
        run_experiment(settings(tiny_folder, shard=Shard(index, 3)), path)
    return paths


def test_shards_join_to_the_whole(shards, finished, tmp_path) -> None:
    merged = tmp_path / "merged.jsonl"
    assert merge_results(shards[::-1], merged) == 16  # in any order

    def results(path: Path) -> list:
        _, rows = read_results(path)
        return sorted([*(row[key] for key in KEYS if row[key] is not None), row["tokens"]]
                      for row in rows)  # fmt: skip

    assert results(merged) == results(finished)


def edited(path: Path, folder: Path, **settings) -> Path:
    """A copy whose first line says something else."""
    target = folder / f"{len(list(folder.iterdir()))}.jsonl"
    head, *lines = path.read_text().splitlines()
    head = json.dumps({"settings": {**json.loads(head)["settings"], **settings}})
    target.write_text("\n".join([head, *lines]) + "\n")
    return target


def test_shards_that_do_not_belong_together_are_refused(shards, finished, tmp_path) -> None:
    one, two, three = shards
    merged = tmp_path / "merged.jsonl"
    unfinished = tmp_path / "unfinished.jsonl"
    unfinished.write_text("".join(three.read_text().splitlines(keepends=True)[:-1]))
    changed = tmp_path / "changed.jsonl"
    changed.write_text(three.read_text().replace('"model_hash": "', '"model_hash": "f'))
    for files, message in (
        ([one], "nothing to merge"),
        ([one, two], "shard 3/3 is missing"),
        ([one, two, edited(two, tmp_path)], "shard 2/3 is there twice"),
        ([one, two, unfinished], "not finished"),
        ([one, two, changed], "not the same model"),
        ([one, two, edited(three, tmp_path, max_new_tokens=9)], "max_new_tokens is 9 there"),
        ([one, two, edited(three, tmp_path, quasar_lab="0.0")], "quasar_lab is '0.0' there"),
        ([one, two, edited(three, tmp_path, shard=[3, 4])], "one of 4 shards"),
        ([one, two, edited(three, tmp_path, shard=None)], "no shard"),
        ([one, two, tmp_path / "absent.jsonl"], "cannot read"),
        ([one, one], "named twice"),
    ):
        with pytest.raises(UserError, match=message):
            merge_results(files, merged)
        assert not merged.exists()
    # another machine is what shards are for
    assert merge_results([one, two, edited(three, tmp_path, processor="x", threads=99)], merged)
    with pytest.raises(UserError, match="no shard"):
        merge_results([merged, two], tmp_path / "again.jsonl")


def test_a_prompt_is_never_split_between_shards(tiny_folder) -> None:
    grid = settings(tiny_folder, tasks=("mt_bench", "gsm8k"), limit=3).grid()
    parts = [grid.share(index, 4) for index in range(1, 5)]
    assert sorted(map(str, grid.runs())) == sorted(str(k) for part in parts for k in part.runs())
    seen = [{(cell.task, cell.prompt.question_id) for cell in part.cells()} for part in parts]
    assert sum(map(len, seen)) == 6 and len(set.union(*seen)) == 6


# --- the command ----------------------------------------------------------------------------


def test_the_command_measures_prints_and_merges(tiny_folder, tmp_path, capsys) -> None:
    questions = tmp_path / "question.jsonl"
    lines = [{"question_id": n, "turns": [f"say {n}"]} for n in range(2)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    paths = []
    for shard in ("1/2", "2/2"):
        paths.append(tmp_path / f"{shard[0]}.jsonl")
        code = cli.main(
            ["bench", "--models", str(tiny_folder), "--tasks", "", "--questions",
             f"mine={questions}", "--temperatures", "0", "--max-new-tokens", "4", "--shard", shard,
             "--draft-tokens", "2,3", "--ngram", "1:3,2", "--output", str(paths[-1]), "--json"]
        )  # fmt: skip
        assert code == 0
    table = json.loads(capsys.readouterr().out.splitlines()[-1])["table"]
    assert {row["task"] for row in table} == {"mine"}
    assert len(table) == 2 + 2 * 4  # plain and INT8, two drafting methods with four settings
    merged = tmp_path / "all.jsonl"
    assert cli.main(["bench", "merge", *map(str, paths), "--output", str(merged)]) == 0
    assert capsys.readouterr().out.startswith("20 runs")
    assert cli.main(["bench", "tables", str(merged), "--output", str(tmp_path / "tables")]) == 0
    assert (tmp_path / "tables" / "all.md").read_text().count("mine") >= 1
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", ","], "no model is named"),
        (["--models", "nothing-like-it"], "nothing-like-it"),
        (["--models", "smollm2-135m,smollm2-135m"], "name each once"),
        (["--methods", "eagle"], "unknown method 'eagle'"),
        (["--tasks", "poems"], "poems"),
        (["--tasks", ""], "no prompts"),
        (["--questions", "mine"], "NAME=FILE"),
        (["--questions", "gsm8k=x.jsonl"], "named twice"),
        (["--questions", "mine=absent.jsonl"], "absent.jsonl"),
        (["--temperatures", "hot"], "'hot': give numbers"),
        (["--temperatures", ""], "must not be empty"),
        (["--temperatures", "-1"], "temperature is -1"),
        (["--seeds", "0.5"], "'0.5': give whole numbers"),
        (["--limit", "0"], "limit"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--draft-tokens", "0"], "num_draft_tokens is 0"),
        (["--ngram", "3:1"], "ngram"),
        (["--engine", "vllm"], "engine 'vllm'"),
        (["--shard", "3/2"], "shard '3/2'"),
        (["--shard", "60/60"], "shard 60/60 of 50 prompts"),
        (["merge", "absent.jsonl", "b.jsonl"], "cannot read absent.jsonl"),
        (["tables", "absent.jsonl"], "cannot read absent.jsonl"),
        (["dance"], "dance"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments, message, capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err.strip()
    assert code == 2 and message in error and "\n" not in error


def test_the_help_names_every_method(capsys) -> None:
    """It is written out, for the parser is made before anything heavy is imported."""
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    for name in METHODS:
        whole, _, percent = name.rpartition("_")
        named = name in words or (f"{whole}_90" in words and f"_{percent}" in words)
        assert named, name
