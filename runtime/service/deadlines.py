"""`Deadlines`: the times at which requests have to end. Does not import torch."""

from __future__ import annotations

import heapq
import itertools

from .request_handle import RequestHandle

__all__ = ["Deadlines"]


class Deadlines:
    """A heap of the deadlines of requests that have not ended. For one thread.

    Entries of ended requests are removed once they are the majority, so that requests with distant
    deadlines take memory only as long as they run.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, bool, RequestHandle]] = []
        self._numbers = itertools.count()
        self._num_ended = 0
        """At most this many entries are of ended requests."""

    def watch(self, handle: RequestHandle) -> None:
        """Add the deadlines of a request."""
        for due_ns, first_token in (
            (handle.deadline_ns, False),
            (handle.first_token_deadline_ns, True),
        ):
            if due_ns is not None and not handle.ended:
                heapq.heappush(self._heap, (due_ns, next(self._numbers), first_token, handle))

    def forget(self, handle: RequestHandle) -> None:
        """Remove the deadlines of a request that ends, now or later."""
        self._num_ended += handle.deadline_ns is not None
        self._num_ended += handle.first_token_deadline_ns is not None
        if self._num_ended > 64 + len(self._heap) // 2:
            self._heap = [e for e in self._heap if e[3] is not handle and not e[3].ended]
            heapq.heapify(self._heap)
            self._num_ended = 0

    def clear(self) -> None:
        """Forget all requests."""
        self._heap.clear()
        self._num_ended = 0

    @property
    def next_ns(self) -> int | None:
        """The earliest deadline, on the clock of `time.perf_counter_ns`; None without any."""
        while self._heap and self._heap[0][3].ended:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now_ns: int) -> list[RequestHandle]:
        """Remove and return the requests that missed a deadline."""
        late = []
        while self._heap and self._heap[0][0] <= now_ns:
            _, _, first_token, handle = heapq.heappop(self._heap)
            if not handle.ended and not (first_token and handle.has_first_token):
                late.append(handle)
        return late

    def check_integrity(self) -> None:
        """Assert that ended requests are not the majority."""
        num_ended = sum(entry[3].ended for entry in self._heap)
        assert num_ended <= 64 + len(self._heap) // 2 + 2
