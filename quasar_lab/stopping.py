"""When a generation ends: an end-of-sequence token, a stop string, the budget, a full context.

Whatever comes after the end inside an accepted block is dropped, so that speculative decoding
stops at the very token at which plain decoding stops.
"""

from collections.abc import Iterable
from typing import Any

from quasar_lab.checks import check_integers, check_tokens
from quasar_lab.errors import UserError


class StopRule:
    """Cuts a step's tokens where the output ends, and remembers why.

    Args:
        budget: tokens that may be emitted in all.
        budget_reason: what ends the output then, "length" or "context_length".
        eos: end-of-sequence tokens; they are emitted.
        stop_strings: texts that end the output once they are complete; they are emitted too.
        tokenizer: turns tokens into text, needed with stop_strings.
    """

    def __init__(
        self,
        budget: int,
        budget_reason: str,
        eos: frozenset[int],
        stop_strings: tuple[str, ...] = (),
        tokenizer: Any = None,
    ) -> None:
        self.budget = budget
        self.eos = eos
        self.stop_strings = stop_strings
        self.tokenizer = tokenizer
        self.emitted: list[int] = []
        self._budget_reason = budget_reason
        # "" until the output has ended
        self.finish_reason = "" if budget > 0 else budget_reason
        # A character is at most 4 bytes and a token at least one: where a stop string that ends
        # in a new token can have begun. A few more, as the first token may lose its space.
        longest = max((len(text) for text in stop_strings), default=0)
        self._window = 4 * longest + 4

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.budget - len(self.emitted)

    def cut(self, tokens: list[int]) -> list[int]:
        """Those of the new tokens that are emitted: all, or those up to the end."""
        complete_at = self._first_completion(tokens) if self.stop_strings else None
        kept = []
        for token in tokens:
            kept.append(token)
            if token in self.eos:
                self.finish_reason = "eos"
            elif len(kept) == complete_at:
                self.finish_reason = "stop_string"
            elif len(kept) == self.room:
                self.finish_reason = self._budget_reason
            if self.finish_reason:
                break
        self.emitted += kept
        return kept

    def _first_completion(self, tokens: list[int]) -> int | None:
        """After how many of the new tokens a stop string is complete; None: not in these."""
        before = self.emitted[-self._window :]
        text = [*before, *tokens]
        # Each prefix as plain decoding would see it, token by token: with some tokenizers a later
        # token changes the text of those before it, and a stop string that was there is gone.
        ends = range(len(before) + 1, len(text) + 1)
        return next(
            (
                count
                for count, end in enumerate(ends, start=1)
                if self._holds_stop_string(text[max(0, end - self._window - 1) : end])
            ),
            None,
        )

    def _holds_stop_string(self, tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(stop in text for stop in self.stop_strings)


def check_stop_strings(stop_strings: object, tokenizer: object) -> tuple[str, ...]:
    """The stop strings as a tuple; UserError for anything else, or without a tokenizer."""
    strings = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
    if not isinstance(strings, Iterable):
        raise UserError(f"stop_strings is {stop_strings!r}: it must be a text or a list of texts")
    strings = tuple(strings)
    if not all(isinstance(text, str) and text for text in strings):
        raise UserError(f"stop_strings is {stop_strings!r}: it must be texts that are not empty")
    if strings and tokenizer is None:
        raise UserError("stop_strings needs the tokenizer too: pass tokenizer=")
    return strings


def eos_ids(eos_token_id: Any, *targets: object, vocab_size: int | None = None) -> frozenset[int]:
    """The end-of-sequence tokens: None asks the targets in turn, [] is none.

    Raises UserError for what are no tokens, or none of this vocabulary.
    """
    if eos_token_id is None:  # a model may list tokens beyond its vocabulary: they never come
        own = (getattr(target, "eos_token_ids", None) for target in targets)
        return frozenset(next((ids for ids in own if ids), ()))
    if isinstance(eos_token_id, set | frozenset):
        eos_token_id = list(eos_token_id)
    ids = check_integers("eos_token_id", eos_token_id).reshape(-1).tolist()
    check_tokens("eos_token_id holds", ids, vocab_size)
    return frozenset(ids)
