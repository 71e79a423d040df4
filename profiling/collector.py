"""Counts and times Python's garbage collections, which stop every thread of the process.

The interpreter calls `gc.callbacks` before and after each collection. This module registers one
callback while any `CollectorWatch` is open and alive.
"""

import gc
import threading
import time
import weakref
from typing import Any, Final

__all__ = ["CollectorWatch"]


class CollectorWatch:
    """Counts and times the collections of the process, in any thread, until it is closed.

    The module holds weak references only: an unclosed watch is unregistered when it is collected.

    Attributes:
        collections: number of collections.
        total_ns: their total duration in nanoseconds.
    """

    __slots__ = ("__weakref__", "collections", "total_ns")

    def __init__(self) -> None:
        self.collections = 0
        self.total_ns = 0
        with _changing:
            _watches.append(weakref.ref(self, _forget))
            if _on_collection not in gc.callbacks:
                gc.callbacks.append(_on_collection)

    def close(self) -> None:
        """Stop counting. Idempotent."""
        for reference in _watches.copy():
            if reference() is self:
                _forget(reference)


_watches: Final[list["weakref.ref[CollectorWatch]"]] = []
# Reentrant: code that holds it may run the collector, which may drop a watch.
_changing: Final = threading.RLock()
_started_ns = 0


def _forget(reference: "weakref.ref[CollectorWatch]") -> None:
    global _started_ns
    with _changing:
        if reference in _watches:
            _watches.remove(reference)
        if not _watches and _on_collection in gc.callbacks:
            gc.callbacks.remove(_on_collection)
            _started_ns = 0


def _on_collection(phase: str, info: dict[str, Any]) -> None:
    """Count a collection. The interpreter runs one at a time, and prints its errors."""
    global _started_ns
    if phase == "start":
        _started_ns = time.perf_counter_ns()
        return
    if not _started_ns:  # it began before the first watch
        return
    took = time.perf_counter_ns() - _started_ns
    _started_ns = 0
    for reference in _watches.copy():
        watch = reference()
        if watch is not None:
            watch.collections += 1
            watch.total_ns += took
