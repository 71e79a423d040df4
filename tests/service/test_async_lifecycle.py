"""An `AsyncEngine` from its start on: drain, sleep, wake and health."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.runtime import AsyncEngine
from stepgraph.runtime.errors import (
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    EngineNotStartedError,
    EngineUnavailableError,
)
from stepgraph.runtime.service.health import Phase

from ..rigs.fake_engine import params
from ..rigs.service_rig import (
    PROMPT,
    SECONDS,
    InjectedError,
    Rig,
    config,
    do,
    fail,
    rig,
    wait_until,
)


def test_the_start_waits_for_the_engine_and_reports_it() -> None:
    r = Rig()

    def on_start() -> None:
        health = r.engine.health()
        assert (health.phase, health.live, health.ready) == (Phase.STARTING, True, False)
        with pytest.raises(EngineUnavailableError):
            r.engine.submit(PROMPT)

    r.on_start = on_start
    with r.engine:
        r.engine.start()  # again, which does nothing
        health = r.engine.health()
        assert (health.live, health.ready, health.step_age) == (True, True, None)
        r.check_serves()
    assert len(r.made) == 1


def test_a_start_that_fails_raises_its_error_and_leaves_no_thread() -> None:
    r = Rig()

    def refuse() -> None:
        raise ConfigError("no such device")

    r.on_start = refuse
    before = threading.active_count()
    with pytest.raises(ConfigError), r.engine:
        pass
    with pytest.raises(ConfigError):
        do(AsyncEngine(r.make).__aenter__())
    assert threading.active_count() == before


def test_an_engine_that_was_not_started_says_so() -> None:
    r = Rig()
    engine = r.engine
    assert (engine.health().phase, engine.health().live) == (Phase.NOT_STARTED, False)

    async def stream() -> None:
        engine.stream(PROMPT)

    uses: list[Callable[[], Any]] = [
        lambda: do(stream()),
        lambda: do(engine.generate(PROMPT)),
        lambda: engine.submit(PROMPT),
        lambda: engine.tokenizer,
        *(lambda call=call: do(call()) for call in (engine.stats, engine.drain, engine.sleep)),
        *(lambda call=call: do(call()) for call in (engine.wake, engine.reset_prefix_cache)),
        lambda: do(engine.reload("demo")),
    ]
    for use in uses:
        with pytest.raises(EngineNotStartedError):
            use()
    with engine:
        r.check_serves()


def test_a_drain_completes_the_present_requests_and_refuses_others() -> None:
    with rig() as r:
        r.steps.close()
        r.preparations.close()
        running = r.engine.submit(tuple(PROMPT), params(1, max_tokens=30))
        draining = r.thread.drain(None)
        wait_until(lambda: r.engine.health().phase is Phase.DRAINING)
        with pytest.raises(EngineUnavailableError):
            r.engine.submit(PROMPT)
        r.preparations.open()  # of a request that was there before
        r.steps.open()
        assert draining.result(SECONDS) is True
        assert running.result(SECONDS).finish_reason == "length"
        assert r.engine.health().phase is Phase.DRAINING
        assert do(r.engine.stats())["queued"] == 0
        do(r.engine.wake())
        r.check_serves()


def test_a_drain_aborts_what_is_left_at_its_timeout() -> None:
    with rig(max_num_seqs=1) as r:
        r.on_step = lambda: time.sleep(0.01)
        r.preparations.close()
        futures = [r.engine.submit(p, params(1, max_tokens=40)) for p in (tuple(PROMPT), (1,))]
        r.preparations.permit()
        wait_until(lambda: r.requests.has_rows)
        begun = time.monotonic()
        assert do(r.engine.drain(0.05)) is False
        assert 0.04 < time.monotonic() - begun < 2.0
        assert [future.result(SECONDS).finish_reason for future in futures] == ["abort"] * 2
        r.preparations.open()
        do(r.engine.wake())
        r.check_serves()


def test_drain_reports_requests_that_a_failure_lost() -> None:
    with rig() as r:
        r.steps.close()
        lost = r.engine.submit(PROMPT, params(1))
        assert r.steps.waiting.acquire(timeout=SECONDS)
        draining = r.thread.drain(None)
        r.steps.permit()
        wait_until(lambda: r.engine.health().phase is Phase.DRAINING)
        r.on_step = fail
        r.steps.permit()
        assert draining.result(SECONDS) is False
        with pytest.raises(EngineFailedError):
            lost.result(SECONDS)
        assert r.engine.health().phase is Phase.FAILED


def test_sleep_frees_the_engine_and_wake_makes_it_again() -> None:
    with rig() as r:
        r.check_serves()
        do(r.engine.sleep())
        assert r.thread.engine is None
        health = r.engine.health()
        assert (health.phase, health.live, health.ready) == (Phase.ASLEEP, True, False)
        with pytest.raises(EngineUnavailableError):
            do(r.engine.stats())
        with pytest.raises(EngineUnavailableError):
            r.engine.submit(PROMPT)
        with pytest.raises(EngineClosedError):
            r.made[0].step()
        do(r.engine.sleep())  # again
        assert do(r.engine.drain()) is True
        r.on_start = fail
        with pytest.raises(InjectedError):
            do(r.engine.wake())
        assert r.engine.health().phase is Phase.ASLEEP
        r.on_start = lambda: None
        do(r.engine.wake())
        r.check_serves()
        assert len(r.made) == 2


@pytest.mark.parametrize("operation", ["sleep", "reload"])
def test_a_drain_that_wake_ends_loses_no_request(operation: str) -> None:
    with rig() as r:
        r.steps.close()
        own = params(1)
        request = r.engine.submit(PROMPT, own)
        assert r.steps.waiting.acquire(timeout=SECONDS)

        async def main() -> None:
            call = r.engine.sleep() if operation == "sleep" else r.engine.reload("other")
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0)
            waking = asyncio.ensure_future(r.engine.wake())
            await asyncio.sleep(0)
            r.steps.permit()
            await waking
            r.steps.open()
            with pytest.raises(EngineUnavailableError):
                await task

        do(main())
        assert r.engine.health().phase is Phase.SERVING
        assert request.result(SECONDS).token_ids == r.expected(PROMPT, own)
        r.check_serves()


def test_health_while_a_step_stalls() -> None:
    with rig(config(stall_seconds=0.05)) as r:
        r.steps.close()
        future = r.engine.submit(PROMPT, params(1))
        assert r.steps.waiting.acquire(timeout=SECONDS)
        wait_until(lambda: not r.engine.health().ready)
        health = r.engine.health()
        assert health.live
        assert health.step_age is not None
        assert health.step_age > 0.05
        assert health.reason is not None
        r.steps.open()
        future.result(SECONDS)
        wait_until(lambda: r.engine.health().step_age is None)
        assert r.engine.health().ready
