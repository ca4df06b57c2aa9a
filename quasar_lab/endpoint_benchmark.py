"""The benchmark's prompts against a server, several at a time.

Rows have the columns of `run_benchmark` and more, so that a server stands in one table with what
was measured here. Speed per request and speed in all are different questions: the first falls as
more requests share the machine, the second rises until it computes as much as it can.
"""

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from quasar_lab.answer_stream import Answer
from quasar_lab.benchmark import plan
from quasar_lab.endpoint import Endpoint
from quasar_lab.errors import UserError
from quasar_lab.grid import Cell
from quasar_lab.methods import DRAFT_COLUMNS
from quasar_lab.progress import ProgressBar
from quasar_lab.results import ResultFile
from quasar_lab.tasks import TASKS, Prompt, conversation

_KEY = ("concurrency", "task", "question_id", "turn", "temperature", "seed")


@dataclass(frozen=True)
class EndpointRun:
    """What a server did. rows: one a request; levels: one a concurrency, as far as it was run.

    levels: concurrency, requests, new_tokens, drafted, accepted (NaN where not exposed, and where
    a request failed or was tried again: the server has counted what came of it, too).
    """

    rows: pd.DataFrame
    levels: pd.DataFrame

    def table(self) -> pd.DataFrame:
        """One row a concurrency: errors, time to first token, speed and acceptance.

        requests; errors; retries; time_to_first_token and its 95th percentile (seconds);
        tokens_per_second (median over requests, from the first token on);
        tokens_per_second_in_all (while any request was under way); mean_acceptance_length (L) and
        draft_acceptance (NaN where the server does not expose its counters).
        """
        records = []
        for concurrency, rows in self.rows.groupby("concurrency", sort=True):
            good = rows[rows["error"] == ""]
            counted = self.levels[self.levels["concurrency"] == concurrency].dropna()
            level = counted.sum(min_count=1)
            steps = level["new_tokens"] - level["accepted"]
            records.append(
                {
                    "method": rows["method"].iloc[0],
                    "concurrency": concurrency,
                    "requests": len(rows),
                    "errors": len(rows) - len(good),
                    "retries": int((rows["attempts"] - 1).clip(lower=0).sum()),
                    "time_to_first_token": good["time_to_first_token"].median(),
                    "time_to_first_token_p95": good["time_to_first_token"].quantile(0.95),
                    "tokens_per_second": good["tokens_per_second"].median(),
                    "tokens_per_second_in_all": good["new_tokens"].sum() / _busy_seconds(rows),
                    # every step emits one token besides the drafts that it accepts
                    "mean_acceptance_length": level["new_tokens"] / steps,
                    "draft_acceptance": level["accepted"] / level["drafted"],
                }
            )
        return pd.DataFrame(records)


def run_endpoint_benchmark(
    endpoint: Endpoint,
    tasks: Iterable[str] | Mapping[str, Sequence[Prompt]] = tuple(TASKS),
    temperatures: Iterable[float] = (0.0,),
    *,
    seeds: Iterable[int] = (0,),
    limit: int | None = 2,
    max_new_tokens: int = 128,
    concurrency: Iterable[int] = (1,),
    method: str = "endpoint",
    results: str | Path | None = None,
) -> EndpointRun:
    """Ask every prompt at every temperature, with so many requests under way at a time.

    endpoint: the server. tasks, temperatures, seeds, limit, max_new_tokens: as for `run_benchmark`.
    concurrency: levels, run one after the other. method: what the rows call it, e.g. "vLLM, W8A8".
    results: a file that keeps each row as it comes; an interrupted run continues from it, and asks
        again what failed.

    A later turn is asked after the server's own answers. Rows have the columns of `run_benchmark`;
    there decode_seconds is new_tokens / tokens_per_second, prefill_seconds is the time to first
    token, and steps, drafted and accepted are known at concurrency 1 only, where the server's
    counters (/metrics) are one request's if nobody else asks it meanwhile. Besides: concurrency,
    time_to_first_token, begin, end (seconds since the epoch), attempts (0: not asked, as an earlier
    turn failed), error, text.

    Raises UserError for wrong settings and a result file of another run; the server's errors are
    in the rows.
    """
    levels = list(dict.fromkeys(concurrency))
    if not levels or min(levels) < 1:
        raise UserError(f"concurrency is {levels}: give whole numbers, at least 1")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
    grid = plan(["plain"], tasks, temperatures, seeds=seeds, limit=limit)
    own = {
        "endpoint": endpoint.url,
        "model": endpoint.model,
        "method": method,
        "max_new_tokens": max_new_tokens,
        "concurrency": levels,
    }
    store = ResultFile(results, {**own, **grid.settings()})
    run = _Run(endpoint, method, max_new_tokens, store, grid.cells())
    missing = sum(len(chain) for level in levels for chain in run.missing(level))
    if missing:
        with ProgressBar(missing, f"asking {endpoint.model}", unit="request") as bar:
            for level in levels:
                run.level(level, bar)
    return EndpointRun(run.frame("request", levels), run.frame("level", levels))


