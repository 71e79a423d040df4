"""Scheduler and step loop over a fake device, on which any mistake of theirs changes the tokens.

The fake device needs no tensors but keeps what a real one keeps: block tables, newest tokens,
positions and sampling state by row, keys and values by slot. Nothing on it is ever cleaned up. The
value it writes for a token depends on the values it finds at the positions before, and the token
it samples depends on all of them and on the row's seed. So a wrong or lost block, a stale row, a
token too many or a missed recomputation shows as an output that differs from that of the plain
sequence, computed without rows and blocks.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from stepgraph.cache.kv_cache import KVCache
from stepgraph.cache.spec import FullAttentionSpec, LayerGroup
from stepgraph.runtime.loop import StepLoop
from stepgraph.runtime.request import (
    CompletionOutput,
    Request,
    RequestGroup,
    RequestOutput,
    RequestStatus,
)
from stepgraph.runtime.runner import Sampled
from stepgraph.runtime.sampling_params import SamplingParams
from stepgraph.runtime.scheduler import Scheduler, StepPlan

VOCAB = 11
GROUPS = (LayerGroup(0, FullAttentionSpec(num_kv_heads=1, head_dim=8, element_bytes=4), (0,)),)


def value_of(previous: int, token: int) -> int:
    """What is cached for a token: depends on everything before it."""
    return zlib.crc32(f"{previous} {token}".encode())


def next_token(seed: int, values: Sequence[int]) -> int:
    return zlib.crc32(f"{seed} {values}".encode()) % VOCAB


def oracle(request: Request) -> tuple[list[int], str]:
    """The output of a request that runs alone, and why it ends."""
    values: list[int] = []
    for token in request.prompt_ids:
        values.append(value_of(values[-1] if values else 0, token))
    output: list[int] = []
    while True:
        output.append(next_token(request.seed, values))
        if output[-1] in request.stop_token_ids and len(output) > request.params.min_tokens:
            return output, "stop"
        if len(output) == request.max_tokens:
            return output, "length"
        values.append(value_of(values[-1], output[-1]))


class FakeDevice:
    """Row state and cache, as steps see them."""

    def __init__(self, max_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self.cached: dict[int, int] = {}  # slot -> value
        self.tables: list[dict[int, int]] = [{} for _ in range(max_rows)]
        self.seeds = [-1] * max_rows
        self.tokens = [-1] * max_rows
        self.positions = [-1] * max_rows

    def slot(self, row: int, position: int) -> int:
        column, offset = divmod(position, self.block_size)
        return self.tables[row][column] * self.block_size + offset

    def write(self, row: int, position: int, token: int) -> None:
        previous = self.cached[self.slot(row, position - 1)] if position else 0
        self.cached[self.slot(row, position)] = value_of(previous, token)

    def sample(self, row: int, position: int) -> int:
        values = [self.cached[self.slot(row, p)] for p in range(position + 1)]
        token = next_token(self.seeds[row], values)
        self.tokens[row], self.positions[row] = token, position + 1
        return token


@dataclass(frozen=True)
class FakeLaunch:
    number: int
    bucket: int
    arrived: object
    device_ns: int
    sampled: list[Sampled]  # seen by the host when it reads the launch, not before


class FakeRunner:
    """Carries out plans on the fake device, and checks each of them on the way."""

    def __init__(self, scheduler: Scheduler, in_flight: int) -> None:
        self.scheduler = scheduler
        self.in_flight = in_flight
        self.device = FakeDevice(scheduler.max_rows, scheduler.cache.block_size)
        self.unread: deque[FakeLaunch] = deque()
        self.plans: list[StepPlan] = []
        self.sampling: list[bool] = []  # for each chunk of the last plan
        self.launched = 0

    def launch(self, number: int, plan: StepPlan) -> FakeLaunch:
        assert number == self.launched
        assert len(self.unread) <= self.in_flight
        check_plan(plan, self.scheduler)
        self.launched += 1
        self.plans.append(plan)
        self.sampling = [chunk.samples for chunk in plan.prefill]  # true of the plan at launch only
        device = self.device
        for admission in plan.admitted:
            device.seeds[admission.row] = admission.request.seed
        for update in plan.table_updates:
            device.tables[update.row][update.column] = update.block
        sampled = []
        for request in plan.decode:
            row = request.row
            assert row is not None
            position = device.positions[row]
            device.write(row, position, device.tokens[row])
            sampled.append(Sampled(request, device.sample(row, position), None))
        for chunk in plan.prefill:
            stop = chunk.start + chunk.count
            for position, token in enumerate(chunk.request.tokens(chunk.start, stop), chunk.start):
                device.write(chunk.row, position, token)
            if chunk.samples:
                sampled.append(Sampled(chunk.request, device.sample(chunk.row, stop - 1), None))
        launch = FakeLaunch(number, len(plan.decode), object(), 0, sampled)
        self.unread.append(launch)
        return launch

    def read(self, launch: FakeLaunch) -> list[Sampled]:
        assert launch is self.unread.popleft(), "launches are read in their order, once"
        return launch.sampled

    def check_integrity(self) -> None:
        assert len(self.unread) <= self.in_flight


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    """What every plan promises; requests are as the step finds them."""
    assert not plan.is_empty
    prefilled = [chunk.request for chunk in plan.prefill]
    taking_part = plan.decode + prefilled
    assert len(set(taking_part)) == len(taking_part), "nobody takes part twice"
    rows = [request.row for request in taking_part]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(scheduler.max_rows))
    assert all(chunk.row == chunk.request.row for chunk in plan.prefill)
    assert all(chunk.count >= 1 for chunk in plan.prefill)
    assert all(chunk.start == chunk.request.num_computed for chunk in plan.prefill)

    assert plan.prefill_tokens == sum(chunk.count for chunk in plan.prefill)
    assert plan.prefill_tokens <= scheduler.prefill_chunk
    assert plan.prefill_tokens + len(plan.decode) <= scheduler.max_batch_tokens
    assert len(plan.prefill) <= scheduler.max_prefill_rows

    assert set(plan.preempted).isdisjoint(taking_part)
    assert [a.request for a in plan.admitted] == prefilled[len(prefilled) - len(plan.admitted) :]
    assert not (plan.admitted and plan.preempted)
    assert sorted(plan.decode, key=lambda request: request.order) == plan.decode
    places = [(update.row, update.column) for update in plan.table_updates]
    assert len(set(places)) == len(places)
    assert {row for row, _ in places} <= set(rows)


class CountingCache(KVCache):
    """Counts what the scheduler asks of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "calls":
            self.calls[name] += 1
        return super().__getattribute__(name)


