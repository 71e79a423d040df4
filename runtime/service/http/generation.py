"""Decodes the prompts of an HTTP request, to their ends or as a stream of events."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from ...bounded_repr import bounded_repr
from ...engine.intake import Prompt
from ...engine.request_output import RequestOutput
from ...sampling_params import SamplingParams
from ..async_engine import AsyncEngine
from ..consumers import AsyncStream
from ..request_handle import Delta
from .exchange import Exchange, event
from .http_errors import HttpError
from .requests import SamplingRequest
from .responses import ChatChunk, Completion, OptionalUsage, Usage
from .unknown_fields import UnknownFields

if TYPE_CHECKING:  # it needs prometheus-client
    from ..metrics import EngineMetrics

__all__ = ["Answer", "Service", "generate"]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """An engine and the settings of its HTTP service."""

    engine: AsyncEngine
    model_names: tuple[str, ...]
    """Names that requests may give; responses without one have the first."""
    metrics: EngineMetrics | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    """Names for `make_output_parser`."""
    fields: UnknownFields
    """Checks the fields of requests."""
    created: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, given: str | None) -> str:
        """Return the name of the model for the response.

        Raises:
            HttpError: 404, no model has this name.
        """
        if given is None:
            return self.model_names[0]
        if given not in self.model_names:
            names = " or ".join(self.model_names)
            raise HttpError(
                404,
                f"the model {bounded_repr(given)} is not served: give {names}, or leave model out",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        return given


class Answer(ABC):
    """The response to one HTTP request, in the shape of its endpoint."""

    def __init__(self, kind: str, model: str, event: type[Completion] | type[ChatChunk]) -> None:
        """`kind` begins its id; `event` is the type of what a stream sends."""
        self.id = f"{kind}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._event = event

    @abstractmethod
    def whole(
        self, ends: Sequence[tuple[Sequence[Delta], RequestOutput]], usage: Usage
    ) -> msgspec.Struct:
        """Return the body for each prompt's completions, in one delta each, and last output."""

    @abstractmethod
    def chunk(
        self, prompt: int, delta: Delta, output: RequestOutput, usage: OptionalUsage
    ) -> msgspec.Struct:
        """Return the event for what a completion of a prompt gained; `output` is the newest."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """Return the event that only reports the usage."""
        return self._event(self.id, self._created, self._model, [], usage)


async def generate(
    exchange: Exchange,
    engine: AsyncEngine,
    request: SamplingRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    answer: Answer,
) -> None:
    """Decode prompts, which share their parameters, and send the response.

    A stream begins when the engine has accepted all prompts.

    Raises:
        StepgraphError: as `AsyncStream.accepted`, or a row had non-finite logits.
    """
    request_id = f"{exchange.request_id}/{answer.id}"
    exchange.note(request_id=request_id)
    options = request.options(exchange.header(b"traceparent"))
    streams: list[AsyncStream] = []
    try:
        for number, prompt in enumerate(prompts):
            options["request_id"] = f"{request_id}-{number}"
            streams.append(engine.stream(prompt, params, **options))
        if request.stream:
            for stream in streams:
                await stream.accepted()
            await exchange.start_events()
            await _send_events(exchange, answer, streams, *request.usage_reports())
        else:
            outputs = await asyncio.gather(*[stream.finish() for stream in streams])
            for output in outputs:
                if output.error is not None:
                    raise output.error
            deltas = [await stream.next_deltas() for stream in streams]
            usage = _usage(streams, sum(len(d.token_ids) for found in deltas for d in found))
            _note_usage(exchange, usage)
            whole = answer.whole(list(zip(deltas, outputs, strict=True)), usage)
            await exchange.respond(whole)
    finally:
        for stream in streams:
            await stream.aclose()


async def _send_events(
    exchange: Exchange,
    answer: Answer,
    streams: Sequence[AsyncStream],
    reports_usage: bool,
    always_reports_usage: bool,
) -> None:
    """Send the deltas of several streams as events of one response, up to its end."""
    num_tokens = 0

    async def send_deltas(number: int, stream: AsyncStream) -> None:
        """Send the events of one prompt: the deltas that are ready together, in one message."""
        nonlocal num_tokens
        while deltas := await stream.next_deltas():
            output = stream.output
            assert output is not None
            events = []
            for delta in deltas:
                num_tokens += len(delta.token_ids)
                usage: OptionalUsage = None if reports_usage else UNSET
                if always_reports_usage:
                    usage = _usage(streams, num_tokens)
                events.append(event(answer.chunk(number, delta, output, usage)))
            await exchange.send_events(b"".join(events))

    # In tasks of their own: a wake-up would pass through the coroutines of all middleware.
    tasks = [asyncio.create_task(send_deltas(*numbered)) for numbered in enumerate(streams)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        usage = _usage(streams, num_tokens)
        _note_usage(exchange, usage)
    end = event(answer.usage_chunk(usage)) + DONE if reports_usage else DONE
    await exchange.send_events(end, last=True)


def _usage(streams: Sequence[AsyncStream], num_tokens: int) -> Usage:
    prompt_tokens = sum(stream.num_prompt_tokens for stream in streams)
    outputs = [stream.output for stream in streams]
    cached = sum(output.cached_tokens for output in outputs if output is not None)
    return Usage.of(prompt_tokens, num_tokens, cached)


def _note_usage(exchange: Exchange, usage: Usage) -> None:
    """Note the tokens of a response for the access log."""
    exchange.note(tokens_in=usage.prompt_tokens, tokens_out=usage.completion_tokens)
