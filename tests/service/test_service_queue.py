"""The admission queue against a plain model, under any load."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stepgraph.runtime.service.admission_queue import OUTPUT_WEIGHT, AdmissionQueue
from stepgraph.runtime.service.request_handle import RequestHandle

from ..rigs.service_rig import WEIGHTS, make_handle


class QueueMachine(RuleBasedStateMachine):
    """The queue against a list of its requests in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(WEIGHTS)
        self.waiting: list[RequestHandle] = []
        self.running: list[RequestHandle] = []
        self.service = dict.fromkeys([*WEIGHTS, "d"], 0.0)  # of the tenant, lifted as in the paper
        self.last = 0.0
        self.count = 0

    @rule(
        tenant=st.sampled_from([*WEIGHTS, "d"]),
        priority=st.integers(0, 2),
        tokens=st.integers(1, 50),
    )
    def push(self, tenant: str, priority: int, tokens: int) -> None:
        handle = make_handle(self.count, None, tenant=tenant, priority=priority)
        handle.num_prompt_tokens = tokens
        self.count += 1
        others = {h.tenant for h in self.waiting}
        if tenant not in others:
            least = min((self.service[other] for other in others), default=self.last)
            self.service[tenant] = max(self.service[tenant], least)
        self.waiting.append(handle)
        self.queue.push(handle)

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        urgent = min(handle.priority for handle in self.waiting)
        level = [handle for handle in self.waiting if handle.priority == urgent]
        least = min(self.service[handle.tenant] for handle in level)
        handle = self.queue.pop()
        assert handle.priority == urgent
        assert self.service[handle.tenant] == pytest.approx(least)
        assert handle is next(h for h in level if h.tenant == handle.tenant), "not the oldest"
        self.last = max(self.last, self.service[handle.tenant])
        weight = WEIGHTS.get(handle.tenant, 1.0)
        self.service[handle.tenant] += handle.num_prompt_tokens / weight
        self.waiting.remove(handle)
        self.running.append(handle)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(handle)
        self.waiting.remove(handle)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), gained=st.integers(0, 20))
    def charge(self, data: st.DataObject, gained: int) -> None:
        handle = data.draw(st.sampled_from(self.running))
        self.queue.charge(handle, handle.num_charged + gained)
        weight = WEIGHTS.get(handle.tenant, 1.0)
        self.service[handle.tenant] += OUTPUT_WEIGHT * gained / weight

    @rule(tenant=st.sampled_from([*WEIGHTS, "d", "new"]), priority=st.integers(-1, 3))
    def ahead(self, tenant: str, priority: int) -> None:
        requests, tokens = self.queue.ahead_of(tenant, priority)
        urgent = [h for h in self.waiting if h.priority < priority]
        equal = [h for h in self.waiting if h.priority == priority]
        assert len(urgent) <= requests <= len(urgent) + len(equal)
        at_least = sum(h.num_prompt_tokens for h in urgent)
        assert at_least <= tokens <= at_least + sum(h.num_prompt_tokens for h in equal)

    @invariant()
    def agrees(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.waiting)
        assert set(self.queue) == set(self.waiting)
        assert (self.queue.head() is None) == (not self.waiting)


QueueMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestQueue = QueueMachine.TestCase


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 8))
def test_the_service_of_two_backlogged_tenants_differs_by_a_bound(seed: int, rows: int) -> None:
    """The bound of the virtual token counter: 2 max(prompt, outputs in flight) over the weight."""
    rng = random.Random(seed)
    queue = AdmissionQueue(WEIGHTS)
    longest, most = rng.randint(1, 60), rng.randint(1, 40)
    service = dict.fromkeys(WEIGHTS, 0.0)
    running: list[tuple[RequestHandle, int]] = []
    count = 0

    def arrive(tenant: str) -> None:
        nonlocal count
        handle = make_handle(count, None, tenant=tenant)
        handle.num_prompt_tokens = rng.randint(1, longest)
        count += 1
        queue.push(handle)

    for tenant in WEIGHTS:
        for _ in range(rows + 1):  # it always has a waiting request
            arrive(tenant)
    bound = 2 * max(longest, OUTPUT_WEIGHT * rows * most) / min(WEIGHTS.values())
    for _ in range(400):
        while len(running) < rows:
            handle = queue.pop()
            arrive(handle.tenant)
            service[handle.tenant] += handle.num_prompt_tokens / WEIGHTS[handle.tenant]
            running.append((handle, rng.randint(1, most)))
        for handle, end in tuple(running):
            queue.charge(handle, handle.num_charged + 1)
            service[handle.tenant] += OUTPUT_WEIGHT / WEIGHTS[handle.tenant]
            if handle.num_charged == end:
                running.remove((handle, end))
        assert max(service.values()) - min(service.values()) <= bound


def test_tenants_that_come_once_take_bounded_memory() -> None:
    queue = AdmissionQueue({})
    for number in range(5000):
        handle = make_handle(number, None, tenant=f"tenant {number}")
        queue.push(handle)
        queue.pop()
        if number % 500 == 0:
            queue.check_integrity()  # which bounds the counters
