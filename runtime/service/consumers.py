"""Consumers of requests: streams in event loops, callbacks and futures in a thread of their own.

A mailbox wakes the consumers of its requests: `LoopMailbox` those in one event loop, at most once a
step for all of them; `CallbackMailbox` those that are functions.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from types import TracebackType

from ..engine.request_output import RequestOutput
from ..errors import EngineBusyError
from .request_handle import Delta, DeltaReader, HandleState, RequestHandle
from .request_record import Listener, RequestRecord
from .step_thread import Inbox, StepThread

__all__ = ["AsyncStream", "CallbackMailbox", "FutureConsumer", "LoopMailbox"]

logger = logging.getLogger("stepgraph.runtime")


class _Waiter(asyncio.Future[None]):
    """What the task of a consumer awaits; `resume` continues that task at once.

    The result of a plain future reaches its task in the next turn of the event loop. Between two
    turns the loop passes on the interpreter lock, and may wait longer for it than a delivery takes.
    """

    _callback: Callable[[_Waiter], object] | None = None
    _context: Context | None = None

    def add_done_callback(
        self, callback: Callable[[_Waiter], object], /, *, context: Context | None = None
    ) -> None:
        super().add_done_callback(callback, context=context)
        self._callback, self._context = callback, context

    def resume(self) -> None:
        """Complete it and continue its task. Call it in the event loop, outside of tasks."""
        callback, context = self._callback, self._context
        if callback is None or context is None:
            self.set_result(None)
            return
        self.remove_done_callback(callback)
        self.set_result(None)
        context.run(callback, self)


class LoopMailbox:
    """The requests whose consumers are tasks of one event loop.

    Any thread may call `post` and `flush`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._news: deque[RequestHandle] = deque()
        self._scheduled = False
        self._waiters: dict[RequestHandle, _Waiter] = {}

    @property
    def closed(self) -> bool:
        """Whether the event loop is closed: its streams cannot be read any more."""
        return self._loop.is_closed()

    def post(self, handle: RequestHandle) -> None:
        """Note that a request has news."""
        if not handle.posted:
            handle.posted = True
            self._news.append(handle)

    def flush(self, *, again: bool = False) -> None:
        """Wake the consumers that have news, unless a wake-up is scheduled already.

        `again` schedules one in any case.
        """
        if self._news and (again or not self._scheduled):
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                if not self.closed:
                    raise
                self._news.clear()

    def news(self, handle: RequestHandle) -> asyncio.Future[None]:
        """Return a future that is done once a request has news, at the latest when it ends.

        One task at a time may await a request.
        """
        waiter = self._waiters[handle] = _Waiter(loop=self._loop)
        return waiter

    def _deliver(self) -> None:
        self._scheduled = False  # first: what is posted from now on schedules again
        try:
            while self._news:
                handle = self._news.popleft()
                handle.posted = False
                waiter = self._waiters.pop(handle, None)
                if waiter is not None and not waiter.done():
                    waiter.resume()
        finally:
            if self._news:  # a task raised `KeyboardInterrupt` or `SystemExit`
                self.flush()


class AsyncStream:
    """An asynchronous iterator of deltas. Read it in the event loop that it was made in.

    One task at a time may wait in it; another one gets `EngineBusyError`.

    The request is aborted, and its row and blocks are free within one step, when the iterator is
    closed (`aclose`, the end of `async with`), or when the task that waits in it is cancelled.
    Dropping the iterator closes nothing: leave an `async for` early only within `async with`.
    A stream that is not read gives up its row, and ends after `ServiceConfig.send_timeout`.
    """

    def __init__(self, handle: RequestHandle, mailbox: LoopMailbox, thread: StepThread) -> None:
        self._handle = handle
        self._mailbox = mailbox
        self._thread = thread
        self._reader = DeltaReader(handle)
        self._deltas: deque[Delta] = deque()
        self._waits = False

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._handle.id

    @property
    def output(self) -> RequestOutput | None:
        """The newest output; None before the first."""
        return self._handle.output

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 before it is accepted."""
        return self._handle.num_prompt_tokens

    async def accepted(self) -> None:
        """Wait until the request is queued, or ended.

        Raises:
            RequestError: it can never be served.
            OverloadedError, DeadlineUnreachableError: it was refused for now.
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        while self._handle.state is HandleState.PREPARING:
            await self._news()
        if self._handle.error is not None:
            raise self._handle.error

    async def finish(self) -> RequestOutput:
        """Wait for the last output and return it. Raises as `accepted`."""
        self._handle.streams = False
        self._handle.num_read = None  # the deltas are not read
        if self._handle.paused:
            self._thread.resume(self._handle)
        while not self._handle.ended:
            await self._news()
        if self._handle.error is not None:
            raise self._handle.error
        assert self._handle.output is not None
        return self._handle.output

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta.

        Raises:
            StopAsyncIteration: the request has ended.
            StepgraphError: as `next_deltas`.
        """
        if not self._deltas:
            self._deltas.extend(await self.next_deltas())
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.popleft()

    async def next_deltas(self) -> list[Delta]:
        """Return all deltas that are ready, after waiting for one; none if the request has ended.

        Raises:
            NonFiniteLogitsError: it ended with `finish_reason` `error`, the delta before this one.
            SendTimeoutError: the deltas were not read for too long.
            StepgraphError: as `accepted`.
        """
        while True:
            ended = self._handle.ended  # read first: then the deltas below are the last ones
            deltas = self._reader.read()
            if self._handle.paused:
                self._thread.resume(self._handle)
            if deltas:
                return deltas
            if not ended:
                await self._news()
                continue
            if self._handle.error is not None:
                raise self._handle.error
            if self._handle.output is not None and self._handle.output.error is not None:
                raise self._handle.output.error
            return []

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        self._abandon()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abandon()

    async def _news(self) -> None:
        if self._waits:
            raise EngineBusyError(
                f"another task waits in the stream of request {self._handle.id}: read it in one"
            )
        self._waits = True
        try:
            await self._mailbox.news(self._handle)
        except BaseException:
            self._abandon()
            raise
        finally:
            self._waits = False

    def _abandon(self) -> None:
        if not self._handle.ended:
            self._thread.abort(self._handle)


class FutureConsumer:
    """Passes the deltas of a request to a callback, and its last output to a future."""

    def __init__(
        self,
        handle: RequestHandle,
        future: Future[RequestOutput],
        callback: Callable[[Delta], None] | None,
        thread: StepThread,
    ) -> None:
        self._handle = handle
        self._future = future
        self._callback = callback
        self._thread = thread
        self._reader = DeltaReader(handle)
        self._settled = False
        """Whether the future cannot be cancelled any more, and its waiters know it."""
        future.add_done_callback(self._abort_if_cancelled)

    def __call__(self) -> None:
        """Take the news of the request."""
        handle = self._handle
        ended = handle.ended  # read first: then the deltas below are the last ones
        if self._callback is not None and not self._settled and not self._future.cancelled():
            try:
                for delta in self._reader.read():
                    self._callback(delta)
            except BaseException as error:
                self._thread.abort(handle)
                self._settle(error)
        if ended:
            self._settle(handle.error)

    def _settle(self, error: BaseException | None) -> None:
        """Complete the future, unless it was cancelled."""
        if self._settled:
            return
        self._settled = True
        if not self._future.set_running_or_notify_cancel():
            return
        if error is not None:
            self._future.set_exception(error)
        else:
            assert self._handle.output is not None
            self._future.set_result(self._handle.output)

    def _abort_if_cancelled(self, future: Future[RequestOutput]) -> None:
        if future.cancelled():
            self._thread.abort(self._handle)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that has ended, for the listeners."""

    handle: RequestHandle
    ended_ns: int
    listeners: tuple[Listener, ...]


