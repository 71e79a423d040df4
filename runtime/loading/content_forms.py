"""Gives messages the form of content that a chat template reads: a string, or a list of parts.

Some templates print a content, others loop over its parts, and others do either. How depends on the
role, and no field of a checkpoint says it, so a template is tried with both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ..errors import RequestError

__all__ = ["ContentForms"]

_FIRST, _SECOND = "first-part-of-a-content", "second-part-of-a-content"
_PARTS: Final = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]

Messages = list[dict[str, Any]]

_CALL_ID: Final = "call00000"
_USER: Final = {"role": "user", "content": "hello"}
_CALL: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": {}}}
    ],
}
_BEFORE: Final[Mapping[str, Messages]] = {
    **{"system": [], "developer": [], "user": [], "assistant": [_USER]},
    "tool": [_USER, _CALL],
}
"""A conversation before a message of each role."""


class _Forms(NamedTuple):
    """What a template reads in messages of a role."""

    text: bool
    parts: bool


class ContentForms:
    """The forms that one template reads. Thread-safe."""

    def __init__(self, render: Callable[[Messages], str]) -> None:
        """Take what renders messages with the template; it may raise `RequestError`."""
        self._render = render
        self._known: dict[str, _Forms] = {}  # by role

    def adapt(self, message: dict[str, Any]) -> None:
        """Give a message the form that the template reads in its role.

        Text parts are joined with line breaks, and a string becomes a part. A content with other
        parts, and one that the template reads in no form, stay as they are.
        """
        content = message.get("content")
        if isinstance(content, str):
            if content and self._of(message["role"]) == _Forms(text=False, parts=True):
                message["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            texts = [part["text"] for part in content if _is_text(part)]
            if len(texts) == len(content) and not self._of(message["role"]).parts:
                message["content"] = "\n".join(texts)

    def _of(self, role: str) -> _Forms:
        role = role if role in _BEFORE else "user"
        if role not in self._known:
            self._known[role] = _Forms(self._reads(role, _FIRST), self._reads(role, _PARTS))
        return self._known[role]

    def _reads(self, role: str, content: str | list[dict[str, str]]) -> bool:
        """Return whether the template writes a content, and as text."""
        after = [_USER] if role in ("system", "developer") else []
        probe: dict[str, Any] = {"role": role, "content": content}
        if role == "tool":
            probe |= {"tool_call_id": _CALL_ID, "name": "f"}
        messages: Messages = [*_BEFORE[role], probe, *after]
        try:
            text = self._render(messages)
        except RequestError:  # the template refuses it
            return False
        if isinstance(content, str):
            return _FIRST in text
        is_dump = f"'{_FIRST}'" in text or f'"{_FIRST}"' in text
        return _FIRST in text and _SECOND in text and not is_dump


def _is_text(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )
