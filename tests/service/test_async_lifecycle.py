"""An `AsyncEngine` from its start to its end: drain, sleep, health, close, exit, Ctrl-C, fork."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import AsyncEngine
from stepgraph.runtime.errors import (
    EngineClosedError,
    EngineFailedError,
    EngineForkedError,
    EngineNotStartedError,
    EngineUnavailableError,
    OverloadedError,
)
from stepgraph.runtime.service.health import Phase

from ..rigs.fake_engine import fake_engine, params
from ..rigs.service_rig import (
    PROMPT,
    SECONDS,
    InjectedError,
    Rig,
    config,
    do,
    fail,
    in_event_loop,
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
    r.on_start = fail
    before = threading.active_count()
    with pytest.raises(InjectedError), r.engine:
        pass
    with pytest.raises(InjectedError):
        do(AsyncEngine(r.make).__aenter__())
    assert threading.active_count() == before


def uses(engine: AsyncEngine) -> list[Callable[[], Any]]:
    """Calls that need an engine which serves."""

    async def stream() -> None:
        engine.stream(PROMPT)

    calls = (engine.stats, engine.drain, engine.sleep, engine.wake, engine.reset_prefix_cache)
    return [
        lambda: engine.submit(PROMPT),
        *(lambda call=call: do(call()) for call in (stream, *calls)),
        lambda: do(engine.generate(PROMPT)),
    ]


def test_an_engine_that_was_not_started_says_so() -> None:
    r = Rig()
    engine = r.engine
    assert (engine.health().phase, engine.health().live) == (Phase.NOT_STARTED, False)

    for use in (*uses(engine), lambda: engine.tokenizer, lambda: do(engine.reload("demo"))):
        with pytest.raises(EngineNotStartedError):
            use()
    with engine:
        r.check_serves()


@in_event_loop
async def test_a_drain_completes_the_present_requests_and_refuses_others() -> None:
    with rig() as r:
        r.steps.close()
        r.preparations.close()
        running = r.engine.submit(tuple(PROMPT), params(1, max_tokens=30))
        draining = asyncio.ensure_future(r.engine.drain())
        while r.engine.health().phase is not Phase.DRAINING:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineUnavailableError):
            r.engine.submit(PROMPT)
        r.preparations.open()  # of a request that was there before
        r.steps.open()
        assert await draining is True
        assert running.result(SECONDS).finish_reason == "length"
        assert r.engine.health().phase is Phase.DRAINING
        assert (await r.engine.stats())["queued"] == 0
        await r.engine.wake()


def test_a_drain_aborts_what_is_left_at_its_timeout() -> None:
    with rig(max_num_seqs=1) as r:
        r.on_step = lambda: time.sleep(0.01)
        r.preparations.close()
        futures = [r.engine.submit(p, params(1, max_tokens=40)) for p in (tuple(PROMPT), (1,))]
        r.preparations.permit()
        wait_until(lambda: r.requests.has_rows)
        begun = time.monotonic()
        assert do(r.engine.drain(0.05)) is False
        assert time.monotonic() - begun > 0.04
        assert [future.result(SECONDS).finish_reason for future in futures] == ["abort"] * 2
        r.preparations.open()
        do(r.engine.wake())


@in_event_loop
async def test_drain_reports_requests_that_a_failure_lost() -> None:
    with rig() as r:
        lost = r.hold(PROMPT, params(1))
        draining = asyncio.ensure_future(r.engine.drain())
        await asyncio.sleep(0)
        r.steps.permit()
        while r.engine.health().phase is not Phase.DRAINING:
            await asyncio.sleep(0.001)
        r.on_step = fail
        r.steps.permit()
        assert await draining is False
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
@in_event_loop
async def test_a_drain_that_wake_ends_loses_no_request(operation: str) -> None:
    with rig() as r:
        own = params(1)
        request = r.hold(PROMPT, own)
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
        assert r.engine.health().phase is Phase.SERVING
        assert request.result(SECONDS).token_ids == r.expected(PROMPT, own)


def test_health_while_a_step_stalls() -> None:
    with rig(config(stall_seconds=0.05)) as r:
        future = r.hold(PROMPT, params(1))
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


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("phase", ["preparing", "decoding"])
def test_close_answers_every_request(phase: str) -> None:
    before = threading.active_count()
    with rig(max_num_seqs=1) as r:
        r.steps.close()
        held = r.preparations if phase == "preparing" else r.steps
        held.close()
        futures = [r.engine.submit((1, i), params(1)) for i in range(5)]
        held.wait()
        r.thread.close()  # as `close` does before it waits
        closing = threading.Thread(target=r.engine.close)
        closing.start()
        if phase == "preparing":  # answered while a prompt is still prepared
            assert isinstance(futures[0].exception(SECONDS), EngineClosedError)
        r.preparations.open()
        r.steps.open()
        closing.join(SECONDS)
        assert not closing.is_alive()
        errors = [future.exception(0.0) for future in futures]
        assert all(isinstance(error, EngineClosedError) for error in errors)
        r.engine.close()  # again
        with pytest.raises(EngineClosedError):
            r.engine.submit(PROMPT)
        assert do(r.engine.drain()) is True
        with pytest.raises(EngineClosedError):
            do(r.engine.sleep())
        assert r.engine.health().phase is Phase.CLOSED
    assert threading.active_count() == before


def test_submits_that_race_with_close_are_answered() -> None:
    for _ in range(20):
        r = Rig()
        r.engine.start()
        futures: list[Any] = []

        def submit(go: threading.Barrier, r: Rig = r, futures: list[Any] = futures) -> None:
            go.wait()
            for prompt in itertools.cycle([(1, 2), [1, 2]]):
                try:
                    futures.append(r.engine.submit(prompt, params(1)))
                except OverloadedError:
                    continue
                except (EngineClosedError, EngineUnavailableError):
                    return

        with ThreadPoolExecutor(2) as pool:
            go = threading.Barrier(3)
            submitting = [pool.submit(submit, go) for _ in range(2)]
            go.wait()
            time.sleep(0.002)
            r.engine.close()
            for thread in submitting:
                thread.result(SECONDS)
        for future in futures:
            error = future.exception(SECONDS)
            assert error is None or isinstance(error, (EngineClosedError, EngineUnavailableError))


def test_close_in_a_callback() -> None:
    with rig() as r:
        r.on_step = lambda: time.sleep(0.005)
        own = params(1, max_tokens=40)
        future = r.engine.submit(PROMPT, own, callback=lambda delta: r.engine.close())
        with pytest.raises(EngineClosedError):
            future.result(SECONDS)


def test_an_engine_that_is_dropped_closes() -> None:
    engine = AsyncEngine(fake_engine)
    engine.start()
    thread, dropped = engine._thread, weakref.ref(engine)
    future = engine.submit(PROMPT, params(1))
    future.result(SECONDS)
    del engine
    wait_until(lambda: dropped() is None or gc.collect() is None)
    thread.join()
    assert thread.health().phase is Phase.CLOSED


HANGING = """
import gc, sys, threading, time
sys.path.insert(0, {root!r})
from stepgraph.runtime import AsyncEngine
from tests.rigs.fake_engine import fake_engine, params

