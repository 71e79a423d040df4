"""Windows of text in which an excerpt is repeated, exactly or with changes.

Source files seldom repeat themselves at length, so a small model that is trained on nothing else
leaves a text that it should repeat. `train --continue-from` mixes these windows with plain ones:

    excerpt, [what follows it], excerpt, [what follows], excerpt, ... up to the end of the window

A repetition is exact, has one identifier renamed throughout, or one line replaced, dropped or
added. Some excerpts are random tokens, which nothing but repeating predicts; their first
occurrence is not learnt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["IGNORED", "RepeatedText", "Window"]

IGNORED = -100
"""Target of a position that is not learnt: what `cross_entropy` leaves out."""
SHORTEST = 32
LONGEST = 640
"""Tokens of an excerpt."""
EXACT, RENAMED = 0.7, 0.85
"""Cumulated shares of exact repetitions and of those with a renamed identifier; in the others a
line differs."""
RANDOM_SHARE = 0.15
"""Of excerpts that are random tokens."""


class Window(NamedTuple):
    """Text of L tokens and what is to be predicted."""

    token_ids: np.ndarray
    """int64 `[L]`."""
    targets: np.ndarray
    """int64 `[L]`: the token after each position, or `IGNORED`."""


class RepeatedText:
    """Draws windows from a stream of source text."""

    def __init__(self, stream: np.ndarray, pieces: Sequence[str], seed: int) -> None:
        """Read the text.

        Args:
            stream: int64 `[tokens]`.
            pieces: the text of each token of the vocabulary.
            seed: of the draws.
        """
        self._stream = stream
        self._rng = np.random.default_rng(seed)
        self._is_newline = np.array([piece.startswith("\n") for piece in pieces])
        self._lines = np.flatnonzero(self._is_newline[stream])[:-1] + 1
        words = [piece.strip() for piece in pieces]
        named = [len(word) > 2 and word.isidentifier() for word in words]
        spaced = [piece.endswith(" ") for piece in pieces]
        self._is_name = np.array(named)
        # A name is replaced by one that is followed by a space, or not, as it is.
        self._names = {
            space: np.flatnonzero(self._is_name & (np.array(spaced) == space))
            for space in (False, True)
        }
        self._spaced = spaced

    def windows(self, length: int) -> Iterator[Window]:
        """Yield windows of `length` tokens for ever."""
        while True:
            yield self.window(length)

    def window(self, length: int) -> Window:
        """Return a window of `length` tokens."""
        rng = self._rng
        longest = min(LONGEST, length // 2 - 8)
        size = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(longest))))
        is_random = rng.random() < RANDOM_SHARE
        if is_random:
            excerpt = self._stream[rng.integers(len(self._stream), size=size)]
            following = excerpt[:0]
        else:
            last = len(self._stream) - length
            start = int(rng.integers(last))
            if rng.random() < 0.5:
                start = int(self._lines[np.searchsorted(self._lines, start)])
            excerpt = self._stream[start : start + size]
            following = self._stream[start + size : start + length]
        parts = [np.zeros(int(rng.random() < 0.5), dtype=np.int64), excerpt]
        count = sum(map(len, parts))
        unlearnt = count if is_random else 0
        while count <= length:
            gap = following[: int(rng.integers(1, 160))] if rng.random() < 0.4 else following[:0]
            parts += [gap, excerpt if is_random else self._changed(excerpt)]
            count += len(gap) + len(parts[-1])
        text = np.concatenate(parts)[: length + 1]
        targets = text[1:].copy()
        targets[: max(0, unlearnt - 1)] = IGNORED
        return Window(text[:-1], targets)

    def _changed(self, excerpt: np.ndarray) -> np.ndarray:
        """Return the excerpt as it is repeated."""
        draw = self._rng.random()
        if draw < EXACT:
            return excerpt
        return self._renamed(excerpt) if draw < RENAMED else self._edited(excerpt)

    def _renamed(self, excerpt: np.ndarray) -> np.ndarray:
        """Return the excerpt with another name in place of one that it has more than once."""
        ids, counts = np.unique(excerpt, return_counts=True)
        candidates = ids[(counts > 1) & self._is_name[ids]]
        if not len(candidates):
            return excerpt
        old = int(self._rng.choice(candidates))
        new = self._rng.choice(self._names[self._spaced[old]])
        return np.where(excerpt == old, new, excerpt)

    def _edited(self, excerpt: np.ndarray) -> np.ndarray:
        """Return the excerpt with one line replaced, dropped or added."""
        ends = np.flatnonzero(self._is_newline[excerpt])
        if len(ends) < 3:
            return excerpt
        line = int(self._rng.integers(len(ends) - 1))
        begin, end = ends[line], ends[line + 1]
        start = int(self._lines[self._rng.integers(len(self._lines) - 1)])
        line_of_text = self._stream[start:]
        added = line_of_text[: int(np.argmax(self._is_newline[line_of_text[:64]]))]
        kind = self._rng.integers(3)
        if kind == 0:
            return np.concatenate((excerpt[:begin], excerpt[end:]))
        rest = excerpt[end:] if kind == 1 else excerpt[begin:]
        return np.concatenate((excerpt[: begin + 1], added, rest))
