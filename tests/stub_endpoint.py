"""An OpenAI-compatible server on 127.0.0.1 that answers well, slowly, badly or not at all.

It "generates" the words of the last message, two tokens a step at most. How it treats a request is
decided by a word in that message, or by `behaviour`.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ALWAYS = {"slow", "silent", "trickle", "cut", "refuse", "garbage", "sick", "mute", "page", "drip",
          "miscount", "deep", "nulls", "wordless"}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: "StubEndpoint"
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in self.server.dripping:
            return self._drip(200)
        if self.path == "/v1/models" and self.server.listing:
            return self._send(*self.server.listing)
        if self.path == "/v1/models":
            listed = [{"id": name, "owned_by": self.server.software} for name in self.server.models]
            return self._send(200, json.dumps({"data": listed}))
        if self.path == "/metrics" and self.server.metrics:
            with self.server.lock:
                drafted, accepted = self.server.drafted, self.server.accepted
            name = "vllm:spec_decode_num"
            return self._send(
                200,
                f"# HELP {name}_draft_tokens_total Tokens.\n"
                f'{name}_draft_tokens_total{{engine="0",model_name="m"}} {float(drafted)}\n'
                f'{name}_accepted_tokens_total{{engine="0",model_name="m"}} {float(accepted)}\n'
                f'{name}_accepted_tokens_per_pos_total{{engine="0",position="0"}} 99.0\n',
            )
        self._send(404, "not here")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.requests.append(body)
            self.server.active += 1
            self.server.most_active = max(self.server.most_active, self.server.active)
            attempt = sum(r["messages"] == body["messages"] for r in self.server.requests)
        words = text.split()
        how = next((word for word in words if word in ALWAYS | {"busy", "flaky"}), "")
        try:
            self._answer(how, words, body, attempt)
        finally:
            with self.server.lock:
                self.server.active -= 1

    def _answer(self, how: str, words: list[str], body: dict[str, Any], attempt: int) -> None:
        if how == "refuse":
            return self._send(400, json.dumps({"error": "max_tokens is too large"}))
        if how == "busy" and attempt < 3:
            return self._send(503, "come back later")
        if how == "page":
            return self._send(200, "<html>please log in</html>", "text/html")
        if how == "drip":
            return self._drip(500)
        if how == "silent":
            self.server.closing.wait(20)
            return None
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if how == "trickle":  # never a whole event
            while not self.server.closing.wait(0.02):
                self._write("d")
            return None
        tokens = (words * body["max_tokens"])[: body["max_tokens"]]
        self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for start in range(0, len(tokens), 2):
            time.sleep(0.05 if how == "slow" else self.server.step_seconds)
            if start and (how == "cut" or (how == "flaky" and attempt == 1)):
                return None
            if how in ("garbage", "deep"):
                text = "[" * 99999 if how == "deep" else "{this is no JSON"
                return self._write(f"data: {text}\n\n")
            if how == "sick":
                return self._event({"error": {"message": "the engine is dead", "code": 500}})
            if how != "wordless":
                self._step(tokens[start : start + 2], start)
        nulls = {"error": None, "usage": None} if how == "nulls" else {}
        self._event({"choices": [{"delta": {}, "finish_reason": "length"}], **nulls})
        if how != "mute":
            count: Any = str(len(tokens)) if how == "miscount" else len(tokens)
            usage = {"completion_tokens": count, "prompt_tokens": len(words)}
            self._event({"choices": [], "usage": usage})
        self._write("data: [DONE]\n\n")
        return None

    def _step(self, tokens: list[str], start: int) -> None:
        with self.server.lock:
            self.server.drafted += 3
            self.server.accepted += len(tokens) * 2 if self.server.shared else len(tokens) - 1
        choice: dict[str, Any] = {"delta": {"content": " ".join(tokens) + " "}}
        if self.server.software == "vllm":
            choice["token_ids"] = list(range(start, start + len(tokens)))
        self._event({"choices": [choice]})

    def _event(self, content: dict[str, Any]) -> None:
        self._write(f"data: {json.dumps(content)}\n\n")

    def _write(self, text: str) -> None:
        # a client that has gone is no fault of the test
        with contextlib.suppress(OSError):
            self.wfile.write(text.encode())
            self.wfile.flush()

    def _drip(self, status: int) -> None:
        """Something comes all the time, but it never ends."""
        self.send_response(status)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while not self.server.closing.wait(0.02):
            self._write(" ")

    def _send(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.send_header("Connection", "close")  # else its thread outlives the server
        self.end_headers()
        self.close_connection = True
        self._write(text)


class StubEndpoint(ThreadingHTTPServer):
    """`requests`: the bodies that came; `most_active`: the most that were under way at a time."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.software, self.metrics, self.step_seconds = ["m"], "vllm", True, 0.002
        self.listing: tuple[int, str] | None = None  # status and text, in place of `models`
        self.dripping: set[str] = set()  # paths that never end
        self.shared = False  # others are served as well, and counted
        self.requests: list[dict[str, Any]] = []
        self.active = self.most_active = self.drafted = self.accepted = 0
        self.lock, self.closing = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def stub_endpoint() -> Iterator[StubEndpoint]:
    server = StubEndpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
