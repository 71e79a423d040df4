"""Tickets: which call gets the outputs of a request, and which request ids are in use.

A request has a ticket from the reservation of its id until its last output has been returned.

Every change is one atomic operation on a dict or a list, so that any thread and any signal handler
may make it without a lock.
"""

from __future__ import annotations

import itertools
from _queue import SimpleQueue

from ..bounded_repr import bounded_repr
from ..errors import RequestError
from ..request import RequestGroup
from .request_output import RequestOutput

__all__ = ["GenerateCall", "Ticket", "Tickets"]


class Ticket:
    """A request whose last output has not been returned."""

    __slots__ = ("abort_posted", "call", "group", "id")

    def __init__(self, call: GenerateCall | None = None) -> None:
        self.id = ""
        self.call = call
        """The call of `generate` that takes its last output; None if `step` returns all."""
        self.group: RequestGroup | None = None
        """Its requests; None before they are queued."""
        self.abort_posted = False


class GenerateCall:
    """A call of `generate`: its requests, in order, and the outputs of those that ended."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.done: dict[str, RequestOutput] = {}
        self.wake: SimpleQueue[None] = SimpleQueue()

    @property
    def complete(self) -> bool:
        """Whether every request so far has ended."""
        return len(self.done) == len(self.tickets)

    def deliver(self, output: RequestOutput) -> None:
        """Take the last output of a request; wake the call if it was the last one."""
        self.done[output.request_id] = output
        if self.complete:
            self.wake.put(None)

    def outputs(self) -> list[RequestOutput]:
        """Return the last outputs in the order of the requests."""
        return [self.done[ticket.id] for ticket in self.tickets]


class Tickets:
    """The requests of an engine by id, from reservation until the last output is returned."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count(1)
        self.calls: set[GenerateCall] = set()
        """Calls that have not returned."""

    def __bool__(self) -> bool:
        """Whether any request has an output to come."""
        return bool(self._tickets)

    def get(self, request_id: str) -> Ticket | None:
        """Return the ticket of an id, or None."""
        return self._tickets.get(request_id)

    def reserve(self, ticket: Ticket, request_id: str | None) -> str:
        """Reserve an id for a ticket, a new one if it is None, and return it.

        Raises:
            RequestError: the id is not a non-empty string, or is in use.
        """
        if request_id is None:
            while True:
                ticket.id = f"request-{next(self._numbers)}"
                if self._tickets.setdefault(ticket.id, ticket) is ticket:
                    return ticket.id
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(
                f"request_id must be a non-empty string, not {bounded_repr(request_id)}",
                field="request_id",
            )
        ticket.id = request_id
        if self._tickets.setdefault(request_id, ticket) is not ticket:
            raise RequestError(
                f"request_id {request_id!r} is already in use until its last output has been"
                " returned: choose another, or leave it out",
                field="request_id",
            )
        return request_id

    def release(self, ticket: Ticket) -> None:
        """Free the id of a ticket, if it has one."""
        if self._tickets.get(ticket.id) is ticket:
            del self._tickets[ticket.id]

    def route(self, outputs: list[RequestOutput]) -> None:
        """Remove the outputs that belong to calls from `outputs`, and deliver the last ones.

        May be repeated after an interrupt.
        """
        others = []
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            call = None if ticket is None else ticket.call
            if call is None:
                others.append(output)
            elif output.finished:
                call.deliver(output)
        outputs[:] = others

    def hand_over(self, outputs: list[RequestOutput]) -> None:
        """Free the ids of the requests whose last output is among `outputs`."""
        for output in outputs:
            if output.finished:
                self._tickets.pop(output.request_id, None)

    def take_back(self, outputs: list[RequestOutput]) -> None:
        """Undo `hand_over`."""
        for output in outputs:
            if output.finished:
                self._tickets.setdefault(output.request_id, Ticket())
