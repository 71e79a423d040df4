"""Tool calls in the text of models, each family's in the format of its chat templates."""

from __future__ import annotations

import ast
import json
import re
import secrets
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from .responses import Function, ToolCall
from .text_parser import Pattern, TextParser, pattern

MAX_HELD_CHARS = 1 << 16
"""Characters of an object that are held until it is known to be a call, and of a value until its
type is known."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How models write calls. White space in these texts is optional when they are read."""

    open: str  # begins one or more calls
    heads: tuple[str, ...]  # before the arguments of a call; grammars have the first one
    end: str = ""  # tags after the arguments: of a call, then of the last one
    trailing: str = ""  # tags that may follow, which grammars leave out
    parameter: tuple[str, str] | None = None  # around each argument; None: they are one object
    quote: str = ""  # around strings, where arguments are literals of Python or of Gemma
    bare: bool = False  # whether calls of offered functions need no `open` where they may begin
    call_id: str = "call_{}"  # with a random number in it
    marks: tuple[str, ...] = ()  # texts of its chat templates; without any, `open` is one

    @property
    def is_object(self) -> bool:
        """Whether a call is one JSON object."""
        return "{string}" in self.heads[0]

    def is_of(self, template: str) -> bool:
        """Return whether a chat template has this format or one that is looked for later."""
        head = "" if self.parameter is None else re.split('["{]', self.parameter[0])[0]
        return all(each in template for each in self.marks or (self.open.strip(), head))

    def patterns(self) -> list[Pattern]:
        """Return patterns of the heads."""
        following = ['{ "', "{ }"]
        if self.quote:
            following = ["{word} =", "{word}:", ")", "}"]
        elif self.parameter is not None:
            following = [self.parameter[0].partition("{")[0], *_TAG.findall(self.end)[:1]]
        return [pattern(head, *following) for head in self.heads]