class Rig:
    """A scheduler, a loop and a fake device, and the requests given to them."""

    def __init__(
        self,
        *,
        usable_blocks: int = 100,
        block_size: int = 4,
        max_rows: int = 8,
        max_batch_tokens: int = 64,
        prefill_chunk: int = 32,
        max_prefill_rows: int = 8,
        in_flight: int = 0,
        make_cache: Callable[..., KVCache] = KVCache,
    ) -> None:
        self.cache = make_cache(GROUPS, usable_blocks + 1, block_size)
        self.scheduler = Scheduler(
            self.cache,
            max_rows=max_rows,
            max_batch_tokens=max_batch_tokens,
            prefill_chunk=prefill_chunk,
            max_prefill_rows=max_prefill_rows,
        )
        self.runner = FakeRunner(self.scheduler, in_flight)
        self.loop = StepLoop(self.scheduler, self.runner, in_flight=in_flight)  # type: ignore[arg-type]
        self.arrivals = 0

    def group(
        self,
        prompt_len: int,
        *,
        name: str | None = None,
        priority: int = 0,
        max_tokens: int = 50,
        min_tokens: int = 0,
        stop: Iterable[int] = (),
        n: int = 1,
    ) -> RequestGroup:
        self.arrivals += 1
        rng = random.Random(self.arrivals)
        prompt = [rng.randrange(VOCAB) for _ in range(prompt_len)]
        max_tokens = min(max_tokens, self.cache.capacity_tokens - prompt_len)
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), n=n)
        name = name or f"request-{self.arrivals}"
        requests = [
            Request(
                id=f"{name}/{index}",
                prompt_ids=prompt,
                params=params,
                seed=rng.getrandbits(32),
                order=(priority, self.arrivals * 1000 + index),
                max_tokens=max_tokens,
                stop_token_ids=frozenset(stop),
                detokenizer=None,
                arrival_ns=0,
            )
            for index in range(n)
        ]
        return RequestGroup(name, prompt, requests)

    def add(self, prompt_len: int, **options: Any) -> Request:
        """Queue one completion."""
        group = self.group(prompt_len, **options)
        self.loop.add(group)
        (request,) = group.requests
        return request

    def step(self, times: int = 1) -> StepPlan:
        """Run steps and return the last plan that was launched."""
        for _ in range(times):
            self.loop.step()
            self.loop.check_integrity()
        return self.runner.plans[-1]

    def drain(self, limit: int = 5000) -> list[RequestOutput]:
        outputs = []
        for _ in range(limit):
            if not self.loop.has_unfinished:
                break
            outputs += self.loop.step()
            self.loop.check_integrity()
        assert not self.loop.has_unfinished, "it goes on for ever"
        assert self.cache.num_free_blocks == self.cache.usable_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not self.runner.unread
        return outputs


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, are preempted and aborted; each output is that of the plain sequence."""

    @initialize(
        usable_blocks=st.integers(2, 10),
        block_size=st.integers(1, 4),
        max_rows=st.integers(1, 4),
        spare_tokens=st.integers(1, 8),
        prefill_chunk=st.integers(1, 9),
        max_prefill_rows=st.integers(1, 3),
        in_flight=st.integers(0, 1),
    )
    def make(self, max_rows: int, spare_tokens: int, **sizes: int) -> None:
        self.rig = Rig(max_rows=max_rows, max_batch_tokens=max_rows + spare_tokens, **sizes)
        self.unfinished: dict[str, RequestGroup] = {}
        self.aborted: set[str] = set()
        self.seen: dict[str, list[int]] = {}  # output tokens of each completion, when last shown

    @rule(
        prompt=st.integers(0, 20),
        priority=st.integers(-1, 1),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        n=st.integers(1, 3),
    )
    def add(self, prompt: int, **options: Any) -> None:
        # Few names: they come back, and find nothing that their last owner left.
        free = (name for name in "abcdefghijklmnop" if name not in self.unfinished)
        if (name := next(free, None)) is not None:
            prompt_len = 1 + prompt % (self.rig.cache.capacity_tokens - 1)
            group = self.rig.group(prompt_len, name=name, **options)
            self.rig.loop.add(group)
            self.unfinished[name] = group
            self.seen[name] = [-1] * len(group.requests)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.rig.loop.step():
                self.check_output(output)
            self.rig.loop.check_integrity()
            assert set(self.rig.loop.groups) == set(self.unfinished)

    @precondition(lambda self: self.unfinished)
    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        name = list(self.unfinished)[index % len(self.unfinished)]
        self.rig.loop.abort(self.unfinished[name])
        self.aborted.add(name)

    def check_output(self, output: RequestOutput) -> None:
        name = output.request_id
        group = self.unfinished[name]  # a finished one is shown once
        assert output.prompt_token_ids == group.prompt_ids
        assert output.finished == all(c.finish_reason for c in output.completions)
        for completion, request in zip(output.completions, group.requests, strict=True):
            self.check_completion(completion, request, name in self.aborted)
        lengths = [len(completion.token_ids) for completion in output.completions]
        assert lengths != self.seen[name] or name in self.aborted, "nothing changed"
        self.seen[name] = lengths
        if output.finished:
            del self.unfinished[name]
            self.aborted.discard(name)

    def check_completion(
        self, completion: CompletionOutput, request: Request, aborted: bool
    ) -> None:
        expected, reason = oracle(request)
        if completion.finish_reason in ("stop", "length"):
            assert (completion.token_ids, completion.finish_reason) == (expected, reason)
        else:
            assert completion.finish_reason is None or aborted
            assert completion.token_ids == expected[: len(completion.token_ids)]
            assert len(completion.token_ids) < len(expected)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "rig"):
            self.rig.loop.check_integrity()
            requests = [r for group in self.unfinished.values() for r in group.requests]
            states = Counter(request.status for request in requests)
            assert states[RequestStatus.RUNNING] == self.rig.scheduler.num_running
            assert states[RequestStatus.WAITING] == self.rig.scheduler.num_waiting
            held = [request.row for request in requests if request.row is not None]
            assert len(set(held)) == len(held) == states[RequestStatus.RUNNING]

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            for output in self.rig.drain():
                self.check_output(output)
            assert not self.unfinished


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestSchedulerAndLoop = SchedulerMachine.TestCase


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_under_heavy_preemption(seed: int, in_flight: int) -> None:
    """The machine above may choose to be idle; this one is known to be crowded."""
    rng = random.Random(seed)
    rig = Rig(
        usable_blocks=9,
        block_size=3,
        max_rows=5,
        max_batch_tokens=11,
        prefill_chunk=7,
        max_prefill_rows=2,
        in_flight=in_flight,
    )
    groups = [
        rig.group(
            rng.randint(1, 8),
            priority=rng.randint(0, 2),
            max_tokens=rng.randint(1, 18),
            stop=rng.sample(range(VOCAB), rng.randint(0, 1)),
            n=rng.randint(1, 2),
        )
        for _ in range(40)
    ]
    outputs = []
    for group in groups:
        rig.loop.add(group)
        outputs += rig.loop.step()
    outputs += rig.drain()
    finished = {output.request_id: output for output in outputs if output.finished}
    for group in groups:
        for completion, request in zip(finished[group.id].completions, group.requests, strict=True):
            assert (completion.token_ids, completion.finish_reason) == oracle(request)
    assert rig.loop.counts["preemptions"] >= 10
    assert rig.loop.counts["preemptions"] == sum(o.num_preemptions for o in finished.values())


def test_admission_is_by_priority_then_arrival() -> None:
    rig = Rig(max_rows=2)
    late, first, second, urgent = (rig.add(2, priority=p) for p in (1, 0, 0, -1))
    plan = rig.step()
    assert [a.request for a in plan.admitted] == [urgent, first]
    rig.loop.abort(rig.loop.groups["request-4"])
    assert [a.request for a in rig.step().admitted] == [second]
    rig.loop.abort(rig.loop.groups["request-2"])
    assert [a.request for a in rig.step().admitted] == [late]


def test_rows_are_given_lowest_first_and_given_back_at_once() -> None:
    rig = Rig(max_rows=3)
    requests = [rig.add(2) for _ in range(4)]
    rig.step()
    assert [request.row for request in requests] == [0, 1, 2, None]
    rig.loop.abort(rig.loop.groups["request-2"])
    assert rig.scheduler.num_running == 2
    rig.step()
    assert [request.row for request in requests] == [0, None, 2, 1]


@pytest.mark.parametrize(("prompt_len", "admitted"), [(32, True), (33, False)])
def test_admission_leaves_every_running_request_a_block(prompt_len: int, admitted: bool) -> None:
    rig = Rig(usable_blocks=10, block_size=4, prefill_chunk=64)
    rig.add(3)
    rig.step()
    assert rig.cache.num_free_blocks == 9
    newcomer = rig.add(prompt_len)  # 8 or 9 blocks, and 1 of headroom
    rig.step()
    assert (newcomer.status is RequestStatus.RUNNING) == admitted


def test_a_lone_request_may_fill_the_cache() -> None:
    rig = Rig(usable_blocks=5, block_size=4, prefill_chunk=64)
    request = rig.add(19)
    assert request.max_tokens == 1
    assert rig.drain()[-1].token_ids == oracle(request)[0]
    request = rig.add(1)
    assert rig.drain()[-1].token_ids == oracle(request)[0]
    assert rig.loop.counts["preemptions"] == 0


def test_a_request_that_does_not_fit_holds_back_those_behind_it() -> None:
    """Otherwise short prompts would keep a long one out for ever."""
    rig = Rig(usable_blocks=10, block_size=4)
    rig.add(16)
    rig.step()
    long, short = rig.add(30), rig.add(1)
    rig.step()
    assert long.status is short.status is RequestStatus.WAITING


def test_a_prompt_is_cut_into_chunks_that_meet() -> None:
    rig = Rig(prefill_chunk=4)
    request = rig.add(10)
    pieces = []
    while not request.output_ids:
        (chunk,) = rig.step().prefill
        pieces.append((chunk.start, chunk.count, *rig.runner.sampling))
    assert pieces == [(0, 4, False), (4, 4, False), (8, 2, True)]
    assert not rig.step().prefill


def test_a_chunk_holds_several_prompts() -> None:
    rig = Rig(prefill_chunk=8)
    requests = [rig.add(length) for length in (3, 2, 5, 4)]
    plan = rig.step()
    assert [(c.request, c.start, c.count) for c in plan.prefill] == [
        (requests[0], 0, 3),
        (requests[1], 0, 2),
        (requests[2], 0, 3),
    ]
    assert rig.runner.sampling == [True, True, False]
    plan = rig.step()
    assert plan.decode == requests[:2]
    assert [(c.request, c.start, c.count) for c in plan.prefill] == [
        (requests[2], 3, 2),
        (requests[3], 0, 4),
    ]


def test_a_chunk_has_at_most_so_many_prompts() -> None:
    rig = Rig(max_prefill_rows=2)
    requests = [rig.add(1) for _ in range(5)]
    assert [c.request for c in rig.step().prefill] == requests[:2]
    assert [c.request for c in rig.step().prefill] == requests[2:4]
    assert [c.request for c in rig.step().prefill] == requests[4:]


def test_decoding_rows_come_out_of_the_token_budget() -> None:
    rig = Rig(max_rows=3, max_batch_tokens=6, prefill_chunk=32)
    rig.add(1), rig.add(1)
    assert rig.step().prefill_tokens == 2
    rig.add(9)
    plan = rig.step()
    assert (len(plan.decode), plan.prefill_tokens) == (2, 4)


def test_decoding_does_not_wait_for_prompts() -> None:
    rig = Rig(prefill_chunk=2)
    decoding = rig.add(2)
    rig.step()
    rig.add(20)
    for _ in range(10):
        plan = rig.step()
        assert plan.decode == [decoding]
        assert plan.prefill_tokens == 2


@pytest.mark.parametrize(("priority", "victim"), [(0, 1), (-1, 0)])
def test_the_request_served_last_is_preempted(priority: int, victim: int) -> None:
    rig = Rig(usable_blocks=4, block_size=2)
    requests = [rig.add(2), rig.add(2, priority=priority)]
    survivor = requests[1 - victim]
    rig.step(3)  # both hold two full blocks
    assert rig.cache.num_free_blocks == 0
    plan = rig.step()
    assert plan.preempted == [requests[victim]]
    assert plan.decode == [survivor]
    assert not plan.admitted  # with the block it has just lost
    preempted = plan.preempted[0]
    assert (preempted.row, preempted.num_computed, preempted.num_preemptions) == (None, 0, 1)
    rig.drain()
    for request in requests:
        assert request.output_ids == oracle(request)[0]


def test_the_request_served_last_preempts_itself() -> None:
    rig = Rig(usable_blocks=3, block_size=4)
    first, last = rig.add(4), rig.add(3)
    rig.step(2)
    assert (first.num_computed, last.num_computed) == (5, 4)
    plan = rig.step()  # the last one needs a block, the first one does not
    assert (plan.decode, plan.preempted) == ([first], [last])


def test_a_preempted_request_is_served_before_later_ones_and_recomputes_all_it_has() -> None:
    rig = Rig(usable_blocks=4, block_size=2)
    first, last = rig.add(2), rig.add(2)
    later = rig.add(1)
    rig.step(4)
    known = last.prompt_ids + last.output_ids
    assert (last.num_preemptions, len(known)) == (1, 5)
    rig.loop.abort(rig.loop.groups["request-1"])
    plan = rig.step()
    assert first.finish_reason == "abort"
    assert plan.admitted[0].request is last
    chunk = plan.prefill[0]
    assert (chunk.request, chunk.start, chunk.count) == (last, 0, 5)
    rig.drain()
    for request in (last, later):
        assert request.output_ids == oracle(request)[0]


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_stopped_request_never_shows_the_token_it_had_under_way(in_flight: int) -> None:
    rig = Rig(in_flight=in_flight)
    probe = rig.group(3, max_tokens=6).requests[0]
    rig.arrivals -= 1  # the same prompt and seed again
    output = oracle(probe)[0]
    request = rig.add(3, max_tokens=6, stop={output[2]})
    final = rig.drain()[-1]
    assert (final.token_ids, final.finish_reason) == oracle(request)
    assert len(final.token_ids) <= 3


@pytest.mark.parametrize("in_flight", [0, 1])
def test_max_tokens_wastes_no_step(in_flight: int) -> None:
    """How long the output gets is known beforehand, so nothing is launched past it."""
    rig = Rig(in_flight=in_flight)
    rig.add(3, max_tokens=5)
    rig.drain()
    assert rig.runner.launched == 5


def test_an_aborted_request_is_reported_by_the_next_step() -> None:
    rig = Rig(max_rows=1)
    running, waiting = rig.group(3, n=1), rig.group(3, n=2)
    rig.loop.add(running)
    rig.loop.add(waiting)
    rig.step(2)
    rig.loop.abort(waiting)
    rig.loop.abort(running)
    assert rig.cache.num_free_blocks == rig.cache.usable_blocks
    outputs = {output.request_id: output for output in rig.loop.step()}
    assert set(outputs) == {running.id, waiting.id}
    assert all(output.finished for output in outputs.values())
    assert [len(c.token_ids) for c in outputs[waiting.id].completions] == [0, 0]
    assert len(outputs[running.id].token_ids) == 2
    assert not rig.loop.has_unfinished


def test_an_error_in_the_text_of_one_request_ends_that_one_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        text, stopped = "so far", None
        pushed = 0

        def push(self, token_ids: Sequence[int]) -> str:
            self.pushed += 1
            if self.pushed == 2:
                raise ZeroDivisionError("broken")
            return ""

    rig = Rig()
    healthy = rig.add(3, max_tokens=6)
    bad = rig.add(3, max_tokens=6)
    bad.detokenizer = Broken()  # type: ignore[assignment]
    finished = {o.request_id: o for o in rig.drain() if o.finished}
    failed = finished["request-2"]
    assert (failed.finish_reason, failed.text) == ("error", "so far")
    assert isinstance(failed.error, ZeroDivisionError)
    assert finished["request-1"].token_ids == oracle(healthy)[0]
    assert "request-2" in caplog.text


def operations_of(plan: Callable[[], StepPlan]) -> int:
    """Byte codes executed in scheduler.py: a cost that does not depend on the machine."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith("scheduler.py"):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plan()
    finally:
        sys.settrace(before)
    return count


