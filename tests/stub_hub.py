"""A Hugging Face Hub on 127.0.0.1 that serves a few folders and every kind of trouble."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"

# repository -> (status, X-Error-Code) of every answer
TROUBLE = {
    "org/none": (404, "RepoNotFound"),
    "org/private": (401, None),
    "org/gated": (401, "GatedRepo"),
    "org/broken": (500, None),
}


class _Handler(BaseHTTPRequestHandler):
    server: "StubHub"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0].strip("/")
        self.server.requests.append(path)
        parts = path.split("/")
        api = parts[:2] == ["api", "models"]
        if api:
            parts = parts[2:]
        repository, rest = "/".join(parts[:2]), parts[2:]
        if repository in TROUBLE:
            return self._error(*TROUBLE[repository])
        folder = self.server.root / repository
        if not folder.is_dir():
            return self._error(404, "RepoNotFound")
        if api:
            return self._describe(repository, folder, rest, with_body)
        # <repository>/resolve/<revision>/<file>
        if rest[1] not in ("main", COMMIT):
            return self._error(404, "RevisionNotFound")
        file = folder / "/".join(rest[2:])
        if not file.is_file():
            return self._error(404, "EntryNotFound")
        body = file.read_bytes()
        cut = repository == "org/cut" and file.suffix == ".safetensors" and with_body
        self._send(body[: len(body) // 2] if cut else body, len(body), with_body)

    def _describe(self, repository: str, folder: Path, rest: list[str], with_body: bool) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return self._error(404, "RevisionNotFound")
        if rest[:1] == ["tree"]:
            answer: object = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}
                for name, path in zip(names, files, strict=True)
            ]
        else:
            siblings = [{"rfilename": name} for name in names]
            answer = {"id": repository, "sha": COMMIT, "siblings": siblings, "private": False}
        body = json.dumps(answer).encode()
        self._send(body, len(body), with_body)

    def _send(self, body: bytes, length: int, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)
        if len(body) < length:
            self.close_connection = True

    def _error(self, status: int, code: str | None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class StubHub(ThreadingHTTPServer):
    """Serves `root`/org/name/*; `requests` lists the paths that were asked for."""

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def stub_hub(root: Path) -> Iterator[StubHub]:
    server = StubHub(root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
