"""Tool calls in the text of models, each family's in the format of its chat templates."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from .responses import Function, ToolCall
from .text_parser import Pattern, TextParser, pattern

MAX_HELD_CHARS = 1 << 16
"""Characters of an object that are held until it is known to be a call, and of a value until its
type is known."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How models write calls. White space in these texts is optional when they are read."""

    open: str
    """Begins one or more calls."""
    heads: tuple[str, ...]
    """What is before the arguments of a call. Grammars have the first one."""
    end: str = ""
    """Tags after the arguments: of a call, then of the last one."""
    trailing: str = ""
    """Tags that may follow, which grammars leave out."""
    parameter: tuple[str, str] | None = None
    """What is around each argument that is a text; None: the arguments are one JSON object."""
    quote: str | None = None
    """Around strings, where arguments are literals of Python instead, or similar ones of Gemma."""
    bare: bool = False
    """Whether calls of offered functions need no `open`, at the start and after a call."""
    marks: tuple[str, ...] = ()
    """A chat template with these texts has this format, without any one with `open`."""

    @property
    def is_object(self) -> bool:
        """Whether a call is one JSON object."""
        return "{string}" in self.heads[0]

    def is_of(self, template: str) -> bool:
        """Return whether a chat template has this format or one that is looked for later."""
        parameter = () if self.parameter is None else (self.parameter[0].partition("{")[0],)
        return all(each in template for each in self.marks or (self.open.strip(), *parameter))

    def patterns(self) -> list[Pattern]:
        """Return patterns of the heads."""
        following = ['{ "', "{ }"]
        if self.quote is not None:
            following = ["{word} =", "{word}:", ")", "}"]
        elif self.parameter is not None:
            following = [self.parameter[0].partition("{")[0], *_TAG.findall(self.end)[:1]]
        return [pattern(head, *following) for head in self.heads]


