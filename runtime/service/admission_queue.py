"""The bounded queue in front of an engine, fair between tenants. Does not import torch.

Requests wait here and enter the engine only when it has a row for them. The next one is taken from
the smallest priority; within it from the tenant that has received the least service relative to its
weight, in the order of arrival. Service is counted in tokens: prompt tokens when a request leaves
the queue, output tokens as they are generated (virtual token counter, Sheng et al. 2024, "Fairness
in Serving Large Language Models"). A tenant that returns from idleness starts at the least counter
of the waiting tenants, so that idleness earns no credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain

from .request_handle import RequestHandle

__all__ = ["AdmissionQueue"]

OUTPUT_WEIGHT = 2
"""Service of an output token, in prompt tokens; the ratio of the paper's evaluation."""

MAX_IDLE_TENANTS = 1024
"""Tenants without a waiting request whose counters are kept."""


class AdmissionQueue:
    """Handles that wait, by priority and tenant. For one thread."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Start empty; tenants that `weights` does not name have weight 1."""
        self._weights = dict(weights)
        self._levels: dict[int, dict[str, deque[RequestHandle]]] = {}
        """By priority and tenant; none is empty."""
        self._served: dict[str, float] = {}  # tokens of service over weight; oldest tenants first
        self._floor = 0.0  # the largest counter at which a tenant was served

    def __bool__(self) -> bool:
        """Whether a request waits."""
        return bool(self._levels)

    def __len__(self) -> int:
        """Number of waiting requests."""
        return sum(map(_num_requests, self._levels.values()))

    def __iter__(self) -> Iterator[RequestHandle]:
        """The waiting requests, in no particular order."""
        for tenants in self._levels.values():
            yield from chain.from_iterable(tenants.values())

    def push(self, handle: RequestHandle) -> None:
        """Append a request to the queue of its priority and tenant."""
        tenant = handle.tenant
        if not any(tenant in tenants for tenants in self._levels.values()):
            least = min((self._served[other] for other in self._waiting()), default=self._floor)
            self._served[tenant] = max(self._served.pop(tenant, 0.0), least)
        tenants = self._levels.setdefault(handle.priority, {})
        tenants.setdefault(tenant, deque()).append(handle)

    def head(self) -> RequestHandle | None:
        """Return the next request, or None."""
        if not self._levels:
            return None
        tenants = self._levels[min(self._levels)]
        return tenants[min(tenants, key=self._served.__getitem__)][0]

    def pop(self) -> RequestHandle:
        """Remove the next request, and charge its prompt to its tenant."""
        handle = self.head()
        assert handle is not None, "the queue is empty"
        self._floor = max(self._floor, self._served[handle.tenant])
        self._served[handle.tenant] += handle.num_prompt_tokens / self._weight(handle.tenant)
        self.remove(handle)
        return handle

    def remove(self, handle: RequestHandle) -> None:
        """Remove a waiting request."""
        tenants = self._levels[handle.priority]
        tenants[handle.tenant].remove(handle)
        if not tenants[handle.tenant]:
            del tenants[handle.tenant]
            if not tenants:
                del self._levels[handle.priority]
            self._forget_idle()

    def clear(self) -> None:
        """Remove all requests, and keep the service of their tenants."""
        self._levels.clear()
        self._forget_idle()

    def charge(self, handle: RequestHandle, num_output: int) -> None:
        """Charge the output tokens of a running request to its tenant, `num_output` so far."""
        gained = num_output - handle.num_charged
        handle.num_charged = num_output
        if handle.tenant in self._served:
            self._served[handle.tenant] += OUTPUT_WEIGHT * gained / self._weight(handle.tenant)

    def ahead_of(self, tenant: str, priority: int) -> tuple[int, int]:
        """Estimate the waiting requests, and their prompt tokens, served before a new one.

        These are all of smaller priorities, and of the same priority the tenant's own requests
        with what the other tenants receive meanwhile by their weights.
        """
        requests = tokens = 0
        for value, tenants in self._levels.items():
            if value > priority:
                continue
            waiting = ahead = float(_num_requests(tenants))
            if value == priority:
                weights = sum(self._weight(other) for other in {*tenants, tenant})
                turn = (len(tenants.get(tenant, ())) + 1) * weights / self._weight(tenant)
                ahead = min(waiting, turn - 1)
            handles = chain.from_iterable(tenants.values())
            requests += round(ahead)
            tokens += round(sum(h.num_prompt_tokens for h in handles) * ahead / waiting)
        return requests, tokens

    def check_integrity(self) -> None:
        """Assert that no queue is empty, and that all waiting tenants have a counter."""
        assert all(self._levels.values())
        assert all(all(tenants.values()) for tenants in self._levels.values())
        waiting = self._waiting()
        assert waiting <= self._served.keys()
        assert len(self._served) - len(waiting) <= MAX_IDLE_TENANTS

    def _waiting(self) -> set[str]:
        """Return the tenants with a waiting request."""
        return set(chain.from_iterable(self._levels.values()))

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _forget_idle(self) -> None:
        """Drop the oldest idle counters above the limit."""
        if len(self._served) > MAX_IDLE_TENANTS:
            waiting = self._waiting()
            idle = [tenant for tenant in self._served if tenant not in waiting]
            for tenant in idle[: max(len(idle) - MAX_IDLE_TENANTS, 0)]:
                del self._served[tenant]


def _num_requests(tenants: Mapping[str, deque[RequestHandle]]) -> int:
    return sum(map(len, tenants.values()))
