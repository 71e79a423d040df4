"""`Inbox`: hands items from any thread to one thread, and loses none. Does not import torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["Inbox"]

T = TypeVar("T")

MAX_WAIT = 3600.0
"""Seconds of one wait; the limit of a lock's timeout depends on the platform."""


class Inbox(Generic[T]):
    """Items for one thread. Once that thread has ended, the thread that puts an item handles it.

    An item leaves the inbox after it was handled. If an exception interrupts its handler, the
    handler gets it once more, so handlers must be idempotent.
    """

    def __init__(self, handle: Callable[[T], None]) -> None:
        """Start empty; `handle` gets each item."""
        self._handle = handle
        self._items: deque[T] = deque()
        self._begun: T | None = None  # the last item whose handler was called
        self._wake = threading.Lock()  # locked: no item has arrived since the last wait
        self._wake.acquire()
        self._handling = threading.Lock()
        self._ended = False

    def put(self, item: T) -> None:
        """Add an item. Any thread and any finalizer may call it: it does not block."""
        self._items.append(item)
        if self._ended:
            self._handle_here()
        else:
            self.wake()

    def wake(self) -> None:
        """End the wait of the thread."""
        with suppress(RuntimeError):  # released already
            self._wake.release()

    def wait(self, timeout: float | None) -> None:
        """Wait for an item, at most `timeout` seconds. It may return early."""
        if not self._items:
            self._wake.acquire(timeout=MAX_WAIT if timeout is None else min(timeout, MAX_WAIT))

    def run(self) -> None:
        """Handle the items that have arrived. For the one thread."""
        while self._items:
            item = self._items[0]
            second = item is self._begun
            if second:
                self._items.popleft()  # there is no third attempt
            self._begun = item
            self._handle(item)
            if not second:
                self._items.popleft()
            self._begun = None

    def end(self) -> None:
        """Let other threads handle what arrives from now on. The one thread calls it last."""
        self._ended = True
        self._handle_here()

    def _handle_here(self) -> None:
        """Handle the items, unless another thread or a caller of this function does."""
        while self._items and self._handling.acquire(blocking=False):
            try:
                self.run()
            finally:
                self._handling.release()
