"""Wakes the tasks of an event loop that wait for requests, at most once a step for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context

from .request_handle import RequestHandle

__all__ = ["LoopMailbox"]


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
