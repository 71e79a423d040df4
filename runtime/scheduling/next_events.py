"""The earliest step at which a decoding request needs blocks, shares a block or ends. No torch."""

from __future__ import annotations

from ..request import Request

__all__ = ["NextEvents"]


class NextEvents:
    """At most one scheduled step per request; lookup by step and by request."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Planned so far; counts each decode step of a launch."""
        self._due: dict[int, dict[Request, None]] = {}  # step number -> requests
        self._steps: dict[Request, int] = {}

    def schedule(self, request: Request, step: int) -> None:
        """Schedule the next event of a request that has none."""
        assert request not in self._steps, f"request {request.id} is already scheduled"
        self._steps[request] = step
        self._due.setdefault(step, {})[request] = None

    def cancel(self, request: Request) -> None:
        """Remove the scheduled event of a request, if it has one."""
        step = self._steps.pop(request, None)
        if step is not None:
            due = self._due[step]
            del due[request]
            if not due:
                del self._due[step]

    def begin_step(self) -> dict[Request, None] | None:
        """Begin the next step; remove and return the requests that are due at it, or None."""
        self.num_steps += 1
        due = self._due.pop(self.num_steps, None)
        if due is not None:
            for request in due:
                del self._steps[request]
        return due

    def between(self, first: int, end: int) -> list[Request]:
        """Return the requests that are due at the steps `first` to `end` - 1."""
        return [request for step in range(first, end) for request in self._due.get(step, ())]

    def all(self) -> dict[Request, int]:
        """Return a copy of the scheduled step of each request."""
        return self._steps.copy()

    def check_integrity(self) -> None:
        """Assert that both lookups agree."""
        by_step = {request: step for step, due in self._due.items() for request in due}
        assert by_step == self._steps
        assert all(self._due.values()), "a step without requests"
