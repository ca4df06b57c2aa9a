"""Results survive a kill at any point, and runs that differ are not mixed."""

import json

import pytest

from quasar_lab import UserError
from quasar_lab.results import ResultFile, write_atomically


def test_rows_are_read_back_and_the_run_goes_on(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    first = ResultFile(path, {"limit": 2})
    first.append({"n": 1})
    second = ResultFile(path, {"limit": 2})
    assert second.rows == [{"n": 1}]
    second.append({"n": 2})
    assert ResultFile(path, {"limit": 2}).rows == [{"n": 1}, {"n": 2}]


def test_a_kill_at_any_byte_loses_at_most_the_line_being_written(tmp_path) -> None:
    """No row is lost or doubled, wherever the file ends."""
    path = tmp_path / "run.jsonl"
    store = ResultFile(path, {"limit": 2})
    head = path.read_bytes()
    for n in range(3):
        store.append({"n": n, "text": "ä"})
    whole = path.read_bytes()
    for size in range(len(head), len(whole) + 1):
        path.write_bytes(whole[:size])
        again = ResultFile(path, {"limit": 2})
        complete = whole[:size].count(b"\n") - 1
        assert [row["n"] for row in again.rows] == list(range(complete))
        again.append({"n": complete, "text": "ä"})
        assert len(ResultFile(path, {"limit": 2}).rows) == complete + 1


def test_a_file_of_another_run_is_refused(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    ResultFile(path, {"limit": 2, "model": "a"})
    with pytest.raises(UserError, match=r"limit = 2, this one has 3"):
        ResultFile(path, {"limit": 3, "model": "a"})


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"rows": 1}\n', ""])
def test_a_file_that_is_no_result_file_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="no result file"):
        ResultFile(path, {})


def test_unwritable_place_is_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match="cannot use the result file"):
        ResultFile(tmp_path, {})


def test_write_atomically_leaves_the_old_file_when_writing_fails(tmp_path) -> None:
    path = tmp_path / "demo.json"
    write_atomically(path, json.dumps({"n": 1}))
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert json.loads(path.read_text()) == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]
