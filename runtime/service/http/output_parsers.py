"""A chat model's text as messages: reasoning, tool calls and content, in pieces of any size.

A parser is a coroutine that reads text and yields where it needs more of it. Text that cannot be
decided yet is held until more arrives. The content that a reasoning parser finds is the text of the
tool parser.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from ...bounded_repr import bounded_repr
from ...errors import ConfigError
from ...request import FinishReason
from .responses import ChatMessage, Function, ToolCall

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


@dataclass(slots=True)
class _Gained:
    """What a text adds to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    """By index. Arguments are as the model wrote them: they may be invalid or cut off."""


class _TextParser(ABC):
    """Reads the text of one completion, in pieces of any size.

    Joined over all calls, the result does not depend on where the text was split. No text raises.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0  # read up to `_at`
        self._last = False  # whether no more text follows
        self._gained = _Gained()
        self._reading = self._parse()

    def push(self, text: str, *, last: bool) -> _Gained:
        """Return what is certain after the next text; with the `last` one, all of it."""
        self._text, self._at, self._last = self._text[self._at :] + text, 0, last
        self._gained = _Gained()
        next(self._reading, None)
        return self._gained

    @abstractmethod
    def _parse(self) -> Generator[None]:
        """Read all text; yield for more, until it is the `_last`."""

    def _take(self, end: int, into: Literal["content", "reasoning"] = "content") -> None:
        """Read the text up to an index as content or reasoning."""
        setattr(self._gained, into, getattr(self._gained, into) + self._text[self._at : end])
        self._at = end

    def _skip_space(self, *, as_content: bool = False) -> Generator[None]:
        """Drop white space, or read it as content."""
        while True:
            end = _space_end(self._text, self._at)
            if as_content:
                self._take(end)
            self._at = end
            if self._at < len(self._text) or self._last:
                return
            yield

    def _skip_tag(self, tag: str) -> Generator[None, None, bool]:
        """Drop a tag; return whether the text continued with it."""
        while not self._text.startswith(tag, self._at):
            if self._last or not tag.startswith(self._text[self._at : self._at + len(tag)]):
                return False
            yield
        self._at += len(tag)
        return True

    def _take_until(
        self, tag: str, into: Literal["content", "reasoning"]
    ) -> Generator[None, None, bool]:
        """Read the text before a tag, and drop the tag; return whether there is one."""
        while (index := self._text.find(tag, self._at)) < 0:
            end = len(self._text)
            if not self._last:  # the tag may have begun
                sizes = range(min(len(tag) - 1, end - self._at), 0, -1)
                end -= next((n for n in sizes if self._text.endswith(tag[:n])), 0)
            self._take(end, into)
            if self._last:
                return False
            yield
        self._take(index, into)
        self._at += len(tag)
        return True


class _ThinkParser(_TextParser):
    """Reads reasoning at the start of the text; `<think>` elsewhere is content.

    White space after either tag is dropped. Reasoning that is not closed lasts to the end.
    """

    def __init__(self, reasons: bool) -> None:
        """Begin before the text; `reasons` is whether the prompt ends within the reasoning."""
        self._reasons = reasons
        super().__init__()

    def _parse(self) -> Generator[None]:
        yield from self._skip_space(as_content=not self._reasons)
        if (yield from self._skip_tag(OPEN)):
            self._reasons = True
            yield from self._skip_space()
        if self._reasons:
            yield from self._take_until(CLOSE, "reasoning")
            yield from self._skip_space()
        while True:
            self._take(len(self._text))
            yield


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
        self, open_tag: str, close_tag: str, names: frozenset[str], *, bare_calls: bool = False
    ) -> None:
        """Begin before the text.

        With `bare_calls`, calls of functions of these `names` need no tag at the start of the text
        and after a call, and `;` separates calls. `close_tag` is empty if calls have none.
        """
        self._open_tag, self._close_tag = open_tag, close_tag
        self._names, self._bare_calls = names, bare_calls
        self._num_calls = 0
        super().__init__()

    def _parse(self) -> Generator[None]:
        tag = "" if self._bare_calls else None  # of the call that begins here
        while True:
            if tag is None:
                if not (yield from self._take_until(self._open_tag, "content")):
                    return
                tag = self._open_tag
            is_call = yield from self._read_call(tag)
            tag = (yield from self._skip_end()) if is_call else None

    def _read_call(self, tag: str) -> Generator[None, None, bool]:
        """Read an object, and decide whether it is a call; what is not is content, with its tag."""
        brackets, num_scanned = _Brackets(), 0
        while True:
            text, start, end = self._text, self._at, None  # the end of what is not a call
            at, limit = _space_end(text, start), start + MAX_HELD_CHARS
            if at >= limit:
                end = limit
            elif at < len(text):
                key = _FIRST_KEY.match(text, at, at + _BEGIN_CHARS)
                is_whole = key is not None and key[1] is not None and text[key.end(1) :][:1] == '"'
                if key is None or (is_whole and not tag and key[1] not in _KEYS):
                    end = at
                elif begin := _BEGIN.match(text, at, at + _BEGIN_CHARS):
                    end = begin.end()
                    if self._begin_call(begin[1].encode(errors="surrogatepass"), tag):
                        self._at = end
                        yield from self._read_arguments()
                        return True
                else:
                    stop = min(len(text), limit)
                    end = brackets.feed(text, max(at, start + num_scanned), stop)
                    num_scanned = stop - start
                    if end is not None and self._add_call(text[at:end], tag):
                        self._at = end
                        return True
                    if stop == limit:
                        end = end or stop
            if end is None and self._last:
                end = len(text)
            if end is not None:
                self._gained.content += tag
                self._take(end)
                return False
            yield

    def _begin_call(self, name: bytes, tag: str) -> bool:
        """Report a call, if there is a function of this name, a string in JSON."""
        try:
            decoded = msgspec.json.decode(name, type=str)
        except ValueError:
            return False
        if not decoded or not (tag or decoded in self._names):
            return False
        index, call_id = self._num_calls, f"call_{secrets.token_hex(12)}"
        self._gained.calls[index] = ToolCall(Function("", decoded), index, call_id, "function")
        return True

    def _add_arguments(self, text: str) -> None:
        index = self._num_calls
        call = self._gained.calls.setdefault(index, ToolCall(Function(""), index))
        call.function.arguments += text

    def _add_call(self, text: str, tag: str) -> bool:
        """Report a whole object, if it is a call."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return False
        given = [bytes(fields[name]) for name in _ARGUMENTS if name in fields]
        if not tag and (not given or not fields.keys() <= _KEYS):
            return False
        arguments = given[0] if given else b"null"
        if len(given) > 1 or arguments[:1] not in (b"{", b"n") or "name" not in fields:
            return False
        if not self._begin_call(bytes(fields["name"]), tag):
            return False
        self._add_arguments("{}" if arguments == b"null" else arguments.decode())
        self._num_calls += 1
        return True

    def _read_object(self, depth: int, *, reports: bool) -> Generator[None]:
        """Read an object to its end, and report it as arguments or drop it."""
        brackets, end = _Brackets(depth), None
        while end is None:
            end = brackets.feed(self._text, self._at, len(self._text))
            stop = len(self._text) if end is None else end
            if reports and stop > self._at:
                self._add_arguments(self._text[self._at : stop])
            self._at = stop
            if end is None:
                if self._last:
                    return
                yield

    def _read_arguments(self) -> Generator[None]:
        """Report arguments as they arrive, and drop what follows them in the object of the call."""
        yield from self._read_object(0, reports=True)
        self._num_calls += 1
        yield from self._skip_space()
        if self._text[self._at : self._at + 1] in (",", "}"):  # the last bracket may be missing
            yield from self._read_object(1, reports=False)

    def _skip_end(self) -> Generator[None, None, str | None]:
        """Drop the end of a call; return the tag of one that follows at once, None without."""
        yield from self._skip_space()
        if not (yield from self._skip_tag(self._close_tag)):
            return None
        yield from self._skip_space()
        if not self._bare_calls:
            return None
        while self._text.startswith(";", self._at):
            self._at += 1
            yield from self._skip_space()
        return "" if self._text.startswith("{", self._at) else None


