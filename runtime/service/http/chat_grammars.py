"""Grammars of chats: a demanded tool call as the parsers read it, and an answer after reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from ...bounded_repr import bounded_repr
from ...errors import RequestError
from ...structured.grammars import prepared_schema
from ...structured_output import MAX_GRAMMAR_BYTES, GrammarKind, StructuredOutput
from .exchange import invalid
from .tool_calls import TOOL_FORMATS, parameter_types

MAX_FORCED_BYTES = 1 << 14
"""Of a grammar whose text is forced: each step tokenises what is left of it."""
_OF_TEXT = frozenset({"type", "anyOf", "title", "description", "default", "examples"})
_OF_OBJECT = _OF_TEXT - {"anyOf"} | {"properties", "required", "additionalProperties", "$schema"}
_OF_OBJECT |= {"$defs", "definitions", "x-guidance"}
"""Keywords that the grammar of arguments follows if they are not written in JSON."""
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write calls; without it a model can put white space between any two parts."""


@contextmanager
def errors_of(field: str) -> Iterator[None]:
    """Raise the errors of a schema or grammar as an `HttpError` about its field."""
    try:
        yield
    except (RequestError, ValueError) as error:
        raise invalid(field, f"{field}: {error}") from error


class _CallGrammar(StructuredOutput):
    """Calls of tools, whose text is forced where only one is possible."""

    __slots__ = ()

    @property
    def kind(self) -> GrammarKind:
        """Not of a user's grammar, in which no text is forced."""
        return "calls"


def tool_call_grammar(
    functions: Mapping[int, Mapping[str, Any]], tool_parser: str | None
) -> StructuredOutput:
    """Return the grammar of one call of one of `functions`, by their positions in `tools`.

    The service's `tool_parser` determines how a call is written.
    """
    if tool_parser is None:
        raise invalid(
            "tool_choice",
            "tool_choice can demand a call only where the format of calls is known, and the chat"
            " template does not show it: start the server with --tool-parser and one of"
            f" {', '.join(TOOL_FORMATS)}, or choose 'auto'",
        )
    written = TOOL_FORMATS[tool_parser]
    rules = []
    for index, function in functions.items():
        schema, name = _parameters(index, function), function["name"]
        head = written.heads[0].replace("{string}", _json(name)[1:-1]).replace("{name}", name)
        arguments = f"arguments_{index}"
        rules.append(f"call_{index}: {_json(head.replace('{id}', '0'))} {arguments}")
        if written.parameter is None:
            rules.append(f"{arguments}: %json {_json(schema)}")
            continue
        with errors_of(f"tools[{index}].function.parameters"):
            rules += _one_by_one(arguments, written.quote, *written.parameter, schema)
    calls = " | ".join(f"call_{index}" for index in functions)
    begin = "" if written.bare else written.open
    rules.insert(0, f"start: {_json(begin)} ({calls}) {_json(written.end)}")
    # Within a grammar, llguidance does not read this character.
    grammar = "\n".join(rules).replace("\x7f", "\\u007f")
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise invalid(
            "tools",
            f"the parameters of tools take {len(grammar)} bytes; to demand a call, tool_choice"
            f" allows {MAX_GRAMMAR_BYTES}: offer fewer or smaller tools, or choose 'auto'",
        )
    if '"$ref"' in grammar or len(grammar) > MAX_FORCED_BYTES:  # references force long texts too
        return StructuredOutput(grammar=grammar)
    return _CallGrammar(grammar=grammar)


def _one_by_one(
    rule: str, quote: str, head: str, close: str, schema: Mapping[str, Any]
) -> Iterator[str]:
    """Write rules of arguments that are written one by one, in the order of the properties."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError("properties must be an object, and required a list")
    _refuse(schema.keys() - _OF_OBJECT, "arguments that a model writes one by one")
    comma = {"": "", '"': ", "}.get(quote, ",")
    layout = {**_SPACING, "item_separator": comma or ", "}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    tag = (quote + close).strip()
    after = close.partition(tag)[2] if close else ""
    lazy = re.escape(tag).replace("/", r"\/")
    yield f"{rule}: {rule}_first_0"
    yield f"{rule}_text[lazy]: /(?s:.*){lazy}/"
    for i, (key, given) in enumerate(properties.items()):
        inner = given if isinstance(given, dict) else {}
        is_text = quote != '"' and "string" in parameter_types(schema, key)
        begin = head.replace("{key}", key).replace("{type}", "true" if is_text else "false")
        values = [inner["const"]] if "const" in inner else inner.get("enum")
        if not is_text:
            inner = prepared_schema({**inner, **shared}, layout)
            value = f"{_json(begin)} %json {_json(inner)} {_json(close)}"
        elif values is not None:
            texts = (each if isinstance(each, str) else _json(each) for each in values)
            value = " | ".join(_json(begin + quote + each + quote + close) for each in texts)
        else:
            _refuse(inner.keys() - _OF_TEXT, f"{key}, a string that a model writes without quotes")
            value = f"{_json(begin + quote)} {rule}_text {_json(after)}"
        yield f"{rule}_{i}: {value}"
        for kind, before in (("first", ""), ("more", comma)):
            skipped = f" | {rule}_{kind}_{i + 1}" * (key not in required)
            yield f"{rule}_{kind}_{i}: {_json(before)} {rule}_{i} {rule}_more_{i + 1}{skipped}"
    for kind in ("first", "more"):
        yield f'{rule}_{kind}_{len(properties)}: ""'


def _refuse(keywords: Set[str], what: str) -> None:
    if keywords:
        found = ", ".join(sorted(keywords))
        raise ValueError(f"{found} cannot be demanded of {what}: leave it out, or choose 'auto'")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parameters(index: int, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's parameters."""
    field = f"tools[{index}].function.parameters"
    schema = function.get("parameters")
    if not isinstance(schema, dict | None):
        raise invalid(field, f"{field} is {bounded_repr(schema)}; allowed is a JSON schema")
    with errors_of(field):
        source = StructuredOutput(json=schema or {}).source
        prepared = prepared_schema(json.loads(source), _SPACING)
    return prepared if len(prepared) > 1 else {"type": "object", **prepared}  # has its layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonedOutput(StructuredOutput):
    """Any text up to the end of the reasoning, white space, and what follows."""

    content: str | None = None
    """The tag that ends the reasoning, and the kind and the source of what follows, in JSON."""

    @classmethod
    def after(cls, end: str, content: StructuredOutput) -> Self:
        """Return the output whose reasoning ends with a tag before a content."""
        return cls(content=_json([end, content.kind, content.source]))

    @property
    def kind(self) -> GrammarKind:
        """A kind of its own, which users cannot ask for."""
        return "reasoned"

    @property
    def source(self) -> str:
        """See `content`."""
        assert self.content is not None
        return self.content


def spells_end_of_reasoning(structured: StructuredOutput, end: str) -> bool:
    """Return whether a grammar is one of the whole output, with the end of the reasoning."""
    return structured.kind != "json" and end in structured.source.replace("\\", "")
