"""`AsyncEngine`: an engine in a thread of its own, for any thread and any event loop."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, TypeVar, Unpack

from ..bounded_repr import bounded_repr
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.forks import call_in_children
from ..engine.intake import Prompt
from ..engine.request_output import RequestOutput
from ..errors import EngineClosedError, EngineForkedError, RequestError
from ..loading.chat_template import ChatPrompt, Message
from ..loading.tokenizer import TextTokenizer
from ..sampling_params import SamplingParams
from .callbacks import CallbackMailbox, FutureConsumer
from .health import Health
from .loop_mailbox import LoopMailbox
from .request_handle import Delta, Mailbox, RequestHandle
from .service_config import ServiceConfig
from .step_thread import StepThread
from .streams import AsyncStream

__all__ = ["AsyncEngine", "RequestOptions"]

INLINE_TOKENS = 1024
"""Prompts of at most this many token ids are checked by the caller: it takes microseconds."""

T = TypeVar("T")

MAX_SECONDS = 1e9
MAX_TENANT_CHARS = 256


class RequestOptions(TypedDict, total=False):
    """Options of a request, all of them with defaults."""

    request_id: str | None
    """Unique among the unfinished requests; None for a new one."""
    priority: int
    """Requests of smaller priority are served first; 0 by default."""
    deadline: float | None
    """Seconds from the call until the last token."""
    first_token_deadline: float | None
    """Seconds from the call until the first token."""
    cache_salt: str | None
    """See `Engine.add_request`."""
    tenant: str | None
    """Tenants share the engine fairly; None takes `cache_salt`."""


class AsyncEngine:
    """Serves requests of any thread and any event loop, in this process, from one step thread.

    Use it as a context manager, with `with` or `async with`: entering waits until the model is
    loaded, leaving closes it. Requests beyond the limits of `ServiceConfig` are refused at once.

    Times are in seconds from the call. A request with a `first_token_deadline` or `deadline` that
    its predicted first token would miss is refused with `DeadlineUnreachableError`. One that passes
    it ends with `finish_reason` `deadline` and the tokens it has; in the queue it is never
    prefilled.

    Handlers installed with `signal.signal` must not call its methods; those of an event loop may.
    """

    def __init__(
        self, start_engine: Callable[[], Engine], config: ServiceConfig | None = None
    ) -> None:
        """Prepare to run an engine; see `from_pretrained`.

        Args:
            start_engine: makes the engine. The step thread calls it at the start, after `sleep` and
                for restarts.
            config: limits and policies; None for the defaults.
        """
        self.config = ServiceConfig() if config is None else config
        self._thread = StepThread(start_engine, self.config, self._on_ended)
        self._pool = ThreadPoolExecutor(self.config.preparation_threads, "stepgraph-prepare")
        self._handles: dict[str, RequestHandle] = {}
        self._loops: dict[asyncio.AbstractEventLoop, LoopMailbox] = {}
        self._callbacks = CallbackMailbox()
        self._ids = count(1)
        self._id_prefix = f"req-{secrets.token_hex(4)}"
        self._engine_config: EngineConfig | None = None
        self._forked = False
        call_in_children(self)
        self._close_at_exit = weakref.finalize(self, _close, self._thread, self._pool)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        config: EngineConfig | None = None,
        service_config: ServiceConfig | None = None,
    ) -> AsyncEngine:
        """Return an engine that loads a model when it is entered.

        Args:
            source: see `Engine.from_pretrained`.
            config: the configuration of the engine; None for the defaults.
            service_config: limits and policies; None for the defaults.
        """
        engine = cls(partial(Engine.from_pretrained, source, config), service_config)
        engine._engine_config = config
        return engine

    def start(self) -> None:
        """Load the model, and wait until it is ready.

        Raises:
            CheckpointError, ConfigError, MemoryBudgetError, StepPreparationError: as
                `Engine.from_pretrained`.
        """
        self._start()
        self._thread.started.result()

    def __enter__(self) -> AsyncEngine:
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

    async def __aenter__(self) -> AsyncEngine:
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
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        mailbox = self._mailbox()
        handle = self._submit(mailbox, prompt, params, options, streams=True)
        return AsyncStream(handle, mailbox, self._thread)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Decode a prompt to its end and return its output. Cancelling the task aborts it.

        Arguments and errors are those of `stream` and `AsyncStream.accepted`.
        """
        mailbox = self._mailbox()
        handle = self._submit(mailbox, prompt, params, options, streams=False)
        return await AsyncStream(handle, mailbox, self._thread).finish()

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

        Arguments and errors are those of `stream`; errors of the prompt come from the future.
        """
        future: Future[RequestOutput] = Future()
        handle = self._make_handle(self._callbacks, options, streams=callback is not None)
        consumer = FutureConsumer(handle, future, callback, self._thread)
        self._callbacks.register(handle, consumer)
        self._prepare_soon(handle, prompt, params, options)
        return future

    def abort(self, request_id: str) -> bool:
        """End a request within one step, with `finish_reason` `abort`. Any thread may call it.

        Returns False if there is no unfinished request of this id.
        """
        handle = self._handles.get(request_id)
        if handle is None:
            return False
        self._thread.abort(handle)
        return True

    def health(self) -> Health:
        """Return whether it lives and is ready to serve. Takes microseconds."""
        return self._thread.health()

    async def stats(self) -> dict[str, Any]:
        """Return `Engine.stats` with the counters of the service, between two steps.

        `queued` counts requests that wait for a row, `queued_tokens` their prompt tokens,
        `preparing` requests that are tokenised, `restarts` the restarts after failures.

        Raises:
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        return await asyncio.wrap_future(self._thread.run(self._stats))

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer of the model; None for presets and without a `tokenizer.json`.

        Raises:
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        return self._thread.check_started().tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence, prompt and output. Raises as `tokenizer`."""
        return self._thread.check_started().max_model_len

    async def prepare(self, function: Callable[[], T]) -> T:
        """Call a function in a preparation thread, where prompts are tokenised.

        Raises:
            EngineClosedError: the engine is closed.
        """
        try:
            future = self._pool.submit(function)
        except RuntimeError as error:
            raise EngineClosedError("the engine is closed: make a new one") from error
        return await asyncio.wrap_future(future)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until the present ones have ended.

        Those left after `timeout` seconds are aborted. Returns whether none was. `wake` ends it.
        """
        return await asyncio.wrap_future(self._thread.drain(timeout))

    async def sleep(self, timeout: float | None = None) -> None:
        """Drain, then free the memory of the engine, on the device and of the weights.

        Raises:
            EngineFailedError, EngineClosedError: there is no engine.
        """
        await self.drain(timeout)
        await asyncio.wrap_future(self._thread.sleep())

    async def wake(self) -> None:
        """Serve again after `drain` or `sleep`. After `sleep` it loads the model again.

        Raises:
            EngineFailedError, EngineClosedError: there is no engine.
            StepgraphError: as `start`; it sleeps on.
        """
        await asyncio.wrap_future(self._thread.wake())

    async def reload(self, source: str | Path, timeout: float | None = None) -> None:
        """Drain, then serve another model with the same configuration.

        If it cannot be loaded, the present model is loaded again and the error raised.

        Raises:
            EngineFailedError, EngineClosedError: there is no engine.
            StepgraphError: as `start`.
        """
        await self.drain(timeout)
        start = partial(Engine.from_pretrained, source, self._engine_config)
        await asyncio.wrap_future(self._thread.reload(start))

    async def aclose(self) -> None:
        """Close without blocking the event loop; see `close`."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End all requests with `EngineClosedError`, and free all memory and threads. Idempotent.

        Waits for the current step. Call `drain` first to let requests end.
        """
        if self._forked:
            return
        self._close_at_exit()
        self._callbacks.close()

    def after_fork(self) -> None:
        """Refuse every use in a forked child, which has no step thread."""
        self._forked = True
        self._close_at_exit.detach()

    def _start(self) -> None:
        if self.config.switch_interval is not None:
            sys.setswitchinterval(self.config.switch_interval)
        self._thread.start()

    def _submit(
        self,
        mailbox: Mailbox,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        streams: bool,
    ) -> RequestHandle:
        handle = self._make_handle(mailbox, options, streams=streams)
        self._prepare_soon(handle, prompt, params, options)
        return handle

    def _make_handle(
        self, mailbox: Mailbox, options: RequestOptions, *, streams: bool
    ) -> RequestHandle:
        """Check the options of a request, and count it."""
        if self._forked:
            raise EngineForkedError(
                "the engine belongs to the parent of this process: make a new one here"
            )
        self._thread.check_serving()
        now = time.perf_counter_ns()
        priority = options.get("priority", 0)
        if not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, not {bounded_repr(priority)}")
        tenant = options.get("tenant")
        if tenant is None:
            tenant = options.get("cache_salt") or ""
        if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_CHARS:
            raise RequestError(
                f"tenant must be a string of at most {MAX_TENANT_CHARS} characters,"
                f" not {bounded_repr(tenant)}"
            )
        request_id = options.get("request_id")
        if request_id is None:
            request_id = f"{self._id_prefix}-{next(self._ids)}"
        elif not isinstance(request_id, str) or not request_id:
            raise RequestError(
                f"request_id must be a non-empty string, not {bounded_repr(request_id)}"
            )
        handle = RequestHandle(
            request_id,
            mailbox,
            streams=streams,
            tenant=tenant,
            priority=priority,
            submitted_ns=now,
            deadline_ns=_due("deadline", options.get("deadline"), now),
            first_token_deadline_ns=_due(
                "first_token_deadline", options.get("first_token_deadline"), now
            ),
        )
        self._thread.dispatcher.limits.enter()
        if self._handles.setdefault(request_id, handle) is not handle:
            self._thread.dispatcher.limits.leave(0)
            raise RequestError(f"request_id {bounded_repr(request_id)} is in use: choose another")
        return handle

    def _prepare_soon(
        self,
        handle: RequestHandle,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
    ) -> None:
        """Prepare a request: short lists of tokens now, others in a thread."""
        salt = options.get("cache_salt")
        prepare = partial(self._prepare, handle, prompt, params, salt)
        if isinstance(prompt, list) and len(prompt) <= INLINE_TOKENS:
            prepare()
            return
        try:
            self._pool.submit(prepare)
        except RuntimeError:  # closed meanwhile
            self._thread.admit(handle)

    def _prepare(
        self,
        handle: RequestHandle,
        prompt: Prompt,
        params: SamplingParams | None,
        cache_salt: str | None,
    ) -> None:
        """Check and tokenise a prompt, and pass it to the step thread."""
        try:
            if handle.abort_reason is None:
                group = self._thread.check_serving().prepare(
                    prompt, params, handle.id, priority=handle.priority, cache_salt=cache_salt
                )
                num_tokens = len(group.prompt_ids)
                self._thread.dispatcher.limits.add_tokens(num_tokens)
                handle.num_prompt_tokens = num_tokens
                handle.group = group
        except BaseException as error:
            handle.error = error
        self._thread.admit(handle)

    def _mailbox(self) -> LoopMailbox:
        """Return the mailbox of the running event loop."""
        loop = asyncio.get_running_loop()
        mailbox = self._loops.get(loop)
        if mailbox is None:
            for other in tuple(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            mailbox = self._loops.setdefault(loop, LoopMailbox(loop))
        return mailbox

    def _on_ended(self, handle: RequestHandle) -> None:
        if self._handles.get(handle.id) is handle:
            del self._handles[handle.id]

    def _stats(self) -> dict[str, Any]:
        requests = self._thread.dispatcher
        return {
            **self._thread.check_started().stats(),
            "queued": requests.num_queued,
            "queued_tokens": requests.limits.num_tokens,
            "preparing": requests.limits.num_requests - requests.num_queued,
            "restarts": self._thread.num_restarts,
        }


def _due(name: str, seconds: float | None, now_ns: int) -> int | None:
    """Return when a deadline is, on the clock of `now_ns`."""
    if seconds is None:
        return None
    valid = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not valid or not 0 < seconds <= MAX_SECONDS:
        raise RequestError(
            f"{name} must be a number of seconds above 0 and up to {MAX_SECONDS:g},"
            f" not {bounded_repr(seconds)}"
        )
    return now_ns + int(seconds * 1e9)


def _close(thread: StepThread, pool: ThreadPoolExecutor) -> None:
    """End the threads of an engine, also at the exit of the interpreter."""
    thread.close()
    thread.join()
    pool.shutdown(wait=True, cancel_futures=True)
