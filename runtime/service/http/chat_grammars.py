"""Grammars of chats: a demanded tool call as the parsers read it, and an answer after reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...bounded_repr import bounded_repr
from ...errors import RequestError
from ...structured.grammars import prepared_schema
from ...structured_output import MAX_GRAMMAR_BYTES, GrammarKind, StructuredOutput
from .exchange import invalid
from .output_parsers import CLOSE

MAX_FORCED_BYTES = 1 << 14
"""Of a grammar whose text is forced: each step tokenises what is left of it."""
_ANY_OBJECT = {"type": "object"}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write calls; without it a model can put white space between any two parts."""
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment"})
"""Keywords that allow and forbid nothing."""
_VALUES = frozenset({"const", "enum"})
"""Keywords that hold no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold schemas by names."""


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
            "tool_choice can demand a call only where the server has --tool-parser hermes or"
            " llama3_json: choose 'auto'",
        )
    arguments = "arguments" if tool_parser == "hermes" else "parameters"
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: _parameters(index, function, f"#/properties/{arguments}"),
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for index, function in functions.items()
    ]
    names = [f"call_{index}" for index in functions]
    rules = [
        f"{name}: %json {json.dumps(call | {'x-guidance': _SPACING}, ensure_ascii=False)}"
        for name, call in zip(names, calls, strict=True)
    ]
    start = "(" + " | ".join(names) + ")"
    if tool_parser == "hermes":
        start = f'"<tool_call>\\n" {start} "\\n</tool_call>"'
    # Within a grammar, llguidance does not read this character.
    grammar = "\n".join((f"start: {start}", *rules)).replace("\x7f", "\\u007f")
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise invalid(
            "tools",
            f"the parameters of tools take {len(grammar)} bytes; to demand a call, tool_choice"
            f" allows {MAX_GRAMMAR_BYTES}: offer fewer or smaller tools, or choose 'auto'",
        )
    if '"$ref"' in grammar or len(grammar) > MAX_FORCED_BYTES:  # references force long texts too
        return StructuredOutput(grammar=grammar)
    return _CallGrammar(grammar=grammar)


def _parameters(index: int, function: Mapping[str, Any], place: str) -> Any:
    """Return the schema of a function's parameters for `place` in another schema."""
    field = f"tools[{index}].function.parameters"
    schema = function.get("parameters")
    if schema is None:
        return _ANY_OBJECT
    if not isinstance(schema, dict):
        raise invalid(field, f"{field} is {bounded_repr(schema)}; allowed is a JSON schema")
    with errors_of(field):
        source = StructuredOutput(json=schema).source
        prepared_schema(json.loads(source), _SPACING)
    return _moved(json.loads(source), place) or _ANY_OBJECT


def _moved(schema: object, place: str) -> object:
    """Return a schema without annotations, whose references are right at `place`."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # references below it are relative to it
        return schema
    moved: dict[str, object] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key == "$ref" and isinstance(value, str) and (value == "#" or value[:2] == "#/"):
            moved[key] = place + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(item, place) for name, item in value.items()}
        else:
            moved[key] = value if key in _VALUES else _moved(value, place)
    return moved


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonedOutput(StructuredOutput):
    """Any text up to `</think>`, white space, and `content`."""

    content: StructuredOutput | None = None

    @property
    def kind(self) -> GrammarKind:
        """A kind of its own, which users cannot ask for."""
        return "reasoned"

    @property
    def source(self) -> str:
        """The tag, and the kind and the source of the content, in JSON."""
        assert self.content is not None
        return json.dumps([CLOSE, self.content.kind, self.content.source], ensure_ascii=False)


def spells_end_of_reasoning(structured: StructuredOutput) -> bool:
    """Return whether a grammar is one of the whole output, with the end of the reasoning."""
    return structured.kind != "json" and CLOSE in structured.source.replace("\\", "")
