"""What people use today, on the same weights: transformers, llama.cpp and vLLM beside the lab.

Each runs in a process of its own (`worker.py`), started once and idle while others are measured, so
that no two pools of threads compete. A package that is not installed is a peer that is skipped,
with the reason.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from quasar_lab.errors import UserError
from quasar_lab.methods import Method, Variant
from quasar_lab.sampling import SamplingConfig

_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Peer:
    """backend: of worker.BACKENDS. speculative: with the backend's own prompt lookup."""

    name: str
    label: str
    backend: str
    speculative: bool = False


PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", "transformers", "transformers"),
        Peer("transformers_lookup", "transformers, prompt lookup", "transformers", True),
        Peer("llama_cpp", "llama.cpp Q8_0", "llama_cpp"),
        Peer("llama_cpp_lookup", "llama.cpp Q8_0, prompt lookup", "llama_cpp", True),
        Peer("vllm", "vLLM", "vllm"),
        Peer("vllm_ngram", "vLLM, n-gram", "vllm", True),
    )
}


def checked_peers(names: Iterable[str]) -> list[Peer]:
    """The peers of these names; UserError for an unknown one."""
    wanted = list(names)
    if unknown := [name for name in wanted if name not in PEERS]:
        raise UserError(f"unknown peer {unknown[0]!r}: choose from {', '.join(PEERS)}")
    return [PEERS[name] for name in dict.fromkeys(wanted)]


class UnavailableError(Exception):
    """A peer that cannot run here; the message is the reason."""


class PeerProcess:
    """A peer at work. Close it, or use it in a `with` statement.

    setup: see worker.py. python: the interpreter that has the backend's package. Raises
    UnavailableError with the reason when it does not start.
    """

    def __init__(self, peer: Peer, setup: dict[str, Any], python: str = sys.executable) -> None:
        self.peer = peer
        # a path of this package must not reach another Python's installation
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        try:
            self._process = subprocess.Popen(
                [python, str(_WORKER), peer.backend],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, env=environment,
            )  # fmt: skip
        except OSError as error:
            raise UnavailableError(f"{python}: {error.strerror}") from error
        try:
            self._ask({**setup, "speculative": peer.speculative})
        except UnavailableError:
            self.close()
            raise

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise UnavailableError(f"the process ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise UnavailableError(found["error"])
        return found

    @property
    def variant(self) -> Variant:
        """What a benchmark's rows call it."""
        return Variant(Method(self.peer.name, self.peer.label, self.peer.backend), None)

    def measure(
        self, prompt_ids: Tensor, sampling: SamplingConfig, max_new_tokens: int
    ) -> dict[str, Any]:
        """Generate greedily: the columns that a row of `run_benchmark` has, as far as known.

        Decoding is counted from the first step's end, as prefill and first token come together:
        new_tokens are those that came after it.
        """
        prompt = prompt_ids.tolist()
        found = self._ask({"prompt": prompt, "max_new_tokens": max_new_tokens})
        tokens, seconds = found["tokens"], found["decode_seconds"]
        decoded = len(tokens) - found["in_first_step"]
        steps = found["steps"]
        return {
            "engine": self.peer.backend,
            "prompt_tokens": len(prompt),
            "tokens": tokens,
            "new_tokens": decoded,
            "steps": steps,
            "drafted": None,  # none of the backends tells
            "accepted": None,
            "mean_acceptance_length": decoded / steps if steps else None,
            "tokens_per_second": decoded / seconds if decoded > 0 and seconds > 0 else None,
            "decode_seconds": seconds,
            "draft_seconds": None,
            "prefill_seconds": found["first_seconds"],
            "finish_reason": "length" if len(tokens) >= max_new_tokens else "eos",
        }

    def close(self) -> None:
        """End the process."""
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
