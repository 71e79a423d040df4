"""The endpoints of OpenAI's Responses API: answers as items that the server keeps."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec
from msgspec import Meta

from ...bounded_repr import bounded_repr
from .chat import ChatAnswer, converse
from .exchange import (
    BodyLimits,
    Dialect,
    ErrorDetails,
    Exchange,
    HttpError,
    encode,
    http_error,
    invalid,
)
from .generation import Operation, Service
from .requests import ChatRequest, chat_prompt
from .response_items import (
    SETTINGS,
    ResponsesRequest,
    chat_messages,
    input_items,
    new_id,
)
from .response_store import Item, StoredResponse
from .responses import ChatChoice, ChatToken, Usage

Response: Any = msgspec.defstruct(
    "Response",
    [
        *(("id", str), ("created_at", int), ("model", str), ("status", str)),
        ("output", list[Item]),
        *[(f.name, f.type) for f in msgspec.structs.fields(ResponsesRequest) if f.name in SETTINGS],
        ("usage", dict[str, Any] | None, None),
        ("error", ErrorDetails | None, None),
        ("incomplete_details", dict[str, str] | None, None),
        ("object", str, "response"),
    ],
    kw_only=True,
    namespace={"__doc__": "A response, with settings of its request."},
)


class ResponseEvent(msgspec.Struct):
    """An event of a stream; its other fields depend on the type."""

    type: str
    sequence_number: int


class Retrieval(msgspec.Struct):
    """The query for a response; it is not streamed again."""

    stream: bool = False


class Deletion(msgspec.Struct):
    """A response that was deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


class Page(msgspec.Struct):
    """The query for a part of a list."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """Id of the item before the first one."""


class InputItems(msgspec.Struct):
    """Items of the input of a response."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(msgspec.Struct):
    """Tokens of the prompt that a request has."""

    input_tokens: int
    object: str = "response.input_tokens"


class _Kind(NamedTuple):
    """A kind of output items: the events about the text, and the part that has the text."""

    item: str
    text_event: str
    part: str | None  # None: the text is the item's `arguments`
    part_event: str = "content_part"
    field: str = "content"  # of the item, with its part


_MESSAGE = _Kind("message", "output_text", "output_text")
_REASONING = _Kind("reasoning", "reasoning_text", "reasoning_text")
_SUMMARY = _Kind(
    "reasoning", "reasoning_summary_text", "summary_text", "reasoning_summary_part", "summary"
)
_CALL = _Kind("function_call", "function_call_arguments", None)
_NEW: Mapping[str, Item] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"arguments": ""},
}
"""Fields of items without text."""


