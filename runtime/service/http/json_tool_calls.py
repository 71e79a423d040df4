"""Tool calls that models write as JSON objects, marked by tags or alone."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .call_reader import CallReader
from .incremental_parser import IncrementalParser
from .output_events import ContentDelta, ToolCallArguments, ToolCallBegin
from .tag_search import begins_with_tag, skip_space

__all__ = ["JsonToolParser", "hermes_parser", "llama_parser"]


class JsonToolParser(IncrementalParser):
    """Finds calls between other text.

    A call is reported when its name is known and its arguments begin as a JSON object; what does
    not come that far is content, tags included. Arguments are reported as they arrive. If they
    become invalid, the call ends there and the rest is content. White space after a call is
    dropped.
    """

    def __init__(
        self,
        open_tag: str,
        close_tag: str | None,
        *,
        bare_calls: bool = False,
        accepts: Callable[[str], bool] = bool,
    ) -> None:
        """Begin before the text.

        Args:
            open_tag: precedes a call.
            close_tag: follows a call; None if calls have none.
            bare_calls: whether a call needs no tag at the start of the text and after a call.
                `;` separates calls.
            accepts: whether there is a function of this name, for calls without a tag.
        """
        super().__init__(self._content)
        self._open_tag = open_tag
        self._close_tag = close_tag
        self._bare_calls = bare_calls
        self._accepts = accepts
        self._call = CallReader(is_bare=False, accepts=bool)
        self._opened = ""
        """The tag of the present call."""
        self._num_calls = 0
        if bare_calls:
            self._begin_call("")

    def _end(self, held: str) -> None:
        if self._read == self._in_call and not self._call.begun:
            self._add(ContentDelta, self._opened + self._call.held())
        self._add(ContentDelta, held)

    def _begin_call(self, tag: str) -> None:
        self._opened = tag
        accepts = bool if tag else self._accepts
        self._call = CallReader(is_bare=not tag, accepts=accepts)
        self._read = self._in_call

    def _content(self, text: str, at: int) -> int:
        at, found = self._add_until(self._open_tag, ContentDelta, text, at)
        if found:
            self._begin_call(self._open_tag)
        return at

    def _in_call(self, text: str, at: int) -> int:
        call, begun = self._call, self._call.begun
        end = call.feed(text, at)
        if call.begun:
            index = self._num_calls
            if not begun:
                call_id = f"call_{secrets.token_hex(12)}"
                self._events.append(ToolCallBegin(index, call_id, call.name))
            arguments = call.take_arguments()
            if arguments:
                self._events.append(ToolCallArguments(index, arguments))
            if call.done or call.failed:
                self._num_calls += 1
                # After a failure too: the object may miss no more than its last brackets.
                closes = call.done or self._close_tag is not None
                self._read = self._after_call if closes else self._content
        elif call.failed:
            self._add(ContentDelta, self._opened + call.held())
            self._read = self._content
        return end

    def _after_call(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        tag = self._close_tag or ""
        closes = begins_with_tag(text, at, tag)
        if closes is None:
            return self._hold(text, at)
        self._read = self._between_calls if closes else self._content
        return at + len(tag) if closes else at

    def _between_calls(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if self._bare_calls and text.startswith(";", at):
            return at + 1
        if at < len(text):
            self._read = self._content
            if self._bare_calls and text[at] == "{":
                self._begin_call("")
        return at


def hermes_parser(tools: Sequence[Mapping[str, Any]]) -> JsonToolParser:
    """Return a parser of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    return JsonToolParser("<tool_call>", "</tool_call>")


def llama_parser(tools: Sequence[Mapping[str, Any]]) -> JsonToolParser:
    """Return a parser of `{"name": …, "parameters": {…}}`, also after `<|python_tag|>`.

    An object without the tag is a call only if it names a function of `tools`, which has the form
    of a chat request's `tools`.
    """
    names = {tool["function"]["name"] for tool in tools if "function" in tool}
    return JsonToolParser("<|python_tag|>", None, bare_calls=True, accepts=names.__contains__)
