"""Real signals: SIGINT takes effect at the end of the step, wherever it arrives."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stepgraph.runtime import Engine, RequestOutput

from ..rigs.engine_rig import run
from ..rigs.fake_engine import check_serves, expected, fake_engine, params
from .test_shared_engine import in_launch

MAIN = threading.main_thread().ident
assert MAIN is not None


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True, scope="module")
def no_collections() -> Iterator[None]:
    """Python drops what a handler raises while a callback of the garbage collector runs."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def same_handler() -> Iterator[None]:
    """The handler of the application is in place after every test."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def handlers() -> Iterator[Callable[[Any], None]]:
    """Install a handler of SIGINT for one test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def test_a_step_runs_to_its_end_and_the_next_one_returns_its_outputs() -> None:
    engine = fake_engine()
    engine.add_request([1, 2, 3], params(1, 2), "it")
    in_launch(engine, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.stats()["steps"] == 1
    in_launch(engine, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()  # the last one
    assert engine.has_unfinished()
    first, last = engine.step()
    assert (len(first.token_ids), first.finished) == (1, False)
    assert last.token_ids == expected(engine, [1, 2, 3], params(1, 2))
    check_serves(engine)


def test_generate_ends_and_the_prefix_cache_stays() -> None:
    engine = fake_engine()
    engine.add_request([5, 5], params(5, 30), "other")
    in_launch(engine, interrupt)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt, [2]], params(1, 30))
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (1, 0), "only its own requests have ended"
    (again,) = engine.generate([prompt], params(1))
    assert again.cached_tokens == 8
    final = run(engine)
    assert final.pop("other").token_ids == expected(engine, [5, 5], params(5, 30))
    assert {output.finish_reason for output in final.values()} == {"abort"}
    check_serves(engine)


def test_a_handler_of_the_application_is_called_after_the_step(
    handlers: Callable[[Any], None],
) -> None:
    engine = fake_engine()
    calls: list[tuple[int, bool]] = []

    def handle(signum: int, frame: object) -> None:
        calls.append((signum, engine.stats()["steps"] == 1))
        assert engine.abort("it") is True

    handlers(handle)
    engine.add_request([1, 2, 3], params(1), "it")
    in_launch(engine, interrupt)
    (output,) = engine.step()
    assert len(output.token_ids) == 1
    assert calls == [(signal.SIGINT, True)]
    assert run(engine)["it"].finish_reason == "abort"
    check_serves(engine)


def test_a_handler_that_is_installed_within_a_step_stays(handlers: Callable[[Any], None]) -> None:
    engine = fake_engine()
    calls: list[str] = []

    def install() -> None:
        interrupt()
        handlers(lambda *_: calls.append("new"))

    handlers(lambda *_: calls.append("old"))
    engine.add_request([1, 2, 3], params(1), "it")
    in_launch(engine, install)
    engine.step()
    assert calls == ["new"]
    interrupt()
    assert calls == ["new", "new"]
    check_serves(engine)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_engines_within_each_other(handlers: Callable[[Any], None], handler: Any) -> None:
    """A signal that arrives in a step within a step of another engine waits for both."""
    handlers(handler)
    inner, outer = fake_engine(), fake_engine()
    inner.add_request([1], params(1), "inner")
    outer.add_request([1], params(1), "outer")
    in_launch(inner, interrupt)
    done: list[RequestOutput] = []
    in_launch(outer, lambda: done.extend(inner.step()))
    if handler is signal.SIG_IGN:
        outer.step()
    else:
        with pytest.raises(KeyboardInterrupt):
            outer.step()
    assert len(done) == 1
    assert signal.getsignal(signal.SIGINT) is handler
    check_serves(inner)
    check_serves(outer)


def test_other_threads_leave_the_handler_alone() -> None:
    engine = fake_engine()
    engine.add_request([1, 2, 3], params(1), "it")
    seen: list[object] = []
    in_launch(engine, lambda: seen.append(signal.getsignal(signal.SIGINT)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.step).result()
    assert seen == [signal.getsignal(signal.SIGINT)]
    check_serves(engine)


@pytest.mark.parametrize("name", ["step", "generate", "score", "add_request", "reset_prefix_cache"])
def test_signals_at_random_moments(name: str) -> None:
    """Of SIGINT no moment makes an engine fail, and nothing is lost."""
    rng = random.Random(name)
    engine = fake_engine()
    uses: dict[str, Callable[[Engine], object]] = {
        "step": lambda engine: [engine.add_request([1, 2], params(1)), engine.step()],
        "generate": lambda engine: engine.generate([[1, 2, 3, 4, 5], [6]], params(2)),
        "score": lambda engine: engine.score([1, 2, 3], 2),
        "add_request": lambda engine: engine.add_request([1, 2, 3], params(4)),
        "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    }
    started = time.perf_counter()
    run(engine)
    uses[name](engine)
    seconds = time.perf_counter() - started
    interrupted = 0
    for _ in range(15):
        run(engine)
        delay = rng.uniform(0, 1.2 * seconds)
        with ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(send, delay)
                while True:
                    uses[name](engine)
                    if name in ("score", "add_request"):
                        run(engine)
            except KeyboardInterrupt:
                interrupted += 1
        check_serves(engine)
    assert interrupted == 15


def send(delay: float) -> None:
    time.sleep(delay)
    assert MAIN is not None
    signal.pthread_kill(MAIN, signal.SIGINT)


def test_signals_while_other_threads_generate() -> None:
    """The interrupted call hands the steps over, whether it ran them or slept."""
    rng = random.Random(4)
    engine = fake_engine(max_num_seqs=6)
    stop = threading.Event()

    def call(number: int) -> int:
        count = 0
        while not stop.is_set():
            own = params(number + count, 12)
            (output,) = engine.generate([[number, count % 11]], own)
            assert output.token_ids == expected(engine, [number, count % 11], own)
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, number) for number in range(3)]
        try:
            for _ in range(10):
                try:
                    pool.submit(send, rng.uniform(0, 0.01))
                    while True:
                        engine.generate([[1, 2, 3]], params(1, 20))
                except KeyboardInterrupt:
                    pass
        finally:
            stop.set()
        assert all(each.result(120) > 0 for each in calls)
    run(engine)
    check_serves(engine)
