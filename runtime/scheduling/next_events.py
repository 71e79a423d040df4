"""The earliest step at which each decoding request needs blocks, publishes or ends. No torch."""

from __future__ import annotations

from ..request import Request

__all__ = ["NextEvents"]


class NextEvents:
    """The step of each request's next event, at most one a request; looked up by either."""

    def __init__(self) -> None:
        self._due: dict[int, dict[Request, None]] = {}  # by number of the step
        self._steps: dict[Request, int] = {}

    def schedule(self, request: Request, step: int) -> None:
        """Note that a request without a scheduled event has one at a step."""
        assert request not in self._steps, f"request {request.id} has a scheduled event already"
        self._steps[request] = step
        self._due.setdefault(step, {})[request] = None

    def cancel(self, request: Request) -> None:
        """Remove the event of a request, if it has one."""
        step = self._steps.pop(request, None)
        if step is not None:
            due = self._due[step]
            del due[request]
            if not due:
                del self._due[step]

    def pop_due(self, step: int) -> dict[Request, None] | None:
        """Remove the events of a step and return their requests; None if there are none."""
        due = self._due.pop(step, None)
        if due is not None:
            for request in due:
                del self._steps[request]
        return due

    def between(self, first: int, end: int) -> list[Request]:
        """Return the requests that are due at the steps `first` to `end` - 1."""
        return [request for step in range(first, end) for request in self._due.get(step, ())]

    def all(self) -> dict[Request, int]:
        """Return the step of each request. A copy."""
        return self._steps.copy()

    def check_integrity(self) -> None:
        """Assert that both look-ups agree."""
        by_step = {request: step for step, due in self._due.items() for request in due}
        assert by_step == self._steps
        assert all(self._due.values()), "a step without requests"
