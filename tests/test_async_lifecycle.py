"""The life of an `AsyncEngine`, from its start to close, exit and fork."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import AsyncEngine, Engine
from stepgraph.runtime.errors import (
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    EngineForkedError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
)
from stepgraph.runtime.service import managed_engine
from stepgraph.runtime.service.health import Phase
from stepgraph.runtime.service.restart_policy import RestartPolicy

from .fake_engine import fake_engine, params
from .service_rig import PROMPT, SECONDS, Rig, config, rig

ROOT = Path(__file__).parent.parent


def do(awaitable: Awaitable[Any]) -> Any:
    """Await in an event loop of its own."""

    async def main() -> Any:
        return await asyncio.wait_for(awaitable, SECONDS)

    return asyncio.run(main())


def wait_until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class InjectedError(Exception):
    pass


def fail() -> None:
    raise InjectedError("injected")


def test_the_start_waits_for_the_engine_and_reports_it() -> None:
    r = Rig()
    assert r.engine.health().phase is Phase.STARTING
    assert not r.engine.health().ready
    with pytest.raises(EngineUnavailableError, match="starting"):
        r.engine.submit(PROMPT)
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
    with pytest.raises(ConfigError, match="no such device"), r.engine:
        pass
    with pytest.raises(ConfigError, match="no such device"):
        do(AsyncEngine(r.make).__aenter__())
    assert threading.active_count() == before


def test_after_a_start_that_failed_calls_say_so() -> None:
    r = Rig()
    r.on_start = fail
    with pytest.raises(InjectedError):
        r.engine.start()
    health = r.engine.health()
    assert (health.phase, health.live, health.ready) == (Phase.FAILED, False, False)
    with pytest.raises(EngineFailedError, match="injected"):
        r.engine.submit(PROMPT)
    with pytest.raises(EngineFailedError):
        do(r.engine.stats())
    with pytest.raises(EngineFailedError):
        do(r.engine.wake())
    assert do(r.engine.drain()) is True
    r.engine.close()


def test_close_before_the_start() -> None:
    r = Rig()
    r.engine.close()
    with pytest.raises(EngineClosedError):
        r.engine.start()
    with pytest.raises(EngineClosedError):
        do(r.engine.stats())
    assert not r.made


def test_a_drain_completes_the_present_requests_and_refuses_others() -> None:
    with rig() as r:
        r.steps.close()
        r.preparations.close()
        running = r.engine.submit(tuple(PROMPT), params(1, max_tokens=30))
        draining = r.engine._thread.drain(None)
        wait_until(lambda: r.engine.health().phase is Phase.DRAINING)
        with pytest.raises(EngineUnavailableError, match="draining"):
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
        wait_until(lambda: r.engine._thread.dispatcher.num_running)
        begun = time.monotonic()
        assert do(r.engine.drain(0.05)) is False
        assert 0.04 < time.monotonic() - begun < 2.0
        assert [future.result(SECONDS).finish_reason for future in futures] == ["abort"] * 2
        r.preparations.open()
        do(r.engine.wake())
        r.check_serves()


@pytest.mark.parametrize("timeout", [-1, float("nan"), 1e12, "soon"])
def test_a_drain_of_an_invalid_timeout_is_refused(timeout: Any) -> None:
    with rig() as r:
        with pytest.raises(RequestError, match="timeout"):
            do(r.engine.drain(timeout))
        r.check_serves()


def test_a_drain_reports_requests_that_a_failure_lost() -> None:
    with rig(config(max_restarts=1)) as r:
        r.steps.close()
        lost = r.engine.submit(PROMPT, params(1))
        assert r.steps.waiting.acquire(timeout=SECONDS)
        draining = r.engine._thread.drain(None)
        r.steps.permit()
        wait_until(lambda: r.engine.health().phase is Phase.DRAINING)
        r.on_step = fail
        r.steps.permit()
        assert draining.result(SECONDS) is False
        with pytest.raises(EngineFailedError):
            lost.result(SECONDS)
        r.on_step = lambda: None
        r.steps.open()
        wait_until(lambda: len(r.made) == 2 and r.engine._thread.engine is not None)
        assert r.engine.health().phase is Phase.DRAINING  # still
        do(r.engine.wake())
        r.check_serves()


def test_sleep_frees_the_engine_and_wake_makes_it_again() -> None:
    with rig() as r:
        r.check_serves()
        do(r.engine.sleep())
        assert r.engine._thread.engine is None
        assert r.engine.health().phase is Phase.ASLEEP
        with pytest.raises(EngineUnavailableError, match="asleep"):
            do(r.engine.stats())
        with pytest.raises(EngineUnavailableError, match="asleep"):
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
            with pytest.raises(EngineUnavailableError, match="woken"):
                await task

        do(main())
        assert r.engine.health().phase is Phase.SERVING
        assert request.result(SECONDS).token_ids == r.expected(PROMPT, own)
        r.check_serves()


def test_reload_serves_another_model_or_the_present_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources: list[object] = []

    def load(source: object, config: object) -> Engine:
        sources.append(source)
        if source == "broken":
            fail()
        return fake_engine()

    def refuse(engine: Engine, source: object) -> None:
        raise ConfigError("another model")

    monkeypatch.setattr(Engine, "from_pretrained", load)
    monkeypatch.setattr(Engine, "reload_weights", refuse)
    with AsyncEngine.from_pretrained("first") as engine:
        result = do(engine.reload("second"))
        assert (result.in_place, result.reason) == (False, "another model")
        with pytest.raises(InjectedError):
            do(engine.reload("broken"))
        assert engine.health().ready
        assert engine.submit(PROMPT, params(1)).result(SECONDS).finish_reason == "length"
    assert sources == ["first", "second", "broken", "second"]


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


def test_a_failed_step_ends_the_engine_without_a_restart_policy() -> None:
    with rig(max_num_seqs=1) as r:
        r.steps.close()
        futures = [r.engine.submit(PROMPT, params(i)) for i in range(3)]
        r.on_step = fail
        r.steps.open()
        errors = [future.exception(SECONDS) for future in futures]
        assert all(isinstance(error, EngineFailedError) for error in errors)
        assert len({id(error) for error in errors}) == 3, "raising changes an exception"
        assert isinstance(errors[0].__cause__, InjectedError)
        assert r.engine.health().phase is Phase.FAILED
        with pytest.raises(EngineFailedError, match="injected"):
            r.engine.submit(PROMPT)
        assert not r.engine.health().live
        r.check_idle()


def test_a_restart_loses_the_running_requests_and_keeps_the_queue() -> None:
    with rig(config(max_restarts=1), max_num_seqs=1) as r:
        r.steps.close()
        futures = [r.engine.submit(PROMPT, params(i)) for i in range(3)]
        assert r.steps.waiting.acquire(timeout=SECONDS)

        def fail_once() -> None:
            r.on_step = lambda: None
            fail()

        r.on_step = fail_once
        r.steps.open()
        with pytest.raises(EngineFailedError):
            futures[0].result(SECONDS)
        for seed, future in enumerate(futures[1:], 1):
            assert future.result(SECONDS).token_ids == r.expected(PROMPT, params(seed))
        assert do(r.engine.stats())["restarts"] == 1
        r.check_serves()


def test_starts_that_fail_are_repeated_within_the_policy() -> None:
    with rig(config(max_restarts=3)) as r:
        attempts: list[float] = []

        def fail_twice() -> None:
            attempts.append(time.monotonic())
            if len(attempts) < 3:
                fail()

        r.on_start = fail_twice
        r.on_step = fail
        with pytest.raises(EngineFailedError):
            r.engine.submit(PROMPT).result(SECONDS)
        r.on_step = lambda: None
        wait_until(lambda: r.engine.health().ready)
        assert len(attempts) == 3
        assert attempts[2] - attempts[1] > 0.1  # a pause, in which it answers
        r.check_serves()
        r.on_step = fail  # the fourth failure
        with pytest.raises(EngineFailedError):
            r.engine.submit(PROMPT).result(SECONDS)
        wait_until(lambda: r.engine.health().phase is Phase.FAILED)


def test_the_engine_can_be_closed_in_the_pause_before_a_restart() -> None:
    with rig(config(max_restarts=100)) as r:
        r.on_start = fail
        r.on_step = fail
        with pytest.raises(EngineFailedError):
            r.engine.submit(PROMPT).result(SECONDS)
        wait_until(lambda: r.engine.health().phase is Phase.STARTING)
        with pytest.raises(EngineUnavailableError):
            do(r.engine.stats())
        begun = time.monotonic()
        r.engine.close()
        assert time.monotonic() - begun < 2.0


def test_a_close_is_not_undone_by_a_restart_that_is_due() -> None:
    with rig(config(max_restarts=100)) as r:
        pause, starting = threading.Event(), threading.Event()

        def slow_failure() -> None:
            starting.set()
            assert pause.wait(SECONDS)
            fail()

        r.on_start = slow_failure
        r.on_step = fail
        with pytest.raises(EngineFailedError):
            r.engine.submit(PROMPT).result(SECONDS)
        assert starting.wait(SECONDS)
        r.on_start = lambda: None  # the next start succeeds, and is due after the pause below
        pause.set()
        wait_until(lambda: r.engine._thread.supervisor.restart_ns is not None)
        r.engine._thread.supervisor.restart_ns = 0
        r.engine.close()
        assert len(r.made) == 1
        assert r.engine.health().phase is Phase.CLOSED


def test_restarts_are_counted_in_the_window_and_their_pauses_double() -> None:
    policy = RestartPolicy(4, 60.0)
    assert [policy.pause(float(now)) for now in range(5)] == [0.0, 0.1, 0.2, 0.4, None]
    assert policy.pause(60.5) == 0.4  # the first is over a window ago
    assert policy.pause(60.5) is None
    assert policy.pause(1000.0) == 0.0
    assert RestartPolicy(0, 60.0).pause(0.0) is None
    many = RestartPolicy(1 << 40, 60.0)
    assert [many.pause(0.0) for _ in range(3000)][-1] == 10.0


def test_a_failure_keeps_no_memory_of_the_engine() -> None:
    with rig(config(max_restarts=1)) as r:
        memory = r.made[0]._loop

        def fail_with_locals(held: object = memory) -> None:  # as the frames of a failed step
            fail()

        r.on_step = fail_with_locals
        future = r.engine.submit(PROMPT)
        error = future.exception(SECONDS)
        wait_until(lambda: len(r.made) == 2)
        assert error is not None
        cause = error.__cause__
        assert cause is not None
        frames = []
        traceback = cause.__traceback__
        while traceback is not None:
            frames.append(traceback.tb_frame)
            traceback = traceback.tb_next
        assert not any("held" in frame.f_locals for frame in frames)


@pytest.mark.parametrize("phase", ["preparing", "pool", "queued", "decoding"])
def test_close_answers_every_request(phase: str) -> None:
    before = threading.active_count()
    with rig(max_num_seqs=1) as r:
        if phase in ("preparing", "pool"):
            r.preparations.close()
        r.steps.close()
        futures = [r.engine.submit((1, i), params(1)) for i in range(5)]
        if phase in ("preparing", "pool"):
            assert r.preparations.waiting.acquire(timeout=SECONDS)
        else:
            assert r.steps.waiting.acquire(timeout=SECONDS)
        closing = threading.Thread(target=r.engine.close)
        closing.start()
        time.sleep(0.01)
        if phase in ("preparing", "pool"):  # answered while a prompt is still prepared
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
        go = threading.Barrier(3)

        def submit(r: Rig = r, go: Any = go, futures: list[Any] = futures) -> None:
            go.wait()
            for prompt in itertools.cycle([(1, 2), [1, 2]]):
                try:
                    futures.append(r.engine.submit(prompt, params(1)))
                except OverloadedError:
                    continue
                except (EngineClosedError, EngineUnavailableError):
                    return

        threads = [threading.Thread(target=submit) for _ in range(2)]
        for thread in threads:
            thread.start()
        go.wait()
        time.sleep(0.002)
        r.engine.close()
        for thread in threads:
            thread.join(SECONDS)
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


def test_engines_are_closed_at_exit() -> None:
    engine = AsyncEngine(fake_engine)
    engine.start()
    managed_engine._close_all()
    assert engine.health().phase is Phase.CLOSED


SCRIPT = """
import asyncio, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from stepgraph.runtime import AsyncEngine
from tests.fake_engine import fake_engine, params
engine = AsyncEngine(fake_engine)
engine.start()
"""


def script(body: str, *, interrupt: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a script with an engine in another process; interrupt it once it prints."""
    code = SCRIPT.format(root=str(ROOT)) + body
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    first = process.stdout.readline() if interrupt else ""
    if interrupt:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, first + out, err)


