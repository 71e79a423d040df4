"""Sends requests of a load to an `AsyncEngine`, or to a server over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from ...errors import DeadlineUnreachableError, OverloadedError, StepgraphError
from ...service.async_engine import AsyncEngine
from ..runtimes.peers import PeerError
from ..workload import greedy
from .generator import Outcome

__all__ = ["EngineClient", "HttpClient"]

LEAST_SECONDS = 1e-9
"""The deadline of a request that is sent after it: the service refuses it."""
MAX_ERROR_CHARS = 300
SHED = (429, 503)
"""Statuses of refused requests."""


def _first_token_seconds(outcome: Outcome, slo_ttft_ms: float) -> float:
    """Return the time until the deadline of a request's first token, from now."""
    left = slo_ttft_ms / 1e3 - (time.perf_counter_ns() - outcome.scheduled_ns) / 1e9
    return max(left, LEAST_SECONDS)


class EngineClient:
    """Streams from an engine in this process."""

    def __init__(self, engine: AsyncEngine, prompts: Sequence[list[int]], output_len: int) -> None:
        """Request `output_len` greedy tokens after each prompt, in a cycle."""
        self.slo_ttft_ms: float | None = None
        """If given, the deadline of first tokens, from the scheduled arrival."""
        self._engine = engine
        self._prompts = prompts
        self._params = greedy(output_len)

    async def send(self, number: int, outcome: Outcome) -> None:
        """Run a request; see `generator.Send`."""
        prompt = self._prompts[number % len(self._prompts)]
        due = self.slo_ttft_ms
        seconds = None if due is None else _first_token_seconds(outcome, due)
        reason = None
        try:
            async with self._engine.stream(
                prompt, self._params, first_token_deadline=seconds
            ) as stream:
                async for delta in stream:
                    outcome.token_ns += [time.perf_counter_ns()] * len(delta.token_ids)
                    reason = delta.finish_reason
        except (OverloadedError, DeadlineUnreachableError):
            outcome.status = "shed"
        except StepgraphError as error:
            outcome.status, outcome.error = "failed", f"{error!s:.{MAX_ERROR_CHARS}}"
        else:
            outcome.status = "missed" if reason == "deadline" else "completed"


class HttpClient:
    """Streams completions from a server with the API of OpenAI, over one connection a request.

    httptools parses the responses: a client library would cost more than what it measures.
    """

    def __init__(self, host: str, port: int, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Post `bodies` to /v1/completions in a cycle.

        Raises:
            PeerError: httptools is not installed.
        """
        try:
            import httptools
        except ModuleNotFoundError as error:
            raise PeerError(
                'measuring servers needs httptools: pip install "stepgraph[server]"'
            ) from error
        self.slo_ttft_ms: float | None = None
        """If given, sent as `first_token_timeout`, which only stepgraph's service reads."""
        self._httptools = httptools
        self._address = (host, port)
        self._bodies = bodies

    async def send(self, number: int, outcome: Outcome) -> None:
        """Run a request; see `generator.Send`."""
        body = dict(self._bodies[number % len(self._bodies)], stream=True)
        if self.slo_ttft_ms is not None:
            body["first_token_timeout"] = _first_token_seconds(outcome, self.slo_ttft_ms)
        content = json.dumps(body).encode()
        host, port = self._address
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.open_connection(*self._address)
            with closing(writer):
                writer.write(head.encode() + content)
                await self._read(reader, outcome)
        except (
            *(OSError, EOFError, ValueError, LookupError),
            self._httptools.HttpParserError,
        ) as error:
            outcome.status, outcome.error = "failed", f"{error!r:.{MAX_ERROR_CHARS}}"

    async def _read(self, reader: asyncio.StreamReader, outcome: Outcome) -> None:
        """Note when tokens arrive and how the response ends."""
        body = _Body()
        parser = self._httptools.HttpResponseParser(body)
        status, reason = 0, None
        while not body.complete and (data := await reader.read(1 << 16)):
            now = time.perf_counter_ns()
            parser.feed_data(data)
            status = parser.get_status_code()
            for event in body.take_events() if status == 200 else ():
                if "error" in event:
                    raise ValueError(str(event["error"]))
                for choice in event["choices"]:
                    ids = choice.get("token_ids")
                    outcome.token_ns += [now] * (bool(choice["text"]) if ids is None else len(ids))
                    reason = choice.get("finish_reason") or reason
        if status not in (0, 200):
            outcome.status = "shed" if status in SHED else "failed"
            outcome.error = f"{status}: {body.rest.decode(errors='replace'):.{MAX_ERROR_CHARS}}"
        elif reason is None:
            raise EOFError("the stream ended without a finish_reason")
        else:
            outcome.status = "missed" if reason == "deadline" else "completed"


class _Body:
    """The body of a response, which httptools adds to as it arrives."""

    def __init__(self) -> None:
        self.rest = b""
        """What was not taken as an event."""
        self.complete = False

    def on_body(self, part: bytes) -> None:
        self.rest += part

    def on_message_complete(self) -> None:
        self.complete = True

    def take_events(self) -> list[dict[str, Any]]:
        """Return the server-sent events since the last call, without the `[DONE]`."""
        *lines, self.rest = self.rest.split(b"\n")
        data = (line[5:].strip() for line in lines if line.startswith(b"data:"))
        return [json.loads(text) for text in data if text != b"[DONE]"]