engine, called = AsyncEngine(fake_engine), threading.Event()
engine.start()
hang = lambda delta: called.set() or threading.Event().wait()
engine.submit([1, 2], params(1), callback=hang)
called.wait(20)
del engine
for _ in range(20): gc.collect() or time.sleep(0.02)
print("ended", flush=True)
"""


def test_a_callback_that_hangs_does_not_outlive_a_dropped_engine() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGING.format(root=str(ROOT))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")


SCRIPT = """
import asyncio, sys, time
sys.path.insert(0, {root!r})
from stepgraph.runtime import AsyncEngine
from tests.rigs.fake_engine import fake_engine, params

async def generate():
    print("go", flush=True)
    while True: await engine.generate([1, 2], params(1, max_tokens=40))

def submit():
    print("go", flush=True)
    while True: engine.submit([1, 2], params(1, max_tokens=40)).result()

engine = AsyncEngine(fake_engine)
engine.start()
engine.submit([1], params(1)).result(5)  # starts the thread of callbacks
try: {call}
except KeyboardInterrupt: print("interrupted")
print(engine.submit([1], params(1)).result(5).finish_reason)
print(asyncio.run(engine.drain(5)))
print(not engine._thread.dispatcher.handles)
asyncio.run(engine.wake())
engine.submit([1, 2], params(1, max_tokens=40), callback=lambda d: time.sleep(0.01))
engine.submit((1, 2), params(1, max_tokens=40))
waiting = engine.submit([3], params(1, max_tokens=40))
waiting.add_done_callback(lambda f: print("answered", flush=True))
"""


@pytest.mark.parametrize(
    "call", ["submit()", pytest.param("asyncio.run(generate())", marks=pytest.mark.slow)]
)
def test_ctrl_c_in_the_main_thread(call: str) -> None:
    """The engine serves on, and answers what still runs when the interpreter ends."""
    process = subprocess.Popen(
        # The interrupt may come when a coroutine has been made and does not run yet.
        [sys.executable, "-W", "ignore:coroutine", "-c", SCRIPT.format(root=str(ROOT), call=call)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out == "interrupted\nlength\nTrue\nTrue\nanswered\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_engine_may_start_in_forked_children() -> None:
    """As `gunicorn --preload` does it: the application is made, then the process forks."""
    r, records = Rig(), multiprocessing.get_context("fork").SimpleQueue()
    r.engine.add_listener(lambda record: records.put((record.request_id, record.outcome)))

    def serve() -> None:
        with r.engine:
            r.check_serves()
            assert r.engine.health().ready

    children = [multiprocessing.get_context("fork").Process(target=serve) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(SECONDS)
        assert child.exitcode == 0
    serve()
    ended = [records.get() for _ in range(3)]
    assert {outcome for _, outcome in ended} == {"length"}
    assert len({request_id for request_id, _ in ended}) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_serves() -> None:
    with rig() as r:
        r.check_serves()

        def child() -> None:
            engine = r.engine
            for use in (*uses(engine), lambda: do(engine.run_in_pool(int)), engine.start):
                with pytest.raises(EngineForkedError):
                    use()
            engine.close()
            assert not engine.health().ready

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(SECONDS)
        assert process.exitcode == 0
