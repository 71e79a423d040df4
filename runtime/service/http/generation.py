"""Decodes the prompts of an HTTP request, to their ends or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET

from ...engine.intake import Prompt
from ...engine.request_output import RequestOutput
from ...sampling_params import SamplingParams
from ..async_engine import AsyncEngine, RequestOptions
from ..consumers import AsyncStream
from ..request_handle import Delta
from .exchange import Exchange, event
from .responses import OptionalUsage, Usage

__all__ = ["Answer", "Generation", "deltas_of"]

DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """The response to one HTTP request, in the shape of its endpoint."""

    @property
    def id(self) -> str:
        """The id of the response."""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> msgspec.Struct:
        """Return the body for the last outputs, one for each prompt."""

    def event(
        self, prompt: int, delta: Delta, output: RequestOutput, usage: OptionalUsage
    ) -> bytes:
        """Return the event for what a completion of a prompt gained; `output` is the newest."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """Return the event that only reports the usage."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The prompts of an HTTP request, which share their parameters."""

    engine: AsyncEngine
    prompts: Sequence[Prompt]
    params: SamplingParams
    options: RequestOptions
    request_id: str
    """Of the HTTP request: the ids of its prompts begin with it."""

    async def respond(self, exchange: Exchange, answer: Answer) -> None:
        """Decode all prompts to their ends, and send the response.

        Raises:
            StepgraphError: as `AsyncStream.accepted`, or a row had non-finite logits.
        """
        exchange.note(request_id=f"{exchange.request_id}/{answer.id}")
        tasks = [
            asyncio.ensure_future(
                self.engine.generate(prompt, self.params, **self._options(answer, number))
            )
            for number, prompt in enumerate(self.prompts)
        ]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        for output in outputs:
            if output.error is not None:
                raise output.error
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        tokens = sum(c.num_tokens for output in outputs for c in output.completions)
        cached = sum(output.cached_tokens for output in outputs)
        usage = Usage.of(prompt_tokens, tokens, cached)
        _note(exchange, answer, usage)
        await exchange.respond(answer.whole(outputs, usage))

    async def stream(
        self, exchange: Exchange, answer: Answer, usage_reports: tuple[bool, bool]
    ) -> None:
        """Send events while the prompts are decoded.

        Args:
            exchange: its response begins when the engine has accepted all prompts.
            answer: makes the events.
            usage_reports: whether the last event reports the usage, and whether each one does.

        Raises:
            StepgraphError: as `respond`.
        """
        streams: list[AsyncStream] = []
        try:
            for number, prompt in enumerate(self.prompts):
                options = self._options(answer, number)
                streams.append(self.engine.stream(prompt, self.params, **options))
            for stream in streams:
                await stream.accepted()
            await exchange.start_events()
            await _EventStream(exchange, answer, streams, usage_reports).run()
        finally:
            for stream in streams:
                await stream.aclose()

    def _options(self, answer: Answer, number: int) -> RequestOptions:
        return {**self.options, "request_id": f"{self.request_id}/{answer.id}-{number}"}


class _EventStream:
    """Sends the deltas of several streams as events of one response."""

    def __init__(
        self,
        exchange: Exchange,
        answer: Answer,
        streams: Sequence[AsyncStream],
        usage_reports: tuple[bool, bool],
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._streams = streams
        self._reports_usage, self._always_reports_usage = usage_reports
        self._num_tokens = 0

    async def run(self) -> None:
        """Send all events, up to the one that ends the stream."""
        # In tasks of their own: a wake-up would pass through the coroutines of all middleware.
        tasks = [
            asyncio.create_task(self._send_deltas(number)) for number in range(len(self._streams))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            _note(self._exchange, self._answer, self._usage())
        end = DONE
        if self._reports_usage:
            end = event(self._answer.usage_chunk(self._usage())) + DONE
        await self._exchange.send_events(end, last=True)

    async def _send_deltas(self, number: int) -> None:
        """Send the events of one prompt: those that are ready together, in one message."""
        stream, answer, exchange = self._streams[number], self._answer, self._exchange
        while deltas := await stream.next_deltas():
            output = stream.output
            assert output is not None
            events = []
            for delta in deltas:
                self._num_tokens += len(delta.token_ids)
                usage: OptionalUsage = None if self._reports_usage else UNSET
                if self._always_reports_usage:
                    usage = self._usage()
                events.append(answer.event(number, delta, output, usage))
            await exchange.send_events(events[0] if len(events) == 1 else b"".join(events))

    def _usage(self) -> Usage:
        prompt_tokens = sum(stream.num_prompt_tokens for stream in self._streams)
        outputs = [stream.output for stream in self._streams]
        cached = sum(output.cached_tokens for output in outputs if output is not None)
        return Usage.of(prompt_tokens, self._num_tokens, cached)


def _note(exchange: Exchange, answer: Answer, usage: Usage) -> None:
    """Note id and tokens of a response for the access log."""
    exchange.note(
        request_id=f"{exchange.request_id}/{answer.id}",
        tokens_in=usage.prompt_tokens,
        tokens_out=usage.completion_tokens,
    )


def deltas_of(output: RequestOutput) -> list[Delta]:
    """Return each completion of a last output as one delta."""
    deltas = []
    for index, completion in enumerate(output.completions):
        whole = completion.delta_since(0, 0)
        reason = completion.finish_reason
        deltas.append(
            Delta(output.request_id, index, whole.text, whole.token_ids, whole.logprobs, (), reason)
        )
    return deltas
