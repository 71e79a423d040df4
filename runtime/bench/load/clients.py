"""Sends requests of a load to an `AsyncEngine`, or to a server over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ...errors import DeadlineUnreachableError, OverloadedError, StepgraphError
from ...service.async_engine import AsyncEngine
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

    Reads HTTP/1.1 and server-sent events from the socket: a client library would cost more than
    what it measures.
    """

    def __init__(self, host: str, port: int, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Post `bodies` to /v1/completions in a cycle."""
        self.slo_ttft_ms: float | None = None
        """If given, sent as `first_token_timeout`, which only stepgraph's service reads."""
        self._address = (host, port)
        self._bodies = bodies

    async def send(self, number: int, outcome: Outcome) -> None:
        """Run a request; see `generator.Send`."""
        body = dict(self._bodies[number % len(self._bodies)], stream=True)
        if self.slo_ttft_ms is not None:
            body["first_token_timeout"] = _first_token_seconds(outcome, self.slo_ttft_ms)
        writer = None
        try:
            reader, writer = await asyncio.open_connection(*self._address)
            writer.write(post_request(self._address, "/v1/completions", body))
            status, headers = await read_head(reader)
            parts = body_parts(reader, headers)
            if status == 200:
                await _read_stream(parts, outcome)
            else:
                text = b"".join([part async for part in parts]).decode(errors="replace")
                outcome.status = "shed" if status in SHED else "failed"
                outcome.error = f"{status}: {text:.{MAX_ERROR_CHARS}}"
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError, LookupError) as error:
            outcome.status, outcome.error = "failed", f"{error!r:.{MAX_ERROR_CHARS}}"
        finally:
            if writer is not None:
                writer.close()


async def _read_stream(parts: AsyncIterator[bytes], outcome: Outcome) -> None:
    """Note when tokens arrive and how the stream ends."""
    reason = None
    async for event in events(parts):
        now = time.perf_counter_ns()
        if event == "[DONE]":
            break
        data = json.loads(event)
        if "error" in data:
            raise ValueError(str(data["error"]))
        for choice in data["choices"]:
            tokens = choice.get("token_ids")
            outcome.token_ns += [now] * (bool(choice["text"]) if tokens is None else len(tokens))
            reason = choice.get("finish_reason") or reason
    if reason is None:
        raise EOFError("the stream ended without a finish_reason")
    outcome.status = "missed" if reason == "deadline" else "completed"


def post_request(address: tuple[str, int], path: str, body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request that closes its connection."""
    content = json.dumps(body).encode()
    host, port = address
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read the head of a response; return its status and its headers in lower case.

    Raises:
        EOFError: the connection ended.
        ValueError, LookupError: it is no HTTP response.
    """
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().splitlines()
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name: value.strip() for name, _, value in pairs}


async def body_parts(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncIterator[bytes]:
    """Yield the body of a response as it arrives: chunked, of known length, or until the end."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while part := await reader.read(1 << 16):
        yield part


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the data of server-sent events; comments and other fields are skipped."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
