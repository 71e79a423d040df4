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

from collections.abc import Sequence
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
        self.extend([token])

    def extend(self, tokens: list[int]) -> None:
        """Append tokens."""
        known, n = self.tokens, self._n
        first = max(len(known), n)
        self._previous += [_NONE] * (min(len(known) + len(tokens), n) - len(known))
        known += tokens
        latest, previous = self._latest, self._previous
        grams = zip(*(known[first - n + i : i - n] for i in range(n)), strict=True)
        for position, gram in enumerate(grams, first):
            previous.append(latest.get(gram, _NONE))
            latest[gram] = position

    def forget(self) -> None:
        """Drop all tokens."""
        self.tokens.clear()
        self._latest.clear()
        self._previous.clear()

    def propose(self, most: int) -> Draft | None:
        """Return at most `most` drafts; None if the newest tokens have not occurred before."""
        tokens, n = self.tokens, self._n
        if tuple(tokens[-n:]) not in self._latest:  # mostly, where nothing repeats
            return None
        found, matched = self._find(tokens[-max(MAX_MATCH, n) :])
        return self._continued(found, matched, most) if found else None

    def propose_after(self, newest: list[int], most: int, separator: int) -> Draft | None:
        """Return what followed the last of `newest`, tokens of another sequence.

        Drafts end before a separator, and where the tokens of the index end.
        """
        found, matched = self._find(newest, separator)
        return self._continued(found, matched, most, separator) if found else None

    def _find(self, newest: list[int], separator: int | None = None) -> tuple[list[int], int]:
        """Return the positions after the longest matches with the end of `newest`; their length.

        Matches before a separator do not count.
        """
        tokens, n = self.tokens, self._n
        if len(newest) < n:
            return [], 0
        position = self._latest.get(tuple(newest[-n:]), _NONE)
        found: list[int] = []
        best, left, longest = n, self._candidates, len(newest)
        tail = newest[-best:]
        while position != _NONE and left:
            if tokens[position - best : position] == tail and tokens[position] != separator:
                matched, most = best, min(longest, position)
                while matched < most and tokens[position - matched - 1] == newest[-matched - 1]:
                    matched += 1
                if matched > best:
                    best, tail, found = matched, newest[-matched:], []
                found.append(position)
            position = self._previous[position]
            left -= 1
        return found, best

    def _continued(
        self, positions: Sequence[int], matched: int, most: int, separator: int | None = None
    ) -> Draft:
        """Return the drafts that the occurrences agree on; see the top of this file.

        Without a separator, drafts follow the end of the sequence.
        """
        tokens, end = self.tokens, len(self.tokens)
        following = tokens[positions[0] : positions[0] + most]
        if (
            len(following) == most
            and separator not in following
            and all(tokens[p : p + most] == following for p in positions[1:])
        ):
            return Draft(following, matched, [True] * most)
        drafts: list[int] = []
        agreed: list[bool] = []
        for done in range(most):
            if separator is None:
                following = [
                    tokens[p + done] if p + done < end else drafts[p + done - end]
                    for p in positions
                ]
            else:
                positions = [
                    p for p in positions if p + done < end and tokens[p + done] != separator
                ]
                if not positions:
                    break
                following = [tokens[p + done] for p in positions]
            token = following[0]
            unanimous = following.count(token) == len(following)
            if not unanimous:
                token = max(following, key=following.count)  # the first, hence latest, of them
                positions = [p for p, t in zip(positions, following, strict=True) if t == token]
            drafts.append(token)
            agreed.append(unanimous)
        return Draft(drafts, matched, agreed)
