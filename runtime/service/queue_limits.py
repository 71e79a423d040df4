"""Bounds of the requests and tokens that wait, counted before anything is prepared."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import OverloadedError

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
        self.num_requests = 0
        self.num_tokens = 0

    def enter(self) -> None:
        """Count a request.

        Raises:
            OverloadedError: there are `max_requests` already.
        """
        with self._lock:
            if self.num_requests < self._max_requests:
                self.num_requests += 1
                return
        raise OverloadedError(
            f"{self._max_requests} requests wait already (max_queued_requests): try again later",
            retry_after=self._retry_after(),
        )

    def add_tokens(self, num_tokens: int) -> None:
        """Count the prompt tokens of a request. One that is too long for the limit may wait alone.

        Raises:
            OverloadedError: they would exceed `max_tokens`.
        """
        with self._lock:
            if not self.num_tokens or self.num_tokens + num_tokens <= self._max_tokens:
                self.num_tokens += num_tokens
                return
        raise OverloadedError(
            f"{self.num_tokens} prompt tokens wait already, and {num_tokens} more exceed"
            f" max_queued_tokens={self._max_tokens}: try again later",
            retry_after=self._retry_after(),
        )

    def leave(self, num_tokens: int) -> None:
        """Count a request out, with the tokens that were counted for it."""
        with self._lock:
            self.num_requests -= 1
            self.num_tokens -= num_tokens
