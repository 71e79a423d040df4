"""The messages of an OpenAI request as chat templates read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...loading.chat_template import MAX_DEPTH
from .http_errors import HttpError

__all__ = ["joined_text", "template_messages"]

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
MAX_ARGUMENTS_DEPTH = MAX_DEPTH - 8
"""Of nested values; they are themselves nested in the messages that a template gets."""


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose parts have type `text`, and whose calls have objects as arguments.

    Arguments that are not a JSON object become an empty one: a model may have written them, and
    the conversation can then continue.

    Raises:
        HttpError: a part is not text, or a tool call has no function.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    converted = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        converted["content"] = [
            {"type": "text", "text": _text(part, f"{where}.content[{i}]")}
            for i, part in enumerate(content)
        ]
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


def joined_text(content: object) -> str:
    """Return the text of a content: a string, or parts."""
    if isinstance(content, list):
        return "\n".join(_text(part, f"content[{i}]") for i, part in enumerate(content))
    return content if isinstance(content, str) else ""


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
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        except (ValueError, RecursionError):
            arguments = {}
    if not isinstance(arguments, dict) or _is_deep(arguments, MAX_ARGUMENTS_DEPTH):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _is_deep(value: object, most: int) -> bool:
    """Return whether objects and arrays nest deeper than `most` levels."""
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deep(item, most - 1) for item in items)


def _invalid(field: str, problem: str) -> HttpError:
    return HttpError(400, f"{field} {problem}", param=field)
