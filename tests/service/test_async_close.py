"""The end of an `AsyncEngine`: close, its last reference, exit, Ctrl-C and fork."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import AsyncEngine
from stepgraph.runtime.errors import (
    EngineClosedError,
    EngineForkedError,
    EngineUnavailableError,
    OverloadedError,
)
from stepgraph.runtime.service.health import Phase

from ..rigs.fake_engine import fake_engine, params
from ..rigs.service_rig import PROMPT, SECONDS, Rig, do, rig, wait_until

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("phase", ["preparing", "decoding"])
def test_close_answers_every_request(phase: str) -> None:
    before = threading.active_count()
    with rig(max_num_seqs=1) as r:
        r.steps.close()
        held = r.preparations if phase == "preparing" else r.steps
        held.close()
        futures = [r.engine.submit((1, i), params(1)) for i in range(5)]
        assert held.waiting.acquire(timeout=SECONDS)
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


SCRIPT = """
import asyncio, os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from stepgraph.runtime import AsyncEngine
from tests.rigs.fake_engine import fake_engine, params
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


@pytest.mark.parametrize("how", ["future", pytest.param("loop", marks=pytest.mark.slow)])
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
