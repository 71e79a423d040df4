"""The form of an answer that must be the call of a tool, as the parsers of this package read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...structured_output import StructuredOutput
from .http_errors import HttpError

__all__ = ["tool_call_grammar"]

_ANY_OBJECT = {"type": "object"}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write calls; without it a model can put white space between any two parts."""


def tool_call_grammar(
    functions: Sequence[Mapping[str, Any]], tool_parser: str | None
) -> StructuredOutput:
    """Return the grammar of one call of one of `functions`, whose arguments follow its parameters.

    Raises:
        HttpError: the service has no parser of this package.
        RequestError: the schemas are too large.
    """
    if tool_parser not in ("hermes", "llama3_json"):
        raise HttpError(
            400,
            "tool_choice can demand a call only where the server has --tool-parser hermes or"
            " llama3_json: choose 'auto'",
            param="tool_choice",
        )
    arguments = "arguments" if tool_parser == "hermes" else "parameters"
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: function.get("parameters") or _ANY_OBJECT,
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    names = [f"call_{index}" for index in range(len(calls))]
    rules = [
        f"{name}: %json {json.dumps(call | {'x-guidance': _SPACING})}"
        for name, call in zip(names, calls, strict=True)
    ]
    start = "(" + " | ".join(names) + ")"
    if tool_parser == "hermes":
        start = f'"<tool_call>\\n" {start} "\\n</tool_call>"'
    return StructuredOutput(grammar="\n".join((f"start: {start}", *rules)))
