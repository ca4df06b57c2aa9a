"""Ask an OpenAI-compatible server (vLLM, llama.cpp, SGLang) and time how its answer streams in.

Whatever a server does wrong becomes part of the answer, never an exception and never a wait without
end: silence is limited, so is an attempt as a whole, and what may pass is tried again.
"""

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from quasar_lab.checkpoints.folder import one_line
from quasar_lab.errors import UserError

# Prometheus counters of drafted and accepted tokens, under vLLM's names
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_PASSING = (408, 429, 500, 502, 503, 504)
_FINISH = {"stop": "eos"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True)
class Answer:
    """One streamed answer, or what came of it.

    tokens: ids where the server tells them (vLLM does); new_tokens, prompt_tokens: as it counts;
    begin, first, end: seconds since the epoch of the request, the first text and the last;
    first_tokens: how many tokens came first; attempts: 1 and one for each retry; error: why there
    is no (whole) answer, else empty.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    new_tokens: int = 0
    prompt_tokens: int = 0
    finish_reason: str = ""
    begin: float = 0.0
    first: float = 0.0
    end: float = 0.0
    first_tokens: float = 0.0
    chunks: int = 0
    attempts: int = 1
    error: str = ""

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the request to the first text: queue, prefill and first step."""
        return self.first - self.begin

    @property
    def tokens_per_second(self) -> float:
        """Of what followed the first text; NaN when everything came at once."""
        seconds = self.end - self.first
        return (self.new_tokens - self.first_tokens) / seconds if seconds > 0 else float("nan")


class _AttemptError(Exception):
    """An attempt failed; `passing`: whether another may succeed."""

    def __init__(self, reason: str, passing: bool = True) -> None:
        super().__init__(reason)
        self.passing = passing


class Endpoint:
    """A server's chat completions.

    url: with or without /v1. model: its name there; None takes the first that the server lists.
    silence: seconds without a byte after which an attempt is given up; longest: seconds for an
    attempt in all; retries: attempts after the first, each after twice the pause (seconds) of the
    one before. A key is read from OPENAI_API_KEY.

    Raises UserError when no such server answers.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        silence: float = 60.0,
        longest: float = 600.0,
        retries: int = 2,
        pause: float = 0.5,
    ) -> None:
        if min(silence, longest) <= 0 or retries < 0 or pause < 0:
            raise UserError(
                f"silence {silence}, longest {longest} (seconds) must be positive, retries "
                f"{retries} and pause {pause} not negative"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.longest, self.retries, self.pause = longest, retries, pause
        key = os.environ.get("OPENAI_API_KEY")
        try:
            local = httpx.URL(self.url).host in _LOOPBACK
            self._client = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(silence, pool=None),
                limits=httpx.Limits(max_connections=None),
                trust_env=not local,  # a proxy cannot reach this machine's own servers
            )
            listed = self._client.get("/v1/models").raise_for_status().json()["data"]
            names = [entry["id"] for entry in listed]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"no OpenAI-compatible server answers at {url} ({one_line(error)}): start one, see "
                "quasar-lab serve-command"
            ) from error
        if not names or (model is not None and model not in names):
            raise UserError(f"{url} serves {', '.join(names) or 'no model'}, not {model!r}")
        self.model = model or names[0]
        self.software = str(listed[names.index(self.model)].get("owned_by") or "server")

    def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop: threading.Event | None = None,
    ) -> Answer:
        """The answer to a conversation. `stop`, once set, ends the attempt and the retries."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.software == "vllm":
            body["return_token_ids"] = True
        stop = stop or threading.Event()
        for attempt in range(1, self.retries + 2):
            answer = Answer(attempts=attempt, begin=time.time())
            try:
                self._stream(body, answer, stop)
            except _AttemptError as trouble:
                answer.error = str(trouble)
                answer.end = time.time()
                if not trouble.passing or attempt > self.retries:
                    break
                if stop.wait(self.pause * 2 ** (attempt - 1)):
                    break
            else:
                break
        return answer

    def _stream(self, body: dict[str, Any], answer: Answer, stop: threading.Event) -> None:
        done = False
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _AttemptError(
                        f"HTTP {response.status_code}: {response.text.strip()[:200]}",
                        passing=response.status_code in _PASSING,
                    )
                for event in self._events(response, answer.begin, stop):
                    if event == "[DONE]":
                        done = True
                        break
                    _take(event, answer)
        except httpx.TimeoutException as error:
            raise _AttemptError(f"nothing came for too long ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise _AttemptError(f"{type(error).__name__}: {one_line(error)}") from error
        if not done or not answer.finish_reason:
            raise _AttemptError("the stream ended in the middle of the answer")
        answer.new_tokens = answer.new_tokens or len(answer.tokens) or answer.chunks
        # without ids the chunks are taken to be of one size
        answer.first_tokens = answer.first_tokens or answer.new_tokens / max(answer.chunks, 1)

    def _events(
        self, response: httpx.Response, begin: float, stop: threading.Event
    ) -> Iterator[str]:
        """The data lines of a server-sent event stream, within the time of an attempt."""
        rest = ""
        for piece in response.iter_text():
            if stop.is_set():
                raise _AttemptError("stopped", passing=False)
            if time.time() - begin > self.longest:
                raise _AttemptError(f"not done after {self.longest:g} s")
            *lines, rest = (rest + piece).split("\n")
            for line in lines:
                if line.startswith("data:"):
                    yield line[5:].strip()

    def counters(self) -> dict[str, float] | None:
        """{"drafted", "accepted"}: tokens since the server started, where it tells (/metrics)."""
        try:
            text = self._client.get("/metrics").raise_for_status().text
        except httpx.HTTPError:
            return None
        found = {}
        for name, metric in (("drafted", _DRAFTED), ("accepted", _ACCEPTED)):
            values = re.findall(rf"^{metric}(?:{{[^}}]*}})? ([0-9.eE+]+)$", text, re.MULTILINE)
            if not values:
                return None
            found[name] = sum(map(float, values))
        return found


def _take(event: str, answer: Answer) -> None:
    """Add one event of the stream to the answer."""
    try:
        chunk = json.loads(event)
        if "error" in chunk:
            raise _AttemptError(f"the server reports {one_line(ValueError(chunk['error']))}")
        usage = chunk.get("usage") or {}
        answer.new_tokens = usage.get("completion_tokens", answer.new_tokens)
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            # models that reason send that text beside the answer's
            text = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
            ids = choice.get("token_ids") or []
            if text or ids:
                answer.end = time.time()
                answer.chunks += 1
                if not answer.first:
                    answer.first, answer.first_tokens = answer.end, len(ids)
            answer.text += text
            answer.tokens += ids
            reason = choice.get("finish_reason")
            answer.finish_reason = _FINISH.get(reason, reason) or answer.finish_reason
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _AttemptError(f"an event that is no chat completion: {event[:80]!r}") from error
