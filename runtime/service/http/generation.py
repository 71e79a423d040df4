"""Whole responses and streams, for the endpoints of all APIs."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec import UNSET

from ...bounded_repr import bounded_repr
from ...engine.request_builder import Prompt
from ...engine.request_output import RequestOutput
from ...errors import RequestError
from ...loading.chat_template import ChatPrompt
from ...loading.tokenizer import TextTokenizer
from ...prompt_ids import too_long
from ...sampling_params import SamplingParams
from ..async_engine import AsyncEngine
from ..consumers import AsyncStream
from ..profiler import Profiler
from ..request_handle import Delta
from .exchange import OPENAI, Dialect, Exchange, HttpError, encode, event
from .output_parsers import chosen_parsers
from .requests import SamplingRequest, StreamOptions, UnknownFields
from .response_store import ResponseStore
from .responses import Chat, Completion, OptionalUsage, Timings, Usage

if TYPE_CHECKING:  # it needs prometheus-client
    from ..metrics import EngineMetrics

R = TypeVar("R", bound=SamplingRequest)

DONE = b"data: [DONE]\n\n"
PING_SECONDS = 10.0
"""Time between the pings of a stream, in APIs that have them: prefill can take longer than clients
and proxies wait for an event."""


@dataclass(frozen=True, slots=True)
class Service:
    """An engine and the settings of its HTTP service."""

    engine: AsyncEngine
    model_names: tuple[str, ...]  # that requests may give; responses without one have the first
    fields: UnknownFields
    metrics: EngineMetrics | None
    parser_names: tuple[str | None, str | None]  # of tool calls and of reasoning, as given
    profiler: Profiler
    admin: bool  # whether every client may use what is for operators
    responses: ResponseStore
    created: int = field(default_factory=lambda: int(time.time()))
    live_views: set[Exchange] = field(default_factory=set)  # those that are open

    @property
    def parsers(self) -> tuple[str | None, str | None]:
        """The parsers of tool calls and of reasoning. Raises as `AsyncEngine.tokenizer`."""
        return chosen_parsers(self.engine.tokenizer, *self.parser_names)

    def tokenizer(self, field: str | None = "prompt") -> TextTokenizer:
        """Return the tokenizer, `RequestError` about a field without one."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RequestError(
                "the checkpoint has no tokenizer: send token ids as the prompt of /v1/completions",
                field=field,
            )
        return tokenizer

    async def encode(self, prompt: str | ChatPrompt, *, special: bool | None = False) -> list[int]:
        """Return the tokens of a prompt; `special` adds the tokens of the post-processor.

        Raises `RequestError` as `tokenizer` and `TextTokenizer.encode`, and for a prompt of more
        than `max_model_len` tokens.
        """
        tokenizer, longest = self.tokenizer(), self.engine.max_model_len

        def encode() -> list[int]:
            text = prompt if isinstance(prompt, str) else tokenizer.render(prompt)
            least = tokenizer.least_tokens(text)
            if least > longest:  # it could occupy the thread for seconds
                raise too_long(f"at least {least} tokens", longest)
            return tokenizer.encode(text, special=bool(special))

        return await self.engine.run_in_pool(encode)

    def model_name(self, given: str | None) -> str:
        """Return the name of the model for the response, 404 if no model has it.

        A name may have the tag `:latest`, which clients of Ollama add.
        """
        if given is None:
            return self.model_names[0]
        for name in (given, given.removesuffix(":latest")):
            if name in self.model_names:
                return name
        names = " or ".join(self.model_names)
        raise HttpError(
            404,
            f"the model {bounded_repr(given)} is not served: give {names}, leave model out, or"
            " serve it under this name with --served-model-name",
            param="model",
            code="model_not_found",
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """An endpoint, with the types of what it reads and sends. Its docstring is the summary."""

    handler: Callable[[Service, Exchange], Awaitable[None]]
    response: type | None  # None: text in a format of Prometheus
    body: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None  # of each event, if the response can be a stream
    statuses: tuple[int, ...] = (200,)  # of a response; every other one is an error
    dialect: Dialect = OPENAI
    query: type[msgspec.Struct] | None = None
    admin: bool = False  # whether it is for operators only, see `app`


class Answer(ABC, Generic[R]):
    """The response to one HTTP request; of a stream, its events.

    It is a list of choices, as in OpenAI's API; others override `body` and the events.
    """

    def __init__(
        self, id: str, request: R, model: str, body: type[Completion] | type[Chat], kind: str
    ) -> None:
        """Take a request.

        `id` begins the id of the response, `model` is the name it reports, and `kind` the `object`
        of each `body`.
        """
        self.id = f"{id}-{secrets.token_hex(12)}"
        self.request = request
        self.model = model
        self.created = int(time.time())
        self._body = body
        self._kind = kind
        self._extras: dict[str, Any] = {}  # fields of the next body
        options = request.stream_options or StreamOptions()
        self._reports_usage = bool(options.include_usage or request.return_timings)
        self._counts_on = bool(options.include_usage and options.continuous_usage_stats)

    @abstractmethod
    def choice(self, prompt: int, delta: Delta, output: RequestOutput) -> msgspec.Struct:
        """Return what a completion of a prompt gained; `output` is the newest."""

    def body(self, choices: list[Any], usage: Any) -> object:
        """Return the whole response."""
        extras, self._extras = self._extras, {}
        head = (self.id, self.created, self.model)
        return self._body(*head, choices, usage, self._kind, **extras)

    def begin(self) -> bytes:
        """Return the encoded events before the first choice."""
        return b""

    def event(self, choice: Any, usage: Callable[[], Usage]) -> bytes:
        """Return the encoded events of a choice, empty if it has no news; `usage` counts so far."""
        counted: OptionalUsage = None if self._reports_usage else UNSET
        if self._counts_on:
            counted = usage()
        return b"data: %b\n\n" % encode(self.body([choice], counted))  # as `event`, a call less

    def end(self, usage: Usage) -> bytes:
        """Return the encoded events after the last choice."""
        return event(self.body([], usage)) + DONE if self._reports_usage else DONE


async def generate(
    exchange: Exchange,
    engine: AsyncEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    answer: Answer[Any],
) -> None:
    """Decode prompts, which share their parameters, and send the response.

    A stream begins when the engine has accepted all prompts.
    """
    request_id = f"{exchange.request_id}/{answer.id}"
    exchange.note(request_id=request_id)
    options = answer.request.options(exchange.header(b"traceparent"))
    async with exchange.cancelled_on_disconnect(), AsyncExitStack() as stack:
        streams: list[AsyncStream] = []
        for number, prompt in enumerate(prompts):
            options["request_id"] = f"{request_id}-{number}"
            stream = engine.stream(prompt, params, **options)
            streams.append(await stack.enter_async_context(stream))
        if answer.request.stream:
            for stream in streams:
                await stream.accepted()
            await exchange.start_stream()
            await _send_events(exchange, answer, streams)
            return
        outputs = await asyncio.gather(*[stream.finish() for stream in streams])
        for output in outputs:
            if output.error is not None:
                raise output.error
        gained = [
            (prompt, delta, output)
            for prompt, output in enumerate(outputs)
            for delta in await streams[prompt].next_deltas()
        ]
        num_tokens = sum(len(delta.token_ids) for _, delta, _ in gained)
        usage = _usage(exchange, streams, num_tokens, answer)
        await exchange.respond(answer.body([answer.choice(*each) for each in gained], usage))


async def _send_events(
    exchange: Exchange, answer: Answer[Any], streams: Sequence[AsyncStream]
) -> None:
    """Send the deltas of several streams as events of one response, up to its end."""
    num_tokens = 0
    if begin := answer.begin():
        await exchange.send_events(begin)

    def usage() -> Usage:
        return _usage(exchange, streams, num_tokens)

    async def send_deltas(number: int, stream: AsyncStream) -> None:
        """Send the events of one prompt: the deltas that are ready together, in one message."""
        nonlocal num_tokens
        while deltas := await stream.next_deltas():
            output = stream.output
            assert output is not None
            events = []
            for delta in deltas:
                num_tokens += len(delta.token_ids)
                events.append(answer.event(answer.choice(number, delta, output), usage))
            if joined := b"".join(events):
                await exchange.send_events(joined)

    async def send_pings(ping: bytes) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            await exchange.send_events(ping)

    # In tasks of their own: a wake-up would pass through the coroutines of all middleware.
    tasks = [asyncio.create_task(send_deltas(*numbered)) for numbered in enumerate(streams)]
    pings = [asyncio.create_task(send_pings(ping))] if (ping := exchange.dialect.ping) else []
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks + pings:
            task.cancel()
        await asyncio.gather(*tasks, *pings, return_exceptions=True)
        counted = _usage(exchange, streams, num_tokens, answer)
    await exchange.send_events(answer.end(counted), last=True)


def _usage(
    exchange: Exchange,
    streams: Sequence[AsyncStream],
    num_tokens: int,
    answer: Answer[Any] | None = None,
) -> Usage:
    """Return the usage so far, and note it for the access log; of an `answer`, also its times."""
    prompt_tokens = sum(stream.num_prompt_tokens for stream in streams)
    outputs = [stream.output for stream in streams]
    cached = sum(output.cached_tokens for output in outputs if output is not None)
    exchange.note(tokens_in=prompt_tokens, tokens_out=num_tokens)
    usage = Usage.of(prompt_tokens, num_tokens, cached)
    if answer is not None and answer.request.return_timings:
        usage.timings = [each for stream in streams for each in Timings.of(stream.record)]
    return usage