class _Run:
    """The state of one run: what is stored, and the lock that lets several threads store."""

    def __init__(
        self,
        endpoint: Endpoint,
        method: str,
        max_new_tokens: int,
        store: ResultFile,
        cells: Sequence[Cell],
    ) -> None:
        self.endpoint, self.method, self.max_new_tokens = endpoint, method, max_new_tokens
        self.store, self.cells = store, cells
        self.lock, self.stop = threading.Lock(), threading.Event()

    def done(self, level: int) -> dict[tuple[Any, ...], dict[str, Any]]:
        """The level's rows by (task, question_id, turn, temperature, seed)."""
        rows = [row for row in self.store.rows if row["kind"] == "request"]
        return {tuple(row[k] for k in _KEY[1:]): row for row in rows if row["concurrency"] == level}

    def missing(self, level: int) -> list[list[Cell]]:
        """What is left to ask, or failed: the turns of a conversation in a list, in order."""
        done = self.done(level)
        chains: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in self.cells:
            row = done.get(_key(cell))
            if row is None or row["error"]:
                talk = (cell.task, cell.prompt.question_id, cell.temperature, cell.seed)
                chains.setdefault(talk, []).append(cell)
        return list(chains.values())

    def level(self, level: int, bar: ProgressBar) -> None:
        """Run one level: `level` threads take conversations until none is left."""
        waiting: queue.SimpleQueue[list[Cell]] = queue.SimpleQueue()
        chains = self.missing(level)
        for chain in chains:
            waiting.put(chain)
        if not chains:
            return
        before, asked = self.endpoint.counters(), len(self.store.rows)
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                while not self.stop.is_set():
                    self._converse(waiting.get_nowait(), level, bar)
                ended.put(None)
            except queue.Empty:
                ended.put(None)
            except BaseException as error:
                ended.put(error)

        # daemons: after Ctrl-C nobody waits for a server that is silent
        workers = [
            threading.Thread(target=work, name="asking", daemon=True)
            for _ in range(min(level, len(chains)))
        ]
        try:
            for worker in workers:
                worker.start()
            for _ in workers:
                error = ended.get()
                if error is not None:
                    raise error
        except BaseException:
            self.stop.set()
            raise
        rows = self.store.rows[asked:]
        counted = _difference(before, self.endpoint.counters())
        if any(row["error"] or row["attempts"] != 1 for row in rows):
            counted = _difference(None, None)
        tokens = sum(row["new_tokens"] for row in rows)
        account = {"concurrency": level, "requests": len(rows), "new_tokens": tokens}
        self.store.append({"kind": "level", **account, **counted})

    def _converse(self, chain: list[Cell], level: int, bar: ProgressBar) -> None:
        for cell in chain:
            done = self.done(level)
            earlier = [done[_key(other)] for other in self.cells
                       if _key(other)[:2] == _key(cell)[:2] and other.turn < cell.turn
                       and _key(other)[3:] == _key(cell)[3:]]  # fmt: skip
            if any(row["error"] for row in earlier):
                answer = Answer(attempts=0, error="not asked: an earlier turn failed")
                counted = _difference(None, None)
            else:
                messages = conversation(cell.prompt, [row["text"] for row in earlier])
                before = self.endpoint.counters() if level == 1 else None
                answer = self.endpoint.ask(
                    messages,
                    max_new_tokens=self.max_new_tokens,
                    temperature=cell.temperature,
                    seed=cell.seed,
                    stop=self.stop,
                )
                counted = _difference(before, self.endpoint.counters() if before else None)
            if failed := done.get(_key(cell)):
                answer.attempts += failed["attempts"]
            if self.stop.is_set():
                return
            with self.lock:
                self.store.append(self._row(cell, level, answer, counted))
                bar.step(f"{cell.task} {cell.prompt.question_id}, {level} at a time")

    def _row(
        self, cell: Cell, level: int, answer: Answer, counted: Mapping[str, float | None]
    ) -> dict[str, Any]:
        tokens = 0 if answer.error else answer.new_tokens
        accepted, speed = counted["accepted"], answer.tokens_per_second
        # every step emits a token of its own: if not, others have asked the server meanwhile
        known = accepted is not None and tokens > accepted and answer.attempts == 1
        counted = counted if known else _difference(None, None)
        steps = tokens - int(accepted or 0) if known else None
        measured = speed > 0 and not answer.error
        return {
            "kind": "request",
            "concurrency": level,
            **dict(zip(_KEY[1:], _key(cell), strict=True)),
            "method": self.method,
            **dict.fromkeys(DRAFT_COLUMNS),
            "engine": self.endpoint.software,
            "prompt_tokens": answer.prompt_tokens,
            "tokens": answer.tokens,
            "new_tokens": tokens,
            "steps": steps,
            "drafted": counted["drafted"],
            "accepted": counted["accepted"],
            "mean_acceptance_length": tokens / steps if steps else None,
            "tokens_per_second": speed if measured else None,
            "decode_seconds": tokens / speed if measured else None,
            "draft_seconds": None,
            "prefill_seconds": answer.time_to_first_token if answer.first else None,
            "finish_reason": "error" if answer.error else answer.finish_reason,
            "time_to_first_token": answer.time_to_first_token if answer.first else None,
            "begin": answer.begin,
            "end": answer.end,
            "attempts": answer.attempts,
            "error": answer.error,
            "text": answer.text,
        }

    def frame(self, kind: str, levels: Sequence[int]) -> pd.DataFrame:
        """The stored rows of a kind, in the order of levels and prompts."""
        if kind == "request":
            keys = [_key(cell) for cell in self.cells]
            rows = [done[key] for done in map(self.done, levels) for key in keys]
        else:
            rows = [row for row in self.store.rows if row["kind"] == kind]
        frame = pd.DataFrame(rows).drop(columns="kind", errors="ignore")
        numbers = ["steps", "drafted", "accepted", "mean_acceptance_length", "tokens_per_second",
                   "decode_seconds", "prefill_seconds", "time_to_first_token"]  # fmt: skip
        return frame.astype({name: float for name in numbers if name in frame})


def _key(cell: Cell) -> tuple[Any, ...]:
    return (cell.task, cell.prompt.question_id, cell.turn, cell.temperature, cell.seed)


def _difference(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, float | None]:
    """What the server counted in between; None where it does not tell, or has begun anew."""
    if before is None or after is None or any(after[name] < before[name] for name in before):
        return {"drafted": None, "accepted": None}
    return {name: after[name] - before[name] for name in ("drafted", "accepted")}


def _busy_seconds(rows: pd.DataFrame) -> float:
    """Seconds in which at least one request was under way; pauses of a resumed run are not."""
    total, until = 0.0, 0.0
    for begin, end in sorted(zip(rows["begin"], rows["end"], strict=True)):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total or float("nan")
