"""The timeline, against a deque; and what it says of the time of a device behind the host."""

import gc
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepgraph.profiling.timeline import NOT_TIMED, RECORD_FIELDS, StepRecord, Timeline
from stepgraph.runtime import Engine

from ..rigs.engine_rig import Open, greedy
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401

int64 = st.integers(-(2**63), 2**63 - 1)
nanoseconds = st.integers(0, 2**63 - 1)
records = st.builds(
    StepRecord,
    started_ns=int64,
    device_ns=st.none() | nanoseconds,
    **{name: nanoseconds for name in RECORD_FIELDS if name not in ("started_ns", "device_ns")},
)


def put(timeline: Timeline, record: StepRecord) -> None:
    values = [getattr(record, name) for name in RECORD_FIELDS]
    timeline.record(*(NOT_TIMED if value is None else value for value in values))


class TimelineAgainstDeque(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 7))
    def start(self, capacity: int) -> None:
        self.timeline = Timeline(capacity)
        self.oracle: deque[StepRecord] = deque(maxlen=capacity)
        self.recorded = 0
        self.steps = 0

    @rule(record=records, skipped=st.integers(0, 2))
    def record(self, record: StepRecord, skipped: int) -> None:
        """The next step, or one behind others that nobody recorded."""
        record = replace(record, step=self.steps + skipped)
        self.steps = record.step + 1
        put(self.timeline, record)
        self.oracle.append(record)
        self.recorded += 1

    @rule(age=st.integers(-2, 12), device_ns=nanoseconds)
    def set_device_ns(self, age: int, device_ns: int) -> None:
        """Of a step that is kept, is gone, was skipped, or is yet to come."""
        step = self.steps - age
        self.timeline.set_device_ns(step, device_ns)
        for index, record in enumerate(self.oracle):
            if record.step == step:
                self.oracle[index] = replace(record, device_ns=device_ns)

    @rule(since=st.integers(0, 12))
    def copy(self, since: int) -> None:
        end, copied = self.timeline.copy_since(since)
        new = min(max(self.recorded - since, 0), self.timeline.capacity - 1)
        expected = [
            -1 if value is None else value
            for record in list(self.oracle)[len(self.oracle) - new :]
            for value in (getattr(record, name) for name in RECORD_FIELDS)
        ]
        assert (end, memoryview(copied).cast("q").tolist()) == (self.recorded, expected)

    @rule()
    def clear(self) -> None:
        self.timeline.clear()
        self.oracle.clear()
        self.recorded = 0

    @invariant()
    def keeps_the_latest_oldest_first(self) -> None:
        assert self.timeline.records() == list(self.oracle)
        assert len(self.timeline) == len(self.oracle)
        assert self.timeline.recorded == self.recorded
        assert self.timeline.capacity == self.oracle.maxlen


TestTimelineAgainstDeque = TimelineAgainstDeque.TestCase
TestTimelineAgainstDeque.settings = settings(max_examples=20, stateful_step_count=30)


def test_another_thread_copies_whole_steps_without_gaps() -> None:
    timeline, width, seen = Timeline(64), len(RECORD_FIELDS), 0

    def record() -> None:
        for step in range(20_000):
            timeline.record(*[step] * width)

    writer = threading.Thread(target=record)
    writer.start()
    end = 0
    while writer.is_alive() or end < 20_000:
        end, copied = timeline.copy_since(end)
        values = memoryview(copied).cast("q").tolist()
        steps = values[::width]
        assert values == [step for step in steps for _ in range(width)]
        assert steps == [*range(end - len(steps), end)]
        seen += len(steps)
    writer.join()
    assert 0 < seen <= 20_000


def test_recording_holds_no_object_and_no_memory() -> None:
    timeline = Timeline(64)
    gc.collect()
    objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    for step in range(5000):
        timeline.record(step, 3, 4, 0, step, 11, 22, 33, 44, 55, 1, 0, 0)
    assert len(gc.get_objects()) - objects < 20
    assert sys.getallocatedblocks() - blocks < 100


