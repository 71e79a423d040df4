"""An `AsyncEngine` over fake engines whose steps and preparations a test can hold back."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from stepgraph.runtime import AsyncEngine, Engine, RequestOutput, SamplingParams, ServiceConfig
from stepgraph.runtime.service.admission import Dispatcher
from stepgraph.runtime.service.health import Phase
from stepgraph.runtime.service.request_handle import RequestHandle, RequestRecord
from stepgraph.runtime.service.step_thread import StepThread

from .fake_engine import expected, fake_engine, params, runner_of

SECONDS = 60.0
"""Limit of every wait of a test; a healthy one ends within milliseconds on an idle machine."""

PROMPT = [1, 2, 3, 4, 5]
LONG = list(range(10)) * 4
"""A prompt of several chunks."""
WEIGHTS = {"a": 1.0, "b": 2.5, "c": 0.5}
"""Of tenants."""


def wait_until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Wait until another thread or process makes a condition true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.001)


def resident_bytes() -> int:
    """Resident bytes of this process without memory that the allocator holds for reuse, of which
    earlier tests may have left much."""
    gc.collect()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


class SkippingClock:
    """The clock of a service, which a test sets forward: so a deadline that is far away passes at
    once, and one that is not to pass does not pass on a busy machine either."""

    def __init__(self) -> None:
        self._real, self._skipped_ns = time.perf_counter_ns, 0

    def skip(self, seconds: float) -> None:
        self._skipped_ns += int(seconds * 1e9)

    def now_ns(self) -> int:
        return self._real() + self._skipped_ns


def do(awaitable: Awaitable[Any], loop_factory: Any = None) -> Any:
    """Await in an event loop of its own."""

    async def main() -> Any:
        return await asyncio.wait_for(awaitable, SECONDS)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        do(test(**arguments))

    return run


async def joined(stream: Any) -> dict[int, tuple[list[int], str | None]]:
    """The tokens and the finish reason of each completion of a stream."""
    found: dict[int, tuple[list[int], str | None]] = {}
    async for delta in stream:
        tokens, reason = found.setdefault(delta.index, ([], None))
        assert reason is None, "a delta after the last one"
        found[delta.index] = ([*tokens, *delta.token_ids], delta.finish_reason)
    return found


def listening(engine: AsyncEngine) -> list[RequestRecord]:
    """The records of the requests that end from now on."""
    records: list[RequestRecord] = []
    engine.add_listener(records.append)
    return records


class InjectedError(Exception):
    pass


def fail(*_: object, **__: object) -> None:
    raise InjectedError("injected")


class Gate:
    """Holds a call back: open, or for a number of calls."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = True
        self._waiting = threading.Semaphore(0)

    def close(self) -> None:
        self._open = False

    def open(self) -> None:
        self._open = True
        self._permits.release(1000)

    def permit(self, count: int = 1) -> None:
        self._permits.release(count)

    def wait(self) -> None:
        """Wait until one more call is held back."""
        assert self._waiting.acquire(timeout=SECONDS)

    def __call__(self) -> None:
        if not self._open:
            self._waiting.release()
            assert self._permits.acquire(timeout=SECONDS)


class Rig:
    """Makes the engines of an `AsyncEngine`, and controls them.

    Attributes:
        engine: the asynchronous engine.
        made: the engines made so far; the last one serves.
        steps, preparations: gates of `Engine.step` and `Engine.prepare`.
        on_step: called before each step; may raise.
        on_launch: called within each step, before its launch, with its plan; may raise.
        on_start: called before an engine is made; may raise.
    """

    def __init__(self, service: ServiceConfig | None = None, **options: Any) -> None:
        self._options = options
        self.made: list[Engine] = []
        self.steps = Gate()
        self.preparations = Gate()
        self.on_step: Callable[[], None] = lambda: None
        self.on_launch: Callable[[Any], None] = lambda plan: None
        self.on_start: Callable[[], None] = lambda: None
        self.num_steps = 0
        self.engine = AsyncEngine(self.make, service)

    def make(self) -> Engine:
        self.on_start()
        engine = fake_engine(**self._options)
        step, prepare = engine.step, engine.prepare
        runner = runner_of(engine)
        launch = runner.launch

        def hooked_launch(number: int, plan: Any) -> Any:
            self.on_launch(plan)
            return launch(number, plan)

        def gated_step() -> Any:
            self.steps()
            self.on_step()
            self.num_steps += 1
            return step()

        def gated_prepare(*args: Any, **options: Any) -> Any:
            self.preparations()
            return prepare(*args, **options)

        engine.step = gated_step  # type: ignore[method-assign]
        runner.launch = hooked_launch
        engine.prepare = gated_prepare  # type: ignore[method-assign]
        self.made.append(engine)
        return engine

    @property
    def thread(self) -> StepThread:
        return self.engine._thread

    @property
    def requests(self) -> Dispatcher:
        return self.thread.dispatcher

    def expected(self, prompt: list[int], own: SamplingParams) -> list[int]:
        """The tokens of a request that runs alone."""
        return expected(self.made[-1], prompt, own)

    def on_thread(self, function: Callable[[], Any]) -> Any:
        """Run a function between two steps and return its result."""
        return self.thread.run(function).result(SECONDS)

    def hold(self, prompt: list[int], own: SamplingParams) -> Future[RequestOutput]:
        """Submit a request, and hold back the step that would begin it."""
        self.steps.close()
        future = self.engine.submit(prompt, own)
        self.steps.wait()
        return future

    def check_idle(self) -> None:
        """Assert that no request, row, block or count is left."""

        def check() -> None:
            requests, engine = self.requests, self.thread.engine
            requests.check_integrity()
            assert not requests.handles
            assert not requests.has_work
            assert requests.limits.num_requests == requests.limits.num_tokens == 0
            if engine is not None:
                engine.check_integrity()
                stats = engine.stats()
                assert (stats["running"], stats["waiting"]) == (0, 0)
                assert stats["blocks"]["free"] == stats["blocks"]["usable"]

        wait_until(lambda: not self.requests.limits.num_requests)  # prepared, although ended
        self.on_thread(check)

    def check_serves(self) -> None:
        """Assert that a new request gets its tokens, and leaves nothing."""
        own = params(7)
        output = self.engine.submit(PROMPT, own).result(SECONDS)
        assert output.token_ids == self.expected(PROMPT, own)
        self.check_idle()


@contextmanager
def rig(service: ServiceConfig | None = None, **options: Any) -> Iterator[Rig]:
    """A started rig, which is closed at the end; if it serves, it has nothing left then."""
    made = Rig(service, **options)
    with made.engine:
        try:
            yield made
        finally:
            made.steps.open()
            made.preparations.open()
        if made.engine.health().phase is Phase.SERVING:
            made.check_serves()


config = ServiceConfig


def make_handle(number: int, loop: Any, **options: Any) -> RequestHandle:
    defaults: dict[str, Any] = {
        "num_completions": 1,
        "tenant": "a",
        "priority": 0,
        "submitted_ns": 0,
        "deadline_ns": None,
        "first_token_deadline_ns": None,
    }
    handle = RequestHandle(f"r{number}", **(defaults | options))
    handle.loop = loop
    return handle