class CallbackMailbox:
    """The requests whose news go to functions. Any thread may call any method.

    The thread starts with the first request: before, the process may fork.
    """

    def __init__(self) -> None:
        self._inbox: Inbox[RequestHandle | _Ended] = Inbox(self._handle)
        self._listeners: tuple[Listener, ...] = ()
        self._consumers: dict[RequestHandle, FutureConsumer] = {}
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = False

    def register(self, handle: RequestHandle, consumer: FutureConsumer) -> None:
        """Call a consumer whenever a request has news, for the last time when it has ended."""
        self._consumers[handle] = consumer
        with self._starting:
            self._start()

    def add_listener(self, listener: Listener) -> None:
        """Call a function with the record of each request that ends from now on."""
        with self._starting:
            self._listeners += (listener,)

    def report(self, handle: RequestHandle) -> None:
        """Pass a request that has ended to the listeners."""
        if self._listeners:
            if self._thread is None:
                with self._starting, suppress(RuntimeError):  # no thread can be started now
                    self._start()
            self._inbox.put(_Ended(handle, time.perf_counter_ns(), self._listeners))

    def discard(self, handle: RequestHandle) -> None:
        """Forget a request that was not submitted."""
        self._consumers.pop(handle, None)

    @property
    def closed(self) -> bool:
        """Whether no consumer can read its requests: never."""
        return False

    def post(self, handle: RequestHandle) -> None:
        """Note that a request has news, which wakes the thread."""
        if not handle.posted:
            handle.posted = True
            self._inbox.put(handle)

    def flush(self, *, again: bool = False) -> None:
        """Do nothing: `post` has woken the thread."""

    def end(self) -> None:
        """End the thread after the news posted so far. News after that are delivered by `post`."""
        with self._starting:
            self._closing = True
            if self._thread is None:
                self._inbox.end()
            else:
                self._inbox.wake()

    def join(self) -> None:
        """Wait for the end of the thread, unless it calls this."""
        with self._starting:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if thread.ident is not None:  # else an interrupt kept it from starting
            thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._closing:
            thread = threading.Thread(target=self._run, name="stepgraph-callbacks", daemon=True)
            self._thread = thread  # first: an interrupt of `start` may leave it running
            try:
                thread.start()
            except RuntimeError:  # no thread can be started
                self._thread = None
                raise

    def _run(self) -> None:
        while True:
            closing = self._closing  # read first: then what is handled below was the rest
            self._inbox.run()
            if closing:
                break
            self._inbox.wait(None)
        self._inbox.end()

    def _handle(self, news: RequestHandle | _Ended) -> None:
        if isinstance(news, _Ended):
            _call_listeners(news)
        else:
            self._deliver(news)

    def _deliver(self, handle: RequestHandle) -> None:
        handle.posted = False
        ended = handle.ended
        consumer = self._consumers.get(handle)
        if consumer is None:
            return
        try:
            consumer()
        except BaseException:  # of a callback added to the future
            logger.exception("a callback of request %s failed", handle.id)
        if ended:
            self._consumers.pop(handle, None)


def _call_listeners(ended: _Ended) -> None:
    record = RequestRecord.of(ended.handle, ended.ended_ns)
    for listener in ended.listeners:
        try:
            listener(record)
        except BaseException:
            logger.exception("a listener failed for request %s", record.request_id)
