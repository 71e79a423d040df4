"""Separates the reasoning that models write between `<think>` and `</think>`."""

from __future__ import annotations

from collections.abc import Callable

from .output_events import ContentDelta, OutputEvent, ReasoningDelta
from .tag_search import find_tag, skip_space

__all__ = ["ThinkParser"]

OPEN = "<think>"
CLOSE = "</think>"


class ThinkParser:
    """Reads reasoning at the start of the text; `<think>` elsewhere is content.

    White space after either tag is dropped. Reasoning that is not closed lasts to the end.
    """

    def __init__(self, started: bool) -> None:
        """Begin before the text; `started` is whether the prompt ends within the reasoning."""
        self._started = started
        self._read: Callable[[str, int], int] = self._before
        self._pending = ""
        """The end of the text, which may begin a tag."""
        self._events: list[OutputEvent] = []

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next text; return the events that are certain."""
        text, self._pending = self._pending + text, ""
        at = 0
        while at < len(text):
            at = self._read(text, at)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[OutputEvent]:
        """Return the events of the text that was held back; there is no more text."""
        if not self._pending:
            return []
        reasons = self._started or self._read == self._reasoning
        return [ReasoningDelta(self._pending) if reasons else ContentDelta(self._pending)]

    def _before(self, text: str, at: int) -> int:
        begin = skip_space(text, at)
        if begin > at and not self._started:
            self._events.append(ContentDelta(text[at:begin]))
        if text.startswith(OPEN, begin):
            self._read = self._before_reasoning
            return begin + len(OPEN)
        if OPEN.startswith(text[begin : begin + len(OPEN)]):
            self._pending = text[begin:]
            return len(text)
        self._read = self._reasoning if self._started else self._content
        return begin

    def _before_reasoning(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at < len(text):
            self._read = self._reasoning
        return at

    def _reasoning(self, text: str, at: int) -> int:
        index, found = find_tag(text, at, CLOSE)
        if index > at:
            self._events.append(ReasoningDelta(text[at:index]))
        if not found:
            self._pending = text[index:]
            return len(text)
        self._read = self._before_content
        return index + len(CLOSE)

    def _before_content(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at < len(text):
            self._read = self._content
        return at

    def _content(self, text: str, at: int) -> int:
        self._events.append(ContentDelta(text[at:]))
        return len(text)
