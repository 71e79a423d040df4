"""What may follow the newest token of a request. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["NOTHING", "Guess"]


class Guess(NamedTuple):
    """Tokens that may follow a request."""

    tokens: Sequence[int]
    chances: Sequence[float]
    """Of each token: the probability that a step accepts it."""

    def first(self, most: int) -> Guess:
        """Return at most the first `most` tokens."""
        return self if len(self.tokens) <= most else Guess(self.tokens[:most], self.chances[:most])


NOTHING = Guess((), ())
