"""Records of requests: one for each request that ends, however it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from stepgraph.runtime import AsyncEngine, Engine, ServiceConfig, StepgraphError
from stepgraph.runtime.errors import EngineFailedError, OverloadedError
from stepgraph.runtime.service.request_record import RequestRecord

from ..rigs.fake_engine import fake_engine, params
from ..rigs.service_rig import wait_until

LONG = 40
"""Output tokens of a request that runs for a while."""


class SlowEngine:
    """Makes engines whose steps take `seconds` longer, and fail on request."""

    def __init__(self) -> None:
        self.seconds = 0.02
        self.failure: Exception | None = None

    def start(self) -> Engine:
        engine = fake_engine(max_num_seqs=2)
        step = engine.step

        def slow_step() -> Any:
            time.sleep(self.seconds)
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure
            return step()

        engine.step = slow_step  # type: ignore[method-assign]
        return engine


def listening(engine: AsyncEngine) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    engine.add_listener(records.append)
    return records


def test_a_finished_request() -> None:
    with AsyncEngine(lambda: fake_engine()) as engine:
        records = listening(engine)
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        outputs = [
            engine.submit(
                prompt, params(1, n=2), tenant="t", priority=3, traceparent="00-x"
            ).result()
            for _ in range(2)
        ]
        wait_until(lambda: len(records) == 2)
    for output, record in zip(outputs, records, strict=True):
        assert record.request_id == output.request_id
        assert (record.tenant, record.priority, record.traceparent) == ("t", 3, "00-x")
        assert (record.outcome, record.phase, record.error) == ("length", "decode", None)
        assert record.finish_reasons == ("length", "length")
        assert (record.num_prompt_tokens, record.num_output_tokens) == (9, 12)
        assert record.num_cached_tokens == output.cached_tokens
        assert record.token_ns == tuple(c.token_ns_since(0) for c in output.completions)
        assert record.params == params(1, n=2).resolved()
        assert record.started_ns is not None
        assert record.first_token_ns is not None
        assert record.last_token_ns is not None
        times = [record.submitted_ns, record.started_ns, record.first_token_ns]
        times += [record.last_token_ns, record.ended_ns]
        assert times == sorted(times)
    assert records[1].num_cached_tokens > 0


def test_listeners_run_in_the_thread_of_callbacks_and_harm_nothing() -> None:
    def fail(record: RequestRecord) -> None:
        raise SystemExit(record.request_id)

    threads: list[str] = []
    with AsyncEngine(lambda: fake_engine()) as engine:
        engine.add_listener(fail)
        engine.add_listener(lambda _: threads.append(threading.current_thread().name))
        for seed in range(3):
            engine.submit([1, 2], params(seed)).result()
    assert threads == ["stepgraph-callbacks"] * 3


def test_every_outcome() -> None:
    slow = SlowEngine()
    config = ServiceConfig(max_queued_requests=4)
    with AsyncEngine(slow.start, config) as engine:
        records = listening(engine)

        def submit(name: str, **options: Any) -> Future[Any]:
            return engine.submit([1, 2], params(1, LONG), request_id=name, **options)

        submit("running")
        submit("running-deadline", deadline=0.4)
        wait_until(lambda: engine.snapshot().queued_requests == 0)
        waiting = [submit("waits"), submit("waits-2"), submit("queued")]
        submit("queued-deadline", deadline=0.05)
        with pytest.raises(OverloadedError):
            submit("overloaded")
        engine.abort("queued")
        wait_until(lambda: len(records) == 3)
        engine.abort("running")
        wait_until(lambda: len(records) == 5)
        slow.seconds = 0.0
        for future in waiting[:2]:
            future.result()
        late = submit("late", first_token_deadline=1e-9)
        assert late.result().finish_reason == "deadline"
        assert engine.submit([1] * 100, params(1), request_id="invalid").exception()
        assert asyncio.run(engine.drain())
        with pytest.raises(StepgraphError):
            submit("draining")
        asyncio.run(engine.wake())
        slow.failure = ValueError("a step failed")
        assert isinstance(submit("lost").exception(), EngineFailedError)
        wait_until(lambda: len(records) == 11)
        ends = {record.request_id: (record.outcome, record.phase) for record in records}
    assert len(records) == len(ends)
    assert ends == {
        "running": ("abort", "decode"),
        "running-deadline": ("deadline", "decode"),
        "queued": ("abort", "queue"),
        "queued-deadline": ("deadline", "queue"),
        "waits": ("length", "decode"),
        "waits-2": ("length", "decode"),
        "overloaded": ("overloaded", "queue"),
        "late": ("deadline", "queue"),
        "invalid": ("invalid", "queue"),
        "lost": ("failed", "prefill"),
        "draining": ("unavailable", "queue"),
    }
    for record in records:
        answered = record.outcome in ("length", "abort", "deadline")
        assert (record.error is None) == answered, record
