"""Consumers of requests: streams of any event loop, and a thread for callbacks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..engine.request_output import RequestOutput
from ..errors import EngineBusyError
from .request_handle import Delta, HandleState, Listener, RequestHandle, RequestRecord
from .step_thread import Inbox, StepThread

logger = logging.getLogger("stepgraph.runtime")


class AsyncStream:
    """An asynchronous iterator of deltas. Read it in the event loop that it was made in.

    One task at a time may wait in it; another one gets `EngineBusyError`.

    The request is aborted, and its row and blocks are free within one step, when the iterator is
    closed (`aclose`, the end of `async with`), or when the task that waits in it is cancelled.
    Dropping the iterator closes nothing: leave an `async for` early only within `async with`.
    A stream that is not read gives up its row, and ends after `ServiceConfig.send_timeout`.
    """

    def __init__(self, handle: RequestHandle, thread: StepThread) -> None:
        self._handle = handle
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._deltas: deque[Delta] = deque()

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

    @property
    def record(self) -> RequestRecord:
        """The request and its times, as if it ended now."""
        return RequestRecord.of(self._handle, time.perf_counter_ns())

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
        self.abort()

    def abort(self) -> None:
        """Do as `aclose`. Any thread may call it."""
        if not self._handle.ended:
            self._thread.abort(self._handle)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _news(self) -> None:
        handle = self._handle
        if handle.waiter is not None and not handle.waiter.done():
            raise EngineBusyError(
                f"another task waits in the stream of request {handle.id}: read it in one"
            )
        handle.waiter = self._loop.create_future()
        try:
            await handle.waiter
        except BaseException:
            self.abort()
            raise


class CallbackThread:
    """A thread that calls callbacks and listeners, one after the other.

    Any thread may call any method. What it gets before its start or after its end is called where
    it arises. It is a daemon, not a thread of a pool, so that a callback that hangs does not keep
    the interpreter from ending.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._inbox = Inbox()
        self._ending = False
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="stepgraph-callbacks", daemon=True)

    def start(self) -> None:
        """Start the thread, unless it was. Raises `RuntimeError` if none can be started."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def call_soon_threadsafe(self, function: Callable[..., Any], *arguments: object) -> None:
        """Call a function in the thread, as an event loop does."""
        if self._thread.ident is None:
            function(*arguments)
        else:
            self._inbox.put(partial(function, *arguments))

    def is_closed(self) -> bool:
        """Return False: it always calls what it gets."""
        return False

    def consume(
        self, handle: RequestHandle, thread: StepThread, callback: Callable[[Delta], None] | None
    ) -> Future[RequestOutput]:
        """Call a function with the deltas of a request; return the future of its last output."""
        future: Future[RequestOutput] = Future()

        def deliver() -> None:
            ended, error = handle.ended, None  # read first: then the deltas below are the last ones
            try:
                if callback is not None and not future.done():
                    for delta in handle.read():
                        callback(delta)
                if not ended or handle.deliver is None:
                    return
                error = handle.error
            except BaseException as raised:
                error = raised
            handle.deliver = None
            try:
                if not future.set_running_or_notify_cancel():
                    return
                if error is None and handle.output is not None:
                    future.set_result(handle.output)
                else:
                    future.set_exception(error)
            except BaseException:  # of a callback of the future
                logger.exception("a callback failed")

        handle.deliver = deliver
        # Of one that was cancelled, or whose callback has raised.
        future.add_done_callback(lambda future: thread.abort(handle))
        self.call_soon_threadsafe(deliver)  # what has arrived already
        return future

    def add_listener(self, listener: Listener) -> None:
        """Call a function with the record of each request that ends from now on."""
        self._listeners.append(listener)

    def report(self, handle: RequestHandle) -> None:
        """Pass a request that has ended to the listeners."""
        if listeners := tuple(self._listeners):
            self.call_soon_threadsafe(_call_listeners, handle, time.perf_counter_ns(), listeners)

    def end(self) -> None:
        """End the thread after what it has been given."""
        self._inbox.put(self._end)

    def join(self) -> None:
        """Wait for the end of the thread, unless it calls this."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _end(self) -> None:
        self._ending = True

    def _run(self) -> None:
        while not self._ending:
            self._inbox.wait()
            self._inbox.run()
        self._inbox.end()


def _call_listeners(handle: RequestHandle, ended_ns: int, listeners: tuple[Listener, ...]) -> None:
    record = RequestRecord.of(handle, ended_ns)
    for listener in listeners:
        try:
            listener(record)
        except BaseException:
            logger.exception("a listener failed for request %s", record.request_id)
