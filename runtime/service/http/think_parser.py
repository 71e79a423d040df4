"""Separates the reasoning that models write between `<think>` and `</think>`."""

from __future__ import annotations

from functools import partial

from .incremental_parser import IncrementalParser
from .output_events import ContentDelta, ReasoningDelta
from .tag_search import begins_with_tag, skip_space

__all__ = ["ThinkParser"]

OPEN = "<think>"
CLOSE = "</think>"


class ThinkParser(IncrementalParser):
    """Reads reasoning at the start of the text; `<think>` elsewhere is content.

    White space after either tag is dropped. Reasoning that is not closed lasts to the end.
    """

    def __init__(self, started: bool) -> None:
        """Begin before the text; `started` is whether the prompt ends within the reasoning."""
        super().__init__(self._before)
        self._started = started

    def _end(self, held: str) -> None:
        reasons = self._started or self._read == self._reasoning
        self._add(ReasoningDelta if reasons else ContentDelta, held)

    def _before(self, text: str, at: int) -> int:
        begin = skip_space(text, at)
        if not self._started:
            self._add(ContentDelta, text[at:begin])
        opens = begins_with_tag(text, begin, OPEN)
        if opens is None:
            return self._hold(text, begin)
        if opens:
            self._read = partial(self._skip_space, then=self._reasoning)
            return begin + len(OPEN)
        self._read = self._reasoning if self._started else self._content
        return begin

    def _reasoning(self, text: str, at: int) -> int:
        at, closed = self._add_until(CLOSE, ReasoningDelta, text, at)
        if closed:
            self._read = partial(self._skip_space, then=self._content)
        return at

    def _content(self, text: str, at: int) -> int:
        self._add(ContentDelta, text[at:])
        return len(text)
