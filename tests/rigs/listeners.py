"""A listener of ranges that notes what it receives."""

from __future__ import annotations

from typing import Any

from stepgraph.profiling import ranges


class Heard:
    """Every event in order: ("push", name, payload), ("pop",)."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def push(self, name: str, payload: ranges.Payload) -> None:
        self.events.append(("push", name, payload))

    def pop(self) -> None:
        self.events.append(("pop",))

    def names(self, kind: str) -> list[str]:
        """The names of all events of a kind, in order."""
        return [event[1] for event in self.events if event[0] == kind]
