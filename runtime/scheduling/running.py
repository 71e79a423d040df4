"""Requests with a row, and the phase of each: prefilling, decoding or ending. No torch."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from ..request import Request

__all__ = ["RunningRequests", "order_of"]

order_of = attrgetter("order")


class RunningRequests:
    """The rows of the decode batch. All lists are in the order of service."""

    def __init__(self, max_num_seqs: int) -> None:
        self.rows: dict[Request, int] = {}
        self.free_rows = list(range(max_num_seqs))
        """A heap: low rows are given first."""
        self.prefilling: list[Request] = []
        self.ending: set[Request] = set()
        """Requests whose launched steps may have sampled all of their tokens."""
        self._all: list[Request] = []
        self._decoding: list[Request] = []
        self._shown: list[Request] | None = []  # a copy of `_decoding`, until that changes
        self._max_num_seqs = max_num_seqs

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all)

    @property
    def last(self) -> Request:
        """The request that is served last."""
        return self._all[-1]

    def decoding(self) -> list[Request]:
        """Return the decoding requests: the same list object until one joins or leaves.

        Steps in flight keep the list that they were launched with.
        """
        if self._shown is None:
            self._shown = self._decoding.copy()
        return self._shown

    def join(self, request: Request) -> int:
        """Give a request a row to prefill, and return the row."""
        row = self.rows[request] = heapq.heappop(self.free_rows)
        insort(self._all, request, key=order_of)
        insort(self.prefilling, request, key=order_of)
        return row

    def begin_decoding(self, request: Request) -> None:
        """Let a request decode that has been prefilled or has not ended after all."""
        self.ending.discard(request)
        insort(self._decoding, request, key=order_of)
        self._shown = None

    def stop_decoding(self, request: Request) -> None:
        """Exclude a decoding request from later steps."""
        self._decoding.remove(request)
        self._shown = None

    def leave(self, request: Request) -> None:
        """Free the row of a request in any phase."""
        self._all.remove(request)
        if request in self.prefilling:
            self.prefilling.remove(request)
        elif request in self.ending:
            self.ending.remove(request)
        elif request in self._decoding:
            self.stop_decoding(request)
        heapq.heappush(self.free_rows, self.rows.pop(request))

    def check_integrity(self) -> None:
        """Assert that each row has at most one request, and each request is in one phase."""
        rows = sorted(self.rows.values())
        assert sorted(rows + self.free_rows) == list(range(self._max_num_seqs))
        assert self.rows.keys() == set(self._all)
        assert len(self.rows) == len(self._all)
        assert self._all == sorted(self._all, key=order_of)
        prefilling, decoding = set(self.prefilling), set(self._decoding)
        assert not prefilling & decoding
        assert [r for r in self._all if r in prefilling] == self.prefilling
        assert [r for r in self._all if r in decoding] == self._decoding
        assert self.ending == set(self._all) - prefilling - decoding
        assert self._shown is None or self._shown == self._decoding
