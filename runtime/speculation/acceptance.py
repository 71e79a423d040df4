"""Measured acceptance of drafts, by how they were found. No torch.

A draft is counted whether or not a step verifies it: once its row has sampled the token in its
place, that token says whether it would have been accepted. So rows that verify nothing keep
measuring, at the cost of a comparison.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import count

from .config import MAX_DRAFTS
from .suffix_index import MAX_MATCH, Draft

__all__ = ["AHEAD", "Acceptance"]

AHEAD = 2
"""Times as many drafts are proposed as a step verifies, so that searches can be left out."""

_LONGEST = (3, 5, 8, 16)
"""Matches of at most so many tokens are counted together; longer ones are the last class."""

_CLASS_OF = tuple(
    2 * bisect_left(_LONGEST, length) for length in range(MAX_MATCH + AHEAD * MAX_DRAFTS + 1)
)
"""Class by length of match: even where occurrences differ, the next odd number where they agree."""

_FIRST_RATES = (0.1, 0.15, 0.15, 0.3, 0.3, 0.5, 0.4, 0.7, 0.5, 0.85)
"""Acceptance assumed for each class before any is measured."""

_FIRST_WEIGHT = 4.0
"""Drafts that an assumed rate counts as, and the rate of all rows in that of a row."""

_MOST_TRIALS = 64.0
"""Drafts after which counts are halved, so that a row that changes is noticed."""


class Acceptance:
    """Acceptance rates of a proposer, or of one row, which begins with those of its proposer."""

    def __init__(self, everywhere: Acceptance | None = None) -> None:
        """Measure one row, and `everywhere` together with it; None: all rows."""
        self._everywhere = everywhere
        self._trials = [0.0 if everywhere else _FIRST_WEIGHT for _ in _FIRST_RATES]
        self._hits = [0.0 if everywhere else _FIRST_WEIGHT * rate for rate in _FIRST_RATES]

    def rate(self, kind: int) -> float:
        """Return the expected acceptance of a draft of a class, if those before it are accepted."""
        if self._everywhere is None:
            return self._hits[kind] / self._trials[kind]
        prior = _FIRST_WEIGHT * self._everywhere.rate(kind)
        return (self._hits[kind] + prior) / (self._trials[kind] + _FIRST_WEIGHT)

    def chances(self, draft: Draft) -> list[float]:
        """Return, for each draft, the probability that it is accepted and all before it are."""
        chance, chances, rate, last = 1.0, [], 0.0, -1
        for length, agreed in enumerate(draft.agreed, draft.matched):
            kind = _CLASS_OF[length] + agreed
            if kind != last:  # mostly the same as for the draft before
                rate, last = self.rate(kind), kind
            chance *= rate
            chances.append(chance)
        return chances

    def judge(self, draft: Draft, tokens: list[int]) -> None:
        """Count the drafts in whose places `tokens` were sampled, up to the first wrong one."""
        hits = 0
        last = -1
        for length, agreed, drafted, token in zip(
            count(draft.matched), draft.agreed, draft.tokens, tokens, strict=False
        ):
            kind = _CLASS_OF[length] + agreed
            if kind != last:  # mostly the same as for the draft before
                self._count(last, hits, hits)
                hits, last = 0, kind
            if drafted != token:
                self._count(kind, hits + 1, hits)
                return
            hits += 1
        self._count(last, hits, hits)

    def _count(self, kind: int, trials: int, hits: int) -> None:
        if not trials:
            return
        if self._trials[kind] >= _MOST_TRIALS:
            self._trials[kind] /= 2
            self._hits[kind] /= 2
        self._trials[kind] += trials
        self._hits[kind] += hits
        if self._everywhere is not None:
            self._everywhere._count(kind, trials, hits)