def test_derived_times_of_a_record() -> None:
    timed = StepRecord(0, 3, 4, 0, 1000, 1, 20, 300, 4000, 50_000)
    assert timed.host_ns == 321, "without the wait and the device"
    assert timed.ended_ns == 55_321
    assert replace(timed, is_async_device=True).ended_ns == 5_321
    assert replace(timed, device_ns=None).ended_ns == 5_321


# Events of a device that works behind the host ----------------------------------------------------


CAPTURED = {
    "mode": "graph",
    "compile": False,
    "max_model_len": 96,
    "buckets": (1, 4),
    "prefill_chunk": 16,
}


class Rig:
    """An engine, and for each of its steps what the device will have worked on it."""

    def __init__(self, engine: Engine, graphs: FakeGraphs) -> None:
        graphs.stream.behind = True
        self.engine = engine
        self.graphs = graphs
        self.expected: dict[int, int] = {}

    def add(self, *prompts: list[int], max_tokens: int = 12) -> None:
        for prompt in prompts:
            self.engine.add_request(prompt, greedy(max_tokens))

    def step(self) -> None:
        number, logged = self.engine.stats()["steps"], len(self.graphs.log)
        self.engine.step()
        replays = [e[1] for e in self.graphs.log[logged:] if e[0] == "replay"]
        if replays:
            self.expected[number] = sum(self.graphs.graphs[i].duration_ns for i in replays)

    def drain(self) -> None:
        while self.engine.has_unfinished():
            self.step()

    def shown(self) -> dict[int, int | None]:
        return {record.step: record.device_ns for record in self.engine.timeline().records()}


@pytest.fixture
def rig(open_engine: Open, fake_graphs: FakeGraphs) -> Iterator[Rig]:
    rig = Rig(open_engine("micro", **CAPTURED), fake_graphs)
    with rig.engine.device_timing() as timeline:
        assert timeline is rig.engine.timeline()
        yield rig


def test_every_step_has_the_time_of_its_own_replays(rig: Rig) -> None:
    rig.add([1, 2, 3], [4, 5])
    for _ in range(4):
        rig.step()
    rig.add([6, 7, 8, 9], [3])
    rig.drain()
    assert rig.shown() == rig.expected
    assert len(set(rig.expected.values())) > 2, "chunks, decode steps, and both in one"
    rig.add([5, 6, 7])  # and after a pause
    rig.drain()
    assert rig.shown() == rig.expected
    for before, after in pairwise(rig.engine.timeline().records()):
        assert before.is_async_device
        assert before.started_ns < before.ended_ns < after.started_ns


def test_joins_and_blocks_are_those_of_the_step(rig: Rig) -> None:
    rig.add([1, 2, 3], [4, 5])
    shown: list[tuple[StepRecord, int]] = []
    for turn in range(30):
        if turn == 4:
            rig.add([6] * 20)
        if not rig.engine.has_unfinished():
            break
        before: Any = rig.engine.timeline().recorded
        rig.step()
        blocks = rig.engine.stats()["blocks"]
        if rig.engine.timeline().recorded > before:
            held = blocks["usable"] - blocks["free"]
            shown.append((rig.engine.timeline().records()[-1], held))
    assert [record.joined for record, _ in shown[:6]] == [2, 0, 0, 0, 1, 0]
    assert sum(record.joined for record, _ in shown) == 3
    # What finishes is given back behind the launch.
    assert all(record.blocks_in_use >= held for record, held in shown)
    assert [r.blocks_in_use for r, _ in shown[:3]] == [held for _, held in shown[:3]]
    assert shown[5][0].blocks_in_use > shown[3][0].blocks_in_use > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_on_cuda_every_finished_step_is_timed(open_engine: Open, mode: str) -> None:
    engine = open_engine("base", device="cuda", mode=mode, compile=False)
    with engine.device_timing() as timeline:
        engine.generate([[1, 2, 3]], greedy(20))
    records = timeline.records()
    assert len(records) >= 20
    first, last = records[0], records[-1]
    worked = [record.device_ns for record in records]
    assert all(ns is not None and ns > 0 for ns in worked)
    assert sum(ns or 0 for ns in worked) < last.ended_ns - first.started_ns
