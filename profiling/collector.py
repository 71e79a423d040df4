"""Counts and times Python's garbage collections, which stop every thread of the process."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any


class CollectorWatch:
    """Counts and times the collections of the process, in any thread, until it is closed.

    Attributes:
        collections: number of collections.
        total_ns: their total duration in nanoseconds.
        close: stops counting. Idempotent; called when the watch is collected.
    """

    __slots__ = ("__weakref__", "_started_ns", "close", "collections", "total_ns")

    def __init__(self) -> None:
        self.collections = 0
        self.total_ns = 0
        self._started_ns = 0
        reference = weakref.ref(self)

        def on_collection(phase: str, info: dict[str, Any]) -> None:
            watch = reference()
            if watch is not None:
                watch._count(phase)

        gc.callbacks.append(on_collection)
        finalize = weakref.finalize(self, gc.callbacks.remove, on_collection)
        finalize.atexit = False
        self.close: Callable[[], object] = finalize

    def _count(self, phase: str) -> None:
        """Count a collection. The interpreter runs one at a time."""
        if phase == "start":
            self._started_ns = time.perf_counter_ns()
        elif self._started_ns:  # else it began before the watch
            self.collections += 1
            self.total_ns += time.perf_counter_ns() - self._started_ns
            self._started_ns = 0