def test_the_interpreter_ends_while_requests_run() -> None:
    done = script(
        "engine.submit([1, 2], params(1, max_tokens=40), callback=lambda d: time.sleep(0.01))\n"
        "engine.submit((1, 2), params(1, max_tokens=40))\n"
        "waiting = engine.submit([3], params(1, max_tokens=40))\n"
        "waiting.add_done_callback(lambda f: print('answered', flush=True))\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "answered\n"


@pytest.mark.parametrize("how", ["future", "loop"])
def test_ctrl_c_in_the_main_thread(how: str) -> None:
    body = {
        "future": "    print('go', flush=True)\n"
        "    while True: engine.submit([1, 2], params(1, max_tokens=40)).result()\n",
        "loop": "    async def main():\n"
        "        print('go', flush=True)\n"
        "        while True: await engine.generate([1, 2], params(1, max_tokens=40))\n"
        "    asyncio.run(main())\n",
    }[how]
    done = script(
        "try:\n" + body + "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "print(engine.submit([1], params(1)).result(5).finish_reason)\n"
        "print(asyncio.run(engine.drain(5)))\n"
        "print(engine._thread.dispatcher.is_empty)\n"
        "engine.close()\n",
        interrupt=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "go\ninterrupted\nlength\nTrue\nTrue\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_serves() -> None:
    with rig() as r:
        r.check_serves()

        def child(write: int) -> None:
            engine, said = r.engine, []
            for use in (
                lambda: engine.submit(PROMPT),
                lambda: do(engine.generate(PROMPT)),
                lambda: do(engine.stats()),
                lambda: do(engine.drain()),
                lambda: do(engine.sleep()),
                lambda: do(engine.wake()),
                lambda: do(engine.run_in_pool(int)),
                engine.start,
            ):
                try:
                    use()
                except EngineForkedError:
                    said.append("refused")
            engine.close()
            said.append(str(engine.health().ready))
            os.write(write, " ".join(said).encode())

        read, write = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=child, args=(write,))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert os.read(read, 1000).decode().split() == ["refused"] * 8 + ["False"]
        os.close(read)
        os.close(write)
        r.check_serves()
