"""What a chat model's text contains, as events: answer, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "ContentDelta",
    "OutputEvent",
    "ReasoningDelta",
    "TextParser",
    "ToolCallArguments",
    "ToolCallBegin",
]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """The model calls a function. Its arguments follow."""

    index: int
    """Number of the call within the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """JSON text of a call's arguments, joined over all events of the call."""

    index: int
    text: str


OutputEvent = ContentDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments


class TextParser(Protocol):
    """Turns the text of one completion into events, in pieces of any size.

    Joined over all calls, the events do not depend on where the text was split. No text raises.
    """

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next text; return the events that are certain."""

    def finish(self) -> list[OutputEvent]:
        """Return the events of the text that was held back; there is no more text."""
