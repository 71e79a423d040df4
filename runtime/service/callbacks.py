"""Delivers the news of requests to functions, futures and listeners, in one thread of an engine."""

from __future__ import annotations

import logging
import threading
import time
from _queue import SimpleQueue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ..engine.request_output import RequestOutput
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
        future.add_done_callback(self._abort_if_cancelled)

    def __call__(self) -> None:
        """Take the news of the request."""
        handle, future = self._handle, self._future
        ended = handle.ended  # read first: then the deltas below are the last ones
        if self._callback is not None and not future.done():
            try:
                for delta in self._reader.read():
                    self._callback(delta)
            except BaseException as error:
                self._thread.abort(handle)
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
        if ended and not future.done() and future.set_running_or_notify_cancel():
            if handle.error is not None:
                future.set_exception(handle.error)
            else:
                future.set_result(handle.output)  # type: ignore[arg-type]

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

    The thread starts with the first registration or listener.
    """

    def __init__(self) -> None:
        self._news: SimpleQueue[RequestHandle | _Ended | None] = SimpleQueue()
        self._consumers: dict[RequestHandle, FutureConsumer] = {}
        self._listeners: tuple[Listener, ...] = ()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def register(self, handle: RequestHandle, consumer: FutureConsumer) -> None:
        """Call a consumer whenever a request has news, for the last time when it has ended."""
        self._consumers[handle] = consumer
        with self._starting:
            self._start()

    def add_listener(self, listener: Listener) -> None:
        """Call a function with the record of each request that ends from now on."""
        with self._starting:
            self._listeners += (listener,)
            self._start()

    @property
    def closed(self) -> bool:
        """Whether no consumer can read its requests: never."""
        return False

    def post(self, handle: RequestHandle) -> None:
        """Note that a request has news, which wakes the thread."""
        if not handle.posted:
            handle.posted = True
            self._news.put(handle)

    def flush(self) -> None:
        """Do nothing: `post` has woken the thread."""

    def report(self, handle: RequestHandle) -> None:
        """Pass a request that has ended to the listeners."""
        if self._listeners:
            self._news.put(_Ended(handle, time.perf_counter_ns(), self._listeners))

    def close(self) -> None:
        """End the thread after the news posted so far, and wait for it unless it calls this."""
        self._listeners = ()
        self._news.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="stepgraph-callbacks", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while (handle := self._news.get()) is not None:
            if isinstance(handle, _Ended):
                _call_listeners(handle)
                continue
            handle.posted = False
            ended = handle.ended
            consumer = self._consumers.get(handle)
            if consumer is None:
                continue
            try:
                consumer()
            except Exception:  # of a callback added to the future
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
