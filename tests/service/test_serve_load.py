"""The load generator of --scenario serve: arrivals, outcomes, a stalling service."""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime.bench.serve import (
    EngineClient,
    Outcome,
    arrival_times,
    closed_loop,
    open_loop,
    summarize,
)
from stepgraph.runtime.service.async_engine import AsyncEngine
from stepgraph.runtime.service.service_config import ServiceConfig

from ..rigs.fake_engine import fake_engine
from ..rigs.service_rig import in_event_loop

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
    """What is not answered before the end is cancelled."""

    async def send(number: int, sent: Outcome) -> None:
        if number == 0:
            clock.seconds += 0.2  # blocks the event loop, as no service should
        await asyncio.sleep(60 * (number == 3))
        sent.token_ns.append(time.perf_counter_ns())
        sent.status = "completed"

    outcomes = clock.run(open_loop(send, [0.0, 0.05, 0.1, 0.3], drain_seconds=5))
    found = summarize(outcomes, seconds=0.3, slo_ttft_ms=50, slo_itl_ms=1)
    assert found["generator_behind"] is True
    assert outcomes[1].ttft_ms == outcomes[1].lag_ms == pytest.approx(150)
    assert [o.status for o in outcomes] == ["completed"] * 3 + ["unfinished"]


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


@in_event_loop
async def test_an_engine_is_loaded_and_sheds():
    """Refused, completed and refused for its deadline; all blocks are free at the end."""
    async with AsyncEngine(fake_engine, ServiceConfig(max_queued_requests=1)) as engine:
        client = EngineClient(engine, [[1, 2, 3], [4, 5]], 5)
        *burst, later = await open_loop(client.send, [0.0] * 12 + [0.2], drain_seconds=10)
        client.slo_ttft_ms = 1e-6
        (late,) = await open_loop(client.send, [0.0], drain_seconds=10)
        blocks = (await engine.stats())["blocks"]
        assert blocks["free"] == blocks["usable"]
    (closed,) = await open_loop(client.send, [0.0], drain_seconds=10)
    assert {o.status for o in burst} <= {"completed", "shed"}
    assert all(len(o.token_ns) == 5 for o in burst if o.status == "completed")
    assert (later.status, len(later.token_ns)) == ("completed", 5)
    assert late.status in ("shed", "missed")
    assert closed.status == "failed"
    assert closed.error