_NAME_FIRST: Final = '{"name": "{string}", "arguments": '
_PARAMETERS: Final = '{"name": "{string}", "parameters": '
_LIST: Final = ("[" + _NAME_FIRST, ", " + _NAME_FIRST, _NAME_FIRST)
_GEMMA: Final = ToolFormat(
    "<|tool_call>", ("call:{name}{",), "}<tool_call|>", parameter=("{key}:", ""), quote='<|"|>'
)
_PYTHON: Final = ToolFormat(
    "<|tool_call_start|>",
    ("[{name}(", ", {name}("),
    ")]<|tool_call_end|>",
    parameter=("{key}=", ""),
    quote='"',
)
_MISTRAL_ID: Final = "{:.9}"  # the templates refuse other lengths

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "harmony": ToolFormat(  # gpt-oss
        " to=functions.",
        (
            "{name}<|channel|>commentary json<|message|>",
            *("{name} <|{any}<|message|>", "{name}<|message|>"),
        ),
        trailing="<|call|>",
        marks=("<|channel|>analysis",),
    ),
    "deepseek_v3": ToolFormat(  # also R1
        "<｜tool▁calls▁begin｜>",
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",),
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        marks=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    "deepseek_v31": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        ("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",),
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    **{
        name: ToolFormat(
            f"<｜DSML｜{section}>\n",
            ('<｜DSML｜invoke name="{name}">\n',),
            f"</｜DSML｜invoke>\n</｜DSML｜{section}>",
            parameter=(
                '<｜DSML｜parameter name="{key}" string="{type}">',
                "</｜DSML｜parameter>\n",
            ),
            marks=("｜DSML｜", f"{section}>"),
        )
        for name, section in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    },
    "kimi_k2": ToolFormat(
        "<|tool_calls_section_begin|>",
        ("<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>",),
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "minimax_m2": ToolFormat(
        "<minimax:tool_call>\n",
        ('<invoke name="{name}">\n',),
        "</invoke>\n</minimax:tool_call>",
        parameter=('<parameter name="{key}">', "</parameter>\n"),
    ),
    "glm": ToolFormat(
        "<tool_call>",
        ("{name}\n",),
        "</tool_call>",
        parameter=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "seed_oss": ToolFormat(
        "<seed:tool_call>\n",
        ("<function={name}>\n",),
        "</function>\n</seed:tool_call>",
        parameter=("<parameter={key}>", "</parameter>\n"),
    ),
    "qwen3_coder": ToolFormat(
        "<tool_call>\n",
        ("<function={name}>\n",),
        "</function>\n</tool_call>",
        parameter=("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    "gemma4": _GEMMA,
    "functiongemma": replace(
        _GEMMA, open="<start_function_call>", end="}<end_function_call>", quote="<escape>"
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]",
        ("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]"),
        call_id=_MISTRAL_ID,
        marks=("[ARGS]",),
    ),
    "mistral_json": ToolFormat("[TOOL_CALLS]", _LIST, "}]", call_id=_MISTRAL_ID),
    "granite": ToolFormat("<|tool_call|>", _LIST, "}]", trailing="<|/tool_call|>"),  # 3; Phi-4-mini
    "nemotron": ToolFormat("<TOOLCALL>", _LIST, "}]</TOOLCALL>"),
    "apriel": ToolFormat("<tool_calls>", _LIST, "}]</tool_calls>"),  # also Jamba, MiniMax M1
    "lfm2": _PYTHON,
    "llama4_pythonic": replace(
        _PYTHON,
        open="<|python_start|>",
        end=")]",
        trailing="<|python_end|>",
        bare=True,
        marks=("[func_name1(",),
    ),
    "hermes": ToolFormat("<tool_call>\n", (_NAME_FIRST, _PARAMETERS), "}\n</tool_call>"),
    "llama3_json": ToolFormat(
        "<|python_tag|>",
        (_PARAMETERS, _NAME_FIRST),
        "}",
        trailing=";",
        bare=True,
        marks=('"parameters": ', "header"),
    ),
}
"""By name, in the order in which they are looked for in a template."""

_TAG: Final = re.compile(r"<[^>]+>|[^\s<]")
_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = frozenset({"name", "type", "id", *_ARGUMENTS})
_PART: Final = re.compile(r'[^"\\{}\[\]]+|\\.|["{}\[\]]', re.S)
_DEPTHS: Final = {"{": 1, "[": 1, "}": -1, "]": -1}
_LITERAL: Final = re.compile(
    r"""(?x) (?P<space>[ \t\r\n]+) | (?P<mark>[\[\](){},:=>]) | ["'] | (?P<tag><\|"\|>|<escape>)
    | (?P<other> <(?=(?s:.{7}))) | (?P<key>[^\s<>"'=:(){}\[\],]{1,256}+) \s{0,32} [=:]
    | (?P<word>[^\s<>"'=:(){}\[\],]{1,256}+) (?= \s{32} | \s{0,32} [^\s=:])"""
)
"""The parts of literals, each of which is known once so much of the text is."""
_QUOTED: Final = {
    quote: re.compile(rf"(?s)(?P<part>(?:[^{quote}\\]|\\.)+)|{quote}") for quote in "\"'"
}
_ESCAPE: Final = re.compile(r"(?s)\\(.)|[^\\]+")
_SIGNS: Final = {"(": "[", ":": ": ", "'": '"'}
_BRACKETS: Final = {"(": "]", "[": "]", "{": "}"}
_TYPES: Final[Mapping[type, str]] = {
    **{str: "string", bool: "boolean", int: "number", float: "number"},
    **{list: "array", dict: "object", type(None): "null"},
}
_ALL_TYPES: Final = frozenset(_TYPES.values())
_STRING: Final = frozenset({"string"})


class ToolParser(TextParser):
    """Finds the tool calls of a format.

    Once a call has begun, its arguments are reported as they arrive. Calls written as JSON objects
    whose first key is not the name are held until they are whole. What is not a call is content,
    tags included. White space after a call is dropped.
    """

    def __init__(self, tool_format: ToolFormat, tools: Mapping[str, object]) -> None:
        """Begin before the text; `tools` are the schemas of the parameters of functions by name."""
        self._format, self._tools = tool_format, tools
        self._patterns = tool_format.patterns()
        self._end = _TAG.findall((tool_format.end + tool_format.trailing).lstrip(")}"))
        self._num_calls = 0
        self._is_sure = False  # whether a call needs no name of a function that is offered
        super().__init__()

    def _parse(self) -> Generator[None]:
        opening = self._format.open.strip()
        tag = "" if self._format.bare else None  # of the call that may begin here
        while True:
            if tag is None:
                tag = yield from self._take_until([opening], self._add_content)
                if not tag:
                    return
            tag = (yield from self._skip_end()) if (yield from self._read_call(tag)) else None

    def _read_call(self, tag: str) -> Generator[None, None, bool]:
        """Read a call; what is not one is content, with its tag."""
        written, self._is_sure = self._format, bool(tag) or not self._format.bare
        found = yield from self._match(*self._patterns)
        if found is not None and self._begin_call(found["name"]):
            self._at = found.end()
            if written.quote:
                yield from self._read_literals()
            elif written.parameter is not None:
                yield from self._read_parameters(found["name"], *written.parameter)
            else:
                yield from self._read_object(0, self._add)
            self._num_calls += 1
            if written.is_object:
                yield from self._skip_space()
                if self._text[self._at : self._at + 1] in (",", "}"):  # it may be missing
                    yield from self._read_object(1, lambda text: None)
            return True
        held = [tag]
        if written.is_object:
            found = yield from self._match(pattern("{list} {", ' "', " }"))
            begins = found is not None
            if begins and not self._is_sure:
                key = yield from self._match(pattern('{list} { "{string}"'))
                begins = key is not None and key["name"] in _KEYS
            if begins:
                yield from self._take_until(["{"], held.append)
                held.append("{")
                is_whole = yield from self._read_object(1, held.append, MAX_HELD_CHARS)
                text = "".join(held[1:])
                if is_whole and self._add_call(text[text.index("{") :]):
                    return True
        self._add_content("".join(held))
        return False

    def _begin_call(self, name: str) -> bool:
        """Report a call, if there is a function of this name, which is a string of JSON in JSON."""
        if self._format.is_object:
            try:
                name = msgspec.json.decode(f'"{name}"'.encode(errors="surrogatepass"))
            except ValueError:
                return False
        if not name or not (self._is_sure or name in self._tools):
            return False
        index, call_id = self._num_calls, self._format.call_id.format(secrets.token_hex(12))
        self._gained.calls[index] = ToolCall(Function("", name), index, call_id, "function")
        return True

    def _add(self, text: str) -> None:
        """Report what the arguments gained."""
        index = self._num_calls
        if index not in self._gained.calls:
            self._gained.calls[index] = ToolCall(Function(""), index)
        self._gained.arguments.setdefault(index, []).append(text)

    def _add_call(self, text: str) -> bool:
        """Report a whole object, if it is a call."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return False
        given = [bytes(fields[name]) for name in _ARGUMENTS if name in fields]
        if not self._is_sure and (not given or not fields.keys() <= _KEYS):
            return False
        arguments, name = given[0] if given else b"null", bytes(fields.get("name", b"")).decode()
        if len(given) > 1 or arguments[:1] not in (b"{", b"n") or name[:1] != '"':
            return False
        if not self._begin_call(name[1:-1]):
            return False
        self._add("{}" if arguments == b"null" else arguments.decode())
        self._num_calls += 1
        return True

    def _read_object(
        self, depth: int, add: Callable[[str], None], most: int = sys.maxsize
    ) -> Generator[None, None, bool]:
        """Pass up to `most` characters to `add`, to the end of an object; return whether it ends.

        The text is within `depth` brackets of it.
        """
        in_string = False
        while True:
            end, stop = self._at, min(len(self._text), self._at + most)
            for found in _PART.finditer(self._text, self._at, stop):
                end, part = found.end(), found[0]
                if part == '"':
                    in_string = not in_string
                elif not in_string and part in _DEPTHS:
                    depth += _DEPTHS[part]
                    if depth <= 0:
                        break
            ends, is_late = depth <= 0 < end - self._at, self._last or stop < len(self._text)
            if is_late and not ends:
                end = stop  # a backslash may be left
            add(self._text[self._at : end])
            most -= end - self._at
            self._at = end
            if ends or is_late:
                return ends
            yield

    def _read_parameters(self, name: str, head: str, close: str) -> Generator[None]:
        """Report parameters that are texts between tags as an object."""
        schema = self._tools.get(name)
        before = "{"
        has_lines = head.endswith("\n")
        begin = pattern(head.rstrip() + "{line}" * has_lines)
        tags = [close.strip(), *["\n" + close.strip()] * has_lines]
        while (found := (yield from self._match(begin))) is not None:
            self._at = found.end()
            self._add(f"{before}{_json(found['key'])}: ")
            before = ", "
            types, written = parameter_types(schema, found["key"]), found.groupdict().get("type")
            if written is not None:  # by the model
                types = _STRING if written in ("true", "string") else _ALL_TYPES - _STRING
            if not (yield from self._read_value(types, tags)):
                return
        if self._at < len(self._text):  # not cut off
            self._add(before.replace(", ", "") + "}")

    def _read_value(self, types: frozenset[str], tags: list[str]) -> Generator[None, None, str]:
        """Report a text up to one of `tags` as a value of one of `types`; return the tag."""
        is_begun, held = False, ""

        def add(text: str) -> None:
            nonlocal is_begun, held
            held += text
            if is_begun or types == _STRING or len(held) > MAX_HELD_CHARS:
                self._add('"' * (not is_begun) + _inner(held))
                is_begun, held = True, ""

        tag = yield from self._take_until(tags, add)
        if is_begun:
            self._add('"' if tag else "")
        else:
            self._add(_value(held, types) if tag else held)
        return tag

    def _read_literals(self) -> Generator[None]:
        """Report literals of Python or Gemma in JSON, up to the bracket that ends the call."""
        self._add("{")
        closing, comma, quote = ["}"], "", ""  # of open brackets; not reported yet; of a string
        while closing:
            found = _QUOTED.get(quote, _LITERAL).match(self._text, self._at)
            if found is None and not self._last:
                yield
                continue
            if found is None:
                self._add(comma + self._text[self._at :])
                self._at = len(self._text)
                return
            self._at = found.end()
            kind, text = found.lastgroup, found[0]
            if kind == "part":
                self._add(_ESCAPE.sub(_escaped, text))
            elif quote:
                self._add('"')
                quote = ""
            elif text in (")", "]", "}"):
                self._add(closing.pop())
                comma = ""
            elif text == ",":
                comma = ", "
            elif kind != "space":
                self._add(comma + ("" if kind == "tag" else _as_json(found)))
                comma, quote = "", text if text in _QUOTED else ""
                if text in _BRACKETS:
                    closing.append(_BRACKETS[text])
                elif kind == "tag":
                    yield from self._read_value(_STRING, [text])

    def _skip_end(self) -> Generator[None, None, str | None]:
        """Drop the end of a call; return the tag of one that may follow at once, None without."""
        is_closed = False
        for tag in self._end:
            is_closed = yield from self._skip(tag)
        yield from self._skip_space()
        return None if is_closed and not self._format.bare else ""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _inner(text: str) -> str:
    """Return a text as a part of a string in JSON."""
    return _json(text)[1:-1]


def _escaped(found: re.Match[str]) -> str:
    """Return an escape or a text of a string of Python as a part of one in JSON."""
    escape = found[1]
    if escape is None or escape not in "\"'\\/bfnrtu\n":
        return _inner(found[0])
    return {"'": "'", "\n": ""}.get(escape, found[0])


def _as_json(found: re.Match[str]) -> str:
    """Return a part of a literal in JSON, of a string its quote."""
    text = found[0]
    if found["key"] is not None:
        return f"{_json(found['key'])}: "
    return _SIGNS.get(text, text) if found["word"] is None else _value(text, _ALL_TYPES)


def _value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a text that is JSON or a literal of Python of these types, or a string."""
    for read in (msgspec.json.decode, ast.literal_eval):
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = read(text.strip())
            if _TYPES.get(type(value)) in types:
                return text.strip() if read is msgspec.json.decode else _json(value)
    return _json(text)


def parameter_types(schema: Any, name: str) -> frozenset[str]:
    """Return the JSON types that a schema allows for one of its properties; all if it is wrong."""
    refs: set[str] = set()  # each of which is followed once

    def types(inner: Any, *path: str) -> frozenset[str]:
        for key in path:
            inner = inner[key]
        if "$ref" in inner:
            is_known = inner["$ref"] in refs
            refs.add(inner["$ref"])
            return frozenset() if is_known else types(schema, *inner["$ref"].split("/")[1:])
        several = [each for key in ("anyOf", "oneOf", "allOf") for each in inner.get(key, ())]
        if several:
            return frozenset().union(*map(types, several))
        values = [inner["const"]] if "const" in inner else inner.get("enum", ())
        given = inner.get("type") or [_TYPES[type(value)] for value in values] or _ALL_TYPES
        names = [given] if isinstance(given, str) else given
        return frozenset("number" if each == "integer" else each for each in names)

    with suppress(AttributeError, LookupError, TypeError, RecursionError):
        return types(schema, "properties", name)
    return _ALL_TYPES
