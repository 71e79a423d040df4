"""What a drafter on the device has proposed for a request. No torch."""

from __future__ import annotations

from .drafter_acceptance import PositionAcceptance

__all__ = ["RowDrafts"]


class RowDrafts:
    """The newest drafts of one request."""

    __slots__ = ("acceptance", "at", "chances", "probabilities", "tokens")

    def __init__(
        self,
        at: int,
        tokens: list[int],
        probabilities: list[float],
        chances: list[float],
        acceptance: PositionAcceptance,
    ) -> None:
        """Keep them.

        Args:
            at: known tokens of the request when they were proposed, which they follow.
            tokens: as the row keeps them on the device.
            probabilities: of those for which the drafter had slots; the others are worthless.
            chances: of the same, that a step accepts them.
            acceptance: of the request.
        """
        self.at, self.tokens = at, tokens
        self.probabilities, self.chances = probabilities, chances
        self.acceptance = acceptance
