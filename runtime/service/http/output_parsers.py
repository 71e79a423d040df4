"""A chat model's text as messages: reasoning, tool calls and content, in pieces of any size.

A parser reads text with states. A state reads the text from an index, adds events, and returns the
index from which the next state reads. Text that cannot be decided yet is held until more arrives.
The content that a reasoning parser finds is the text of the tool parser.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from ...bounded_repr import bounded_repr
from ...errors import ConfigError
from ...request import FinishReason
from .responses import ChatMessage, Function, ToolCall

__all__ = [
    *("CLOSE", "OPEN", "ChatOutput", "OutputParser", "ends_in_reasoning", "make_output_parser"),
    *("ContentDelta", "OutputEvent", "ReasoningDelta"),
    *("ToolCallArguments", "ToolCallBegin"),
]

OPEN = "<think>"
CLOSE = "</think>"

MAX_HELD_CHARS = 1 << 16
"""Characters of an object that are held until it is known to be a call."""

_SPACE = re.compile(r"[ \t\r\n]*")
_BEGIN = re.compile(
    r"""(?s)\{\s{0,32}"name"\s{0,32}:\s{0,32}("(?:[^"\\]|\\.){1,256}")\s{0,32},"""
    r"""\s{0,32}"(?:arguments|parameters)"\s{0,32}:\s{0,32}(?=\{\s{0,32}["}])"""
)
"""The usual begin of a call, up to its arguments, which are then passed on as they arrive."""
_FIRST_KEY = re.compile(
    r"""(?s)\{\s{0,32}(?:\Z|\}|"((?:[^"\\]|\\.){0,256})(?:\\?\Z|"\s{0,32}(?:\Z|:)))"""
)
"""What an object may begin with, cut off anywhere."""
_BEGIN_CHARS = 1024
"""Characters in which these are looked for."""
_BRACKET = re.compile(r'\\.?|["{}\[\]]', re.S)
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})


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
    """JSON text of a call's arguments, joined over all events of the call. As the model wrote it:
    it may be invalid or cut off."""

    index: int
    text: str


OutputEvent = ContentDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments


