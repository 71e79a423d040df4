"""The drafts of one request, and the protocol of what proposes them. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .acceptance import Acceptance
from .suffix_index import Draft

__all__ = ["Proposer", "RequestDrafter"]

MAX_INDEXED_TOKENS = 1 << 17
"""Tokens of a request that are indexed: of longer prompts the last ones; then indexing begins anew.
"""

PROMISING = 0.3
"""Chance of a first draft that is worth a look at every token."""

PATIENCE, REST = 8, 4
"""After `PATIENCE` looks without a promising draft, one look every `REST` tokens, and after as many
more looks one every `4 * REST`."""


class Proposer(Protocol):
    """Proposes drafts for one sequence, on the host."""

    def extend(self, tokens: list[int]) -> None:
        """Append known tokens of the sequence."""

    def forget(self) -> None:
        """Begin anew, without known tokens."""

    def propose(self, most: int) -> Draft | None:
        """Return at most `most` tokens that may follow the known ones; None: no idea."""


class RequestDrafter:
    """Keeps the proposer of a request up to date, and measures its acceptance."""

    def __init__(self, proposer: Proposer, acceptance: Acceptance, most: int, first: int) -> None:
        """Draft at most `most` tokens; the proposer sees the tokens from position `first` on."""
        self.acceptance = acceptance
        self.draft: Draft | None = None
        """After the tokens known at the last `catch_up`."""
        self.chances: list[float] = []
        """Of each draft: the probability that a step accepts it."""
        self._proposer = proposer
        self._most = most
        self.seen = first
        """Tokens of the request that the proposer has seen, or never will."""
        self._indexed = 0
        self._in_vain = 0

    def catch_up(self, known: int, tokens_of: Callable[[int, int], list[int]], most: int) -> int:
        """Draft what follows the `known` tokens of the request, if the proposer has seen them.

        Shows it at most `most` more, and returns how many. `tokens_of`: see `Request.tokens`.
        """
        seen = self.seen
        if known == seen:
            return 0
        rest = 4 * REST if self._in_vain >= 2 * PATIENCE else REST
        if self._in_vain >= PATIENCE and known - seen < rest:
            self.chances = []
            return 0
        if self._indexed + most > MAX_INDEXED_TOKENS:
            self._proposer.forget()
            self._indexed, self.draft = 0, None
        stop = min(known, seen + most)
        tokens = tokens_of(seen, stop)
        if self.draft is not None:
            self.acceptance.judge(self.draft, tokens)
        self._proposer.extend(tokens)
        self.seen = stop
        self._indexed += stop - seen
        self.draft = self._proposer.propose(self._most) if stop == known else None
        self.chances = [] if self.draft is None else self.acceptance.chances(self.draft)
        promising = bool(self.chances) and self.chances[0] >= PROMISING
        self._in_vain = 0 if promising else self._in_vain + 1
        return stop - seen
