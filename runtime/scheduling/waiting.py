"""The queue of requests without a row, in the order of service. Does not import torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..request import Request, RequestStatus

__all__ = ["WaitingQueue"]


def _is_alive(request: Request) -> bool:
    return request.status is not RequestStatus.FINISHED


class WaitingQueue:
    """A heap by `Request.order`. Ended requests are removed later, in batches."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_alive = 0

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return self._num_alive

    def __iter__(self) -> Iterator[Request]:
        """The requests that have not ended, in any order."""
        return (request for _, request in self._heap if _is_alive(request))

    def push(self, request: Request) -> None:
        """Add a request."""
        heapq.heappush(self._heap, (request.order, request))
        self._num_alive += 1

    def head(self) -> Request | None:
        """Return the first request in the order of service, or None."""
        while self._heap:
            request = self._heap[0][1]
            if _is_alive(request):
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the head."""
        assert self.head() is not None, "the queue is empty"
        heapq.heappop(self._heap)
        self._num_alive -= 1

    def drop_ended(self) -> None:
        """Count one of the requests as ended."""
        self._num_alive -= 1
        if len(self._heap) > 2 * self._num_alive + 64:
            self._heap = [entry for entry in self._heap if _is_alive(entry[1])]
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """Assert that the count is right."""
        assert sum(1 for _ in self) == self._num_alive
