"""Measured acceptance of a drafter's proposals. No torch.

By the probability that the drafter gave each of them, once the host has read it; before, by the
number of the draft and by row.
"""

from __future__ import annotations

from collections.abc import Sequence

from .config import MAX_DRAFTS

__all__ = ["DrafterAcceptance", "PositionAcceptance"]

_CLASSES = 10
"""Of probabilities: 0 to 0.1, 0.1 to 0.2, ..."""

_FIRST_WEIGHT = 8.0
"""Drafts that the first rates count as: a drafter is assumed to know how often it is right."""

_MOST_TRIALS = 256.0
"""Drafts after which counts are halved, so that a change is noticed."""

_FIRST_RATE, _RATE_WEIGHT, _MOST_ROW_TRIALS = 0.6, 4.0, 16.0
"""By number: the rate assumed for the first draft, the drafts that an assumed rate counts as, and
the drafts of a row after which its counts are halved. For later drafts the rate of the draft before
is assumed, for a row that of all rows."""


class DrafterAcceptance:
    """Acceptance rates of all rows together."""

    def __init__(self) -> None:
        """Start with the middle of each class."""
        self._trials = [_FIRST_WEIGHT] * _CLASSES
        self._hits = [_FIRST_WEIGHT * (kind + 0.5) / _CLASSES for kind in range(_CLASSES)]

    def chances(self, probabilities: Sequence[float]) -> list[float]:
        """Return, for each draft, the probability that it is accepted and all before it are."""
        chance, chances = 1.0, []
        for probability in probabilities:
            kind = _kind(probability)
            chance *= self._hits[kind] / self._trials[kind]
            chances.append(chance)
        return chances

    def judge(
        self, drafts: Sequence[int], probabilities: Sequence[float], tokens: Sequence[int]
    ) -> None:
        """Count the drafts in whose places `tokens` were sampled, up to the first wrong one."""
        for draft, probability, token in zip(drafts, probabilities, tokens, strict=False):
            kind, right = _kind(probability), draft == token
            if self._trials[kind] >= _MOST_TRIALS:
                self._trials[kind] /= 2
                self._hits[kind] /= 2
            self._trials[kind] += 1
            self._hits[kind] += right
            if not right:
                return


class PositionAcceptance:
    """Acceptance rates by number of the draft: of a drafter, or of one row."""

    def __init__(self, everywhere: PositionAcceptance | None = None) -> None:
        """Measure one row, and `everywhere` together with it; None: all rows."""
        self._everywhere = everywhere
        self._trials = [0.0] * MAX_DRAFTS
        self._hits = [0.0] * MAX_DRAFTS

    def chances(self, count: int) -> list[float]:
        """Return, for each of `count` drafts, the probability that all up to it are accepted."""
        chance, chances = 1.0, []
        for rate in self._rates(count):
            chance *= rate
            chances.append(chance)
        return chances

    def judge(self, drafts: Sequence[int], tokens: Sequence[int]) -> None:
        """Count the drafts in whose places `tokens` were sampled, up to the first wrong one."""
        most = _MOST_TRIALS if self._everywhere is None else _MOST_ROW_TRIALS
        for index, (draft, token) in enumerate(zip(drafts, tokens, strict=False)):
            if self._trials[index] >= most:
                self._trials[index] /= 2
                self._hits[index] /= 2
            self._trials[index] += 1
            self._hits[index] += draft == token
            if draft != token:
                break
        if self._everywhere is not None:
            self._everywhere.judge(drafts, tokens)

    def _rates(self, count: int) -> list[float]:
        if self._everywhere is not None:
            assumed = self._everywhere._rates(count)
            return [
                (hits + _RATE_WEIGHT * rate) / (trials + _RATE_WEIGHT)
                for hits, trials, rate in zip(self._hits, self._trials, assumed, strict=False)
            ]
        rates, rate = [], _FIRST_RATE
        for hits, trials in zip(self._hits[:count], self._trials, strict=False):
            rate = (hits + _RATE_WEIGHT * rate) / (trials + _RATE_WEIGHT)
            rates.append(rate)
        return rates


def _kind(probability: float) -> int:
    """Return the class of a probability; the lowest one for NaN."""
    return int(min(probability, 0.999) * _CLASSES) if probability > 0 else 0
