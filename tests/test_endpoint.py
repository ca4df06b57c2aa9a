"""Measuring a server: good, slow, failing and cutting ones; nothing hangs, nothing is lost."""

import json
import queue
import re
import threading
import time
from types import SimpleNamespace

import pandas as pd
import pytest
from stub_endpoint import stub_endpoint

from quasar_lab import Prompt, UserError, run_benchmark
from quasar_lab import endpoint_benchmark as module
from quasar_lab.cli import main
from quasar_lab.endpoint import Endpoint
from quasar_lab.endpoint_benchmark import run_endpoint_benchmark
from quasar_lab.summary import summarize

TASKS = {
    "chat": [Prompt(1, "chat", ("one two three", "and again")), Prompt(2, "chat", ("a b",))],
    "code": [Prompt(3, "code", ("x y z",))],
}
OPTIONS = dict(max_new_tokens=8, method="stub")


@pytest.fixture
def server():
    with stub_endpoint() as running:
        yield running


def connect(server, **settings) -> Endpoint:
    """Patient enough for a busy machine."""
    return Endpoint(server.url, **{"silence": 20.0, "longest": 40.0, "pause": 0.01, **settings})


def impatient(server) -> Endpoint:
    """A connection that gives up an attempt after 0.6 s, and after 0.3 s of silence."""
    endpoint = connect(server, retries=1)
    endpoint.silence, endpoint.longest = 0.3, 0.6
    endpoint._client.timeout = 0.3
    return endpoint


def ask(endpoint: Endpoint, text: str, tokens: int = 8, **options):
    return endpoint.ask([{"role": "user", "content": text}], max_new_tokens=tokens, **options)


