"""Open-loop and closed-loop load on a service, and what its clients see.

The open loop sends each request at its scheduled time, however many are unanswered, and measures
from that time: a service that stalls cannot delay the requests that would show it (coordinated
omission, Tene 2013, "How NOT to Measure Latency").
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import count, pairwise
from typing import Any, Literal, get_args

from ...profiling.stats import Summary
from ..config import EngineConfig
from ..errors import DeadlineUnreachableError, OverloadedError, StepgraphError
from ..service.async_engine import AsyncEngine
from .peers import MAX_REASON, ChildProcess, PeerError
from .workload import greedy

__all__ = ["EngineClient", "HttpClient", "Outcome", "Server", "arrival_times", "closed_loop"]
__all__ += ["engine_command", "open_loop", "summarize"]

HOST = "127.0.0.1"
START_SECONDS = 600
POLL_SECONDS = 0.2
READY_PATH = "/ready"
"""Page that responds with 200 once the model is loaded."""
GUARD = '("$@" </dev/null; kill -9 0) & read -r _; kill -9 0'
"""Shell script that runs a command, and ends its process group when the command or the pipe on its
standard input ends: also a killed benchmark leaves no server."""
LEAST_SECONDS = 1e-9
"""The deadline of a request that is sent after it: the service refuses it."""
MAX_ERROR_CHARS = 300
SHED = (429, 503)
"""Statuses of refused requests."""
MAX_LAG_MS = 5.0
"""A generator whose 99th percentile of lag is above this fell behind its own schedule."""
WARM_FRACTION = 0.2
"""Part of a closed loop that is not counted: its rows fill up."""

Status = Literal["completed", "shed", "missed", "failed", "unfinished"]


def arrival_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrivals of a Poisson process, in seconds from the start, in order.

    Args:
        rate: mean requests per second, above 0.
        seconds: length of the run; at least one request arrives, at its begin if no other does.
        seed: equal arguments give equal arrivals.
    """
    generator = random.Random(f"{rate!r} {seed}")
    times: list[float] = []
    now = generator.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += generator.expovariate(rate)
    return times or [0.0]


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times are from `time.perf_counter_ns`."""

    scheduled_ns: int
    sent_ns: int = 0
    """When its client began to send it."""
    token_ns: list[int] = field(default_factory=list)
    """When the client received each token."""
    status: Status = "unfinished"
    """`shed`: refused; `missed`: ended by its deadline; `failed`: ended by an error."""
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        """From the scheduled arrival to the first token; None without a token."""
        return (self.token_ns[0] - self.scheduled_ns) / 1e6 if self.token_ns else None

    @property
    def itl_ms(self) -> list[float]:
        """The gaps between tokens, 0 between tokens that arrive together."""
        return [(after - before) / 1e6 for before, after in pairwise(self.token_ns)]

    @property
    def lag_ms(self) -> float:
        """How late it was sent."""
        return (self.sent_ns - self.scheduled_ns) / 1e6

    def is_good(self, slo_ttft_ms: float, slo_itl_ms: float) -> bool:
        """Whether it completed, and its first token and every gap met the objective."""
        return (
            self.status == "completed"
            and self.ttft_ms is not None
            and self.ttft_ms <= slo_ttft_ms
            and max(self.itl_ms, default=0.0) <= slo_itl_ms
        )


Send = Callable[[int, Outcome], Awaitable[None]]
"""Sends the request of a number and fills in `token_ns`, `status` and `error`."""


async def open_loop(
    send: Send, arrivals: Sequence[float], *, drain_seconds: float
) -> list[Outcome]:
    """Send a request at each arrival, in seconds from now; return what became of them.

    Requests that are unanswered `drain_seconds` after the last arrival are cancelled, and stay
    `unfinished`.
    """
    start_ns = time.perf_counter_ns()
    outcomes: list[Outcome] = []
    tasks: list[asyncio.Task[None]] = []
    for number, at in enumerate(arrivals):
        scheduled_ns = start_ns + int(at * 1e9)
        await asyncio.sleep(max(scheduled_ns - time.perf_counter_ns(), 0) / 1e9)
        outcomes.append(Outcome(scheduled_ns))
        tasks.append(asyncio.create_task(_send(send, number, outcomes[-1])))
    await _finish(tasks, drain_seconds)
    return outcomes


async def closed_loop(
    send: Send, *, concurrency: int, seconds: float
) -> tuple[float, list[Outcome]]:
    """Keep `concurrency` requests in the service for some seconds.

    Returns the tokens that it delivered per second after the first part of the run, and what became
    of the requests; those at the end are `unfinished`.
    """
    numbers = count()
    outcomes: list[Outcome] = []
    start_ns = time.perf_counter_ns()
    end_ns = start_ns + int(seconds * 1e9)

    async def work() -> None:
        while time.perf_counter_ns() < end_ns:
            outcomes.append(Outcome(time.perf_counter_ns()))
            await _send(send, next(numbers), outcomes[-1])

    await _finish([asyncio.create_task(work()) for _ in range(concurrency)], seconds)
    first_ns = start_ns + int(WARM_FRACTION * seconds * 1e9)
    tokens = sum(first_ns <= at < end_ns for outcome in outcomes for at in outcome.token_ns)
    return tokens / ((end_ns - first_ns) / 1e9), outcomes


async def _send(send: Send, number: int, outcome: Outcome) -> None:
    outcome.sent_ns = time.perf_counter_ns()
    await send(number, outcome)


async def _finish(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Cancel the tasks that do not end in time."""
    _, running = await asyncio.wait(tasks, timeout=seconds)
    for task in running:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def summarize(
    outcomes: Sequence[Outcome], *, seconds: float, slo_ttft_ms: float, slo_itl_ms: float
) -> dict[str, Any]:
    """Return counts, latencies in ms and goodput of an open loop, for the JSON.

    Args:
        outcomes: of all requests, at least one.
        seconds: over which they arrived.
        slo_ttft_ms: the objective for first tokens, see `Outcome.is_good`.
        slo_itl_ms: the objective for gaps.
    """
    statuses = Counter(outcome.status for outcome in outcomes)
    good = sum(outcome.is_good(slo_ttft_ms, slo_itl_ms) for outcome in outcomes)
    lag = Summary.of(outcome.lag_ms for outcome in outcomes)
    errors = (outcome.error for outcome in outcomes if outcome.error is not None)
    return {
        "requests": len(outcomes),
        **{name: statuses[name] for name in get_args(Status)},
        "good": good,
        "goodput": good / seconds,
        "ttft_ms": _summary([o.ttft_ms for o in outcomes if o.ttft_ms is not None]),
        "itl_ms": _summary([gap for outcome in outcomes for gap in outcome.itl_ms]),
        "lag_ms": lag.to_json(),
        "generator_behind": (lag.max if lag.p99 is None else lag.p99) > MAX_LAG_MS,
        "error": next(errors, None),
    }


