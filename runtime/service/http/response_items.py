"""The body of `/v1/responses`, and its items as a conversation for a chat template."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...bounded_repr import bounded_repr
from ...sampling_params import MAX_LOGPROBS, MAX_TOKENS_LIMIT
from .exchange import invalid
from .requests import (
    ChatRequest,
    Effort,
    Entries,
    ResponseFormat,
    SamplingRequest,
    content_texts,
)
from .response_store import Item

Metadata = Annotated[dict[str, str], Meta(max_length=16)]
LOGPROBS = "message.output_text.logprobs"


class TextFormat(ResponseFormat, kw_only=True, omit_defaults=True):
    """`text.format`: the output follows `schema`, `strict` or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """`text` of the Responses API."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """`reasoning` of the Responses API; with `summary` all of the reasoning is the summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(SamplingRequest, kw_only=True):
    """The body of `/v1/responses`: the API of OpenAI, and the fields of all requests for tokens."""

    previous_response_id: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextOptions | None = None
    tools: Entries | None = msgspec.field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = "auto"
    parallel_tool_calls: bool | None = True
    max_tool_calls: int | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    metadata: Metadata | None = msgspec.field(default_factory=dict)
    store: bool | None = True
    background: bool | None = False
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    input: str | Entries | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self, messages: list[dict[str, Any]], max_model_len: int) -> ChatRequest:
        """Return the request for an answer to `messages`.

        Raises:
            HttpError: a field has a value that is not supported; `param` names it.
        """
        for name, (instead, *neutral) in _INSTEAD.items():
            if (value := getattr(self, name)) not in (None, *neutral):
                raise invalid(name, f"{name} ({value!r:.60}) is not supported: use {instead}")
        kept = self.truncate_prompt_tokens
        if self.truncation == "auto" and kept is None:
            kept = -1 if self.max_output_tokens else max_model_len - max_model_len // 4
        common = {name: getattr(self, name) for name in _COMMON}
        tools, choice = self._tools()
        if self.text is not None and choice in (None, "auto", "none"):  # no call is demanded
            common["response_format"] = self.text.format
        return ChatRequest(
            **common | {"truncate_prompt_tokens": kept},
            messages=messages,
            tools=tools,
            tool_choice=choice,
            max_completion_tokens=self.max_output_tokens,
            logprobs=bool(self.top_logprobs) or LOGPROBS in (self.include or ()),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )

    def _tools(self) -> tuple[list[dict[str, Any]] | None, Any]:
        """Return the tools and the choice among them, as chats have them."""
        tools: list[dict[str, Any]] = []
        for index, tool in enumerate(self.tools or ()):
            where = f"tools[{index}]"
            _one_of(tool, "type", ("function",), where)
            _string(tool, "name", where)
            function = {name: value for name, value in tool.items() if name != "type"}
            tools.append({"type": "function", "function": function})
        choice: Any = self.tool_choice
        match choice:
            case {"type": "function", "name": name}:
                choice = {"type": "function", "function": {"name": name}}
            case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*given]}:
                found = [each.get("name") for each in given if isinstance(each, dict)]
                names = {name for name in found if isinstance(name, str)}
                tools = [tool for tool in tools if tool["function"]["name"] in names]
                choice = mode
            case dict():
                shown = bounded_repr(choice, 60)
                allowed = "none, auto, required, a function or allowed_tools"
                raise invalid("tool_choice", f"tool_choice is {shown}; allowed are {allowed}")
        return tools or None, choice


SETTINGS = (
    {*ResponsesRequest.__struct_fields__} - {*SamplingRequest.__struct_fields__}
    | {"temperature", "top_p", "user"}
) - {"input", "include", "chat_template_kwargs"}
"""Fields of requests that their responses repeat."""
_COMMON = {
    *SamplingRequest.__struct_fields__,
    *("parallel_tool_calls", "top_logprobs", "chat_template_kwargs"),
}
"""Fields of `ChatRequest` with the same name and meaning."""
_INSTEAD: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": ("max_output_tokens",),
    "response_format": ("text.format",),
    "n": ("/v1/chat/completions", 1),
    "prompt_logprobs": ("/v1/chat/completions",),
    "return_token_ids": ("/v1/chat/completions", False),
}
"""Fields of all requests for tokens that are refused: what to use, and values without effect."""

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
"""Of the ids of items, by their types."""
_ROLES = ("user", "assistant", "system", "developer")


