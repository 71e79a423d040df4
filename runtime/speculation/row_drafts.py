"""What the drafter of an engine has proposed for a request. No torch."""

from __future__ import annotations

__all__ = ["RowDrafts"]


class RowDrafts:
    """The newest drafts of one request."""

    __slots__ = ("at", "chances", "probabilities", "tokens")

    def __init__(
        self, at: int, tokens: list[int], probabilities: list[float], chances: list[float]
    ) -> None:
        """`at`: known tokens of the request when they were proposed, which they follow."""
        self.at, self.tokens = at, tokens
        self.probabilities, self.chances = probabilities, chances
