"""`AsyncEngine`: an engine in a thread of its own, for any thread and any event loop."""

from __future__ import annotations

import asyncio
import atexit
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from ..arguments import check_config, check_type
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.forks import call_in_children
from ..engine.request_builder import Prompt
from ..engine.request_output import RequestOutput
from ..errors import (
    EngineClosedError,
    EngineFailedError,
    EngineForkedError,
    EngineUnavailableError,
    RequestError,
    StepgraphError,
)
from ..loading.chat_template import ChatPrompt, Message
from ..loading.loader import check_source
from ..loading.tokenizer import TextTokenizer
from ..prompt_ids import type_name
from ..sampling_params import SamplingDefaults, SamplingParams
from ..structured.compiler import MAX_COMPILATIONS
from ..structured_output import StructuredOutput
from .consumers import AsyncStream, CallbackThread
from .health import Health, Phase, ReloadResult, ServiceSnapshot
from .request_handle import (
    ConsumerLoop,
    Delta,
    Listener,
    RequestHandle,
    RequestOptions,
    make_handle,
    nanoseconds,
)
from .service_config import ServiceConfig
from .step_thread import StepThread

T = TypeVar("T")

INLINE_TOKENS = 1024
"""Prompts of at most this many token ids are checked by the caller: it takes microseconds."""

DRAIN_POLL_SECONDS = 0.005
"""Time between two looks at whether the requests have ended."""

_open: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()  # those to close at exit


