"""Threads, re-entry and forks: who may call an engine when, and what the others see."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from stepgraph.runtime import (
    Engine,
    EngineBusyError,
    EngineClosedError,
    EngineFailedError,
    EngineForkedError,
    RequestOutput,
)

from ..rigs.engine_rig import parts_of, run
from ..rigs.fake_engine import check_serves, expected, fake_engine, params

SECONDS = 120
"""What a test that would hang waits."""


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    """Threads take turns within a step, many times."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_launch(engine: Engine, use: Callable[[], object]) -> None:
    """Let the next launch call `use` in the middle of its step."""
    runner = parts_of(engine).runner
    launch = runner.launch

    def hooked(*arguments: Any) -> Any:
        runner.launch = launch  # type: ignore[method-assign]
        use()
        return launch(*arguments)

    runner.launch = hooked  # type: ignore[method-assign]


@contextmanager
def step_under_way(engine: Engine) -> Iterator[None]:
    """Run the block while another thread is in the middle of a step of one request."""
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(SECONDS)

    engine.add_request([1, 2], params(1), "under way")
    in_launch(engine, wait)
    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(engine.step)
        assert inside.wait(SECONDS)
        try:
            yield
        finally:
            go_on.set()
        stepping.result(SECONDS)


def random_prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(11), k=rng.randint(1, 20)) for _ in range(count)]


def check_outputs(
    engine: Engine, prompts: list[list[int]], own: list[Any], outputs: list[RequestOutput]
) -> None:
    assert [o.token_ids for o in outputs] == [
        expected(engine, prompt, p) for prompt, p in zip(prompts, own, strict=True)
    ]


# Threads -----------------------------------------------------------------------------------------


def test_generate_from_many_threads() -> None:
    """Each gets its own outputs in order; one more thread calls `step` meanwhile."""
    engine = fake_engine(num_blocks=25, max_num_seqs=6)  # and preemptions
    stop = threading.Event()
    final: dict[str, RequestOutput] = {}

    def call(number: int) -> None:
        rng = random.Random(number)
        for turn in range(6):
            prompts = random_prompts(100 * number + turn, rng.randint(1, 3))
            own = [params(rng.randrange(99), rng.randint(1, 9)) for _ in prompts]
            check_outputs(engine, prompts, own, engine.generate(prompts, own))

    def step() -> None:
        added = 0
        while added < 8 or not stop.is_set() or engine.has_unfinished():
            if added < 8 and len(final) == added:
                engine.add_request([added] * 3, params(added), f"mine {added}")
                added += 1
            for output in engine.step():
                if output.finished:
                    assert output.request_id not in final
                    final[output.request_id] = output

    def watch() -> None:
        while not stop.is_set():
            stats = engine.stats()
            assert stats["healthy"] is True
            assert min(stats["waiting"], stats["running"], stats["blocks"]["free"]) >= 0

    with ThreadPoolExecutor(10) as pool:
        watcher = pool.submit(watch)
        stepper = pool.submit(step)
        calls = [pool.submit(call, number) for number in range(8)]
        try:
            for each in calls:
                each.result(SECONDS)
        finally:
            stop.set()
        watcher.result(SECONDS)
        stepper.result(SECONDS)
    assert engine.stats()["steps"] < engine.stats()["output_tokens"], "they share the batch"
    assert len(final) == 8
    for name, output in final.items():
        number = int(name.split()[1])
        assert output.token_ids == expected(engine, [number] * 3, params(number))
    check_serves(engine)


def test_operations_wait_for_the_step_of_another_thread() -> None:
    engine = fake_engine()
    uses: list[Callable[[], object]] = [
        engine.reset_prefix_cache,
        engine.check_integrity,
        lambda: engine.step() and None,
        lambda: engine.generate([[1, 2]], params(4))[0].token_ids,
        engine.close,
    ]
    for use in uses:
        with ThreadPoolExecutor(1) as pool:
            with step_under_way(engine):
                waiting = pool.submit(use)
                assert not waiting.done()
            if waiting.result(SECONDS) is not None:
                assert waiting.result() == expected(engine, [1, 2], params(4))
            if use != engine.close:
                run(engine)
    with pytest.raises(EngineClosedError):
        engine.step()


