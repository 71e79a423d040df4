"""The drafts of one request, and the protocol of what proposes them. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .acceptance import Acceptance
from .shared_outputs import SharedOutputs
from .suffix_index import MAX_MATCH, Draft

__all__ = ["MAX_INDEXED_TOKENS", "Proposer", "RequestDrafter"]

MAX_INDEXED_TOKENS = 1 << 17
"""Tokens of a request that are indexed, then indexing begins anew; of a long prompt the last half
of so many."""


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

    def __init__(
        self,
        proposer: Proposer,
        acceptance: Acceptance,
        most: int,
        first: int,
        shared: SharedOutputs | None = None,
        salt: str | None = None,
    ) -> None:
        """Draft at most `most` tokens.

        The proposer sees the tokens from position `first` on. Outputs of other requests of the same
        `salt` in `shared` are looked up where it has no draft, or one with a shorter match.
        """
        self.acceptance = acceptance
        self.draft: Draft | None = None
        """After the tokens known at the last `catch_up`."""
        self.chances: list[float] = []
        """Of each draft: the probability that a step accepts it."""
        self._proposer = proposer
        self._most = most
        self._shared, self._salt = shared, salt
        self.seen = first
        """Tokens of the request that the proposer has seen, or never will."""
        self._indexed = 0

    def catch_up(self, known: int, tokens_of: Callable[[int, int], list[int]], most: int) -> int:
        """Draft what follows the `known` tokens of the request, if the proposer has seen them.

        Shows it at most `most` more, and returns how many. `tokens_of`: see `Request.tokens`.
        """
        seen = self.seen
        if known == seen:
            return 0
        stop = min(known, seen + most)
        if self._indexed + stop - seen > MAX_INDEXED_TOKENS:
            self._proposer.forget()
            self._indexed, self.draft = 0, None
        tokens = tokens_of(seen, stop)
        if self.draft is not None:
            self.acceptance.judge(self.draft, tokens)
        self._proposer.extend(tokens)
        self.seen = stop
        self._indexed += stop - seen
        draft = None
        if stop == known:
            draft = self._proposer.propose(self._most)
            if self._shared is not None and (draft is None or draft.matched < MAX_MATCH):
                newest = tokens_of(max(0, known - MAX_MATCH), known)
                other = self._shared.propose(self._salt, newest, self._most)
                if other is not None and (draft is None or other.matched > draft.matched):
                    draft = other
        self.draft = draft
        self.chances = [] if draft is None else self.acceptance.chances(draft)
        return stop - seen
