"""Bounds of the requests and tokens that wait, counted before anything is prepared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import OverloadedError
from .request_handle import RequestHandle

__all__ = ["QueueLimits"]


class QueueLimits:
    """Counts waiting requests, those being prepared included. For any thread."""

    def __init__(
        self, max_requests: int, max_tokens: int, retry_after: Callable[[], float]
    ) -> None:
        """Start at zero; `retry_after` predicts the seconds until a request leaves."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._retry_after = retry_after
        self._lock = threading.Lock()
        self._tokens: dict[RequestHandle, int] = {}  # of the waiting requests
        self.num_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return len(self._tokens)

    def oldest_wait(self) -> float:
        """Return the seconds since the oldest of the waiting requests was submitted; 0 for none."""
        with self._lock:
            oldest = next(iter(self._tokens), None)
        return 0.0 if oldest is None else (time.perf_counter_ns() - oldest.submitted_ns) / 1e9

    def enter(self, handle: RequestHandle) -> None:
        """Count a request.

        Raises:
            OverloadedError: there are `max_requests` already.
        """
        with self._lock:
            if len(self._tokens) < self._max_requests:
                self._tokens[handle] = 0
                return
        raise OverloadedError(
            f"{self._max_requests} requests wait already (max_queued_requests): try again later",
            retry_after=self._retry_after(),
        )

    def add_tokens(self, handle: RequestHandle, num_tokens: int) -> None:
        """Count the prompt tokens of a request. One that is too long for the limit may wait alone.

        Raises:
            OverloadedError: they would exceed `max_tokens`.
        """
        with self._lock:
            if not self.num_tokens or self.num_tokens + num_tokens <= self._max_tokens:
                self._tokens[handle] += num_tokens
                self.num_tokens += num_tokens
                return
        raise OverloadedError(
            f"{self.num_tokens} prompt tokens wait already, and {num_tokens} more exceed"
            f" max_queued_tokens={self._max_tokens}: try again later",
            retry_after=self._retry_after(),
        )

    def leave(self, handle: RequestHandle) -> None:
        """Count a request out, with its tokens. Does nothing if it is not counted."""
        with self._lock:
            self.num_tokens -= self._tokens.pop(handle, 0)
