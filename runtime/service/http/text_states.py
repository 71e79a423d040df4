"""State machines over text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Callable

from .tag_search import skip_space

__all__ = ["State", "TextStates"]

State = Callable[[str, int], int]
"""Reads the text from an index; returns the index from which the next state reads."""


class TextStates:
    """Reads text with one state after the other, until it is done or has failed."""

    def __init__(self, start: State) -> None:
        """Begin before the text, in the state `start`."""
        self.done = False
        """Whether all that is looked for has been read."""
        self.failed = False
        """Whether the text is invalid."""
        self._read = start

    def _advance(self, text: str, at: int) -> int:
        """Read `text` from `at`; return the index of the first character that was not read."""
        while at < len(text) and not (self.done or self.failed):
            at = self._read(text, at)
        return at

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _skip_space(self, text: str, at: int, *, then: State) -> int:
        """Drop white space; the state after it is `then`."""
        at = skip_space(text, at)
        if at < len(text):
            self._read = then
        return at

    def _expect(self, char: str, text: str, at: int, *, then: State) -> int:
        """Read a character, after white space; the state after it is `then`."""
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != char:
            return self._fail(at)
        self._read = then
        return at + 1
