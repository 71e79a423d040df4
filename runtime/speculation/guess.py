"""What may follow the newest token of a request. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..request import Request

__all__ = ["NOTHING", "Guess", "with_grammar"]


class Guess(NamedTuple):
    """Tokens that may follow a request."""

    tokens: Sequence[int]
    chances: Sequence[float]
    """Of each token: the probability that a step accepts it."""


NOTHING = Guess((), ())


def with_grammar(request: Request, guess: Guess, most: int) -> Guess:
    """Return what the grammar of a request allows of a guess, or at most `most` tokens it forces.

    Forced tokens are certain. Without a grammar, the guess is returned.
    """
    if request.matcher is None:
        return guess
    tokens, forced = request.matcher.drafts(request, guess.tokens)
    tokens = tokens[:most]
    return Guess(tokens, [1.0] * len(tokens) if forced else guess.chances[: len(tokens)])
