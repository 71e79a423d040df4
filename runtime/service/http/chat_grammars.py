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
            "tool_choice can demand a call only where the server has --tool-parser hermes or"
            " llama3_json: choose 'auto'",
        )
    arguments = "arguments" if tool_parser == "hermes" else "parameters"
    names = [f"call_{index}" for index in functions]
    rules = []
    for name, (index, function) in zip(names, functions.items(), strict=True):
        head = f'{{"name": {_json(function["name"])}, "{arguments}": '
        rules.append(f'{name}: {_json(head)} %json {_json(_parameters(index, function))} "}}"')
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
        return _json([CLOSE, self.content.kind, self.content.source])


def spells_end_of_reasoning(structured: StructuredOutput) -> bool:
    """Return whether a grammar is one of the whole output, with the end of the reasoning."""
    return structured.kind != "json" and CLOSE in structured.source.replace("\\", "")
