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
from typing import Any

import httpx

from quasar_lab.answer_stream import MALFORMED, Answer, AttemptError, events, take
from quasar_lab.checkpoints.folder import one_line
from quasar_lab.errors import UserError

# Prometheus counters of drafted and accepted tokens, under vLLM's names
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_PASSING = (408, 429, 500, 502, 503, 504)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DENIED = (401, 403)
_WANTED = "give the address of an OpenAI-compatible server"


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
        self.url = _checked_url(url)
        self.silence, self.longest, self.retries, self.pause = silence, longest, retries, pause
        key = _checked_key(os.environ.get("OPENAI_API_KEY", ""))
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(silence, pool=None),
                limits=httpx.Limits(max_connections=None),
                # a proxy cannot reach this machine's own servers
                trust_env=httpx.URL(self.url).host not in _LOOPBACK,
            )
        # a proxy or certificates that the environment names and that are not there
        except (OSError, ImportError, ValueError) as error:
            raise UserError(f"cannot connect to {url}: {one_line(error)}") from error
        owners = self._served_models()
        if model is not None and model not in owners:
            raise UserError(f"{url} serves {', '.join(owners)}, not {model!r}")
        self.model = model or next(iter(owners))
        self.software = owners[self.model]

    def _served_models(self) -> dict[str, str]:
        """What the server lists: model -> who owns it, which is how vLLM tells its name."""
        try:
            text = self._get("/v1/models")
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            what = "set OPENAI_API_KEY to its key" if status in _DENIED else _WANTED
            raise UserError(f"{self.url} answers /v1/models with HTTP {status}: {what}") from error
        except (httpx.HTTPError, AttemptError, OSError, ValueError) as error:
            raise UserError(
                f"no server answers at {self.url} ({one_line(error)}): start one, see quasar-lab "
                "serve-command"
            ) from error
        try:
            listed = json.loads(text)["data"]
            owners = {entry["id"]: str(entry.get("owned_by") or "server") for entry in listed}
            if not all(isinstance(name, str) for name in owners):
                raise TypeError("a model's id that is no text")
        except MALFORMED as error:
            raise UserError(f"{self.url} lists no models at /v1/models: {_WANTED}") from error
        if not owners:
            raise UserError(f"{self.url} serves no model: start it with one")
        return owners

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
            except AttemptError as trouble:
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
        done = seen = False
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                pieces = self._pieces(response, answer.begin, self.longest, stop)
                if response.status_code != 200:
                    text = next((p for p in pieces if p.strip()), response.reason_phrase)
                    raise AttemptError(
                        f"HTTP {response.status_code}: {one_line(ValueError(text))}",
                        passing=response.status_code in _PASSING,
                    )
                for event in events(pieces):
                    seen = True
                    if event == "[DONE]":
                        done = True
                        break
                    take(event, answer)
        except httpx.TimeoutException as error:
            raise AttemptError(f"nothing came for too long ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise AttemptError(f"{type(error).__name__}: {one_line(error)}") from error
        if not seen:
            kind = response.headers.get("Content-Type", "nothing")
            raise AttemptError(f"the answer is no stream of events but {kind}")
        if not done or not answer.finish_reason:
            raise AttemptError("the stream ended in the middle of the answer")
        answer.end = answer.end or time.time()  # an answer without a word
        answer.new_tokens = answer.new_tokens or len(answer.tokens) or answer.chunks
        # without ids the chunks are taken to be of one size
        answer.first_tokens = answer.first_tokens or answer.new_tokens / max(answer.chunks, 1)

    def _pieces(
        self,
        response: httpx.Response,
        begin: float,
        longest: float,
        stop: threading.Event | None = None,
    ) -> Iterator[str]:
        """The text of a response as it comes, which takes `longest` seconds from `begin` at most:
        httpx limits only the time from one byte to the next."""
        for piece in response.iter_text():
            if stop is not None and stop.is_set():
                raise AttemptError("stopped", passing=False)
            if time.time() - begin > longest:
                raise AttemptError(f"not done after {longest:g} s")
            yield piece

    def _get(self, path: str) -> str:
        with self._client.stream("GET", path) as response:
            response.raise_for_status()
            return "".join(self._pieces(response, time.time(), self.silence))

    def counters(self) -> dict[str, float] | None:
        """{"drafted", "accepted"}: tokens since the server started, where it tells (/metrics)."""
        try:
            text = self._get("/metrics")
        except (httpx.HTTPError, AttemptError):
            return None
        found = {}
        for name, metric in (("drafted", _DRAFTED), ("accepted", _ACCEPTED)):
            values = re.findall(rf"^{metric}(?:{{[^}}]*}})? ([0-9.eE+]+)$", text, re.MULTILINE)
            if not values:
                return None
            found[name] = sum(map(float, values))
        return found


def _checked_url(url: str) -> str:
    """The address without /v1, if it is one."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise UserError(f"endpoint {url!r} is no address: {one_line(error)}") from error
    if parts.userinfo:
        raise UserError("the endpoint's address holds a password: set OPENAI_API_KEY instead")
    if parts.scheme not in ("http", "https") or not parts.host:
        raise UserError(
            f"endpoint {url!r} is no address of a server: write it like http://127.0.0.1:8000"
        )
    return url.rstrip("/").removesuffix("/v1")


def _checked_key(key: str) -> str:
    """The key as a header can hold it; a message must not repeat it."""
    key = key.strip()
    if not (key.isascii() and (key.isprintable() or not key)):
        raise UserError("OPENAI_API_KEY holds characters that no header can: set it anew")
    return key
