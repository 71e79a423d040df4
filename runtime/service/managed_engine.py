"""`ManagedEngine`: starts, observes, replaces and closes the engine of an `AsyncEngine`."""

from __future__ import annotations

import asyncio
import atexit
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ..arguments import MAX_COUNT, check_callable, check_config, check_integer
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.forks import call_in_children
from ..errors import EngineClosedError, EngineForkedError
from ..loading.loader import check_source
from ..loading.tokenizer import TextTokenizer
from ..prompt_ids import type_name
from ..sampling_params import SamplingDefaults
from ..structured.compile_threads import MAX_COMPILATIONS
from .callbacks import CallbackMailbox
from .health import Health, Phase
from .reload_result import ReloadResult
from .request_options import nanoseconds
from .request_record import Listener
from .service_config import ServiceConfig
from .service_snapshot import ServiceSnapshot
from .step_thread import StepThread

__all__ = ["ManagedEngine"]

T = TypeVar("T")

_open: weakref.WeakSet[ManagedEngine] = weakref.WeakSet()  # those to close at exit


class ManagedEngine:
    """An engine in a step thread: its life from start to close, its state and its counters."""

    def __init__(
        self, start_engine: Callable[[], Engine], config: ServiceConfig | None = None
    ) -> None:
        """Prepare to run an engine; see `AsyncEngine`."""
        given: object = start_engine
        if not callable(given):
            name = type(self).__name__
            raise TypeError(
                f"{name} takes a function that makes an Engine, not {type_name(given)}: load"
                f" a model with {name}.from_pretrained('path/to/checkpoint', EngineConfig(...))"
            )
        check_config("config", config, ServiceConfig)
        self.config = ServiceConfig() if config is None else config
        self._thread = StepThread(start_engine, self.config)
        self._supervisor = self._thread.supervisor
        self._pool = ThreadPoolExecutor(self.config.preparation_threads, "stepgraph-prepare")
        self._grammar_pool = ThreadPoolExecutor(MAX_COMPILATIONS, "stepgraph-grammars")
        """Prepares prompts whose outputs follow a grammar, which can take seconds to compile."""
        self._callbacks = CallbackMailbox()
        self._thread.dispatcher.on_ended = self._callbacks.report
        self._engine_config: EngineConfig | None = None
        self._progress = False
        self._forked = False
        call_in_children(self)
        _open.add(self)
        self._finalizer = weakref.finalize(self, _drop, self._thread, self._callbacks)
        self._finalizer.atexit = False  # see `_close_all`

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        config: EngineConfig | None = None,
        service_config: ServiceConfig | None = None,
        *,
        progress: bool = False,
    ) -> Self:
        """Return an engine that loads a model when it is entered.

        Args:
            source: see `Engine.from_pretrained`.
            config: the configuration of the engine; None for the defaults.
            service_config: limits and policies; None for the defaults.
            progress: see `Engine.from_pretrained`.
        """
        check_source(source)
        check_config("config", config, EngineConfig)
        check_config("service_config", service_config, ServiceConfig)
        engine = cls(
            partial(Engine.from_pretrained, source, config, progress=progress), service_config
        )
        engine._engine_config, engine._progress = config, progress
        return engine

    def start(self) -> None:
        """Load the model, and wait until it is ready.

        Raises:
            CheckpointError, ConfigError, MemoryBudgetError, StepPreparationError: as
                `Engine.from_pretrained`.
        """
        self._start()
        self._thread.started.result()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            self._start()
            await asyncio.wrap_future(self._thread.started)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def health(self) -> Health:
        """Return whether it lives and is ready to serve. Takes microseconds."""
        return self._thread.health()

    def snapshot(self) -> ServiceSnapshot:
        """Return its state and counters. Takes microseconds; any thread may call it."""
        return ServiceSnapshot.of(self._thread)

    def add_listener(self, listener: Listener) -> None:
        """Call a function with the `RequestRecord` of each request that ends from now on.

        Refused requests are among them, except those whose options are invalid. One thread of this
        engine calls all listeners and callbacks, one after the other. What a listener raises is
        logged.
        """
        check_callable("listener", listener, "a RequestRecord")
        self._callbacks.add_listener(listener)

    async def stats(self) -> dict[str, Any]:
        """Return `Engine.stats` with the counters of the service, between two steps.

        `queued` counts requests that wait for a row, `queued_tokens` their prompt tokens,
        `preparing` requests that are tokenised, `restarts` the restarts after failures.

        Raises:
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        self._check_process()
        return await asyncio.wrap_future(self._thread.run(self._stats))

    async def cached_hashes(self, most: int) -> list[bytes]:
        """Return the hashes of up to `most` cached blocks; see `Engine.cached_hashes`.

        They are copied between two steps, and listed in another thread.

        Raises:
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        self._check_process()
        check_integer("most", most, 0, MAX_COUNT)
        copy = self._thread.run(lambda: self._supervisor.check_started().cached_hashes())
        return await asyncio.to_thread(await asyncio.wrap_future(copy), most)

    async def reset_prefix_cache(self) -> None:
        """Drop the prefix cache between two steps; see `Engine.reset_prefix_cache`.

        Raises:
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        self._check_process()
        reset = self._thread.run(lambda: self._supervisor.check_started().reset_prefix_cache())
        await asyncio.wrap_future(reset)

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer of the model; None for presets and without a `tokenizer.json`.

        Raises:
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        return self._supervisor.check_started().tokenizer

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Values of fields that requests leave out. Raises as `tokenizer`."""
        return self._supervisor.check_started().sampling_defaults

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence, prompt and output. Raises as `tokenizer`."""
        return self._supervisor.check_started().max_model_len

    async def run_in_pool(self, function: Callable[[], T]) -> T:
        """Call a function in a preparation thread, where prompts are tokenised.

        Raises:
            EngineClosedError: the engine is closed.
        """
        check_callable("function", function, "no argument")
        self._check_process()  # a child lacks the threads of the pool
        try:
            future = self._pool.submit(function)
        except RuntimeError as error:
            raise EngineClosedError("the engine is closed: make a new one") from error
        return await asyncio.wrap_future(future)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until the present ones have ended.

        Those left after `timeout` seconds are aborted. Returns whether all ended by themselves:
        none was aborted for it, or lost with a failed engine. `wake` ends it; cancelling the call,
        also that of `sleep` or `reload`, does not.

        Raises:
            RequestError: `timeout` is not a number of seconds from 0 to 10^9.
        """
        self._check_process()
        if timeout is not None:
            nanoseconds("timeout", timeout, zero=True)
        return await asyncio.wrap_future(self._thread.drain(timeout))

    async def sleep(self, timeout: float | None = None) -> None:
        """Drain, then free the memory of the engine, on the device and of the weights.

        Raises:
            EngineFailedError, EngineClosedError: there is no engine.
            EngineUnavailableError: `wake` or `reload` ended the drain.
        """
        await self.drain(timeout)
        await asyncio.wrap_future(self._thread.sleep())

    async def wake(self) -> None:
        """Serve again after `drain` or `sleep`. After `sleep` it loads the model again.

        Raises:
            EngineFailedError, EngineClosedError: there is no engine.
            EngineUnavailableError: it failed and is about to be restarted.
            StepgraphError: as `start`; it sleeps on.
        """
        self._check_process()
        await asyncio.wrap_future(self._thread.wake())

    async def reload(self, source: str | Path, timeout: float | None = None) -> ReloadResult:
        """Drain, then serve another model with the same configuration.

        If its config allows it, only the weights are replaced (`Engine.reload_weights`); otherwise,
        and if that fails, a new engine is started. If the model cannot be loaded, the present one
        is served again and the error raised; if it was asleep, it sleeps on.

        Raises:
            EngineFailedError, EngineClosedError: there is no engine.
            EngineUnavailableError: `wake` or another `reload` ended the drain.
            StepgraphError: as `start`.
        """
        check_source(source)
        await self.drain(timeout)
        start = partial(
            Engine.from_pretrained, source, self._engine_config, progress=self._progress
        )
        return await asyncio.wrap_future(self._thread.reload(source, start))

    async def aclose(self) -> None:
        """Close without blocking the event loop; see `close`."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End all requests with `EngineClosedError`, and free all memory and threads. Idempotent.

        Waits for the current step. Call `drain` first to let requests end.
        """
        if self._forked:
            return
        self._thread.close()
        self._thread.join()
        self._pool.shutdown()
        self._grammar_pool.shutdown()
        self._callbacks.end()
        self._callbacks.join()
        self._finalizer.detach()

    def after_fork(self) -> None:
        """Refuse every use in a forked child, which lacks the threads of an engine that runs.

        One that was not started has none, so that each child may start it.
        """
        if self._thread.supervisor.phase is Phase.NOT_STARTED:
            return
        self._forked = True
        self._finalizer.detach()

    def _check_process(self) -> None:
        if self._forked:
            raise EngineForkedError(
                "the engine was started in the parent of this process: start it after the fork, in"
                " the lifespan of the application, or make a new one here"
            )

    def _start(self) -> None:
        self._check_process()
        if self.config.switch_interval is not None:
            sys.setswitchinterval(self.config.switch_interval)
        self._thread.start()

    def _stats(self) -> dict[str, Any]:
        requests = self._thread.dispatcher
        return {
            **self._supervisor.check_started().stats(),
            "queued": requests.num_queued,
            "queued_tokens": requests.limits.num_tokens,
            "preparing": requests.limits.num_requests - requests.num_queued,
            "restarts": self._supervisor.num_restarts,
        }


def _drop(thread: StepThread, callbacks: CallbackMailbox) -> None:
    """Close an engine that is garbage-collected, without waiting."""
    thread.close()
    thread.run(callbacks.end)


@atexit.register
def _close_all() -> None:
    """Close all engines at the exit of the interpreter."""
    for engine in tuple(_open):
        engine.close()
