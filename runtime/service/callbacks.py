"""Delivers the news of requests to functions and futures, in one thread for all of an engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from ..engine.request_output import RequestOutput
from .inbox import Inbox
from .request_handle import Delta, DeltaReader, RequestHandle
from .request_record import Listener, RequestRecord
from .step_thread import StepThread

__all__ = ["CallbackMailbox", "FutureConsumer"]

logger = logging.getLogger("stepgraph.runtime")


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
