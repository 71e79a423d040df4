"""The drafts of one request, and the protocol of what proposes them. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .acceptance import AHEAD, Acceptance
from .guess import NOTHING, Guess
from .pause import Pause
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
        """What followed the tokens that the proposer has seen."""
        self.guess = NOTHING
        """What may follow the tokens known at the last `catch_up`."""
        self._chances: list[float] = []
        """Of what is left of the draft."""
        self.rests_until = 0
        """The step for which drafts are looked for again, by the caller's count."""
        self._pause = Pause()
        self._proposer = proposer
        self._most = most
        self._shared, self._salt = shared, salt
        self.seen = first
        """Tokens of the request that the proposer has seen, or never will."""
        self._followed = 0
        """Known tokens after them, all of which the draft has in their places."""
        self._indexed = 0

    def catch_up(self, known: int, tokens_of: Callable[[int, int], list[int]], most: int) -> int:
        """Guess what follows the `known` tokens of the request, if the proposer has seen them.

        While the tokens are those of the draft, its rest is the guess, and nothing is searched.
        Otherwise shows the proposer at most `most` more tokens, and returns how many. `tokens_of`:
        see `Request.tokens`.
        """
        seen, draft = self.seen, self.draft
        if draft is not None:
            reached = known - seen
            if reached == self._followed or self._follows(draft, reached, tokens_of):
                return 0
        elif known == seen:
            return 0
        stop = min(known, seen + most)
        if self._indexed + stop - seen > MAX_INDEXED_TOKENS:
            self._proposer.forget()
            self._indexed, self.draft = 0, None
        tokens = tokens_of(seen, stop)
        if self.draft is not None:
            self.acceptance.judge(self.draft, tokens)
        self._proposer.extend(tokens)
        self.seen, self._followed = stop, 0
        self._indexed += stop - seen
        self.draft, self.guess = None, NOTHING
        if stop == known:
            self._propose(known, tokens_of)
        return stop - seen

    def read(self, stop: int, tokens_of: Callable[[int, int], list[int]], most: int) -> None:
        """Show the proposer at most `most` tokens before position `stop`, if it has not seen them.

        For prompts: nothing is guessed.
        """
        stop = min(stop, self.seen + most, self.seen + MAX_INDEXED_TOKENS - self._indexed)
        if self.draft is None and stop > self.seen:
            self._proposer.extend(tokens_of(self.seen, stop))
            self._indexed += stop - self.seen
            self.seen = stop

    def _follows(
        self, draft: Draft, reached: int, tokens_of: Callable[[int, int], list[int]]
    ) -> bool:
        """Guess the rest of the draft, if it is long enough and has the new tokens in its place."""
        followed, seen = self._followed, self.seen
        if len(draft.tokens) - reached < self._most:
            return False
        if draft.tokens[followed:reached] != tokens_of(seen + followed, seen + reached):
            return False
        new = reached - followed
        certain = 1 / self._chances[new - 1]
        self._followed = reached
        self._guess(draft, [chance * certain for chance in self._chances[new:]])
        return True

    def _guess(self, draft: Draft, chances: list[float]) -> None:
        """Guess the next tokens of the draft, whose chances these are."""
        first, most = self._followed, self._most
        self._chances = chances
        self.guess = Guess(draft.tokens[first : first + most], chances[:most])

    def _propose(self, known: int, tokens_of: Callable[[int, int], list[int]]) -> None:
        most = AHEAD * self._most
        draft = self._proposer.propose(most)
        if self._shared is not None and (draft is None or draft.matched < MAX_MATCH):
            newest = tokens_of(max(0, known - MAX_MATCH), known)
            other = self._shared.propose(self._salt, newest, most)
            if other is not None and (draft is None or other.matched > draft.matched):
                draft = other
        self.draft = draft
        if draft is not None:
            self._guess(draft, self.acceptance.chances(draft))

    def is_promising(self, least: float, step: int, most_pause: int) -> bool:
        """Return whether at least so many drafts are expected to be accepted; otherwise rest.

        `step` and `most_pause`: see `Pause.next_look`.
        """
        if sum(self.guess.chances) >= least:
            self._pause = Pause()
            return True
        self.rests_until = self._pause.next_look(step, most_pause)
        return False
