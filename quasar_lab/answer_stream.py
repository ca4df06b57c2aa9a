"""One streamed answer of an OpenAI-compatible server: its events, and what they add up to."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quasar_lab.checkpoints.folder import one_line

# what JSON of another shape than expected raises
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_FINISH = {"stop": "eos"}


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


class AttemptError(Exception):
    """An attempt failed; `passing`: whether another may succeed."""

    def __init__(self, reason: str, passing: bool = True) -> None:
        super().__init__(reason)
        self.passing = passing


def events(pieces: Iterable[str]) -> Iterator[str]:
    """The data lines of a server-sent event stream."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        for line in lines:
            if line.startswith("data:"):
                yield line[5:].strip()


def take(event: str, answer: Answer) -> None:
    """Add one event of the stream to the answer."""
    try:
        chunk = json.loads(event)
        # some servers send an error of null with every event
        if chunk.get("error"):
            raise AttemptError(f"the server reports {one_line(ValueError(chunk['error']))}")
        usage = chunk.get("usage") or {}
        answer.new_tokens = _count(usage, "completion_tokens", answer.new_tokens)
        answer.prompt_tokens = _count(usage, "prompt_tokens", answer.prompt_tokens)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            # models that reason send that text beside the answer's
            text = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
            ids = choice.get("token_ids") or []
            reason = choice.get("finish_reason") or ""
            if not isinstance(reason, str) or not all(isinstance(token, int) for token in ids):
                raise TypeError("a reason that is no text, or tokens that are no ids")
            if text or ids:
                answer.end = time.time()
                answer.chunks += 1
                if not answer.first:
                    answer.first, answer.first_tokens = answer.end, len(ids)
            answer.text += text
            answer.tokens += ids
            answer.finish_reason = _FINISH.get(reason, reason) or answer.finish_reason
    except MALFORMED as error:
        raise AttemptError(f"an event that is no chat completion: {event[:80]!r}") from error


def _count(usage: Mapping[str, Any], name: str, default: int) -> int:
    """A number of tokens in a server's account; `default` where it tells none."""
    count = usage.get(name)
    if count is None:
        return default
    if not isinstance(count, int) or count < 0:
        raise TypeError(f"{name} is {count}")
    return count