@pytest.mark.parametrize("how", ["close", "fail"])
def test_waiting_calls_learn_of_the_end(how: str) -> None:
    """Whichever call runs the steps, the end of the engine is the end of all of them."""
    engine = fake_engine()
    error = EngineClosedError if how == "close" else EngineFailedError
    begun = threading.Barrier(5)

    def call(number: int) -> None:
        begun.wait(SECONDS)
        while True:
            engine.generate([[number] * 5], params(number, 20))

    def fail() -> None:
        raise RuntimeError("the device is gone")

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, number) for number in range(4)]
        begun.wait(SECONDS)
        if how == "close":
            engine.close()
        else:
            in_launch(engine, fail)
        for each in calls:
            with pytest.raises(error):
                each.result(SECONDS)
    if how == "fail":
        assert engine.stats()["healthy"] is False
        engine.close()


def test_score_leaves_requests_of_other_threads_for_later() -> None:
    engine = fake_engine()
    with ThreadPoolExecutor(1) as pool:
        in_launch(engine, lambda: pool.submit(engine.add_request, [5], params(5), "x").result())
        assert engine.score([1, 2, 3, 4], 2).shape == (3, 1)
    assert run(engine)["x"].token_ids == expected(engine, [5], params(5))
    check_serves(engine)


# Re-entry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["step", "generate", "score"])
def test_a_callback_within_a_step(outer: str) -> None:
    engine = fake_engine()
    seen: list[object] = []
    refused: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.generate([[1]]),
        lambda: engine.score([1, 2]),
        engine.reset_prefix_cache,
        engine.check_integrity,
        engine.close,
    ]

    def callback() -> None:
        for use in refused:
            with pytest.raises(EngineBusyError):
                use()
        seen.append(engine.add_request([9, 9], params(9), "added"))
        seen.append(engine.add_request([9, 9], params(9), "aborted"))
        assert engine.abort("aborted") is True
        assert engine.stats()["healthy"] is True
        assert engine.has_unfinished()

    if outer == "step":
        engine.add_request([1, 2, 3], params(1), "outer")
    in_launch(engine, callback)
    if outer == "step":
        engine.step()
    elif outer == "generate":
        (output,) = engine.generate([[1, 2, 3]], params(1))
        assert output.token_ids == expected(engine, [1, 2, 3], params(1))
    else:
        engine.score([1, 2, 3], 2)
    assert seen == ["added", "aborted"]
    final = run(engine)
    if outer == "step":
        assert final["outer"].token_ids == expected(engine, [1, 2, 3], params(1))
    assert final["added"].token_ids == expected(engine, [9, 9], params(9))
    assert final["aborted"].finish_reason == "abort"
    check_serves(engine)


# Forks -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused() -> None:
    engine = fake_engine()
    engine.add_request([1, 2], params(1), "parent's")
    engine.step()
    uses: list[Callable[[], object]] = [
        engine.step,
        engine.stats,
        engine.has_unfinished,
        engine.reset_prefix_cache,
        engine.check_integrity,
        engine.timeline,
        lambda: engine.add_request([1]),
        lambda: engine.abort("parent's"),
        lambda: engine.generate([[1]]),
        lambda: engine.score([1, 2]),
        lambda: engine.kv_bytes_read(1),
        engine.__enter__,
    ]
    with step_under_way(engine):  # in a thread that the child does not have
        child = os.fork()
        if child == 0:
            failures = len(uses)
            try:
                for use in uses:
                    try:
                        use()
                    except EngineForkedError:
                        failures -= 1
                engine.close()
                engine.__exit__(None, None, None)
                del engine, uses
                gc.collect()
                check_serves(fake_engine())  # its own
            except BaseException:
                failures += 100
            os._exit(failures)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    final = run(engine)
    assert final["parent's"].token_ids == expected(engine, [1, 2], params(1))
    check_serves(engine)