_NAME_FIRST: Final = '{"name": "{string}", "arguments": '
_PARAMETERS: Final = '{"name": "{string}", "parameters": '
_LIST: Final = ("[" + _NAME_FIRST, ", " + _NAME_FIRST, _NAME_FIRST)
_DSML: Final = '<｜DSML｜parameter name="{key}" string="{type}">', "</｜DSML｜parameter>\n"

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
    "deepseek_v32": ToolFormat(
        "<｜DSML｜function_calls>\n",
        ('<｜DSML｜invoke name="{name}">\n',),
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        parameter=_DSML,
        marks=("｜DSML｜", "function_calls>"),
    ),
    "deepseek_v4": ToolFormat(
        "<｜DSML｜tool_calls>\n",
        ('<｜DSML｜invoke name="{name}">\n',),
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        parameter=_DSML,
        marks=("｜DSML｜",),
    ),
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
    "gemma4": ToolFormat("<|tool_call>", ("call:{name}{",), "<tool_call|>", quote='<|"|>'),
    "functiongemma": ToolFormat(
        "<start_function_call>", ("call:{name}{",), "<end_function_call>", quote="<escape>"
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]", ("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]"), marks=("[ARGS]",)
    ),
    "mistral_json": ToolFormat("[TOOL_CALLS]", _LIST, "}]"),
    "granite": ToolFormat("<|tool_call|>", _LIST, "}]", trailing="<|/tool_call|>"),  # 3; Phi-4-mini
    "lfm2": ToolFormat(
        "<|tool_call_start|>", ("[{name}(", ", {name}("), "]<|tool_call_end|>", quote='"'
    ),
    "llama4_pythonic": ToolFormat(
        "<|python_start|>",
        ("[{name}(", ", {name}("),
        "]",
        trailing="<|python_end|>",
        quote='"',
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
_BRACKET: Final = re.compile(r'\\.?|["{}\[\]]', re.S)
_LITERAL: Final = re.compile(
    r"""(?x) (?P<space>[ \t\r\n]+) | (?P<mark>[\[\](){},:=>]) | (?P<quote>["']|<\|"\|>|<escape>)
    | (?P<other> <(?=(?s:.{7}))) | (?P<key>[^\s<>"'=:(){}\[\],]{1,256}+) \s{0,32} [=:]
    | (?P<word>[^\s<>"'=:(){}\[\],]{1,256}+) (?= \s{32} | \s{0,32} [^\s=:])"""
)
"""The parts of literals, each of which is known once so much of the text is."""
_QUOTED: Final = {quote: re.compile(rf"(?s)(?:[^{quote}\\]|\\.)+") for quote in "\"'"}
_ESCAPE: Final = re.compile(r"(?s)\\(.)|[^\\]+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_CONSTANTS: Final = {
    **{"True": "true", "False": "false", "None": "null", "(": "[", ":": ": "},
    **{word: word for word in ("true", "false", "null", *"[{=><")},
}
_BRACKETS: Final = {"(": "]", "[": "]", "{": "}"}
_TYPES: Final[Mapping[type, str]] = {
    **{str: "string", bool: "boolean", int: "number", float: "number"},
    **{list: "array", dict: "object", type(None): "null"},
}
_ALL_TYPES: Final = frozenset(_TYPES.values())
_MOST_EVALUATED: Final = 1 << 12
"""Characters of a literal of Python where JSON is expected."""
_DEEPEST_SCHEMA: Final = 16


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
        self._end = _TAG.findall((tool_format.end + tool_format.trailing).removeprefix("}"))
        self._num_calls = 0
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
        is_trusted = bool(tag) or not self._format.bare
        found = yield from self._match(*self._patterns)
        quote = '"' if self._format.is_object else ""
        name = "" if found is None else quote + found["name"] + quote
        if found is not None and self._begin_call(name, is_trusted=is_trusted):
            self._at = found.end()
            if self._format.parameter is not None:
                yield from self._read_parameters(name, *self._format.parameter)
            elif self._format.quote is not None:
                yield from self._read_literals()
            else:
                yield from self._skip_space()
                yield from self._read_object(0, reports=True)
            self._num_calls += 1
            if self._format.is_object:
                yield from self._skip_space()
                if self._text[self._at : self._at + 1] in (",", "}"):  # it may be missing
                    yield from self._read_object(1, reports=False)
            return True
        if self._format.is_object:
            return (yield from self._read_whole_object(tag, is_trusted=is_trusted))
        self._gained.content += tag
        return False

    def _read_whole_object(self, tag: str, *, is_trusted: bool) -> Generator[None, None, bool]:
        """Hold an object until it is whole, and report it if it is a call."""
        found = yield from self._match(pattern("{list} {", ' "', " }"))
        begin = 0 if found is None else found.end() - 1 - self._at
        if found is not None and not is_trusted:
            key = yield from self._match(pattern('{list} { "{string}"'))
            if key is None or key["name"] not in _KEYS:
                found = None
        if found is None:
            self._gained.content += tag
            return False
        brackets, num_scanned = _Brackets(), 0
        while True:
            start = self._at + begin
            stop = min(len(self._text), start + MAX_HELD_CHARS)
            end = brackets.feed(self._text, start + num_scanned, stop)
            num_scanned = stop - start
            if end is not None and self._add_call(self._text[start:end], is_trusted=is_trusted):
                self._at = end
                return True
            if end is not None or self._last or num_scanned == MAX_HELD_CHARS:
                self._gained.content += tag + self._text[self._at : end or stop]
                self._at = end or stop
                return False
            yield

    def _begin_call(self, name: str, *, is_trusted: bool) -> bool:
        """Report a call, if there is a function of this name, which may be a string in JSON."""
        if name.startswith('"'):
            try:
                name = msgspec.json.decode(name.encode(errors="surrogatepass"), type=str)
            except ValueError:
                return False
        if not name or not (is_trusted or name in self._tools):
            return False
        index, call_id = self._num_calls, f"call_{secrets.token_hex(12)}"
        self._gained.calls[index] = ToolCall(Function("", name), index, call_id, "function")
        return True

    def _add(self, text: str) -> None:
        """Report what the arguments gained."""
        index = self._num_calls
        call = self._gained.calls.setdefault(index, ToolCall(Function(""), index))
        call.function.arguments += text

    def _add_call(self, text: str, *, is_trusted: bool) -> bool:
        """Report a whole object, if it is a call."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return False
        given = [bytes(fields[name]) for name in _ARGUMENTS if name in fields]
        if not is_trusted and (not given or not fields.keys() <= _KEYS):
            return False
        arguments = given[0] if given else b"null"
        if len(given) > 1 or arguments[:1] not in (b"{", b"n") or "name" not in fields:
            return False
        name = bytes(fields["name"]).decode()
        if name[:1] != '"' or not self._begin_call(name, is_trusted=is_trusted):
            return False
        self._add("{}" if arguments == b"null" else arguments.decode())
        self._num_calls += 1
        return True

    def _read_object(self, depth: int, *, reports: bool) -> Generator[None]:
        """Read an object to its end, and report it as arguments or drop it."""
        brackets, end = _Brackets(depth), None
        while end is None:
            end = brackets.feed(self._text, self._at, len(self._text))
            stop = len(self._text) if end is None else end
            if reports and stop > self._at:
                self._add(self._text[self._at : stop])
            self._at = stop
            if end is None:
                if self._last:
                    return
                yield

    def _read_parameters(self, name: str, head: str, close: str) -> Generator[None]:
        """Report parameters that are texts between tags as an object."""
        schema = self._tools.get(name)
        before = "{"
        begin = pattern(head.rstrip())
        while (found := (yield from self._match(begin))) is not None:
            self._at = found.end()
            self._add(f"{before}{_json(found['key'])}: ")
            before = ", "
            types = parameter_types(schema, found["key"])
            if "type" in begin[0].groupindex:  # written by the model
                types = _ALL_TYPES - {"string"}
                if found["type"] in ("true", "string"):
                    types = frozenset({"string"})
            tags = [close.strip()]
            if head.endswith("\n"):
                yield from self._skip_tag("\n")
                tags.append("\n" + close.strip())
            if not (yield from self._read_value(types, tags)):
                return
            yield from self._skip_space()
        if self._at < len(self._text):  # not cut off
            self._add(before.replace(", ", "") + "}")

    def _read_value(self, types: frozenset[str], tags: list[str]) -> Generator[None, None, str]:
        """Report a text up to one of `tags` as a value of one of `types`; return the tag."""
        is_begun, held = False, ""

        def add(text: str) -> None:
            nonlocal is_begun, held
            held += text
            if is_begun or types == {"string"} or len(held) > MAX_HELD_CHARS:
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
        closing, comma = ["}"], ""  # of the brackets that are open; one that is not reported yet
        while closing:
            found = _LITERAL.match(self._text, self._at)
            if found is None:
                if self._last:
                    self._add(comma + self._text[self._at :])
                    self._at = len(self._text)
                    return
                yield
                continue
            self._at = found.end()
            kind, text = found.lastgroup, found[0]
            if text in (")", "]", "}"):
                self._add(closing.pop())
                comma = ""
            elif text == ",":
                comma = ", "
            elif kind != "space":
                self._add(comma + _as_json(found))
                comma = ""
                if kind == "quote" and (yield from self._read_string(text)):
                    self._add('"')
                elif text in _BRACKETS:
                    closing.append(_BRACKETS[text])

    def _read_string(self, quote: str) -> Generator[None, None, bool]:
        """Report a string up to its quote as JSON; return whether it has one."""
        if quote not in _QUOTED:
            closed = yield from self._take_until((quote,), lambda text: self._add(_inner(text)))
            return bool(closed)
        while True:
            if found := _QUOTED[quote].match(self._text, self._at):
                self._add(_ESCAPE.sub(_escaped, found[0]))
                self._at = found.end()
            if self._text.startswith(quote, self._at):
                self._at += 1
                return True
            if self._last:
                self._at = len(self._text)
                return False
            yield

    def _skip_end(self) -> Generator[None, None, str | None]:
        """Drop the end of a call; return the tag of one that may follow at once, None without."""
        is_closed = False
        for tag in self._end:
            yield from self._skip_space()
            is_closed = yield from self._skip_tag(tag)
        yield from self._skip_space()
        return None if is_closed and not self._format.bare else ""


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
    if found["quote"] is not None:
        return '"'
    if found["key"] is not None:
        return f"{_json(found['key'])}: "
    return text if _NUMBER.fullmatch(text) else _CONSTANTS.get(text) or _json(text)


def _value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a text that is JSON or a literal of Python of these types, or a string."""
    with suppress(ValueError, RecursionError):
        if _TYPES[type(msgspec.json.decode(text))] in types:
            return text.strip()
    if len(text) <= _MOST_EVALUATED:
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(text.strip())
            if _TYPES.get(type(value)) in types - {"string"}:
                return _json(value)
    return _json(text)


def parameter_types(schema: object, name: str) -> frozenset[str]:
    """Return the JSON types that a schema allows for one of its properties."""

    def at(schema: object, *path: str) -> object:
        for key in path:
            schema = schema.get(key) if isinstance(schema, Mapping) else None
        return schema

    refs: set[str] = set()  # each of which is followed once

    def types(inner: object, depth: int) -> frozenset[str]:
        if not isinstance(inner, Mapping) or depth > _DEEPEST_SCHEMA:
            return _ALL_TYPES
        if isinstance(ref := inner.get("$ref"), str):
            if ref in refs:
                return frozenset()
            refs.add(ref)
            return types(at(schema, *ref.split("/")[1:]), depth + 1)
        given = inner.get("type")
        if isinstance(given, str | list) and given:
            names = [given] if isinstance(given, str) else given
            return frozenset("number" if each == "integer" else str(each) for each in names)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(several := inner.get(key), list) and several:
                return frozenset[str]().union(*(types(each, depth + 1) for each in several))
        values = [inner["const"]] if "const" in inner else inner.get("enum")
        if isinstance(values, list) and values:
            return frozenset(_TYPES.get(type(each), "null") for each in values)
        return _ALL_TYPES

    return types(at(schema, "properties", name), 0)
