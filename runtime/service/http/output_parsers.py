"""A chat model's text as messages, by parsers of this package and of installed packages.

A package adds parsers by entry points. One of the group `stepgraph.tool_parsers` is a function
from the request's `tools` to a `TextParser`; one of `stepgraph.reasoning_parsers` is a function
from a bool, whether the prompt ends within the reasoning, to a `TextParser`. The content that a
reasoning parser finds is the text of the tool parser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from itertools import groupby
from typing import Any, Final

from ...bounded_repr import bounded_repr
from ...errors import ConfigError
from ...request import FinishReason
from .responses import ChatMessage, Function, ToolCall
from .text_parsers import (
    CLOSE,
    OPEN,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    TextParser,
    ThinkParser,
    ToolCallArguments,
    ToolCallBegin,
    hermes_parser,
    llama_parser,
)

__all__ = ["ChatOutput", "OutputParser", "ends_in_reasoning", "make_output_parser"]

BUILT_IN: Final[Mapping[str, Mapping[str, Callable[..., TextParser]]]] = {
    "tool": {"hermes": hermes_parser, "llama3_json": llama_parser},
    "reasoning": {"think": ThinkParser},
}


class OutputParser:
    """Turns the text of one completion into events: reasoning first, tool calls in the rest."""

    def __init__(self, tools: TextParser | None, reasoning: TextParser | None) -> None:
        """Begin before the text; None leaves tool calls or reasoning in the content."""
        self._tools = tools
        self._reasoning = reasoning

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next text; return the events that are certain, none of them empty."""
        if not text:
            return []
        events: list[OutputEvent] = [ContentDelta(text)]
        if self._reasoning is not None:
            events = self._reasoning.push(text)
        return _join(self._find_calls(events))

    def finish(self) -> list[OutputEvent]:
        """Return the events of the text that was held back; there is no more text."""
        events = [] if self._reasoning is None else self._find_calls(self._reasoning.finish())
        if self._tools is not None:
            events += self._tools.finish()
        return _join(events)

    def _find_calls(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """Replace content by what the tool parser finds in it."""
        if self._tools is None:
            return events
        found: list[OutputEvent] = []
        for event in events:
            found += self._tools.push(event.text) if isinstance(event, ContentDelta) else [event]
        return found


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


def make_output_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    in_reasoning: bool = False,
) -> OutputParser:
    """Return a parser for one completion.

    Args:
        tool_parser: `hermes` (also Qwen), `llama3_json` or an entry point's name; None finds no
            calls.
        reasoning_parser: `think` or an entry point's name; None finds no reasoning.
        tools: functions that the request offers, as in a chat request. Without any, no calls are
            found.
        in_reasoning: whether the prompt ends within the reasoning; see `ends_in_reasoning`.

    Raises:
        ConfigError: there is no parser of this name, or it cannot be loaded.
    """
    find_calls = None if tool_parser is None else _find("tool", tool_parser)
    find_reasoning = None if reasoning_parser is None else _find("reasoning", reasoning_parser)
    return OutputParser(
        None if find_calls is None or not tools else find_calls(tools),
        None if find_reasoning is None else find_reasoning(in_reasoning),
    )


def ends_in_reasoning(prompt: str, continued: str = "") -> bool:
    """Return whether a rendered prompt ends within the reasoning.

    It does after `<think>`, with which some chat templates end; and after a last message that is
    continued, if its text is in a reasoning that the text or the template has begun.
    """
    continued = continued.strip()
    before = prompt.rstrip()
    if continued:
        before = before.rpartition(continued)[0].rstrip()
    begins = continued.startswith(OPEN) or before.endswith(OPEN)
    return begins and CLOSE not in continued


@cache
def _find(kind: str, name: str) -> Callable[..., TextParser]:
    """Return what makes the parsers of a name."""
    built_in = BUILT_IN[kind]
    if name in built_in:
        return built_in[name]
    installed = entry_points(group=f"stepgraph.{kind}_parsers")
    if name not in installed.names:
        names = ", ".join(sorted({*built_in, *installed.names}))
        raise ConfigError(
            f"there is no {kind} parser {bounded_repr(name)}; choose one of {names}",
            field=f"{kind}_parser",
        )
    try:
        loaded: Callable[..., TextParser] = installed[name].load()
    except Exception as error:
        raise ConfigError(
            f"the {kind} parser {name} of {installed[name].value} cannot be loaded: {error!r}",
            field=f"{kind}_parser",
        ) from error
    return loaded


def _join(events: list[OutputEvent]) -> list[OutputEvent]:
    """Join neighbours that differ in their text only."""
    joined: list[OutputEvent] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        first, *others = group
        if others and not isinstance(first, ToolCallBegin):
            text = "".join(event.text for event in (first, *others))  # type: ignore[union-attr]
            first = replace(first, text=text)
        joined.append(first)
    return joined


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
