"""Wakes the tasks of an event loop that wait for requests, at most once a step for all of them."""

from __future__ import annotations

import asyncio
from collections import deque

from .request_handle import RequestHandle

__all__ = ["LoopMailbox"]


class LoopMailbox:
    """The requests whose consumers are tasks of one event loop.

    Any thread may call `post` and `flush`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._news: deque[RequestHandle] = deque()
        self._scheduled = False
        self._waiters: dict[RequestHandle, asyncio.Future[None]] = {}

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

    async def news(self, handle: RequestHandle) -> None:
        """Wait until a request has news. One task at a time may wait for a request."""
        waiter = self._loop.create_future()
        self._waiters[handle] = waiter
        try:
            await waiter
        finally:
            self._waiters.pop(handle, None)

    def _deliver(self) -> None:
        self._scheduled = False  # first: what is posted from now on schedules again
        while self._news:
            handle = self._news.popleft()
            handle.posted = False
            waiter = self._waiters.get(handle)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