def _summary(samples: Sequence[float]) -> dict[str, Any] | None:
    return Summary.of(samples).to_json() if samples else None


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
        """Run a request; see `Send`."""
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
    """Streams completions with token ids from `stepgraph serve`, over one connection a request.

    httptools parses the responses: a client library would cost more than what it measures.
    """

    def __init__(self, port: int, bodies: Sequence[Mapping[str, Any]]) -> None:
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
        """If given, sent as `first_token_timeout`."""
        self._httptools = httptools
        self._address = (HOST, port)
        self._bodies = bodies

    async def send(self, number: int, outcome: Outcome) -> None:
        """Run a request; see `Send`."""
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
                    outcome.token_ns += [now] * len(choice.get("token_ids") or ())
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


class Server(ChildProcess):
    """A server on a free port of this machine; `close` it at the end."""

    def __init__(
        self, command: Callable[[int], Sequence[str]], name: str = "stepgraph serve"
    ) -> None:
        """Start `command`, which gets the port, and wait until its model is loaded.

        Raises:
            PeerError: it ended, or does not answer.
        """
        with socket.create_server((HOST, 0)) as probe:
            self.port: int = probe.getsockname()[1]
        super().__init__(name, ["sh", "-c", GUARD, "sh", *command(self.port)], os.environ)
        end = time.monotonic() + START_SECONDS
        try:
            while not self._is_ready():
                if self.process.poll() is not None:
                    raise PeerError(f"{name}: it ended: {self.last_words():.{MAX_REASON}}")
                if time.monotonic() > end:
                    raise PeerError(f"{name}: it does not answer within {START_SECONDS} s")
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        connection = HTTPConnection(HOST, self.port, timeout=START_SECONDS)
        with closing(connection), suppress(OSError, HTTPException):
            connection.request("GET", READY_PATH)
            return connection.getresponse().status == 200
        return False


def engine_command(model: str, config: EngineConfig, port: int) -> list[str]:
    """Return the command of `stepgraph serve` with a configuration."""
    flags: list[str] = []
    defaults = EngineConfig()
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        if value == getattr(defaults, option.name):
            continue
        name = option.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            flags += [f"--{name}", *map(str, value)]
        else:
            flags.append(f"--{name}={value}")
    command = [sys.executable, "-m", "stepgraph", "serve", model]
    return [*command, "--host", HOST, "--port", str(port), "--no-access-log", *flags]