def new_id(kind: str) -> str:
    """Return an id for an item of a type."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"


def input_items(given: str | Sequence[Item] | None) -> list[Item]:
    """Return the items of an input, each with a type and an id, and contents as lists of parts.

    Raises:
        HttpError: an item is invalid or not supported; `param` names it, or what of it.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input[{index}]") for index, item in enumerate(given or ())]


def _item(given: Item, where: str) -> Item:
    item = dict(given)
    if item.get("type") is None:
        item["type"] = "message" if "role" in item else "item_reference"
    kind = _one_of(item, "type", (*_PREFIXES, "item_reference"), where)
    if kind == "item_reference":
        _string(item, "id", where)
    elif not isinstance(item.get("id"), str):
        item["id"] = new_id(kind)
    match kind:
        case "message":
            is_answer = _one_of(item, "role", _ROLES, where) == "assistant"
            part = "output_text" if is_answer else "input_text"
            item["content"] = _parts(item, "content", where, part)
        case "reasoning":
            for name in ("content", "summary"):
                item[name] = _parts(item, name, where, "reasoning_text")
        case "function_call":
            for name in ("call_id", "name", "arguments"):
                _string(item, name, where)
        case "function_call_output":
            _string(item, "call_id", where)
            content_texts(item.get("output"), f"{where}.output")
    return item


def _parts(item: Item, name: str, where: str, kind: str) -> list[dict[str, Any]]:
    """Return the parts of a content; a text is one part of a `kind`, null has none."""
    content = item.get(name)
    content_texts(content, f"{where}.{name}")
    return [{"type": kind, "text": content}] if isinstance(content, str) else content or []


def _string(item: Mapping[str, Any], name: str, where: str) -> None:
    if not isinstance(item.get(name), str):
        raise invalid(f"{where}.{name}", f"{where}.{name} must be a string")


def _one_of(item: Mapping[str, Any], name: str, values: Sequence[str], where: str) -> str:
    """Return a field that has one of some values; an object of another type is not supported."""
    value: Any = item.get(name)
    if value not in values:
        where = where if name == "type" else f"{where}.{name}"
        shown, allowed = bounded_repr(value, 60), ", ".join(values)
        message = f"{where}: {name} {shown} is not supported; allowed are {allowed}"
        raise invalid(where, message, "unsupported_field")
    return str(value)


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the conversation that items are, for a chat template.

    A reasoning, a text and calls that follow each other are one message, and so are system messages
    (many templates take only one).
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "reasoning":
                text = "\n".join(content_texts(item["content"] or item["summary"], "content"))
                _answer(messages, "reasoning_content")["reasoning_content"] = text
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _answer(messages, "tool_calls").setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content, call_id = _content(item.get("output")), item["call_id"]
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "message" if item["role"] == "assistant":
                _answer(messages, "content")["content"] = _content(item["content"])
            case "message" if item["role"] == "user":
                messages.append({"role": "user", "content": _content(item["content"])})
            case "message":
                texts = content_texts(item["content"], "content")
                if messages and messages[-1]["role"] == "system":
                    texts.insert(0, messages.pop()["content"])
                messages.append({"role": "system", "content": "\n\n".join(texts)})
    return messages


_ORDER = ("reasoning_content", "content", "tool_calls")


def _answer(messages: list[dict[str, Any]], gains: str) -> dict[str, Any]:
    """Return the message that gains a field: the last one, or a new one of the assistant."""
    later = () if gains == "tool_calls" else _ORDER[_ORDER.index(gains) :]
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & {*later}:
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(given: object) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text, or several parts."""
    texts = content_texts(given, "content")
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
