"""Grammars of chats: a demanded tool call as the parsers read it, and an answer after reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from ...bounded_repr import bounded_repr
from ...errors import RequestError
from ...structured.grammars import prepared_schema
from ...structured_output import MAX_GRAMMAR_BYTES, GrammarKind, StructuredOutput
from .exchange import invalid
from .tool_calls import TOOL_FORMATS, ToolFormat, parameter_types

MAX_FORCED_BYTES = 1 << 14
"""Of a grammar whose text is forced: each step tokenises what is left of it."""
_DESCRIPTIONS = {"title", "description", "default", "examples"}
_KEYWORDS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_KEYWORDS |= _DESCRIPTIONS | {"$schema", "x-guidance"}
_KEYWORDS_OF_TEXT = _DESCRIPTIONS | {"type", "anyOf"}
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
            "tool_choice can demand a call only where the server finds calls: start it with"
            f" --tool-parser {' or '.join(TOOL_FORMATS)}, or choose 'auto'",
        )
    written = TOOL_FORMATS[tool_parser]
    rules = []
    for index, function in functions.items():
        schema, name = _parameters(index, function), function["name"]
        head = written.heads[0].replace("{string}", _json(name)[1:-1]).replace("{name}", name)
        arguments = f"arguments_{index}"
        rules.append(f"call_{index}: {_json(head.replace('{id}', '0'))} {arguments}")
        if written.parameter is None and written.quote is None:
            rules.append(f"{arguments}: %json {_json(schema)}")
        else:
            with errors_of(f"tools[{index}].function.parameters"):
                rules += _one_by_one(arguments, written, schema)
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


def _one_by_one(rule: str, written: ToolFormat, schema: Mapping[str, Any]) -> Iterator[str]:
    """Write rules of arguments that are written one by one, in the order of the properties."""
    if more := schema.keys() - _KEYWORDS:
        raise ValueError(
            f"{min(more)} cannot be demanded where a model does not write its arguments as one"
            " JSON object: use properties, or choose 'auto'"
        )
    if written.parameter is not None:
        (head, close), comma, end = written.parameter, "", ""
        quotes: tuple[str, str] | None = "", close
    elif written.heads[0].endswith("("):
        head, close, comma, end, quotes = "{key}=", "", ", ", ")", None
    else:
        quote = written.quote or ""
        head, close, comma, end, quotes = "{key}:", "", ",", "}", (quote, quote)
    layout = _SPACING if comma != "," else {**_SPACING, "item_separator": comma}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties", {})
    yield f"{rule}: {rule}_first_0"
    for i, (key, given) in enumerate(properties.items()):
        is_text = quotes is not None and "string" in parameter_types(schema, key)
        begin = head.replace("{key}", key).replace("{type}", "true" if is_text else "false")
        if is_text and quotes is not None:
            value = f"{_json(begin + quotes[0])} {_text(given, quotes[1], rule)}"
        else:
            inner = prepared_schema({**given, **shared} if given else {}, layout)
            value = f"{_json(begin)} %json {_json(inner)} {_json(close)}"
        yield f"{rule}_{i}: {value}"
        optional = key not in schema.get("required", ())
        for kind, before in (("first", ""), ("more", comma)):
            skipped = f" | {rule}_{kind}_{i + 1}" if optional else ""
            yield f"{rule}_{kind}_{i}: {_json(before)} {rule}_{i} {rule}_more_{i + 1}{skipped}"
    for kind in ("first", "more"):
        yield f"{rule}_{kind}_{len(properties)}: {_json(end)}"
    if quotes is not None:
        tag = re.escape(quotes[1].strip()).replace("/", r"\/")
        yield f"{rule}_text[lazy]: /(?s:.*){tag}/"


def _text(schema: Mapping[str, Any], close: str, rule: str) -> str:
    """Return the grammar of a string without quotes, and of what closes it."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return "(" + " | ".join(_json(value + close) for value in values) + ")"
    if more := schema.keys() - _KEYWORDS_OF_TEXT:
        raise ValueError(
            f"{min(more)} cannot be demanded of a string that a model writes without quotes: leave"
            " it out, or choose 'auto'"
        )
    return f"{rule}_text {_json(close[close.index(close.strip()) + len(close.strip()) :])}"


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
