"""The endpoints `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UnsetType, defstruct

from ...bounded_repr import bounded_repr
from ...engine.request_output import RequestOutput
from ..request_handle import MAX_TENANT_CHARS, Delta
from .chat import ChatAnswer, converse
from .exchange import Dialect, Exchange, HttpError, encode, invalid
from .generation import Operation, Service
from .requests import (
    ChatRequest,
    Entries,
    ResponseFormat,
    StopString,
    allowed,
    call_arguments,
    chat_prompt,
    content_texts,
)
from .responses import ChatChoice, ChatMessage, ToolCall, Usage

Object = dict[str, Any]


def _refused(where: str, value: object, allowed: str) -> HttpError:
    return invalid(where, f"{where} is {bounded_repr(value)}; allowed is {allowed}")


class ToolChoice(msgspec.Struct):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model reasons first, if its template reads `enable_thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputConfig(msgspec.Struct):
    """The form of the answer; templates read `effort` as `reasoning_effort`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: ResponseFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/messages/count_tokens`: a conversation."""

    model: str | None = None
    messages: Entries
    system: str | Entries | None = None
    tools: Entries | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self, **fields: Any) -> ChatRequest:
        """Return the request in the shape of OpenAI's API, with more `fields`."""
        choice, output = self.tool_choice or ToolChoice(), self.output_config or OutputConfig()
        variables: Object = {} if output.effort is None else {"reasoning_effort": output.effort}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        named: Any = {"type": "function", "function": {"name": choice.name}}
        turns: list[Object] = []
        for role, gained in self._blocks():
            if role == "tool" or not turns or turns[-1]["role"] != role:
                turns.append({"role": role, "content": [], **gained})
            else:  # successive messages of a role are one
                for key, parts in gained.items():
                    turns[-1].setdefault(key, []).extend(parts)
        for turn in turns:
            if "reasoning_content" in turn:
                turn["reasoning_content"] = "".join(turn["reasoning_content"])
        if turns and "tool_calls" in turns[-1]:
            raise invalid("messages", "messages end with a tool_use: add its tool_result")
        return ChatRequest(
            model=self.model,
            messages=turns,
            tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())],
            tool_choice={"any": "required", "tool": named}.get(choice.type, choice.type),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            chat_template_kwargs=variables,
            continue_final_message=bool(turns) and turns[-1]["role"] == "assistant",
            response_format=output.format,
            **fields,
        )

    def _blocks(self) -> Iterator[tuple[str, Object]]:
        """Return the role of each block, and what it adds to a message of a chat."""
        if self.system:
            texts = content_texts(self.system, "system")
            yield "system", {"content": [{"type": "text", "text": text} for text in texts]}
        names: dict[str, str] = {}  # of the tools, by the id of their call
        for number, message in enumerate(self.messages):
            role, content = message.get("role"), message.get("content")
            if role not in ("user", "assistant", "system") or not isinstance(content, str | list):
                form = "a role (user or assistant) with a content (a text or blocks)"
                raise _refused(f"messages[{number}]", message, form)
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for index, block in enumerate(blocks):
                where = f"messages[{number}].content[{index}]"
                match block:
                    case {"type": "text", "text": str()}:
                        yield role, {"content": [block]}
                    case {"type": "thinking", "thinking": str(text)}:
                        yield role, {"reasoning_content": [text]}
                    case {"type": "redacted_thinking"}:
                        pass
                    case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict()}:
                        names[id] = name
                        function = {"name": name, "arguments": block["input"]}
                        call = {"id": id, "type": "function", "function": function}
                        yield role, {"tool_calls": [call]}
                    case {"type": "tool_result", "tool_use_id": str(id)}:
                        texts = ["Error:"] * (block.get("is_error") is True)
                        texts += content_texts(block.get("content"), f"{where}.content")
                        result = {"content": "\n".join(texts)}
                        yield "tool", {**result, "tool_call_id": id, "name": names.get(id)}
                    case _:
                        form = "a block of type text, thinking, redacted_thinking, tool_use (with"
                        form += " id, name, input) or tool_result (with tool_use_id)"
                        raise _refused(where, block, form)


def _tool(tool: Object, where: str) -> Object:
    match tool:
        case {"type": str(kind)} if kind != "custom":
            raise _refused(f"{where}.type", kind, "custom: the server runs no tools")
        case {"name": str(name), "input_schema": dict(schema)}:
            function = {"name": name, "parameters": schema}
            if "description" in tool:
                function["description"] = tool["description"]
            return {"type": "function", "function": function}
    raise _refused(where, tool, "an object with a name and an input_schema")


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `/v1/messages`; the `user_id` of `metadata` is the tenant."""

    max_tokens: Annotated[int, allowed("max_tokens")]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], allowed("stop")] | None = None
    temperature: Annotated[float, allowed("temperature")] | None = None
    top_p: Annotated[float, allowed("top_p")] | None = None
    top_k: Annotated[int, allowed("top_k")] | None = None
    metadata: dict[str, str | None] | None = None

    def chat(self, **fields: Any) -> ChatRequest:
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k"):
            fields[name] = getattr(self, name)
        user = (self.metadata or {}).get("user_id") or ""
        user = user[:MAX_TENANT_CHARS]  # clients send longer ones
        return super().chat(stop=self.stop_sequences, user=user or None, **fields)


class MessageBody(msgspec.Struct):
    """The response of `/v1/messages`. Blocks have a type: `thinking`, `text` or `tool_use`."""

    id: str
    model: str
    content: list[Object]
    usage: dict[str, int]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


class MessageEvent(msgspec.Struct, omit_defaults=True):
    """The data of an event of a stream, whose `event` is the `type`."""

    type: str
    message: MessageBody | None = None
    index: int | None = None
    content_block: Object | None = None
    delta: Object | None = None
    usage: dict[str, int] | None = None


TokenCount = defstruct("TokenCount", [("input_tokens", int)])


class MessagesError(msgspec.Struct):
    """The body of an error response, and of an error event; `error` has `type` and `message`."""

    error: dict[str, str]
    request_id: str
    type: str = "error"


_ERRORS: Final = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class _MessagesDialect(Dialect):
    error_body = MessagesError
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    id_headers = (b"request-id",)
    fields = (
        ("continue_final_message$", "messages"),
        ("stop$", "stop_sequences"),
        (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
        ("response_format", "output_config.format"),
        ("chat_template_kwargs", "thinking"),
    )

    def error(self, error: HttpError, request_id: str) -> MessagesError:
        kind = _ERRORS.get(error.status, error.details.type)
        return MessagesError({"type": kind, "message": self.named(error)}, request_id)

    def error_event(self, error: HttpError, request_id: str) -> bytes:
        return _event(self.error(error, request_id))


def _event(value: MessageEvent | MessagesError) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value.type.encode(), encode(value))


async def messages(service: Service, exchange: Exchange) -> None:
    """Respond to a conversation with the model's answer, as Anthropic's API does."""
    request = await exchange.read(MessagesRequest, service.fields.check)
    await converse(service, exchange, request.chat(), MessagesAnswer)


async def count_tokens(service: Service, exchange: Exchange) -> None:
    """Respond with the number of tokens of a conversation."""
    chat = (await exchange.read(CountTokensRequest)).chat()
    exchange.param_of = chat.param_of
    service.model_name(chat.model)
    await exchange.respond({"input_tokens": len(await service.encode(chat_prompt(chat)))})


_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "pause_turn",  # clients send the answer back to continue it
}


class MessagesAnswer(ChatAnswer):
    """The answer as blocks: reasoning, text, calls of tools."""

    def __init__(self, *arguments: Any) -> None:
        """Take the arguments of a `ChatAnswer`."""
        super().__init__(*arguments)
        self.id = self.id.replace("chatcmpl-", "msg_")
        self._stop: Object = {}  # why the message ended
        self._type: str | None = None  # of the block that gains, None before the stream
        self._index = -1  # of the newest block

    def choice(self, prompt: int, delta: Delta, output: RequestOutput) -> ChatChoice:
        choice = super().choice(prompt, delta, output)
        if (reason := choice.finish_reason) is not None:
            found = output.completions[0].stop_string if reason == "stop" else None
            reason = _STOP_REASONS.get(reason, reason) if found is None else "stop_sequence"
            self._stop = {"stop_reason": reason, "stop_sequence": found}
        return choice

    def body(self, choices: list[ChatChoice], usage: Any) -> MessageBody:
        content = []
        for block, delta in (part for choice in choices for part in _gained(choice.message)):
            if "partial_json" in delta:
                block["input"] = call_arguments(delta["partial_json"])
            else:
                block |= {**delta, "type": block["type"]}
            content.append(block | ({"signature": self.id} if "signature" in block else {}))
        return MessageBody(self.id, self.model, content, _counts(usage), **self._stop)

    def event(self, choice: ChatChoice, usage: Callable[[], Usage]) -> bytes:
        events = []
        if self._type is None:
            message = MessageBody(self.id, self.model, [], _counts(usage()))
            events, self._type = [MessageEvent("message_start", message)], ""
        for block, delta in _gained(choice.delta):
            if block["type"] != self._type or block.get("id"):
                events += self._close()
                self._type, self._index = block["type"], self._index + 1
                events.append(MessageEvent("content_block_start", None, self._index, block))
            events.append(MessageEvent("content_block_delta", None, self._index, None, delta))
        return b"".join(map(_event, events))

    def end(self, usage: Usage) -> bytes:
        last = MessageEvent("message_delta", delta=self._stop, usage=_counts(usage))
        return b"".join(map(_event, (*self._close(), last, MessageEvent("message_stop"))))

    def _close(self) -> list[MessageEvent]:
        """Return the events that end the block which gains, if there is one."""
        events = [MessageEvent("content_block_stop", index=self._index)] if self._type else []
        if self._type == "thinking":
            signed = {"type": "signature_delta", "signature": self.id}
            events.insert(0, MessageEvent("content_block_delta", None, self._index, None, signed))
        return events


def _counts(usage: Usage) -> dict[str, int]:
    """Return the tokens of a message; `input_tokens` were not in the prefix cache."""
    cached = usage.prompt_tokens_details.cached_tokens
    counts = {"input_tokens": usage.prompt_tokens - cached, "cache_read_input_tokens": cached}
    return {**counts, "cache_creation_input_tokens": 0, "output_tokens": usage.completion_tokens}


def _gained(message: ChatMessage | UnsetType) -> Iterator[tuple[Object, Object]]:
    """Return the blocks that a message gained, as they begin, and the deltas of their texts."""
    if not message:
        return
    for call in message.calls(begin=False):
        yield {"type": "tool_use"}, _arguments_of(call)
    if thought := message.reasoning_content:
        begun: Object = {"type": "thinking", "thinking": "", "signature": ""}
        yield begun, {"type": "thinking_delta", "thinking": thought}
    if text := message.content:
        yield {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
    for call in message.calls(begin=True):
        begun = {"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}}
        yield begun, _arguments_of(call)


def _arguments_of(call: ToolCall) -> Object:
    return {"type": "input_json_delta", "partial_json": call.function.arguments}


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/messages"): Operation(
        messages, MessageBody, MessagesRequest, MessageEvent, dialect=_MessagesDialect()
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        count_tokens, TokenCount, CountTokensRequest, dialect=_MessagesDialect()
    ),
}
