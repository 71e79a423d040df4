"""The text of a chat completion as messages: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...request import FinishReason
from .output_events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from .output_parsers import OutputParser
from .responses import ChatMessage, Function, ToolCall

__all__ = ["ChatOutput"]


class ChatOutput:
    """Makes the messages of one completion from its text, in pieces of any size."""

    def __init__(
        self,
        parser: OutputParser | None,
        *,
        keeps_special: bool = False,
        one_call: bool = False,
    ) -> None:
        """Begin before the text; without a parser all of it is content.

        `keeps_special` is whether hidden tokens are only left out of the reasoning. With `one_call`
        calls after the first are left out.
        """
        self._parser = parser
        self._keeps_special = keeps_special
        self._one_call = one_call
        self._hidden: set[str] = set()
        self._has_calls = False

    @property
    def is_plain(self) -> bool:
        """Whether all of the text is content."""
        return self._parser is None

    def hide(self, texts: Iterable[str]) -> None:
        """Leave special tokens that the output has out of its messages; parsers read them."""
        self._hidden.update(texts)

    def message(self, text: str, finish_reason: FinishReason | None) -> ChatMessage:
        """Return the next text as a message, whose parts are unset if they gain nothing."""
        if self._parser is None:
            return ChatMessage(content=text)
        events = self._parser.push(text)
        if finish_reason is not None:
            events += self._parser.finish()
        if self._one_call:
            events = [event for event in events if not _is_later_call(event)]
        message = _message(self._without_hidden(events))
        self._has_calls |= bool(message.tool_calls)
        return message

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return the reason of the OpenAI API; call it after `message`."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    def _without_hidden(self, events: list[OutputEvent]) -> list[OutputEvent]:
        if not self._hidden:
            return events
        kept: list[OutputEvent] = []
        for event in events:
            keeps = self._keeps_special and not isinstance(event, ReasoningDelta)
            if keeps or isinstance(event, ToolCallBegin):
                kept.append(event)
                continue
            text = event.text
            for hidden in self._hidden:
                text = text.replace(hidden, "")
            if text:
                kept.append(replace(event, text=text))
        return kept


def _is_later_call(event: OutputEvent) -> bool:
    return isinstance(event, ToolCallBegin | ToolCallArguments) and event.index > 0


def _message(events: Sequence[OutputEvent]) -> ChatMessage:
    message = ChatMessage()
    calls: dict[int, ToolCall] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                message.content = (message.content or "") + text
            case ReasoningDelta(text):
                message.reasoning_content = (message.reasoning_content or "") + text
                message.reasoning = message.reasoning_content
            case ToolCallBegin(index, call_id, name):
                calls[index] = ToolCall(Function("", name), index, call_id, "function")
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, ToolCall(Function(""), index))
                call.function.arguments += text
    if calls:
        message.tool_calls = list(calls.values())
    return message
