"""Listeners of ranges and marks that write down what they hear."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stepgraph.profiling import ranges


class Heard:
    """Every event in order: ("push", name, payload), ("pop",), ("mark", name, payload).

    What Python's collector tells of itself is left out unless a test asks for it: it runs whenever
    it likes.
    """

    def __init__(self, *, collections: bool = False) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.threads: list[str] = []
        self._collections = collections

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        self.threads.append(threading.current_thread().name)

    def push(self, name: str, payload: ranges.Payload) -> None:
        self._note("push", name, payload)

    def pop(self) -> None:
        self._note("pop")

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        if name != ranges.COLLECTION or self._collections:
            self._note("mark", name, payload)

    def names(self, kind: str) -> list[str]:
        """The names of all events of a kind, in order."""
        return [event[1] for event in self.events if event[0] == kind]


class Listening:
    """The functions of `ranges`, each called while somebody listens."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with ranges.listening(Heard()):
                return getattr(ranges, name)(*args)

        return call