class _TextParser(ABC):
    """Turns the text of one completion into events, in pieces of any size.

    Joined over all calls, the events do not depend on where the text was split. No text raises.
    """

    def __init__(self, start: Callable[[str, int], int]) -> None:
        """Begin before the text, in the state `start`."""
        self._read = start
        self._held = ""
        """The end of the text, which is not decided."""
        self._events: list[OutputEvent] = []

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next text; return the events that are certain."""
        text, self._held, at = self._held + text, "", 0
        while at < len(text):
            at = self._read(text, at)
        return self._take_events()

    def finish(self) -> list[OutputEvent]:
        """Return the events of the held-back text, at the end of the output."""
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

    def _skip_space(self, text: str, at: int, *, then: Callable[[str, int], int]) -> int:
        """Drop white space; the state after it is `then`."""
        at = _skip_space(text, at)
        if at < len(text):
            self._read = then
        return at

    def _add_until(
        self, tag: str, kind: type[ContentDelta | ReasoningDelta], text: str, at: int
    ) -> tuple[int, bool]:
        """Add the text before a tag; return the index after the tag and whether it was found."""
        index = text.find(tag, at)
        if index >= 0:
            self._add(kind, text[at:index])
            return index + len(tag), True
        for begin in range(max(at, len(text) - len(tag) + 1), len(text)):
            if tag.startswith(text[begin:]):
                self._add(kind, text[at:begin])
                return self._hold(text, begin), False
        self._add(kind, text[at:])
        return len(text), False


class ThinkParser(_TextParser):
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
        begin = _skip_space(text, at)
        if not self._started:
            self._add(ContentDelta, text[at:begin])
        opens = _begins_with_tag(text, begin, OPEN)
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


class _Brackets:
    """Finds the end of an object: the bracket that closes it, outside of strings."""

    def __init__(self, depth: int = 0) -> None:
        """Begin within `depth` open brackets."""
        self._depth = depth
        self._in_string = False
        self._escapes = False

    def feed(self, text: str, at: int, stop: int) -> int | None:
        """Read `text` from `at` to `stop`; return the index after the end, None without it."""
        if self._escapes and at < stop:
            self._escapes, at = False, at + 1
        for found in _BRACKET.finditer(text, at, stop):
            token = found[0]
            if token[0] == "\\":
                self._escapes = len(token) == 1
            elif token == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if token in "{[" else -1
                if self._depth <= 0:
                    return found.end()
        return None


class _JsonToolParser(_TextParser):
    """Finds tool calls that models write as JSON objects, marked by tags or alone.

    If a call begins with its name and then its arguments, the arguments are reported as they
    arrive. Otherwise it is held until its object is whole. What is not a call is content, tags
    included. White space after a call is dropped.
    """

    def __init__(
        self,
        open_tag: str,
        close_tag: str = "",
        *,
        bare_calls: bool = False,
        accepts: Callable[[str], bool] = bool,
    ) -> None:
        """Begin before the text.

        Args:
            open_tag: precedes a call.
            close_tag: follows a call; empty if calls have none.
            bare_calls: whether a call needs no tag at the start of the text and after a call.
                `;` separates calls.
            accepts: whether there is a function of this name, for calls without a tag.
        """
        super().__init__(self._content)
        self._open_tag = open_tag
        self._close_tag = close_tag
        self._bare_calls = bare_calls
        self._accepts = accepts
        self._opened = ""
        """The tag of the present call."""
        self._brackets = _Brackets()
        self._num_scanned = 0  # characters of the held object that they have read
        self._num_calls = 0
        if bare_calls:
            self._begin_object("")

    def _end(self, held: str) -> None:
        if self._read == self._object:
            held = self._opened + held
        self._add(ContentDelta, held)

    def _content(self, text: str, at: int) -> int:
        at, found = self._add_until(self._open_tag, ContentDelta, text, at)
        if found:
            self._begin_object(self._open_tag)
        return at

    def _begin_object(self, tag: str) -> None:
        self._opened, self._read = tag, self._object
        self._brackets, self._num_scanned = _Brackets(), 0

    def _not_a_call(self, text: str, start: int, end: int) -> int:
        """The text up to `end` is content, with the tag before it."""
        self._add(ContentDelta, self._opened + text[start:end])
        self._read = self._content
        return end

    def _object(self, text: str, start: int) -> int:
        """Read an object from its begin, and decide whether it is a call."""
        at = _skip_space(text, start)
        if at - start >= MAX_HELD_CHARS:
            return self._not_a_call(text, start, start + MAX_HELD_CHARS)
        if at == len(text):
            return self._hold(text, start)
        key = _FIRST_KEY.match(text, at, at + _BEGIN_CHARS)
        if key is None:
            return self._not_a_call(text, start, at)
        is_whole = key[1] is not None and text.startswith('"', key.end(1))
        if is_whole and not self._opened and key[1] not in _KEYS:
            return self._not_a_call(text, start, at)
        begin = _BEGIN.match(text, at, at + _BEGIN_CHARS)
        if begin is not None:
            if not self._begin_call(begin[1].encode(errors="surrogatepass")):
                return self._not_a_call(text, start, begin.end())
            self._brackets, self._read = _Brackets(), self._arguments
            return begin.end()
        stop = min(len(text), start + MAX_HELD_CHARS)
        end = self._brackets.feed(text, max(at, start + self._num_scanned), stop)
        self._num_scanned = stop - start
        if end is None:
            if stop == start + MAX_HELD_CHARS:
                return self._not_a_call(text, start, stop)
            return self._hold(text, start)
        if not self._take_call(text[at:end]):
            return self._not_a_call(text, start, end)
        self._read = self._after_call
        return end

    def _begin_call(self, name: bytes) -> bool:
        """Report a call, if there is a function of this name, a string in JSON."""
        try:
            decoded = msgspec.json.decode(name, type=str)
        except ValueError:
            return False
        if not decoded or not (self._opened or self._accepts(decoded)):
            return False
        call_id = f"call_{secrets.token_hex(12)}"
        self._events.append(ToolCallBegin(self._num_calls, call_id, decoded))
        return True

    def _take_call(self, text: str) -> bool:
        """Report a whole object, if it is a call."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return False
        given = [bytes(fields[name]) for name in _ARGUMENTS if name in fields]
        if not self._opened and (not given or not fields.keys() <= _KEYS):
            return False
        arguments = given[0] if given else b"null"
        if len(given) > 1 or arguments[:1] not in (b"{", b"n") or "name" not in fields:
            return False
        if not self._begin_call(bytes(fields["name"])):
            return False
        shown = "{}" if arguments == b"null" else arguments.decode()
        self._events.append(ToolCallArguments(self._num_calls, shown))
        self._num_calls += 1
        return True

    def _arguments(self, text: str, at: int) -> int:
        end = self._brackets.feed(text, at, len(text))
        stop = len(text) if end is None else end
        self._events.append(ToolCallArguments(self._num_calls, text[at:stop]))
        if end is not None:
            self._num_calls += 1
            self._read = partial(self._skip_space, then=self._after_arguments)
        return stop

    def _after_arguments(self, text: str, at: int) -> int:
        self._read = self._after_call  # also without the last brackets
        if text[at] == ",":
            self._brackets, self._read = _Brackets(depth=1), self._other_fields
        return at + 1 if text[at] in "}," else at

    def _other_fields(self, text: str, at: int) -> int:
        end = self._brackets.feed(text, at, len(text))
        if end is None:
            return len(text)
        self._read = self._after_call
        return end

    def _after_call(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        closes = _begins_with_tag(text, at, self._close_tag)
        if closes is None:
            return self._hold(text, at)
        self._read = self._between_calls if closes else self._content
        return at + len(self._close_tag) if closes else at

    def _between_calls(self, text: str, at: int) -> int:
        at = _skip_space(text, at)
        if self._bare_calls and text.startswith(";", at):
            return at + 1
        if at < len(text):
            self._read = self._content
            if self._bare_calls and text[at] == "{":
                self._begin_object("")
        return at


def _hermes_parser(tools: Sequence[Mapping[str, Any]]) -> _TextParser:
    """Return a parser of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    return _JsonToolParser("<tool_call>", "</tool_call>")


def _llama_parser(tools: Sequence[Mapping[str, Any]]) -> _TextParser:
    """Return a parser of `{"name": …, "parameters": {…}}`, also after `<|python_tag|>`.

    An object without the tag is a call only if it names a function of `tools`, which has the form
    of a chat request's `tools`.
    """
    names = {tool["function"]["name"] for tool in tools if "function" in tool}
    return _JsonToolParser("<|python_tag|>", bare_calls=True, accepts=names.__contains__)


_TOOL_PARSERS: Final = {"hermes": _hermes_parser, "llama3_json": _llama_parser}
_REASONING_PARSERS: Final = {"think": ThinkParser}


def _begins_with_tag(text: str, start: int, tag: str) -> bool | None:
    """Return whether `text` from `start` begins with a tag; None if more text must tell."""
    if text.startswith(tag, start):
        return True
    return None if tag.startswith(text[start : start + len(tag)]) else False


def _skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` that is not JSON white space."""
    found = _SPACE.match(text, start)
    assert found is not None, "the pattern matches nothing too"
    return found.end()


class OutputParser:
    """Turns the text of one completion into events: reasoning first, tool calls in the rest."""

    def __init__(self, *parsers: _TextParser | None) -> None:
        """Begin before the text. Each parser reads the content that the one before it finds."""
        self._parsers = [parser for parser in parsers if parser is not None]

    def push(self, text: str, *, last: bool = False) -> list[OutputEvent]:
        """Take the next text; return the events that are certain, none of them empty.

        With the `last` text these are also the events of what was held back.
        """
        events: list[OutputEvent] = [ContentDelta(text)] if text else []
        for parser in self._parsers:
            found: list[OutputEvent] = []
            for event in events:
                found += parser.push(event.text) if isinstance(event, ContentDelta) else [event]
            events = found + parser.finish() if last else found
        return events


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
        events = self._parser.push(text, last=finish_reason is not None)
        if self._one_call:
            events = [event for event in events if getattr(event, "index", 0) == 0]
        content = reasoning = ""
        calls: dict[int, ToolCall] = {}
        for event in events:
            match event:
                case ContentDelta(text):
                    content += text
                case ReasoningDelta(text):
                    reasoning += text
                case ToolCallBegin(index, call_id, name):
                    calls[index] = ToolCall(Function("", name), index, call_id, "function")
                case ToolCallArguments(index, text):
                    call = calls.setdefault(index, ToolCall(Function(""), index))
                    call.function.arguments += text
        message = ChatMessage()
        if content := self._shown(content):
            message.content = content
        if reasoning := self._shown(reasoning, is_reasoning=True):
            message.reasoning_content = message.reasoning = reasoning
        for call in calls.values():
            call.function.arguments = self._shown(call.function.arguments)
        if calls:
            message.tool_calls = list(calls.values())
            self._has_calls = True
        return message

    def _shown(self, text: str, *, is_reasoning: bool = False) -> str:
        if is_reasoning or not self._keeps_special:
            for hidden in self._hidden:
                text = text.replace(hidden, "")
        return text

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return the reason of the OpenAI API; call it after `message`."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason


def make_output_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    in_reasoning: bool = False,
) -> OutputParser:
    """Return a parser for one completion.

    Args:
        tool_parser: `hermes` (also Qwen) or `llama3_json`; None finds no calls.
        reasoning_parser: `think`; None finds no reasoning.
        tools: functions that the request offers, as in a chat request. Without any, no calls are
            found.
        in_reasoning: whether the prompt ends within the reasoning; see `ends_in_reasoning`.

    Raises:
        ConfigError: no parser has this name.
    """
    for field, name, known in (
        ("tool_parser", tool_parser, _TOOL_PARSERS.keys()),
        ("reasoning_parser", reasoning_parser, _REASONING_PARSERS.keys()),
    ):
        if name is not None and name not in known:
            raise ConfigError(
                f"{field} is {bounded_repr(name)}; allowed are {', '.join(known)}", field=field
            )
    return OutputParser(
        None if reasoning_parser is None else _REASONING_PARSERS[reasoning_parser](in_reasoning),
        None if tool_parser is None or not tools else _TOOL_PARSERS[tool_parser](tools),
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