class AsyncEngine:
    """Serves requests of any thread and any event loop, in this process, from one step thread.

    Use it as a context manager, with `with` or `async with`: entering waits until the model is
    loaded, leaving closes it. Requests beyond the limits of `ServiceConfig` are refused at once.

    Times are in seconds from the call. A request with a `first_token_deadline` or `deadline` that
    its predicted first token would miss is refused with `DeadlineUnreachableError`. One that passes
    it ends with `finish_reason` `deadline` and the tokens it has; in the queue it is never
    prefilled.

    Handlers of `signal.signal` must not call its methods; handlers of an event loop can.
    """

    def __init__(
        self, start_engine: Callable[[], Engine], config: ServiceConfig | None = None
    ) -> None:
        """Prepare to run an engine; see `from_pretrained`.

        Args:
            start_engine: makes the engine. The step thread calls it at the start and after `sleep`.
            config: limits and policies; None for the defaults.
        """
        given: object = start_engine
        if not callable(given):
            raise TypeError(
                f"AsyncEngine takes a function that makes an Engine, not {type_name(given)}: load a"
                " model with AsyncEngine.from_pretrained('path/to/checkpoint', EngineConfig(...))"
            )
        check_config("config", config, ServiceConfig)
        self.config = ServiceConfig() if config is None else config
        self._thread = StepThread(start_engine, self.config)
        self._pool = ThreadPoolExecutor(self.config.preparation_threads, "stepgraph-prepare")
        self._grammar_pool = ThreadPoolExecutor(MAX_COMPILATIONS, "stepgraph-grammars")
        """Prepares prompts whose outputs follow a grammar, which can take seconds to compile."""
        self._callbacks = CallbackThread()
        self._thread.dispatcher.on_ended = self._callbacks.report
        self._engine_config: EngineConfig | None = None
        self._progress = False
        self._forked = False
        self._ids = _request_ids()
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

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            self._start()
            await asyncio.wrap_future(self._thread.started)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Queue a prompt and return an iterator of its deltas. Call it within an event loop.

        Args:
            prompt: text, token ids, or a `ChatPrompt` (see `Prompt`).
            params: how tokens are chosen; None for the defaults.
            options: see `RequestOptions`.

        Raises:
            RequestError: an option is invalid. Errors of the prompt come from the iterator.
            OverloadedError: too many requests wait.
            EngineUnavailableError, EngineFailedError, EngineClosedError: the engine is not running.
        """
        loop = asyncio.get_running_loop()
        return AsyncStream(
            self._begin(loop, prompt, params, options, num_read=0, streams=True), self._thread
        )

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Decode a prompt to its end and return its output. Cancelling the task aborts it.

        Takes the arguments of `stream`; raises as `stream` and `AsyncStream.accepted`.
        """
        loop = asyncio.get_running_loop()
        return await AsyncStream(self._begin(loop, prompt, params, options), self._thread).finish()

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Decode the answer to a conversation and return its output.

        For tools and other variables of the template, and to stream, give a `ChatPrompt` to
        `generate` or `stream`.
        """
        return await self.generate(ChatPrompt(messages), params, **options)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        callback: Callable[[Delta], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Future[RequestOutput]:
        """Queue a prompt from any thread, without an event loop, and return its future.

        The result is the last output; `cancel` aborts the request. One thread of this engine calls
        all callbacks, one after the other. If a callback raises, its request is aborted and the
        future has the exception.

        Takes the arguments of `stream` and raises as it; errors of the prompt come from the future.
        """
        if callback is not None:
            check_type("callback", callback, Callable, "a function of a Delta")
        streams = callback is not None
        handle = self._begin(self._callbacks, prompt, params, options, streams=streams)
        return self._callbacks.consume(handle, self._thread, callback)

    def abort(self, request_id: str) -> bool:
        """End a request within one step, with `finish_reason` `abort`. Any thread may call it.

        Returns False if no unfinished request has this id.
        """
        check_type("request_id", request_id, str, "a string")
        handle = self._thread.dispatcher.handles.get(request_id)
        if handle is None or self._forked:
            return False
        self._thread.abort(handle)
        return True

    def health(self) -> Health:
        """Return whether it lives and is ready to serve. Takes microseconds."""
        return self._thread.health()

    def snapshot(self) -> ServiceSnapshot:
        """Return its state and counters. Takes microseconds; any thread may call it."""
        thread, limits = self._thread, self._thread.dispatcher.limits
        engine, counters = thread.counted
        gauges = timeline = None
        if engine is not None:
            try:
                gauges, timeline = engine.gauges(), engine.timeline()
                counters = counters.plus(engine.counters())
            except EngineClosedError:  # meanwhile, and counted
                gauges = timeline = None
                _, counters = thread.counted
        return ServiceSnapshot(
            thread.health(),
            gauges,
            counters,
            timeline,
            limits.num_requests,
            limits.num_tokens,
            len(thread.dispatcher.handles),
        )

    def add_listener(self, listener: Listener) -> None:
        """Call a function with the `RequestRecord` of each request that ends from now on.

        Refused requests are among them, except those whose options are invalid. One thread of this
        engine calls all listeners and callbacks, one after the other. What a listener raises is
        logged.
        """
        check_type("listener", listener, Callable, "a function of a RequestRecord")
        self._callbacks.add_listener(listener)

    async def stats(self) -> dict[str, Any]:
        """Return `Engine.stats` with the counters of the service, between two steps.

        `queued` counts requests that wait for a row, `queued_tokens` their prompt tokens,
        `preparing` requests that are tokenised. Raises as `tokenizer`.
        """
        return await self._between_steps(self._stats)

    async def reset_prefix_cache(self) -> None:
        """Drop the prefix cache between two steps; see `Engine.reset_prefix_cache`.

        Raises as `tokenizer`.
        """
        await self._between_steps(lambda: self._thread.check_started().reset_prefix_cache())

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer of the model; None for presets and checkpoints without one.

        Raises:
            EngineUnavailableError, EngineFailedError, EngineClosedError: the engine is not running.
        """
        return self._thread.check_started().tokenizer

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Values of fields that requests leave out. Raises as `tokenizer`."""
        return self._thread.check_started().sampling_defaults

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence, prompt and output. Raises as `tokenizer`."""
        return self._thread.check_started().max_model_len

    async def run_in_pool(self, function: Callable[[], T]) -> T:
        """Call a function in a preparation thread, where prompts are tokenised.

        Raises:
            EngineClosedError: the engine is closed.
        """
        check_type("function", function, Callable, "a function of no argument")
        self._check_process()  # a child lacks the threads of the pool
        try:
            future = self._pool.submit(function)
        except RuntimeError as error:
            raise self._thread.refusal(Phase.CLOSED) from error
        return await asyncio.wrap_future(future)

    def run_between_steps(self, function: Callable[[], T]) -> Future[T]:
        """Call a function between two steps, in the step thread. Any thread may call this method.

        Raises `EngineNotStartedError` before the start; a closed engine calls the function at once.
        """
        check_type("function", function, Callable, "a function of no argument")
        self._check_process()
        return self._thread.run(function)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until the present ones have ended.

        Those left after `timeout` seconds are aborted. Returns whether all ended by themselves:
        none was aborted for it, or lost with a failed engine. `wake` ends it; cancelling the call,
        also a call of `sleep` or `reload`, only ends the wait.

        Raises:
            RequestError: `timeout` is not a number of seconds from 0 to 10^9.
        """
        thread, complete, end_ns = self._thread, True, None
        requests = thread.dispatcher
        if timeout is not None:
            end_ns = time.perf_counter_ns() + nanoseconds("timeout", timeout, least=0)
        await self._between_steps(thread.begin_drain)
        if not requests.handles:
            return True
        while requests.handles and thread.phase is Phase.DRAINING:
            if end_ns is not None and end_ns <= time.perf_counter_ns():
                complete, end_ns = False, None
                await self._between_steps(requests.abort_all)
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        return complete and thread.phase in (Phase.DRAINING, Phase.ASLEEP)

    async def sleep(self, timeout: float | None = None) -> None:
        """Drain, then free the memory of the engine, on the device and of the weights.

        Raises:
            EngineFailedError, EngineClosedError: the engine is not running.
            EngineUnavailableError: `wake` or `reload` ended the drain.
        """
        await self.drain(timeout)
        await self._between_steps(self._thread.sleep)

    async def wake(self) -> None:
        """Serve again after `drain` or `sleep`. After `sleep` it loads the model again.

        Raises:
            EngineFailedError, EngineClosedError: the engine is not running.
            StepgraphError: as `start`; it sleeps on.
        """
        await self._between_steps(self._thread.wake)

    async def reload(self, source: str | Path, timeout: float | None = None) -> ReloadResult:
        """Drain, then serve another model with the same configuration.

        If its config allows it, only the weights are replaced (`Engine.reload_weights`); otherwise,
        and if that fails, a new engine is started. If the model cannot be loaded, the present one
        is served again and the error raised; if it was asleep, it sleeps on.

        Raises:
            EngineFailedError, EngineClosedError: the engine is not running.
            EngineUnavailableError: `wake` or another `reload` ended the drain.
            StepgraphError: as `start`.
        """
        check_source(source)
        await self.drain(timeout)
        start = partial(
            Engine.from_pretrained, source, self._engine_config, progress=self._progress
        )
        return await self._between_steps(partial(self._thread.reload, source, start))

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
        self._ids = _request_ids()  # children do not share ids of requests
        if self._thread.phase is Phase.NOT_STARTED:
            return
        self._forked = True
        self._finalizer.detach()

    def _check_process(self) -> None:
        if self._forked:
            raise EngineForkedError(
                "the engine was started in the parent of this process: start it after the fork, in"
                " the lifespan of the application, or make a new one here"
            )

    async def _between_steps(self, operation: Callable[[], T]) -> T:
        """Call a function in the step thread, between two steps."""
        return await asyncio.wrap_future(self.run_between_steps(operation))

    def _start(self) -> None:
        self._check_process()
        if self.config.switch_interval is not None:
            sys.setswitchinterval(self.config.switch_interval)
        if self._thread.phase is Phase.NOT_STARTED:
            self._callbacks.start()
        self._thread.start()

    def _stats(self) -> dict[str, Any]:
        requests = self._thread.dispatcher
        return {
            **self._thread.check_started().stats(),
            "queued": requests.num_queued,
            "queued_tokens": requests.limits.num_tokens,
            "preparing": requests.limits.num_requests - requests.num_queued,
        }

    def _begin(
        self,
        loop: ConsumerLoop,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        num_read: int | None = None,
        streams: bool = False,
    ) -> RequestHandle:
        """Count a request and prepare it: short lists of tokens now, others in a thread.

        Those whose grammar has to be compiled have threads of their own, for which no other prompt
        waits. See `RequestHandle` for `loop`, `num_read` and `streams`.
        """
        self._check_process()
        handle = make_handle(next(self._ids), params, options, time.perf_counter_ns())
        handle.loop, handle.num_read, handle.streams = loop, num_read, streams
        handle.is_chat = isinstance(prompt, ChatPrompt)
        thread = self._thread
        try:
            try:
                thread.check_serving()
                thread.dispatcher.register(handle)
            except StepgraphError as error:
                if not isinstance(error, RequestError):  # else another request has its id
                    handle.error = error
                    self._callbacks.report(handle)
                raise
            if handle.due_ns is not None:
                thread.watch(handle)
            prepare = partial(self._prepare, handle, prompt, params, options.get("cache_salt"))
            structured = getattr(params, "structured", None)
            if isinstance(prompt, list) and len(prompt) <= INLINE_TOKENS and structured is None:
                prepare()
            else:
                engine, pool = thread.engine, self._pool
                if isinstance(structured, StructuredOutput) and (
                    engine is None or not engine.has_compiled(structured)
                ):
                    pool = self._grammar_pool
                try:
                    pool.submit(prepare)
                except RuntimeError as error:  # closed meanwhile, or no thread can be started
                    handle.failure = EngineUnavailableError(
                        f"the prompt cannot be prepared: {error}"
                    )
                    thread.admit(handle)
        except BaseException as error:  # such as KeyboardInterrupt
            if thread.dispatcher.handles.get(handle.id) is handle:
                thread.abort(handle)
                if handle.group is None:
                    handle.failure = error
                thread.admit(handle)
            raise
        return handle

    def _prepare(
        self,
        handle: RequestHandle,
        prompt: Prompt,
        params: SamplingParams | None,
        cache_salt: str | None,
    ) -> None:
        """Check and tokenise a prompt, and pass it or its error to the step thread."""
        try:
            if not handle.ended:  # else it was aborted or expired meanwhile
                group = self._thread.check_started().prepare(
                    prompt, params, handle.id, priority=handle.priority, cache_salt=cache_salt
                )
                self._thread.dispatcher.limits.add_tokens(handle, len(group.prompt_ids))
                handle.group = group
        except (EngineClosedError, EngineFailedError):  # of an engine that has just been replaced
            handle.failure = self._thread.refusal()
        except BaseException as error:
            handle.failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._thread.admit(handle)


def _request_ids() -> Iterator[str]:
    """Return ids for the requests of one process."""
    return map(f"req-{secrets.token_hex(4)}-{{}}".format, count(1))


def _drop(thread: StepThread, callbacks: CallbackThread) -> None:
    """Close an engine that is garbage-collected, without waiting."""
    thread.close()
    thread.run(callbacks.end)


@atexit.register
def _close_all() -> None:
    """Close all engines at the exit of the interpreter."""
    for engine in tuple(_open):
        engine.close()