class ResponsesAnswer(ChatAnswer):
    """An answer as items, one after the other; its stream has events about each and its text."""

    def __init__(self, turn: _Turn, *chat: Any) -> None:
        """Begin before the first item; `chat` are the arguments of `ChatAnswer`."""
        super().__init__(*chat)
        self.id = turn.stored.id
        self._turn = turn
        reasoning = turn.request.reasoning
        self._reasoning = _SUMMARY if reasoning and reasoning.summary else _REASONING
        self._items: list[Item] = []
        self._open: _Kind | None = None  # of the last item, while it gains text
        self._gained: list[str] = []  # texts of the last item
        self._logprobs: list[ChatToken] = []  # of their tokens
        self._pending: list[ChatToken] = []  # of tokens whose text a parser withholds
        self._place: dict[str, Any] = {}  # fields of all events about the text
        self._num_events = self._num_reasoning_tokens = 0
        self._reason: str | None = None  # of the end
        self.response = turn.stored.response = Response(
            id=self.id,
            created_at=self.created,
            model=self.model,
            status="queued" if turn.request.background else "in_progress",
            output=self._items,
            **{name: getattr(turn.request, name) for name in SETTINGS},
        )

    def begin(self) -> bytes:
        names = ("response.created", "response.in_progress")
        return b"".join([self._event(name, response=self.response) for name in names])

    def event(self, choice: ChatChoice, usage: Callable[[], Usage]) -> bytes:
        self.response.status = "in_progress"
        return b"".join(self._take(choice))

    def body(self, choices: list[Any], usage: Any) -> Any:
        for choice in choices:
            self.event(choice, lambda: usage)
        self.end(usage)
        return self.response

    def end(self, usage: Usage) -> bytes:
        status = "completed" if self._reason in ("stop", "tool_calls") else "incomplete"
        events = b""
        if status == "completed" and all(item["type"] == "reasoning" for item in self._items):
            events = b"".join(self._write(_MESSAGE, ""))  # clients expect a message or a call
        return events + self.stop(status, usage)

    def stop(
        self, status: str, usage: Usage | None = None, error: ErrorDetails | None = None
    ) -> bytes:
        """End the response and store it; return the events of its end."""
        if self._open is _MESSAGE:
            self._logprobs += self._pending  # of tokens without text, such as the end of a sequence
        events = b"".join(self._close("completed" if status == "completed" else "incomplete"))
        response, response.status = self.response, status
        if error is not None:
            response.error = error
            said = {"code": error.code, "message": error.message, "param": error.param}
            events += self._event("error", **said)
        if status == "incomplete":
            reason = "max_output_tokens" if self._reason == "length" else str(self._reason)
            response.incomplete_details = {"reason": reason}
        if usage is not None:
            response.usage = {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": usage.prompt_tokens_details,
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": usage.total_tokens,
                **({"timings": usage.timings} if usage.timings else {}),
            }
        stored = self._turn.stored
        stored.items += self._items
        response.store = response.store is not False and self._service.responses.add(stored)
        return events + self._event(f"response.{status}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _take(self, choice: ChatChoice) -> Iterator[bytes]:
        """Add what a choice gained to the items; yield the events."""
        self._reason = choice.finish_reason
        if choice.logprobs is not None:
            self._pending += choice.logprobs.content
        gained = choice.delta or choice.message
        assert gained
        for call in gained.calls(begin=False):
            yield from self._write(_CALL, call.function.arguments)
        if gained.reasoning_content:
            yield from self._write(self._reasoning, gained.reasoning_content)
        if gained.content:
            yield from self._write(_MESSAGE, gained.content)
        for call in gained.calls(begin=True):
            yield from self._begin_item(_CALL, call_id=call.id, name=call.function.name)
            yield from self._write(_CALL, call.function.arguments)

    def _write(self, kind: _Kind, text: str) -> Iterator[bytes]:
        """Add a text to the last item, or to a new one if that is of another kind."""
        if self._open is not kind:
            yield from self._begin_item(kind)
        tokens, self._pending = self._pending, []
        self._gained.append(text)
        self._logprobs += tokens
        logprobs = {"logprobs": tokens} if kind is _MESSAGE else {}
        if text:
            name = f"response.{kind.text_event}.delta"
            yield self._event(name, **self._place, delta=text, **logprobs)

    def _begin_item(self, kind: _Kind, **fields: Any) -> Iterator[bytes]:
        yield from self._close("completed")
        self._open, self._gained, self._logprobs = kind, [], []
        item_id, index = new_id(kind.item), len(self._items)
        head = {"id": item_id, "type": kind.item, "status": "in_progress"}
        self._items.append(head | _NEW[kind.item] | fields)
        yield self._event("response.output_item.added", output_index=index, item=self._items[-1])
        self._place = {"item_id": item_id, "output_index": index}
        if kind.part is not None:
            self._place[f"{kind.field}_index"] = 0
            part = self._part(kind, "")
            yield self._event(f"response.{kind.part_event}.added", **self._place, part=part)

    def _part(self, kind: _Kind, text: str) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": self._logprobs} if kind is _MESSAGE else {}
        return {"type": kind.part, "text": text, **more}

    def _close(self, status: str) -> Iterator[bytes]:
        """End the last item, unless it has ended; yield the events."""
        kind, self._open = self._open, None
        if kind is None:
            return
        item, text = self._items[-1], "".join(self._gained)
        item["status"] = status
        if kind.item == "reasoning":
            self._num_reasoning_tokens += len(self._tokenizer.encode(text, special=False))
        name = f"response.{kind.text_event}.done"
        if kind.part is None:
            item["arguments"] = text
            yield self._event(name, **self._place, arguments=text, name=item["name"])
        else:
            part = self._part(kind, text)
            item[kind.field] = [part]
            logprobs = {"logprobs": self._logprobs} if kind is _MESSAGE else {}
            yield self._event(name, **self._place, text=text, **logprobs)
            yield self._event(f"response.{kind.part_event}.done", **self._place, part=part)
        index = self._place["output_index"]
        yield self._event("response.output_item.done", output_index=index, item=item)


class _Turn(Dialect):
    """A request that has been read, and its response in the store and as an answer.

    As the dialect of the response it names the fields of this API, and an error within a stream is
    an event of the answer.
    """

    fields = (
        ("messages", "input"),
        ("max_(completion_)?tokens", "max_output_tokens"),
        (r"response_format\.json_schema(\.schema)?", "text.format.schema"),
        ("response_format", "text.format"),
        (r"(tools\[\d+\])\.function", r"\1"),
        ("reasoning_effort", "reasoning.effort"),
    )
    answer: ResponsesAnswer

    def __init__(self, request: ResponsesRequest, stored: StoredResponse) -> None:
        self.request = request
        self.stored = stored

    def make_answer(self, *chat: Any) -> ResponsesAnswer:
        """Return the answer; takes the arguments of `ChatAnswer`."""
        self.answer = ResponsesAnswer(self, *chat)
        return self.answer

    def error_event(self, error: HttpError, request_id: str) -> bytes:
        details = self.details(error)
        details.code = details.code or details.type  # clients demand one
        return self.answer.stop("failed", error=details)


async def _read(service: Service, exchange: Exchange) -> tuple[_Turn, ChatRequest]:
    """Read a request: as a turn of a conversation, and as a chat with the whole conversation."""
    request = await exchange.read(ResponsesRequest, service.fields.check)
    store, items = service.responses, input_items(request.input)
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            field = f"input[{index}].id"
            items[index] = store.item(item["id"], exchange.key, field)
    if (previous := request.previous_response_id) is not None:
        field = "previous_response_id"
        items[:0] = store.find(previous, exchange.key, field).items
        if previous in store.running:
            raise invalid(field, f"{field}: the response is still in progress: wait for its end")
    if not items:
        raise invalid("input", "input is missing: give a text or a list of items")
    head = [{"role": "system", "content": request.instructions}] if request.instructions else []
    chat = request.chat(chat_messages([*input_items(head), *items]), service.engine.max_model_len)
    response_id = f"resp_{secrets.token_hex(24)}"
    turn = _Turn(request, StoredResponse(response_id, exchange.key, items, len(items)))
    exchange.dialect, exchange.param_of = turn, chat.param_of
    return turn, chat


async def create_response(service: Service, exchange: Exchange) -> None:
    """Respond to an input with the items of an answer."""
    turn, chat = await _read(service, exchange)
    if turn.request.background:
        stores = turn.request.store is not False and service.engine.config.max_stored_responses
        if turn.request.stream or not stores:
            raise invalid(
                "background",
                "background is not available with stream, with store false, or where the server has"
                " --max-stored-responses 0: clients get the response by its id",
            )
        await _begin_in_background(service, exchange, turn, chat)
        await exchange.respond(turn.answer.response)
    else:
        await converse(service, exchange, chat, turn.make_answer)


async def _begin_in_background(
    service: Service, exchange: Exchange, turn: _Turn, chat: ChatRequest
) -> None:
    """Begin to make a response without its client; return when the engine has accepted it.

    A stream begins when it is accepted: the task streams to a client that drops all events.
    """
    loop, running, stored = asyncio.get_running_loop(), service.responses.running, turn.stored
    begun = loop.create_future()

    async def receive() -> MutableMapping[str, Any]:
        return cast(MutableMapping[str, Any], await loop.create_future())  # it never disconnects

    async def send(message: MutableMapping[str, Any]) -> None:
        if not begun.done():
            begun.set_result(None)

    def end(task: asyncio.Task[None]) -> None:
        del running[stored.id]
        if task.cancelled():
            turn.answer.stop("cancelled")
        elif isinstance(error := task.exception(), Exception):
            turn.error_event(http_error(error, chat.param_of), "")
        own.log(complete=True)

    own = Exchange(exchange.scope, receive, send, BodyLimits(0))
    chat.stream = True
    task = asyncio.create_task(converse(service, own, chat, turn.make_answer))
    await asyncio.wait({task, begun}, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        task.result()
    running[stored.id], stored.task = stored, task
    task.add_done_callback(end)


def _stored(service: Service, exchange: Exchange) -> StoredResponse:
    return service.responses.find(exchange.parameters["id"], exchange.key, "id")


async def get_response(service: Service, exchange: Exchange) -> None:
    """Respond with a response that is stored, or made in the background."""
    stored = _stored(service, exchange)
    if exchange.query(Retrieval).stream:
        raise invalid("stream", "a stored response is not streamed again: leave stream out")
    await exchange.respond(stored.response)


async def _cancel(stored: StoredResponse) -> None:
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait({stored.task})


async def delete_response(service: Service, exchange: Exchange) -> None:
    """Drop a response; if it is made in the background, also cancel it."""
    stored = _stored(service, exchange)
    await _cancel(stored)
    service.responses.remove(stored.id)
    await exchange.respond(Deletion(stored.id))


async def cancel_response(service: Service, exchange: Exchange) -> None:
    """Cancel a response that is made in the background, unless it has ended."""
    stored = _stored(service, exchange)
    if stored.task is None:
        raise invalid("id", "only responses with background can be cancelled; this one has ended")
    await _cancel(stored)
    await exchange.respond(stored.response)


async def list_input_items(service: Service, exchange: Exchange) -> None:
    """Respond with items of the input of a response, with earlier turns; the newest first."""
    stored, page = _stored(service, exchange), exchange.query(Page)
    items = stored.items[: stored.num_input][:: 1 if page.order == "asc" else -1]
    ids = [item["id"] for item in items]
    if page.after and page.after not in ids:
        shown = bounded_repr(page.after)
        raise invalid("after", f"after is {shown}; allowed is the id of an item of this list")
    begin = ids.index(page.after) + 1 if page.after else 0
    end = begin + page.limit
    first, last = (ids[begin:end] or [None])[0], (ids[begin:end] or [None])[-1]
    await exchange.respond(InputItems(items[begin:end], first, last, end < len(items)))


async def count_input_tokens(service: Service, exchange: Exchange) -> None:
    """Respond with the number of tokens of the prompt that a request has."""
    turn, chat = await _read(service, exchange)
    service.model_name(turn.request.model)
    tokens = await service.encode(chat_prompt(chat), special=chat.add_special_tokens)
    await exchange.respond(InputTokens(len(tokens)))


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/responses"): Operation(
        create_response, Response, body=ResponsesRequest, event=ResponseEvent
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        count_input_tokens, InputTokens, body=ResponsesRequest
    ),
    ("GET", "/v1/responses/{id}"): Operation(get_response, Response, query=Retrieval),
    ("DELETE", "/v1/responses/{id}"): Operation(delete_response, Deletion),
    ("POST", "/v1/responses/{id}/cancel"): Operation(cancel_response, Response),
    ("GET", "/v1/responses/{id}/input_items"): Operation(list_input_items, InputItems, query=Page),
}
