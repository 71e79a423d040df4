"""`Drains`: calls that wait until no request is left."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

from ..engine.engine import Engine
from .dispatcher import Dispatcher

__all__ = ["Drains"]


@dataclass(slots=True)
class _Drain:
    end_ns: int | None
    """When the remaining requests are aborted; None for never, or if that was done."""
    future: Future[bool]
    complete: bool = True
    """Whether no request was aborted for it, or lost."""


class Drains:
    """The drains of an engine. For one thread.

    `active` holds from the first drain until the engine is woken or put to sleep.
    """

    def __init__(self) -> None:
        self.active = False
        """Whether new requests are refused."""
        self._waiting: list[_Drain] = []

    def add(self, end_ns: int | None, future: Future[bool]) -> None:
        """Begin a drain, unless this call repeats one."""
        self.active = True
        if not future.done() and all(drain.future is not future for drain in self._waiting):
            self._waiting.append(_Drain(end_ns, future))

    @property
    def next_ns(self) -> int | None:
        """When the first drain aborts its requests; None for never."""
        return min([d.end_ns for d in self._waiting if d.end_ns is not None], default=None)

    def settle(self, requests: Dispatcher, engine: Engine | None) -> None:
        """Complete the drains if no request is left; abort the rest when their time is over."""
        if self._waiting and not requests.is_empty:
            now = time.perf_counter_ns()
            for drain in self._waiting:
                if drain.end_ns is not None and drain.end_ns <= now:
                    drain.end_ns, drain.complete = None, False
                    requests.abort_all(engine)
        if requests.is_empty:
            self._complete(True)

    def note_loss(self) -> None:
        """Note that running requests are lost."""
        for drain in self._waiting:
            drain.complete = False

    def end(self, *, complete: bool) -> None:
        """Complete all drains, and accept requests again."""
        self._complete(complete)
        self.active = False

    def _complete(self, complete: bool) -> None:
        while self._waiting:
            drain = self._waiting[0]
            if not drain.future.done():
                drain.future.set_result(complete and drain.complete)
            self._waiting.pop(0)
