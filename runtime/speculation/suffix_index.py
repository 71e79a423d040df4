"""Finds what followed earlier occurrences of the newest tokens of a sequence. No torch.

The index maps each n-gram to the position after its latest occurrence, and each such position to
the one before it. A lookup walks this chain, newest first, and compares backwards:

    0 1 2 3 4 5 6 7 8 9             n = 2, newest tokens (b c)
    a b c d x b c e b c             chain of (b c): 7, 3
                                    at 7: matched 2 (x b c and e b c differ), continues e b c ...
                                    at 3: matched 2, continues d x b ...

Each draft is the token that most of the longest matches continue with, the latest of them at a tie,
and the matches that continue otherwise are dropped. A match that reaches the end of the sequence
continues with the drafts themselves, so that a loop is drafted to any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["MAX_CANDIDATES", "MAX_MATCH", "Draft", "SuffixIndex"]

MAX_MATCH = 32
"""Longer matches count as this long."""

MAX_CANDIDATES = 8
"""Occurrences that a lookup compares, the latest ones."""

_NONE = 0
"""No position follows an n-gram at 0."""


class Draft(NamedTuple):
    """Drafted tokens, and how each of them was found."""

    tokens: list[int]
    matched: int
    """Tokens before the first draft that the occurrence shares, at most `MAX_MATCH`."""
    agreed: list[bool]
    """Whether all occurrences that the drafts so far agree with continue with this draft."""


class SuffixIndex:
    """An index of one sequence that grows. Takes 150 to 400 bytes a token."""

    def __init__(self, least_match: int, candidates: int = MAX_CANDIDATES) -> None:
        """Index n-grams of `least_match` tokens, and compare at most `candidates` occurrences."""
        assert least_match >= 1
        assert candidates >= 1
        self.tokens: list[int] = []
        self._n = least_match
        self._candidates = candidates
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> position after it
        self._previous: list[int] = []  # position after an n-gram -> that after the one before

    def append(self, token: int) -> None:
        """Append a token: the n-gram that ends before it now has a continuation."""
        tokens, n = self.tokens, self._n
        position = len(tokens)
        if position >= n:
            key = tuple(tokens[-n:])
            self._previous.append(self._latest.get(key, _NONE))
            self._latest[key] = position
        else:
            self._previous.append(_NONE)
        tokens.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.append(token)

    def forget(self) -> None:
        """Drop all tokens."""
        self.tokens.clear()
        self._latest.clear()
        self._previous.clear()

    def propose(self, most: int) -> Draft | None:
        """Return at most `most` drafts; None if the newest tokens have not occurred before."""
        tokens, n = self.tokens, self._n
        if len(tokens) < n:
            return None
        position = self._latest.get(tuple(tokens[-n:]), _NONE)
        if position == _NONE:
            return None
        best, found, left = 0, [position], self._candidates
        newest = tokens[-MAX_MATCH:]
        while position != _NONE and left:
            if position >= MAX_MATCH and tokens[position - MAX_MATCH : position] == newest:
                matched = MAX_MATCH  # compared at once, because loops match this far
            else:
                matched = self._matched(position)
            if matched > best:
                best, found = matched, [position]
            elif matched == best:
                found.append(position)
            position = self._previous[position]
            left -= 1
        return self._continued(found, best, most)

    def _matched(self, position: int) -> int:
        """Return how many tokens before a position are the newest ones too."""
        tokens, matched = self.tokens, self._n
        most = min(MAX_MATCH, position)
        end = len(tokens)
        while matched < most and tokens[position - matched - 1] == tokens[end - matched - 1]:
            matched += 1
        return matched

    def _continued(self, positions: Sequence[int], matched: int, most: int) -> Draft:
        """Return the drafts that the occurrences agree on; see the top of this file."""
        tokens, end = self.tokens, len(self.tokens)
        drafts: list[int] = []
        agreed: list[bool] = []
        while len(drafts) < most:
            done = len(drafts)
            if len(positions) == 1:
                at = positions[0] + done
                known = tokens[at : at + most - done]
                drafts += known
                while len(drafts) < most:  # the end of the sequence is followed by the drafts
                    drafts.append(drafts[positions[0] + len(drafts) - end])
                agreed += [True] * (most - done)
                break
            following = [
                tokens[p + done] if p + done < end else drafts[p + done - end] for p in positions
            ]
            token = following[0]
            unanimous = following.count(token) == len(following)
            if not unanimous:
                token = max(following, key=following.count)  # the first, hence latest, of them
                positions = [p for p, t in zip(positions, following, strict=True) if t == token]
            drafts.append(token)
            agreed.append(unanimous)
        return Draft(drafts, matched, agreed)
