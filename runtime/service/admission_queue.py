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
from dataclasses import dataclass, field

from .request_handle import RequestHandle

__all__ = ["AdmissionQueue"]

OUTPUT_WEIGHT = 2
"""Service of an output token, in prompt tokens; the ratio of the paper's evaluation."""

MAX_IDLE_TENANTS = 1024
"""Tenants without a waiting request whose counters are kept."""


@dataclass(slots=True)
class _Level:
    """The waiting requests of one priority."""

    tenants: dict[str, deque[RequestHandle]] = field(default_factory=dict)
    num_requests: int = 0
    num_tokens: int = 0


class AdmissionQueue:
    """Handles that wait, by priority and tenant. For one thread."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Start empty; tenants that `weights` does not name have weight 1."""
        self._weights = dict(weights)
        self._levels: dict[int, _Level] = {}  # by priority; none is empty
        self._served: dict[str, float] = {}  # tokens of service over weight; oldest tenants first
        self._num_waiting: dict[str, int] = {}  # of each tenant that waits
        self._floor = 0.0  # the largest counter at which a tenant was served

    def __len__(self) -> int:
        """Number of waiting requests."""
        return sum(level.num_requests for level in self._levels.values())

    def __iter__(self) -> Iterator[RequestHandle]:
        """The waiting requests, in no particular order."""
        for level in self._levels.values():
            for queue in level.tenants.values():
                yield from queue

    def push(self, handle: RequestHandle) -> None:
        """Append a request to the queue of its priority and tenant."""
        tenant = handle.tenant
        if tenant not in self._num_waiting:
            least = min((self._served[other] for other in self._num_waiting), default=self._floor)
            self._served[tenant] = max(self._served.pop(tenant, 0.0), least)
            self._num_waiting[tenant] = 0
        self._num_waiting[tenant] += 1
        level = self._levels.setdefault(handle.priority, _Level())
        level.tenants.setdefault(tenant, deque()).append(handle)
        level.num_requests += 1
        level.num_tokens += handle.num_prompt_tokens

    def head(self) -> RequestHandle | None:
        """Return the next request, or None."""
        if not self._levels:
            return None
        tenants = self._levels[min(self._levels)].tenants
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
        tenant, level = handle.tenant, self._levels[handle.priority]
        level.tenants[tenant].remove(handle)
        level.num_requests -= 1
        level.num_tokens -= handle.num_prompt_tokens
        if not level.tenants[tenant]:
            del level.tenants[tenant]
        if not level.tenants:
            del self._levels[handle.priority]
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._forget_idle()

    def clear(self) -> None:
        """Remove all requests, and keep the service of their tenants."""
        self._levels.clear()
        self._num_waiting.clear()
        self._forget_idle()

    def charge(self, handle: RequestHandle, num_output: int) -> None:
        """Charge the output tokens of a running request to its tenant, `num_output` so far."""
        gained = num_output - handle.num_charged
        handle.num_charged = num_output
        if handle.tenant in self._served:
            self._served[handle.tenant] += OUTPUT_WEIGHT * gained / self._weight(handle.tenant)

    def ahead_of(self, tenant: str, priority: int) -> tuple[int, int]:
        """Estimate the waiting requests, and their prompt tokens, served before a new one.

        These are all of smaller priorities, and of the same priority those of the tenant itself
        with what the other tenants receive meanwhile by their weights.
        """
        requests = tokens = 0
        for value, level in self._levels.items():
            if value < priority:
                requests += level.num_requests
                tokens += level.num_tokens
            elif value == priority:
                own = len(level.tenants.get(tenant, ()))
                weights = sum(self._weight(other) for other in {*level.tenants, tenant})
                turn = (own + 1) * weights / self._weight(tenant)
                ahead = min(float(level.num_requests), turn - 1)
                requests += round(ahead)
                tokens += round(level.num_tokens * ahead / level.num_requests)
        return requests, tokens

    def check_integrity(self) -> None:
        """Assert that counts, sums and counters agree with the waiting requests."""
        counts: dict[str, int] = {}
        for level in self._levels.values():
            handles = [handle for queue in level.tenants.values() for handle in queue]
            assert len(handles) == level.num_requests > 0
            assert sum(handle.num_prompt_tokens for handle in handles) == level.num_tokens
            assert all(level.tenants.values())
            for handle in handles:
                counts[handle.tenant] = counts.get(handle.tenant, 0) + 1
        assert counts == self._num_waiting
        assert counts.keys() <= self._served.keys()
        assert len(self._served) - len(counts) <= MAX_IDLE_TENANTS

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _forget_idle(self) -> None:
        """Drop the oldest idle counters above the limit."""
        excess = len(self._served) - len(self._num_waiting) - MAX_IDLE_TENANTS
        if excess > 0:
            idle = [tenant for tenant in self._served if tenant not in self._num_waiting]
            for tenant in idle[:excess]:
                del self._served[tenant]
