"""The load generator of --scenario serve: arrivals, outcomes, a stalling service, HTTP streams."""

from __future__ import annotations

import asyncio
import json
import math
import selectors
import socket
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.bench import load
from stepgraph.runtime.bench.load import (
    EngineClient,
    HttpClient,
    Outcome,
    arrival_times,
    closed_loop,
    open_loop,
    summarize,
)
from stepgraph.runtime.bench.peers import PeerError
from stepgraph.runtime.service.async_engine import AsyncEngine
from stepgraph.runtime.service.service_config import ServiceConfig

from ..rigs.fake_engine import fake_engine

MS = 1_000_000


class Clock(selectors.SelectSelector):
    """Waiting takes no time: `time.perf_counter_ns` and the clock of the event loop jump."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.seconds += timeout or 0.0
        return super().select(0)

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        class Loop(asyncio.SelectorEventLoop):
            def time(loop) -> float:  # noqa: N805
                return self.seconds

        with asyncio.Runner(loop_factory=lambda: Loop(self)) as runner:
            return runner.run(main)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(clock.seconds * 1e9))
    return clock


def outcome(*token_ms: float, scheduled: int = 0, sent: int = 0, status: Any = "completed"):
    times = [int(at * MS) for at in token_ms]
    return Outcome(scheduled * MS, sent * MS, times, status)


@given(st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_arrivals_are_seeded_ordered_and_of_the_rate(seed):
    times = arrival_times(50.0, 100.0, seed)
    assert times == arrival_times(50.0, 100.0, seed)
    assert times != arrival_times(50.0, 100.0, seed + 1)
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 100
    assert abs(len(times) - 5000) < 6 * math.sqrt(5000)  # six deviations of the count
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert 0.8 < deviation / mean < 1.25  # exponential: 1


def test_counts_percentiles_and_goodput():
    outcomes = [
        outcome(110, 120, 130, scheduled=100, sent=103),  # TTFT 10, good
        outcome(151, 160, scheduled=100),  # TTFT 51: late
        outcome(120, 141, scheduled=100),  # a gap of 21: late
        outcome(150, 170, scheduled=100),  # both on the limit
        outcome(105, 115, scheduled=100, status="missed"),
        *[outcome(status=status) for status in ("shed", "failed", "unfinished")],
    ]
    found = summarize(outcomes, seconds=4.0, slo_ttft_ms=50.0, slo_itl_ms=20.0)
    assert (found["requests"], found["good"], found["goodput"]) == (8, 2, 0.5)
    counts = [found[s] for s in ("completed", "shed", "missed", "failed", "unfinished")]
    assert counts == [4, 1, 1, 1, 1]
    assert (found["ttft_ms"]["n"], found["ttft_ms"]["max"], found["ttft_ms"]["p50"]) == (5, 51, 20)
    assert (found["itl_ms"]["n"], found["itl_ms"]["max"]) == (6, 21)
    assert found["ttft_ms"]["p99"] is None  # too few
    assert found["generator_behind"] is False
    assert summarize(outcomes[-1:], seconds=1, slo_ttft_ms=1, slo_itl_ms=1)["ttft_ms"] is None


def test_a_stall_counts_for_every_request_that_it_delays(clock):
    """A service that answers at once, but nothing for 0.3 s: requests scheduled then wait."""

    async def send(number: int, sent: Outcome) -> None:
        if 0.105 < clock.seconds < 0.4:
            await asyncio.sleep(0.4 - clock.seconds)
        sent.token_ns.append(time.perf_counter_ns())
        sent.status = "completed"

    arrivals = [number / 100 for number in range(60)]
    outcomes = clock.run(open_loop(send, arrivals, drain_seconds=5))
    delayed = [o for o in outcomes if o.ttft_ms is not None and o.ttft_ms > 15]
    assert len(delayed) == 28  # not one, as a client that waits for each answer would see
    late = summarize(outcomes, seconds=0.6, slo_ttft_ms=15, slo_itl_ms=1)
    assert late["good"] == len(outcomes) - len(delayed)


def test_a_generator_that_is_blocked_says_so_and_its_delay_counts(clock):
    async def send(number: int, sent: Outcome) -> None:
        if number == 0:
            clock.seconds += 0.2  # blocks the event loop, as no service should
        sent.token_ns.append(time.perf_counter_ns())
        sent.status = "completed"

    outcomes = clock.run(open_loop(send, [0.0, 0.05, 0.1, 0.3], drain_seconds=5))
    found = summarize(outcomes, seconds=0.3, slo_ttft_ms=50, slo_itl_ms=1)
    assert found["generator_behind"] is True
    assert outcomes[1].ttft_ms == outcomes[1].lag_ms == pytest.approx(150)


def test_unanswered_requests_are_cancelled(clock):
    async def send(number: int, sent: Outcome) -> None:
        await asyncio.sleep(60 * number)
        sent.status = "completed"

    outcomes = clock.run(open_loop(send, [0.0, 0.0], drain_seconds=30))
    assert [o.status for o in outcomes] == ["completed", "unfinished"]


def test_a_closed_loop_measures_capacity(clock):
    """Each request holds one of three places for 20 ms: 50 requests of two tokens a place."""
    inside = most = 0

    async def send(number: int, sent: Outcome) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.02)
        sent.token_ns += [time.perf_counter_ns()] * 2
        inside -= 1

    tokens, _ = clock.run(closed_loop(send, concurrency=3, seconds=6.0))
    assert most == 3
    assert tokens == pytest.approx(300, rel=0.01)


def test_an_engine_is_loaded_and_sheds():
    """Refused, completed and refused for its deadline; all blocks are free at the end."""

    async def main() -> list[Outcome]:
        config = ServiceConfig(max_queued_requests=1)
        async with AsyncEngine(lambda: fake_engine(), config) as engine:
            client = EngineClient(engine, [[1, 2, 3], [4, 5]], 5)
            outcomes = await open_loop(client.send, [0.0] * 12 + [0.2], drain_seconds=10)
            client.slo_ttft_ms = 1e-6
            outcomes += await open_loop(client.send, [0.0], drain_seconds=10)
            stats = await engine.stats()
            assert stats["blocks"]["free"] == stats["blocks"]["usable"]
        outcomes += await open_loop(client.send, [0.0], drain_seconds=10)
        return outcomes

    *burst, later, late, closed = asyncio.run(main())
    assert {o.status for o in burst} <= {"completed", "shed"}
    assert all(len(o.token_ns) == 5 for o in burst if o.status == "completed")
    assert (later.status, len(later.token_ns)) == ("completed", 5)
    assert late.status in ("shed", "missed")
    assert closed.status == "failed"
    assert closed.error


def sse(*events: Any, end: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in events) + end


def choice(text: str, reason: str | None = None, **fields: Any) -> dict[str, Any]:
    ids = [1] * bool(text)
    return {"choices": [{"text": text, "token_ids": ids, "finish_reason": reason, **fields}]}


TOKENS = sse(choice("a"), choice("b", token_ids=[1, 2]), choice("", "length"))
CHUNKED = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
UNTIL_END = "HTTP/1.1 200 OK\r\n\r\n"


def chunked(text: str, size: int) -> str:
    """Chunks that do not end where events do."""
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return CHUNKED + "".join(f"{len(p):x}\r\n{p}\r\n" for p in parts) + "0\r\n\r\n"


@pytest.mark.parametrize(
    ("response", "status", "tokens"),
    [
        (UNTIL_END + TOKENS, "completed", 3),
        *[(chunked(TOKENS, size), "completed", 3) for size in (1, 7, 1000)],
        (UNTIL_END + ": ping\n\n" + TOKENS, "completed", 3),
        (UNTIL_END + sse(choice("a"), choice("", "deadline")), "missed", 1),
        (UNTIL_END + sse(choice("a"), choice("", "stop"), end=""), "completed", 1),
        (UNTIL_END + sse(choice("a"), end=""), "failed", 1),
        (UNTIL_END + sse(choice("a"), {"error": {"message": "lost"}}), "failed", 1),
        ("HTTP/1.1 503 no\r\nContent-Length: 4\r\n\r\nbusy", "shed", 0),
        ("HTTP/1.1 429 no\r\nContent-Length: 0\r\n\r\n", "shed", 0),
        ("HTTP/1.1 500 no\r\nContent-Length: 4\r\n\r\noops", "failed", 0),
        ("HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", "failed", 0),
        (CHUNKED + "zz\r\n", "failed", 0),
        ("nonsense\r\n\r\n", "failed", 0),
        ("x" * 100_000, "failed", 0),
        ("", "failed", 0),
    ],
)
def test_what_a_server_answers(response, status, tokens):
    pytest.importorskip("httptools")
    received: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        received.append(json.loads(await reader.readexactly(length)))
        writer.write(response.encode())
        await writer.drain()
        writer.close()

    async def main() -> Outcome:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            client = HttpClient(port, [{"prompt": "one"}, {"prompt": "two"}])
            client.slo_ttft_ms = 1000.0
            (sent,) = await open_loop(lambda _, o: client.send(3, o), [0.0], drain_seconds=5)
        return sent

    sent = asyncio.run(main())
    assert (sent.status, len(sent.token_ns)) == (status, tokens), sent.error
    assert (sent.error is None) == (status in ("completed", "missed"))
    assert received[0]["prompt"] == "two"
    assert received[0]["stream"] is True
    assert 0 < received[0]["first_token_timeout"] <= 1


def test_a_server_ends_with_its_owner(monkeypatch):
    """One that ends is reported; one that runs is ended with its children, also without `close`."""
    monkeypatch.setattr(load, "READY_PATH", "/")
    serving = [sys.executable, "-m", "http.server", "--bind", load.HOST]
    server = load.Server(lambda port: [*serving, str(port)], "fake")
    assert server.process.stdin is not None
    server.process.stdin.close()  # as if this process had been killed
    assert server.process.wait(10) < 0
    with pytest.raises(ConnectionError):  # noqa: PT012
        for _ in range(1000):  # the child may end a moment later
            socket.create_connection((load.HOST, server.port)).close()
            time.sleep(0.01)
    server.close()
    with pytest.raises(PeerError):
        load.Server(lambda _: ["sh", "-c", "echo last words; exit 3"], "fake")
