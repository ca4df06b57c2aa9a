"""Prompt lookup: the text has said this before, so guess that it goes on as it did then.

The last n tokens are looked up in the text itself; what followed them there is the draft (Saxena
2023, "Prompt lookup decoding"; it is the drafter that Quasar uses). No model, no probabilities:
the draft is deterministic. An index from each n-gram to where it was continued makes a lookup
independent of the length of the text.
"""

from typing import Any

from quasar_lab.checks import check_whole
from quasar_lab.draft import Draft, to_ids
from quasar_lab.errors import UserError


class NGramDrafter:
    """Continue the text as it continued after an earlier occurrence of its last n tokens.

    Args:
        max_ngram, min_ngram: the longest n-gram is looked up first, then shorter ones.
        num_draft_tokens: at most so many tokens are proposed.
        match: of several occurrences, "latest" or "first".
    """

    def __init__(
        self,
        max_ngram: Any = 3,
        min_ngram: Any = 1,
        num_draft_tokens: Any = 5,
        match: Any = "latest",
    ) -> None:
        self.max_ngram = check_whole("max_ngram", max_ngram)
        self.min_ngram = check_whole("min_ngram", min_ngram)
        self.num_draft_tokens = check_whole("num_draft_tokens", num_draft_tokens)
        if self.min_ngram > self.max_ngram:
            raise UserError(f"min_ngram is {min_ngram}: it must be at most max_ngram, {max_ngram}")
        if match not in ("latest", "first"):
            raise UserError(f'match is {match!r}: it must be "latest" or "first"')
        self.match = match
        self.reset([])

    def reset(self, prompt_ids: Any) -> None:
        """Start over on the prompt (a list or an integer tensor)."""
        self._tokens: list[int] = []
        # n-gram -> index of the token that followed it
        self._continuation: dict[tuple[int, ...], int] = {}
        # for each token, the index entries that its arrival changed and their values before
        self._changes: list[list[tuple[tuple[int, ...], int | None]]] = []
        self.extend(prompt_ids)
        self._changes.clear()  # only what comes after the prompt can be taken back

    def extend(self, tokens: Any) -> None:
        """Append tokens (a list or an integer tensor)."""
        for token in to_ids(tokens):
            # The n-grams that end before this token have a continuation only now: indexed any
            # earlier, the end of the text would find itself.
            self._changes.append(self._index_suffixes())
            self._tokens.append(token)

    def _index_suffixes(self) -> list[tuple[tuple[int, ...], int | None]]:
        changes = []
        end = len(self._tokens)
        for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
            ngram = tuple(self._tokens[end - n :])
            before = self._continuation.get(ngram)
            if before is None or self.match == "latest":
                changes.append((ngram, before))
                self._continuation[ngram] = end
        return changes

    def rollback(self, n: int) -> None:
        """Forget the last n tokens; only tokens after the prompt can be forgotten."""
        if n > len(self._changes):
            raise UserError(f"cannot roll back {n} tokens: {len(self._changes)} follow the prompt")
        for _ in range(n):
            self._tokens.pop()
            for ngram, before in self._changes.pop():
                if before is None:
                    del self._continuation[ngram]
                else:
                    self._continuation[ngram] = before

    def propose(self, max_tokens: int) -> Draft:
        """What followed the longest n-gram that the text ends with; empty if it is new."""
        num_tokens = min(max_tokens, self.num_draft_tokens)
        for n in range(min(self.max_ngram, len(self._tokens)), self.min_ngram - 1, -1):
            start = self._continuation.get(tuple(self._tokens[-n:]))
            if start is not None:
                return Draft(self._tokens[start : start + max(num_tokens, 0)])
        return Draft([])

    def __repr__(self) -> str:
        return (
            f"NGramDrafter(max_ngram={self.max_ngram}, min_ngram={self.min_ngram}, "
            f"num_draft_tokens={self.num_draft_tokens}, match={self.match!r})"
        )
