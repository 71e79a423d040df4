"""Consumers of requests: streams of any event loop, and a thread for callbacks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

from ..engine.request_output import RequestOutput
from ..errors import EngineBusyError, EngineClosedError
from .request_handle import (
    Delta,
    HandleState,
    Inbox,
    Listener,
    LoopMailbox,
    RequestHandle,
    RequestRecord,
)
from .step_thread import StepThread

__all__ = ["AsyncStream", "CallbackThread"]

logger = logging.getLogger("stepgraph.runtime")


class AsyncStream:
    """An asynchronous iterator of deltas. Read it in the event loop that it was made in.

    One task at a time may wait in it; another one gets `EngineBusyError`.

    The request is aborted, and its row and blocks are free within one step, when the iterator is
    closed (`aclose`, the end of `async with`), or when the task that waits in it is cancelled.
    Dropping the iterator closes nothing: leave an `async for` early only within `async with`.
    A stream that is not read gives up its row, and ends after `ServiceConfig.send_timeout`.
    """

    def __init__(self, handle: RequestHandle, thread: StepThread, mailbox: LoopMailbox) -> None:
        self._handle = handle
        self._thread = thread
        self._mailbox = mailbox
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
        handle = self._handle
        while True:
            ended = handle.ended  # read first: then the deltas below are the last ones
            deltas = handle.read()
            if handle.paused:
                self._thread.resume(handle)
            if deltas:
                return deltas
            if ended:
                break
            await self._news()
        error = handle.error
        if error is None and handle.output is not None:
            error = handle.output.error
        if error is not None:
            raise error
        return []

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        if not self._handle.ended:
            self._thread.abort(self._handle)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _news(self) -> None:
        if self._waits:
            raise EngineBusyError(
                f"another task waits in the stream of request {self._handle.id}: read it in one"
            )
        self._waits = True
        try:
            await self._mailbox.news(self._handle)
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._waits = False


_Consumer = tuple[StepThread, Callable[[Delta], None] | None, Future[RequestOutput]]


class CallbackThread:
    """A thread that calls callbacks and listeners, and the mailbox of requests that have them.

    Any thread may call any method. The thread starts with the first request: before, the process
    may fork.
    """

    closed = False

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._consumers: dict[RequestHandle, _Consumer] = {}
        self._inbox = Inbox()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self) -> CallbackThread:
        """Start the thread, unless it runs.

        Raises:
            EngineClosedError: it has ended, or ends.
            RuntimeError: no thread can be started.
        """
        with self._lock:
            if self._closing:
                raise EngineClosedError("the engine is closed: make a new one")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="stepgraph-callbacks", daemon=True)
                self._thread = thread  # first: an interrupt of `start` may leave it running
                try:
                    thread.start()
                except RuntimeError:
                    self._thread = None
                    raise
        return self

    def consume(
        self, handle: RequestHandle, thread: StepThread, callback: Callable[[Delta], None] | None
    ) -> Future[RequestOutput]:
        """Call a function with the deltas of a request; return the future of its last output."""
        future: Future[RequestOutput] = Future()

        def abort_cancelled(future: Future[RequestOutput]) -> None:
            if future.cancelled() and not future.set_running_or_notify_cancel():
                thread.abort(handle)

        future.add_done_callback(abort_cancelled)
        self._consumers[handle] = thread, callback, future
        self._inbox.put(partial(self._deliver, handle))  # it may have ended
        return future

    def add_listener(self, listener: Listener) -> None:
        """Call a function with the record of each request that ends from now on."""
        with self._lock:
            self._listeners += (listener,)

    def report(self, handle: RequestHandle) -> None:
        """Pass a request that has ended to the listeners."""
        if not self._listeners:
            return
        call = partial(_call_listeners, handle, time.perf_counter_ns(), self._listeners)
        with suppress(EngineClosedError, RuntimeError):  # no thread can be started now
            self.start()
        if self._thread is None:
            call()
        else:
            self._inbox.put(call)

    def post(self, handle: RequestHandle) -> None:
        """Note that a request has news."""
        if not handle.posted:
            handle.posted = True
            self._inbox.put(partial(self._deliver, handle))

    def flush(self, *, again: bool = False) -> None:
        """Do nothing: `post` wakes the thread."""

    def end(self) -> None:
        """End the thread after what it has been given. Later callbacks run where they arise."""
        with self._lock:
            self._closing = True
            if self._thread is None:
                self._inbox.end()
        self._inbox.put(lambda: None)  # wakes the thread

    def join(self) -> None:
        """Wait for the end of the thread, unless it calls this."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if thread.ident is not None:  # else an interrupt kept it from starting
            thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._inbox.wait()
            try:
                self._inbox.run()
            except BaseException:  # of a callback that was added to a future
                logger.exception("a callback failed")
        self._inbox.end()

    def _deliver(self, handle: RequestHandle) -> None:
        """Pass the news of a request to its consumer."""
        handle.posted = False  # first: what follows is posted again
        consumer = self._consumers.get(handle)
        if consumer is None:
            return
        thread, callback, future = consumer
        ended, error = handle.ended, handle.error  # first: then the deltas below are the last ones
        if callback is not None and not future.done():
            try:
                for delta in handle.read():
                    callback(delta)
            except BaseException as raised:
                thread.abort(handle)
                ended, error = True, raised
        if ended:
            del self._consumers[handle]
            with suppress(InvalidStateError):  # it was cancelled
                if error is not None:
                    future.set_exception(error)
                elif handle.output is not None:
                    future.set_result(handle.output)


def _call_listeners(handle: RequestHandle, ended_ns: int, listeners: tuple[Listener, ...]) -> None:
    record = RequestRecord.of(handle, ended_ns)
    for listener in listeners:
        try:
            listener(record)
        except BaseException:
            logger.exception("a listener failed for request %s", record.request_id)
