"""The requests without a row: waiting ones in the order of service, and paused ones. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain

from ..request import Request, RequestStatus

__all__ = ["WaitingQueue"]


def _is_alive(request: Request) -> bool:
    return request.status is not RequestStatus.FINISHED


class WaitingQueue:
    """A heap by `Request.order`. Ended requests are removed later, in batches."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_alive = 0  # in the heap
        self.paused: set[Request] = set()
        """Requests that have not ended and that `head` does not return until they are resumed."""

    def __len__(self) -> int:
        """Number of requests that have not ended and are not paused."""
        return self._num_alive

    def __iter__(self) -> Iterator[Request]:
        """The requests that have not ended, in any order, paused ones included."""
        alive = (request for _, request in self._heap if _is_alive(request))
        return chain(alive, self.paused)

    def push(self, request: Request) -> None:
        """Add a request, which may be paused."""
        if request.paused:
            self.paused.add(request)
            return
        heapq.heappush(self._heap, (request.order, request))
        self._num_alive += 1

    def pause(self, request: Request) -> None:
        """Set a waiting request aside."""
        self._heap = [entry for entry in self._heap if entry[1] is not request]
        heapq.heapify(self._heap)
        self._num_alive -= 1
        self.paused.add(request)

    def resume(self, request: Request) -> None:
        """Let a paused request wait again."""
        self.paused.remove(request)
        self.push(request)

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

    def drop_ended(self, request: Request) -> None:
        """Remove a request that has ended."""
        if request in self.paused:
            self.paused.remove(request)
            return
        self._num_alive -= 1
        if len(self._heap) > 2 * self._num_alive + 64:
            self._heap = [entry for entry in self._heap if _is_alive(entry[1])]
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """Assert that the count is right, and that exactly the paused requests are set aside."""
        assert sum(1 for _ in self) == self._num_alive + len(self.paused)
        assert all(_is_alive(request) for request in self.paused)
        assert all(request.paused == (request in self.paused) for request in self)
