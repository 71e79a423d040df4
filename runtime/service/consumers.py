"""Consumers of requests: streams of any event loop, and a thread for callbacks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from ..engine.request_output import RequestOutput
from ..errors import EngineBusyError, EngineClosedError
from .request_handle import Delta, HandleState, Listener, RequestHandle, RequestRecord
from .step_thread import StepThread

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

    async def deliver(self, callback: Callable[[Delta], None] | None) -> RequestOutput:
        """Call a function with each delta, and return the last output. Raises as `accepted`."""
        ended = False
        while callback is not None and not ended:
            ended = self._handle.ended  # read first: then the deltas below are the last ones
            for delta in self._handle.read():
                callback(delta)
            if not ended:
                await self._news()
        return await self.finish()

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
        if self._waits:
            raise EngineBusyError(
                f"another task waits in the stream of request {self._handle.id}: read it in one"
            )
        self._waits = True
        try:
            self._handle.waiter = self._handle.loop.create_future()
            await self._handle.waiter
        except BaseException:
            self.abort()
            raise
        finally:
            self._waits = False


class CallbackThread:
    """A thread with an event loop, which calls callbacks and listeners, one after the other.

    Any thread may call any method. The thread starts with the first request: before, the process
    may fork.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._ended = False

    def start(self) -> asyncio.AbstractEventLoop:
        """Start the thread, unless it runs; return its event loop.

        Raises:
            EngineClosedError: it has ended.
            RuntimeError: no thread can be started.
        """
        with self._lock:
            if self._ended:
                raise EngineClosedError("the engine is closed: make a new one")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=self._run, args=(loop,), name="stepgraph-callbacks", daemon=True
                )
                # First: an interrupt of `start` may leave it running.
                self._loop, self._thread = loop, thread
                try:
                    thread.start()
                except RuntimeError:
                    loop.close()
                    self._loop = self._thread = None
                    raise
            return self._loop

    def consume(
        self, stream: AsyncStream, callback: Callable[[Delta], None] | None
    ) -> Future[RequestOutput]:
        """Call a function with the deltas of a stream; return the future of its last output."""
        with self._lock:
            loop = self.start()
            future = asyncio.run_coroutine_threadsafe(stream.deliver(callback), loop)
        # Of one that was cancelled, or whose callback has raised.
        future.add_done_callback(lambda future: stream.abort())
        return future

    def add_listener(self, listener: Listener) -> None:
        """Call a function with the record of each request that ends from now on."""
        with self._lock:
            self._listeners += (listener,)

    def report(self, handle: RequestHandle) -> None:
        """Pass a request that has ended to the listeners."""
        if not self._listeners:
            return
        arguments = handle, time.perf_counter_ns(), self._listeners
        try:
            with self._lock:
                self.start().call_soon_threadsafe(_call_listeners, *arguments)
        except RuntimeError:  # the thread has ended, or cannot be started now
            _call_listeners(*arguments)

    def end(self) -> None:
        """End the thread after what it has been given. Later listeners run where records arise."""
        with self._lock:
            self._closing = True
            if self._loop is None:
                self._ended = True
            elif not self._ended:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self) -> None:
        """Wait for the end of the thread, unless it calls this."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if thread.ident is not None:  # else an interrupt kept it from starting
            thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                if not self._closing:
                    loop.run_forever()
                loop.run_until_complete(asyncio.sleep(0))  # begins what was given last
                if tasks := asyncio.all_tasks(loop):
                    loop.run_until_complete(asyncio.wait(tasks))
                elif self._ended:
                    break
                else:
                    with self._lock:
                        self._ended = True
            except BaseException:  # of a callback, or of one that was added to a future
                logger.exception("a callback failed")
        loop.close()


def _call_listeners(handle: RequestHandle, ended_ns: int, listeners: tuple[Listener, ...]) -> None:
    record = RequestRecord.of(handle, ended_ns)
    for listener in listeners:
        try:
            listener(record)
        except BaseException:
            logger.exception("a listener failed for request %s", record.request_id)
