"""Suffix decoding: copy what followed the longest stretch of text that has been said before.

A suffix automaton (Blumer et al. 1985) of everything so far is grown token by token, and each
step knows the longest suffix of the text that also occurs earlier, however long: no limit of n
tokens as with n-grams. The longer the match, the more it is worth copying (Oliaro et al. 2024,
"SuffixDecoding", arXiv 2411.04975): the draft's length is proportional to the match's.
"""

import math
import numbers
from typing import Any

from quasar_lab.checks import check_whole
from quasar_lab.draft import Draft, to_ids
from quasar_lab.errors import UserError

# How many of the matched suffixes learn of a new occurrence, and how many may hang on one another.
# In a text of one repeated token there are as many as tokens, and a new token would have to be
# entered in all: bounds keep the cost of a step independent of the text.
_MAX_UPDATES = 32
_MAX_DEPTH = 64


class SuffixDrafter:
    """Copy what followed the latest occurrence of the longest repeated suffix.

    Args:
        num_draft_tokens: at most so many tokens are proposed.
        length_factor: at most length_factor * (tokens matched) are proposed.
        min_match: shorter matches propose nothing.
    """

    def __init__(
        self, num_draft_tokens: Any = 16, length_factor: Any = 2.0, min_match: Any = 1
    ) -> None:
        self.num_draft_tokens = check_whole("num_draft_tokens", num_draft_tokens)
        self.min_match = check_whole("min_match", min_match)
        self.length_factor = length_factor
        if not isinstance(length_factor, numbers.Real) or not 0 < float(length_factor) < math.inf:
            raise UserError(f"length_factor is {length_factor!r}: it must be a positive number")
        self.reset([])

    def reset(self, prompt_ids: Any) -> None:
        """Start over on the prompt (a list or an integer tensor)."""
        self.automaton = SuffixAutomaton()
        for token in to_ids(prompt_ids):
            self.automaton.append(token)
        self.automaton.forget_changes()

    def extend(self, tokens: Any) -> None:
        """Append tokens (a list or an integer tensor)."""
        for token in to_ids(tokens):
            self.automaton.append(token)

    def rollback(self, n: int) -> None:
        """Forget the last n tokens; only tokens after the prompt can be forgotten."""
        for _ in range(n):
            self.automaton.undo()

    def propose(self, max_tokens: int) -> Draft:
        """What followed the match, as far as its length allows; empty without a match."""
        match = self.automaton.match_length
        if match < self.min_match:
            return Draft([])
        num_tokens = min(max_tokens, self.num_draft_tokens, int(self.length_factor * match))
        return Draft(self.automaton.continuation(max(num_tokens, 0)))

    def __repr__(self) -> str:
        return (
            f"SuffixDrafter(num_draft_tokens={self.num_draft_tokens}, "
            f"length_factor={self.length_factor}, min_match={self.min_match})"
        )


class SuffixAutomaton:
    """The suffixes of a growing text; what a token costs does not depend on how long it is.

    A state stands for all strings that end at the same positions; its link leads to the state of
    the longest of their suffixes that ends in more places. So the link of the state of the whole
    text is the longest suffix that occurred before.

    `match_length` is that suffix's length (0: the last token is new), `match_end` the index of
    the last token of its latest earlier occurrence. Where more than 64 links would follow one
    another (a text that repeats itself as often), the text is read on from a shorter suffix: a
    match of up to 64 tokens is never missed, a longer one may be found shorter than it is.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.match_length = 0
        self.match_end = -1
        # state 0 is the empty string
        self._length = [0]
        self._link = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._latest = [-1]  # index of the last token of the latest occurrence
        self._depth = [0]  # links from here to the empty string, when the state was linked
        self._last = 0
        # one entry a token: the counters before it came, and (table, key, value before) of each
        # change it made
        self._changes: list[tuple[tuple[int, int, int, int], list[tuple[Any, int, Any]]]] = []

    def append(self, token: int) -> None:
        """Lengthen the text by one token."""
        before = (len(self._length), self._last, self.match_length, self.match_end)
        changes: list[tuple[Any, int, Any]] = []
        following, link, latest = self._next, self._link, self._latest
        index = len(self.tokens)
        self.tokens.append(token)
        parent = self._last
        while self._depth[parent] > _MAX_DEPTH:
            parent = link[parent]
        if token in following[parent]:  # only after such a cut: the suffix has been here before
            match = self._last = self._split(changes, parent, token)
        else:
            state = self._last = self._new_state(self._length[parent] + 1, 0, {}, index)
            while parent != -1 and token not in following[parent]:
                changes.append((following[parent], token, None))
                following[parent][token] = state
                parent = link[parent]
            match = 0 if parent == -1 else self._split(changes, parent, token)
            link[state] = match
            self._depth[state] = self._depth[match] + 1

        self.match_length, self.match_end = self._length[match], latest[match]
        for _ in range(_MAX_UPDATES):
            if match <= 0:
                break
            changes.append((latest, match, latest[match]))
            latest[match] = index
            match = link[match]
        self._changes.append((before, changes))

    def _split(self, changes: list[tuple[Any, int, Any]], parent: int, token: int) -> int:
        """The state of the string (parent's longest + token), split off if it has none."""
        following, link = self._next, self._link
        found = following[parent][token]
        if self._length[found] == self._length[parent] + 1:
            return found
        clone = self._new_state(
            self._length[parent] + 1, link[found], dict(following[found]), self._latest[found]
        )
        while parent != -1 and following[parent].get(token) == found:
            changes.append((following[parent], token, found))
            following[parent][token] = clone
            parent = link[parent]
        changes.append((link, found, link[found]))
        link[found] = clone
        changes.append((self._depth, found, self._depth[found]))
        self._depth[found] = self._depth[clone] + 1
        return clone

    def _new_state(self, length: int, link: int, following: dict[int, int], latest: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._next.append(following)
        self._latest.append(latest)
        self._depth.append(self._depth[link] + 1)
        return len(self._length) - 1

    def undo(self) -> None:
        """Take the last token back."""
        if not self._changes:
            raise UserError("only tokens that came after the prompt can be taken back")
        (num_states, self._last, self.match_length, self.match_end), changes = self._changes.pop()
        for table, key, value in reversed(changes):
            if value is None:
                del table[key]
            else:
                table[key] = value
        for table in (self._length, self._link, self._next, self._latest, self._depth):
            del table[num_states:]
        self.tokens.pop()

    def forget_changes(self) -> None:
        """Give up the possibility to undo what was appended so far; frees its memory."""
        self._changes.clear()

    def continuation(self, num_tokens: int) -> list[int]:
        """What followed the match; a match that overlaps the end goes round its period."""
        if self.match_length == 0:
            return []
        period = len(self.tokens) - 1 - self.match_end
        start = self.match_end + 1
        return [self.tokens[start + i % period] for i in range(num_tokens)]
