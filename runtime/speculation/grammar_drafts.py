"""Drafts of an output that follows a grammar. No torch."""

from __future__ import annotations

from ..request import Request
from .guess import Guess

__all__ = ["with_grammar"]


def with_grammar(request: Request, guess: Guess, most: int) -> Guess:
    """Return what the grammar of a request allows of a guess, or at most `most` tokens it forces.

    Forced tokens are certain. Without a grammar, the guess is returned.
    """
    if request.matcher is None:
        return guess
    tokens, forced = request.matcher.drafts(request, guess.tokens)
    tokens = tokens[:most]
    return Guess(tokens, [1.0] * len(tokens) if forced else guess.chances[: len(tokens)])