def cost_of_planning(queued: int) -> list[tuple[int, Counter[str]]]:
    rig = Rig(max_rows=4, usable_blocks=12, block_size=2, make_cache=CountingCache)
    assert isinstance(rig.cache, CountingCache)
    for _ in range(queued):
        rig.loop.add(rig.group(3, max_tokens=40))
    costs = []
    plan = rig.scheduler.plan

    def counted() -> StepPlan:
        rig.cache.calls.clear()
        made: list[StepPlan] = []
        operations = operations_of(lambda: made.append(plan()) or made[0])
        costs.append((operations, rig.cache.calls.copy()))
        return made[0]

    rig.scheduler.plan = counted  # type: ignore[method-assign]
    for _ in range(20):  # admission, decoding, blocks run out, preemption, admission again
        rig.loop.step()
    assert rig.loop.counts["preemptions"] > 0
    return costs


def test_planning_costs_the_same_however_many_wait() -> None:
    assert cost_of_planning(10) == cost_of_planning(10_000)


def test_aborted_requests_do_not_pile_up_in_the_queue() -> None:
    rig = Rig(max_rows=1)
    rig.add(1)
    rig.step()
    for _ in range(20):
        groups = [rig.group(1) for _ in range(200)]
        for group in groups:
            rig.loop.add(group)
        for group in groups[1:]:  # not the head: a dead one there is dropped when it is looked at
            rig.loop.abort(group)
        rig.step()
    assert rig.scheduler.num_waiting == 20
    assert len(rig.scheduler._waiting) <= 2 * rig.scheduler.num_waiting + 64


@pytest.mark.parametrize(
    "damage",
    [
        lambda scheduler: scheduler._free_rows.append(0),
        lambda scheduler: scheduler._running.reverse(),
        lambda scheduler: scheduler._running.pop(),
        lambda scheduler: scheduler._rows.popitem(),
        lambda scheduler: setattr(scheduler, "_num_waiting", 5),
        lambda scheduler: scheduler._waiting.append(((9, 9), scheduler._running[0])),
        lambda scheduler: scheduler.cache._allocators[0]._tables.popitem(),
    ],
)
def test_integrity_check_sees_damage(damage: Callable[[Any], object]) -> None:
    rig = Rig()
    rig.add(2), rig.add(2)
    rig.step()
    damage(rig.scheduler)
    with pytest.raises(AssertionError):
        rig.scheduler.check_integrity()
