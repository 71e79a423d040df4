"""`RestartPolicy`: when a failed engine is started again. Does not import torch."""

from __future__ import annotations

from collections import deque

__all__ = ["RestartPolicy"]

FIRST_PAUSE = 0.1
MAX_PAUSE = 10.0


class RestartPolicy:
    """At most `max_restarts` within `window` seconds, with pauses that double.

    The first restart of a window is immediate. A start that fails counts as a restart.
    """

    def __init__(self, max_restarts: int, window: float) -> None:
        """Begin without restarts; 0 never restarts."""
        self._max_restarts = max_restarts
        self._window = window
        self._restarts: deque[float] = deque()  # times of those within the window

    def pause(self, now: float) -> float | None:
        """Return the seconds until the restart after a failure at `now`; None for no restart."""
        while self._restarts and now - self._restarts[0] > self._window:
            self._restarts.popleft()
        count = len(self._restarts)
        if count >= self._max_restarts:
            return None
        self._restarts.append(now)
        return 0.0 if not count else min(FIRST_PAUSE * 2.0 ** min(count - 1, 32), MAX_PAUSE)
