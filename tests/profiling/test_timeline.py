import gc
import sys
import threading
from collections import deque
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stepgraph.profiling.timeline import NOT_TIMED, RECORD_FIELDS, StepRecord, Timeline

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
