"""Dispatcher and admission queue under any load: answers, tokens, order and fairness."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stepgraph.runtime import SamplingParams
from stepgraph.runtime.errors import (
    DeadlineUnreachableError,
    EngineFailedError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    SendTimeoutError,
)
from stepgraph.runtime.service.admission import OUTPUT_WEIGHT, AdmissionQueue, Dispatcher
from stepgraph.runtime.service.request_handle import HandleState, RequestHandle

from ..rigs.fake_device import oracle
from ..rigs.fake_engine import completions_of, fake_engine, params, runner_of
from ..rigs.service_rig import WEIGHTS, config, make_handle

pytestmark = pytest.mark.usefixtures("no_tracebacks")


ERRORS = (
    *(RequestError, EngineFailedError, DeadlineUnreachableError),
    *(OverloadedError, SendTimeoutError),
)


class Loop:
    """An event loop that runs each callback at once."""

    def __init__(self) -> None:
        self.closed = False

    def is_closed(self) -> bool:
        return self.closed

    def call_soon_threadsafe(self, callback: Any, *arguments: Any) -> None:
        callback(*arguments)


class DispatcherMachine(RuleBasedStateMachine):
    """Dispatcher and engine: every request is answered exactly once, with the right tokens."""

    @initialize(rows=st.integers(1, 4), blocks=st.integers(13, 40))
    def start(self, rows: int, blocks: int) -> None:
        self.options = {"max_num_seqs": rows, "num_blocks": blocks}
        self.requests = Dispatcher(
            config(
                max_queued_requests=8,
                max_queued_tokens=60,
                tenant_weights=WEIGHTS,
                max_unread_tokens=3,
                send_timeout=5.0,
            ),
            lambda: EngineUnavailableError("there is no engine"),
        )
        self.loops = [Loop(), Loop()]
        self.now = 0
        self.count = 0
        self.reads = True
        self.given: dict[RequestHandle, tuple[list[int], SamplingParams]] = {}
        self.read: dict[tuple[RequestHandle, int], list[int]] = {}
        self.answers: dict[RequestHandle, object] = {}
        self.fail_at: str | None = None
        self.reported: set[RequestHandle] = set()
        self.requests.on_ended = self.report
        self.make_engine()

    def make_engine(self) -> None:
        self.requests.engine = self.engine = fake_engine(**self.options)
        runner = runner_of(self.engine)
        for name in ("launch", "read"):
            setattr(runner, name, self.failing(name, getattr(runner, name)))

    def report(self, handle: RequestHandle) -> None:
        assert handle not in self.reported, "reported twice"
        self.reported.add(handle)

    def failing(self, name: str, call: Any) -> Any:
        def guarded(*args: Any) -> Any:
            if self.fail_at == name:
                self.fail_at = None
                raise RuntimeError(f"injected in {name}")
            return call(*args)

        return guarded

    @rule(
        prompt=st.lists(st.integers(0, 10), min_size=1, max_size=40),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        options=st.fixed_dictionaries(
            {"tenant": st.sampled_from([*WEIGHTS, "d"]), "priority": st.integers(0, 1)}
        ),
        deadlines=st.tuples(*[st.sampled_from([None, None, 0.001, 0.5, 20.0])] * 2),
        loop=st.integers(0, 1),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        options: dict[str, Any],
        deadlines: tuple[float | None, float | None],
        loop: int,
    ) -> None:
        own = params(self.count, max_tokens=max_tokens, n=n)
        due = [None if s is None else self.now + int(s * 1e9) for s in deadlines]
        handle = make_handle(
            self.count,
            self.loops[loop],
            num_completions=n,
            deadline_ns=due[0],
            first_token_deadline_ns=due[1],
            **options,
        )
        handle.num_read = 0 if self.count % 3 else None
        self.count += 1
        try:
            self.requests.register(handle)
        except OverloadedError:
            assert self.requests.limits.num_requests == 8
            return
        self.given[handle] = (prompt, own)
        self.requests.watch(handle)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def reuse_of_an_id_is_refused(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.given)))
        again = make_handle(int(handle.id[1:]), self.loops[0])
        if handle.id in self.requests.handles and self.requests.limits.num_requests < 8:
            with pytest.raises(RequestError):
                self.requests.register(again)
            self.requests.abort(again, "abort")
            assert not again.ended

    @precondition(lambda self: self.unprepared())
    @rule(data=st.data(), fails=st.sampled_from([False] * 9 + [True]))
    def prepare(self, data: st.DataObject, fails: bool) -> None:
        self.prepare_one(data.draw(st.sampled_from(self.unprepared())), fails)

    def unprepared(self) -> list[RequestHandle]:
        return [h for h in self.given if h.group is None and h.failure is None]

    def prepare_one(self, handle: RequestHandle, fails: bool = False) -> None:
        prompt, own = self.given[handle]
        try:
            if fails:
                raise RequestError("injected in the tokenizer")
            group = self.engine.prepare(prompt, own, handle.id, priority=handle.priority)
            self.requests.limits.add_tokens(handle, len(prompt))
            handle.group = group
        except (RequestError, OverloadedError) as error:
            handle.failure = error
        self.requests.admit(handle, self.now)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "deadline"]))
    def abort(self, data: st.DataObject, reason: Any) -> None:
        self.requests.abort(data.draw(st.sampled_from(list(self.given))), reason)

    @rule(seconds=st.sampled_from([0.0001, 0.01, 0.3, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)

    @rule()
    def stop_or_go_on_reading(self) -> None:
        self.reads = not self.reads

    @rule(where=st.sampled_from(["launch", "read"]))
    def fail_next(self, where: str) -> None:
        self.fail_at = where

    @rule(number=st.integers(0, 1))
    def close_loop(self, number: int) -> None:
        self.loops[number].closed = True
        self.turn()
        loop = self.loops[number]
        served = (HandleState.QUEUED, HandleState.RUNNING)
        assert not any(
            h.state in served and h.abort_reason is None
            for h in self.requests.handles.values()
            if h.loop is loop
        )
        loop.closed = False

    @rule()
    def turn(self) -> None:
        requests = self.requests
        requests.expire(self.now)
        try:
            requests.fill_rows(self.engine, self.now)
            if requests.has_rows:
                requests.deliver(self.engine.step(), self.engine, self.now)
        except EngineFailedError as error:
            requests.lose_all(error)
            self.engine.close()
            self.make_engine()
        requests.end_unreadable()
        requests.flush()

    @invariant()
    def answers_are_right_and_final(self) -> None:
        if not hasattr(self, "requests"):
            return
        self.requests.check_integrity()
        for handle, (prompt, own) in self.given.items():
            if self.reads or handle.ended:
                for delta in handle.read():
                    self.read.setdefault((handle, delta.index), []).extend(delta.token_ids)
                if handle.paused:
                    self.requests.resume(handle)
            assert handle.ended == (handle.id not in self.requests.handles)
            if not handle.ended:
                continue
            answer = (handle.error, handle.output)
            if handle in self.answers:
                assert self.answers[handle] == answer, "answered twice"
                continue
            self.answers[handle] = answer
            if handle.error is not None:
                assert isinstance(handle.error, ERRORS)
                continue
            assert handle.output is not None
            self.check_output(handle, prompt, own)

    def check_output(self, handle: RequestHandle, prompt: list[int], own: SamplingParams) -> None:
        assert handle.output is not None
        assert len(handle.output.completions) == own.n
        alone = completions_of(self.engine, prompt, own)
        for index, completion in enumerate(handle.output.completions):
            assert completion.token_ids == self.read.get((handle, index), [])
            assert completion.finish_reason in ("length", "abort", "deadline")
            wanted, _ = oracle(alone[index])
            assert completion.token_ids == wanted[: completion.num_tokens]
            if completion.finish_reason == "length":
                assert completion.num_tokens == min(own.max_tokens, 48 - len(prompt))

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        self.reads = True
        self.answers_are_right_and_final()
        for handle in self.unprepared():
            self.prepare_one(handle)
        for _ in range(3000):
            if not self.requests.handles:
                break
            self.turn()
            self.answers_are_right_and_final()
        self.answers_are_right_and_final()
        assert self.answers.keys() == self.given.keys() == self.reported
        assert self.requests.limits.num_requests == self.requests.limits.num_tokens == 0
        self.engine.check_integrity()
        blocks = self.engine.stats()["blocks"]
        assert blocks["free"] == blocks["usable"]
        self.engine.close()


DispatcherMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestDispatcher = DispatcherMachine.TestCase


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
        assert bool(self.queue) == bool(self.waiting)


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
