"""The base of parsers whose text arrives in pieces of any size."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .output_events import ContentDelta, OutputEvent, ReasoningDelta
from .tag_search import find_tag
from .text_states import State, TextStates

__all__ = ["IncrementalParser"]


class IncrementalParser(TextStates, ABC):
    """A `TextParser` that reads all text with states."""

    def __init__(self, start: State) -> None:
        """Begin before the text, in the state `start`."""
        super().__init__(start)
        self._held = ""
        """The end of the text, which may begin a tag."""
        self._events: list[OutputEvent] = []

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next text; return the events that are certain."""
        text, self._held = self._held + text, ""
        self._advance(text, 0)
        return self._take_events()

    def finish(self) -> list[OutputEvent]:
        """Return the events of the text that was held back; there is no more text."""
        self._end(self._held)
        return self._take_events()

    @abstractmethod
    def _end(self, held: str) -> None:
        """Add the events of the text that was held back."""

    def _take_events(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    def _add(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        if text:
            self._events.append(kind(text))

    def _hold(self, text: str, at: int) -> int:
        """Hold the text from `at` back until more arrives."""
        self._held = text[at:]
        return len(text)

    def _add_until(
        self, tag: str, kind: type[ContentDelta | ReasoningDelta], text: str, at: int
    ) -> tuple[int, bool]:
        """Add the text before a tag; return the index after the tag and whether it was found."""
        index, found = find_tag(text, at, tag)
        self._add(kind, text[at:index])
        return (index + len(tag), True) if found else (self._hold(text, index), False)