class TestAsk:
    def test_a_good_answer(self, server) -> None:
        answer = ask(connect(server), "one two three")
        assert answer.text.split() == ["one", "two", "three"] * 2 + ["one", "two"]
        assert answer.tokens == list(range(8)) and answer.new_tokens == 8
        assert (answer.error, answer.attempts, answer.finish_reason) == ("", 1, "length")
        assert answer.prompt_tokens == 3 and answer.chunks == 4 and answer.first_tokens == 2
        assert answer.begin < answer.first < answer.end
        rate = (8 - 2) / (answer.end - answer.first)
        assert answer.tokens_per_second == pytest.approx(rate)
        sent = server.requests[0]
        assert sent["stream"] and sent["return_token_ids"] and sent["temperature"] == 0

    def test_a_server_that_tells_less(self, server) -> None:
        """Without usage and ids the chunks are what can be counted."""
        server.software = "somebody"
        answer = ask(connect(server), "mute b")
        assert "return_token_ids" not in server.requests[0]
        assert answer.new_tokens == 4 and answer.tokens == [] and answer.first_tokens == 1
        full = ask(connect(server), "a b")
        assert full.new_tokens == 8 and full.first_tokens == 2

    def test_what_passes_is_tried_again(self, server) -> None:
        busy = ask(connect(server), "busy b")
        assert (busy.error, busy.attempts, busy.new_tokens) == ("", 3, 8)
        flaky = ask(connect(server), "flaky b")
        assert (flaky.error, flaky.attempts, flaky.new_tokens) == ("", 2, 8)
        assert flaky.text.split() == ["flaky", "b"] * 4  # nothing of the attempt that was cut

    @pytest.mark.parametrize(
        "word, reason, attempts",
        [
            ("silent", "nothing came for too long", 2),
            ("trickle", "not done after 0.6 s", 2),
            ("slow", "not done after 0.6 s", 2),
            ("cut", "ended in the middle", 2),
            ("garbage", "no chat completion", 2),
            ("sick", "the engine is dead", 2),
            ("refuse", "HTTP 400: .*max_tokens is too large", 1),
            ("page", "no stream of events but text/html", 2),
            ("drip", "not done after 0.6 s", 2),
            ("deep", "no chat completion", 2),
            ("miscount", "no chat completion", 2),
        ],
    )
    def test_what_does_not_pass_ends_with_the_reason(self, word, reason, attempts, server) -> None:
        start = time.monotonic()
        answer = ask(impatient(server), f"{word} b", tokens=200)
        assert answer.attempts == attempts == len(server.requests)
        assert time.monotonic() - start < 10  # far above 2 x 0.6 s: it is about a hang
        assert re.search(reason, answer.error), answer.error

    def test_stop_ends_an_answer_under_way(self, server) -> None:
        stop = threading.Event()
        timer = threading.Timer(0.1, stop.set)
        timer.start()
        answer = ask(connect(server, longest=60), "slow b", tokens=1000, stop=stop)
        assert answer.error == "stopped" and answer.attempts == 1

    def test_a_server_that_dies_in_between(self, server) -> None:
        with stub_endpoint() as mortal:
            endpoint = connect(mortal, retries=1)
        answer = ask(endpoint, "a b")
        assert "ConnectError" in answer.error and answer.attempts == 2
        assert endpoint.counters() is None

    def test_nulls_are_no_errors(self, server) -> None:
        answer = ask(connect(server), "nulls b")
        assert (answer.error, answer.attempts, answer.new_tokens) == ("", 1, 8)

    def test_an_answer_without_a_word_has_an_end(self, server) -> None:
        server.software = "somebody"
        answer = ask(connect(server), "wordless b")
        assert answer.error == "" and answer.end >= answer.begin

    def test_nobody_there(self, server) -> None:
        with pytest.raises(UserError, match="no server answers"):
            Endpoint("http://127.0.0.1:9")
        with pytest.raises(UserError, match="serves m, not 'other'"):
            connect(server, model="other")
        with pytest.raises(UserError, match="must be positive"):
            connect(server, silence=0)
        assert Endpoint(f"{server.url}/v1/").model == "m"

    @pytest.mark.parametrize(
        "url", ["", "not a url", "127.0.0.1:8000", "localhost", "http://", "http://[::1", "ftp://h"]
    )
    def test_what_is_no_address(self, url) -> None:
        with pytest.raises(UserError, match="is no address"):
            Endpoint(url)

    @pytest.mark.parametrize(
        "listing, message",
        [
            ((200, "<html>hello</html>"), "lists no models at /v1/models"),
            ((200, ""), "lists no models"),
            ((200, "[]"), "lists no models"),
            ((200, '{"data": null}'), "lists no models"),
            ((200, '{"data": ["m"]}'), "lists no models"),
            ((200, '{"data": [{"id": 5}]}'), "lists no models"),
            ((200, "[" * 99999), "lists no models"),
            ((200, '{"data": []}'), "serves no model"),
            ((302, ""), "HTTP 302: give the address"),
            ((401, '{"error": "who are you?"}'), "HTTP 401: set OPENAI_API_KEY"),
            ((404, "not here"), "HTTP 404: give the address"),
            ((500, "boom"), "HTTP 500"),
        ],
    )
    def test_another_kind_of_server(self, listing, message, server) -> None:
        server.listing = listing
        with pytest.raises(UserError, match=message) as raised:
            connect(server, model="m")
        assert "\n" not in str(raised.value)

    def test_a_list_that_never_ends(self, server) -> None:
        """httpx limits the time between two bytes only."""
        server.dripping = {"/metrics", "/v1/models"}
        with pytest.raises(UserError, match=r"not done after 0\.3 s"):
            connect(server, silence=0.3)
        server.dripping = {"/metrics"}
        assert impatient(server).counters() is None

    @pytest.mark.parametrize(
        "name, value", [("ALL_PROXY", "socks5://127.0.0.1:9"), ("SSL_CERT_FILE", "/none")]
    )
    def test_what_the_environment_names_is_not_there(self, name, value, monkeypatch) -> None:
        monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=r"cannot connect|no server answers"):
            Endpoint("http://host.invalid")

    def test_the_key_goes_to_the_server_only(self, server, monkeypatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        endpoint = connect(server)
        assert endpoint._client.headers["Authorization"] == "Bearer sesame"
        assert "sesame" not in repr(ask(endpoint, "refuse b"))
        monkeypatch.setenv("OPENAI_API_KEY", "sesame\n")  # as `$(cat file)` or an editor leaves it
        assert connect(server)._client.headers["Authorization"] == "Bearer sesame"
        for key in ("ses\name", "sésame"):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            with pytest.raises(UserError, match="OPENAI_API_KEY holds") as raised:
                connect(server)
            assert key not in str(raised.value)
        with pytest.raises(UserError, match="holds a password") as raised:
            Endpoint("http://me:sesame@127.0.0.1:9")
        assert "sesame" not in str(raised.value)

    def test_counters(self, server) -> None:
        endpoint = connect(server)
        ask(endpoint, "a b")
        assert endpoint.counters() == {"drafted": 12, "accepted": 4}
        server.metrics = False
        assert endpoint.counters() is None


class TestRun:
    def test_every_prompt_at_every_level(self, server) -> None:
        server.step_seconds = 0.01
        run = run_endpoint_benchmark(connect(server), TASKS, concurrency=(1, 3), **OPTIONS)
        assert len(run.rows) == 2 * 4 and set(run.rows["error"]) == {""}
        assert list(run.rows["concurrency"]) == [1] * 4 + [3] * 4
        assert server.most_active == 3
        table = run.table().set_index("concurrency")
        assert list(table["requests"]) == [4, 4]
        # 8 tokens in 4 steps, one draft accepted in each
        assert list(table["mean_acceptance_length"]) == [2.0, 2.0]
        assert list(table["draft_acceptance"]) == pytest.approx([1 / 3, 1 / 3])
        rows = run.rows[run.rows["concurrency"] == 3]
        busy = module._busy_seconds(rows)
        assert table.loc[3, "tokens_per_second_in_all"] == pytest.approx(32 / busy)
        assert busy <= rows["end"].max() - rows["begin"].min() + 1e-9

    def test_the_next_turn_follows_the_servers_answer(self, server) -> None:
        run_endpoint_benchmark(connect(server), TASKS, **OPTIONS)
        [second] = [r for r in server.requests if r["messages"][-1]["content"] == "and again"]
        roles = [message["role"] for message in second["messages"]]
        assert roles == ["user", "assistant", "user"]
        assert second["messages"][1]["content"].split()[:3] == ["one", "two", "three"]

    def test_rows_stand_beside_local_ones(self, server, tiny_language_model) -> None:
        local = run_benchmark(tiny_language_model, ["plain"], TASKS, max_new_tokens=8)
        run = run_endpoint_benchmark(connect(server), TASKS, **OPTIONS)
        assert set(local.columns) <= set(run.rows.columns)
        table = summarize(pd.concat([local, run.rows]))
        assert table.loc["stub", "mean_acceptance_length"] == 2.0
        rates = run.rows["new_tokens"].sum() / run.rows["decode_seconds"].sum()
        plain = local["new_tokens"].sum() / local["decode_seconds"].sum()
        assert table.loc["stub", "speedup"] == pytest.approx(rates / plain)

    def test_trouble_is_counted_and_the_rest_goes_on(self, server) -> None:
        tasks = {
            "t": [
                Prompt(1, "t", ("cut a", "never asked")),
                Prompt(2, "t", ("busy a",)),
                Prompt(3, "t", ("fine a",)),
                Prompt(4, "t", ("refuse a",)),
            ]
        }
        run = run_endpoint_benchmark(
            connect(server), tasks, limit=None, concurrency=(1, 4), **OPTIONS
        )
        assert len(run.rows) == 2 * 5
        rows = run.rows[run.rows["concurrency"] == 1].set_index(["question_id", "turn"])
        assert rows.loc[(1, 0), "attempts"] == 3 and "middle" in rows.loc[(1, 0), "error"]
        assert rows.loc[(1, 0), "text"].split() == ["cut", "a"]  # what came is kept
        assert rows.loc[(1, 1), "attempts"] == 0 and "earlier turn" in rows.loc[(1, 1), "error"]
        assert rows.loc[(2, 0), "attempts"] == 3 and rows.loc[(2, 0), "error"] == ""
        assert rows.loc[(3, 0), "new_tokens"] == 8 and rows.loc[(4, 0), "new_tokens"] == 0
        table = run.table()
        assert list(table["errors"]) == [3, 3] and table.loc[0, "retries"] == 4
        assert table.loc[0, "tokens_per_second_in_all"] > 0

    def test_without_metrics_nothing_is_made_up(self, server) -> None:
        server.metrics = False
        run = run_endpoint_benchmark(connect(server), TASKS, **OPTIONS)
        table = run.table()
        assert table["mean_acceptance_length"].isna().all() and run.rows["steps"].isna().all()
        assert (table["tokens_per_second"] > 0).all()

    def test_a_run_that_was_killed_goes_on(self, server, tmp_path, monkeypatch) -> None:
        path = tmp_path / "rows.jsonl"
        endpoint = connect(server)
        real, calls = Endpoint.ask, []

        def dies(self, messages, **options):
            calls.append(messages)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return real(self, messages, **options)

        monkeypatch.setattr(Endpoint, "ask", dies)
        with pytest.raises(KeyboardInterrupt):
            run_endpoint_benchmark(endpoint, TASKS, results=path, **OPTIONS)
        kept = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        assert len(kept) == 2
        run = run_endpoint_benchmark(endpoint, TASKS, results=path, **OPTIONS)
        assert len(calls) == 5 and len(run.rows) == 4
        again = run_endpoint_benchmark(endpoint, TASKS, results=path, **OPTIONS)
        assert len(calls) == 5
        pd.testing.assert_frame_equal(again.rows, run.rows)
        with pytest.raises(UserError, match="max_new_tokens = 8"):
            run_endpoint_benchmark(endpoint, TASKS, results=path, max_new_tokens=9, method="stub")

    def test_what_failed_is_asked_again(self, server, tmp_path) -> None:
        """A server that died and was started anew: the same command goes on."""
        tasks = {"t": [Prompt(1, "t", ("flaky a", "then b")), Prompt(2, "t", ("fine a",))]}
        options = dict(limit=None, results=tmp_path / "rows.jsonl", **OPTIONS)
        first = run_endpoint_benchmark(connect(server, retries=0), tasks, **options)
        assert list(first.rows["error"] != "") == [True, True, False]
        assert first.table().loc[0, "errors"] == 2 and len(server.requests) == 2
        again = run_endpoint_benchmark(connect(server, retries=0), tasks, **options)
        assert list(again.rows["error"]) == ["", "", ""] and len(server.requests) == 4
        table = again.table()
        assert table.loc[0, "requests"] == 3 and table.loc[0, "retries"] == 1

    def test_acceptance_is_of_what_went_well(self, server) -> None:
        """The counters hold what failed attempts drafted, too; and what others asked meanwhile."""
        tasks = {"t": [Prompt(1, "t", ("flaky a",)), Prompt(2, "t", ("fine a",))]}
        run = run_endpoint_benchmark(connect(server), tasks, limit=None, **OPTIONS)
        assert list(run.rows["steps"].isna()) == [True, False]
        assert run.rows.loc[1, "mean_acceptance_length"] == 2.0
        assert run.table()["mean_acceptance_length"].isna().all()
        server.shared = True
        crowded = run_endpoint_benchmark(connect(server), {"t": tasks["t"][1:]}, **OPTIONS)
        assert crowded.rows["steps"].isna().all()

    def test_a_server_that_counts_anew(self) -> None:
        counted = module._difference({"drafted": 9, "accepted": 5}, {"drafted": 3, "accepted": 1})
        assert counted == {"drafted": None, "accepted": None}

    def test_no_more_threads_than_conversations(self, server) -> None:
        run = run_endpoint_benchmark(connect(server), TASKS, concurrency=(10**9,), **OPTIONS)
        assert len(run.rows) == 4 and server.most_active <= 3

    def test_ctrl_c_does_not_wait_for_a_silent_server(self, server, monkeypatch) -> None:
        class Interrupted(queue.SimpleQueue):
            def get(self, *_: object) -> None:
                raise KeyboardInterrupt

        own = SimpleNamespace(SimpleQueue=Interrupted, Empty=queue.Empty)
        monkeypatch.setattr(module, "queue", own)
        tasks = {"t": [Prompt(1, "t", ("silent a",))]}
        with pytest.raises(KeyboardInterrupt):
            run_endpoint_benchmark(connect(server, silence=60), tasks, **OPTIONS)
        assert any(thread.name == "asking" for thread in threading.enumerate())  # left to itself

    @pytest.mark.parametrize("levels", [(), (0,), (1, -2)])
    def test_wrong_concurrency(self, levels, server) -> None:
        with pytest.raises(UserError, match="concurrency is"):
            run_endpoint_benchmark(connect(server), TASKS, concurrency=levels, **OPTIONS)


class TestCommandLine:
    def test_bench_endpoint(self, server, tmp_path, capsys) -> None:
        output = str(tmp_path / "rows.jsonl")
        command = ["bench", "--endpoint", server.url, "--tasks", "gsm8k", "--limit", "2",
                   "--max-new-tokens", "8", "--concurrency", "1,2", "--output", output]  # fmt: skip
        assert main([*command, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["rows"] == 4
        assert [row["concurrency"] for row in printed["table"]] == [1, 2]
        assert main(command) == 0  # all is there already
        assert "tokens_per_second_in_all" in capsys.readouterr().out
        assert len(server.requests) == 4

    def test_what_is_for_local_runs_is_refused(self, server, capsys) -> None:
        assert main(["bench", "--endpoint", server.url, "--methods", "plain"]) == 2
        assert "--methods is for runs on this machine" in capsys.readouterr().err
        assert main(["bench", "--endpoint", server.url, "--draft-tokens", "3"]) == 2
        assert "--draft-tokens is for runs on this machine" in capsys.readouterr().err
        for option, value in (("--concurrency", "4"), ("--label", "x")):
            assert main(["bench", option, value]) == 2
            assert f"{option} is for --endpoint" in capsys.readouterr().err

    def test_wrong_input_is_one_line(self, server, tmp_path, capsys) -> None:
        def complaint(url: str, *more: str) -> str:
            """What is said, in one line, by a run that ends with code 2."""
            options = ["--tasks", "gsm8k", "--limit", "1", "--max-new-tokens", "4"]
            output = ["--output", str(tmp_path / "rows.jsonl")]
            assert main(["bench", "--endpoint", url, *options, *output, *more]) == 2
            printed = capsys.readouterr()
            errors = [x for x in printed.err.splitlines() if not x.startswith("quasar-lab: asking")]
            assert printed.out == "" and len(errors) == 1
            return errors[0]

        assert "no server answers" in complaint("http://127.0.0.1:9")
        assert "endpoint '' is no address" in complaint("")  # an unset variable runs nothing here
        assert "serves m, not 'x'" in complaint(server.url, "--models", "x")
        assert "unknown task 'x'" in complaint(server.url, "--tasks", "x")
        assert "concurrency is [0]" in complaint(server.url, "--concurrency", "0")
        assert "Is a directory" in complaint(server.url, "--output", str(tmp_path))
        # every request failed: no success
        question = tmp_path / "question.jsonl"
        question.write_text('{"question_id": 1, "category": "c", "turns": ["refuse this"]}\n')
        refused = complaint(server.url, "--questions", f"gsm8k={question}", "--label", "y")
        assert "none of 1 requests was answered: HTTP 400" in refused


def test_pauses_of_a_resumed_run_are_not_busy() -> None:
    rows = pd.DataFrame({"begin": [0.0, 1.0, 10.0, 10.5], "end": [2.0, 3.0, 11.0, 10.6]})
    assert module._busy_seconds(rows) == 4.0
