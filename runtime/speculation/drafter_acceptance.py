"""Measured acceptance of a drafter's proposals, by the probability it gave them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["DrafterAcceptance"]

_CLASSES = 10
"""Of probabilities: 0 to 0.1, 0.1 to 0.2, ..."""

_FIRST_WEIGHT = 8.0
"""Drafts that the first rates count as: a drafter is assumed to know how often it is right."""

_MOST_TRIALS = 256.0
"""Drafts after which counts are halved, so that a change is noticed."""


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


def _kind(probability: float) -> int:
    """Return the class of a probability; the lowest one for NaN."""
    return int(min(probability, 0.999) * _CLASSES) if probability > 0 else 0
