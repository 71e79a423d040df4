"""Real signals: SIGINT during `generate` takes effect at the end of the step it arrives in."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from stepgraph.runtime import Engine

from ..rigs.engine_rig import run
from ..rigs.fake_engine import check_serves, expected, fake_engine, params
from .test_shared_engine import in_launch

MAIN = threading.main_thread().ident or 0


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
    """The handler of the application is in place after every test.

    It is Python's own during the test: a job in the background of a shell ignores SIGINT.
    """
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    handler = signal.signal(signal.SIGINT, found)
    assert handler is signal.default_int_handler


def test_interrupt_ends_generate_and_keeps_the_prefix_cache() -> None:
    engine = fake_engine()
    engine.add_request([5, 5], params(5, 30), "other")
    in_launch(engine, interrupt)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt, [2]], params(1, 30))
    stats = engine.stats()
    assert stats["steps"] == 1
    assert (stats["running"], stats["waiting"]) == (1, 0), "only its own requests have ended"
    (again,) = engine.generate([prompt], params(1))
    assert again.cached_tokens == 8
    final = run(engine)
    assert final.pop("other").token_ids == expected(engine, [5, 5], params(5, 30))
    assert {output.finish_reason for output in final.values()} == {"abort"}
    check_serves(engine)


def test_interrupt_in_the_last_step_loses_no_output() -> None:
    engine = fake_engine()
    in_launch(engine, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]], params(1, 1))
    (output,) = engine.step()
    assert output.token_ids == expected(engine, [1, 2, 3], params(1, 1))
    check_serves(engine)


def test_handler_of_the_application_is_called_between_steps() -> None:
    engine = fake_engine()
    calls: list[int] = []

    def handle(signum: int, frame: object) -> None:
        calls.append(signum)
        assert engine.stats()["steps"] == 1
        assert engine.abort("request-1") is True

    signal.signal(signal.SIGINT, handle)
    in_launch(engine, interrupt)
    (output,) = engine.generate([[1, 2, 3]], params(1))
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handle
    assert (len(output.token_ids), output.finish_reason) == (1, "abort")
    assert calls == [signal.SIGINT]
    check_serves(engine)


USES: list[Callable[[Engine], object]] = [
    lambda engine: engine.generate([[1, 2, 3, 4, 5], [6]], params(2)),
    lambda engine: engine.score([1, 2, 3], 2),
]


@pytest.mark.parametrize("use", USES, ids=["generate", "score"])
def test_interrupt_at_random_moments(use: Callable[[Engine], object]) -> None:
    """At no moment does SIGINT make an engine fail."""
    rng = random.Random(1)
    engine = fake_engine()
    started = time.perf_counter()
    use(engine)
    seconds = time.perf_counter() - started
    for _ in range(10):
        run(engine)
        delay = rng.uniform(0, 1.2 * seconds)
        timer = threading.Timer(delay, lambda: signal.pthread_kill(MAIN, signal.SIGINT))
        with suppress(KeyboardInterrupt):
            timer.start()
            while True:
                use(engine)
        timer.join()
        check_serves(engine)
