"""The messages of an OpenAI request as chat templates read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .http_errors import HttpError

__all__ = ["template_messages"]

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose content is text, and whose tool calls have objects as arguments.

    The parts of a content are joined with line breaks. Many templates read nothing else.

    Raises:
        HttpError: a part is no text, or the arguments of a tool call are no JSON object.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    converted = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        converted["content"] = "\n".join(
            _text(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    elif content is None:
        converted["content"] = ""
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise _invalid(f"{where}.tool_calls", "must be a list")
        converted["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return converted


def _text(part: object, where: str) -> str:
    """Return the text of a part of a content."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
        raise _invalid(where, "is not supported: the parts of a content must have type 'text'")
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise _invalid(f"{where}.text", "must be a string")
    return text


def _tool_call(call: object, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments decoded; OpenAI sends them as a string of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _invalid(f"{where}.function", "must be an object")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise _invalid(f"{where}.function.arguments", "must be a JSON object") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _invalid(field: str, problem: str) -> HttpError:
    return HttpError(400, f"{field} {problem}", param=field)