def _space_end(text: str, start: int) -> int:
    """Return the index of the first character from `start` that is not JSON white space."""
    found = _SPACE.match(text, start)
    assert found is not None, "the pattern matches nothing too"
    return found.end()


_TOOL_PARSERS: Final = {
    # <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": lambda names: _JsonToolParser("<tool_call>", "</tool_call>", names),
    # {"name": …, "parameters": {…}}, also after the tag
    "llama3_json": lambda names: _JsonToolParser("<|python_tag|>", "", names, bare_calls=True),
}
_REASONING_PARSERS: Final = {"think": _ThinkParser}


class OutputParser:
    """Makes the messages of one completion: reasoning first, tool calls in the rest."""

    def __init__(
        self, *parsers: _TextParser | None, keeps_special: bool = False, one_call: bool = False
    ) -> None:
        """Begin before the text. Each parser reads the content that the one before it finds.

        `keeps_special` is whether hidden tokens are only left out of the reasoning. With `one_call`
        calls after the first are left out.
        """
        self._parsers = [parser for parser in parsers if parser is not None]
        self._keeps_special = keeps_special
        self._one_call = one_call
        self._hidden: set[str] = set()
        self._has_calls = False

    def hide(self, texts: Iterable[str]) -> None:
        """Leave special tokens that the output has out of its messages; parsers read them."""
        self._hidden.update(texts)

    def message(self, text: str, *, last: bool = False) -> ChatMessage:
        """Return the next text as a message, whose parts are unset if they gain nothing."""
        message, reasoning = ChatMessage(), ""
        calls: dict[int, ToolCall] = {}
        for parser in self._parsers:
            gained = parser.push(text, last=last)
            text, reasoning = gained.content, reasoning + gained.reasoning
            calls |= gained.calls
        if self._one_call:
            calls = {index: call for index, call in calls.items() if index == 0}
        if not self._keeps_special:
            text = self._shown(text)
            for call in calls.values():
                call.function.arguments = self._shown(call.function.arguments)
        if text or not self._parsers:
            message.content = text
        if reasoning := self._shown(reasoning):
            message.reasoning_content = message.reasoning = reasoning
        if calls:
            message.tool_calls = list(calls.values())
            self._has_calls = True
        return message

    def _shown(self, text: str) -> str:
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
    **options: bool,
) -> OutputParser:
    """Return a parser for one completion; see `OutputParser` for the `options`.

    `tools` are the functions that the request offers; without any, no calls are found.
    `in_reasoning` is whether the prompt ends within the reasoning.

    Raises:
        ConfigError: no parser has this name.
    """
    for name, given, known in (
        ("tool_parser", tool_parser, _TOOL_PARSERS.keys()),
        ("reasoning_parser", reasoning_parser, _REASONING_PARSERS.keys()),
    ):
        if given is not None and given not in known:
            raise ConfigError(
                f"{name} is {bounded_repr(given)}; allowed are {', '.join(known)}", field=name
            )
    names = frozenset(tool["function"]["name"] for tool in tools or () if "function" in tool)
    return OutputParser(
        None if reasoning_parser is None else _REASONING_PARSERS[reasoning_parser](in_reasoning),
        None if tool_parser is None or not tools else _TOOL_PARSERS[tool_parser](names),
        **options,
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
