"""A ring of the last steps and where their time went. Standard library only."""

import struct
from dataclasses import dataclass

# A record is eleven 64-bit integers. Packed into one buffer a record leaves no object behind:
# nothing for the garbage collector to visit, however long the engine runs.
_LAYOUT = struct.Struct("=11q")
_NOT_TIMED = -1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Where the time of one step went; times in nanoseconds, none counted twice.

    Attributes:
        step: number of the step.
        rows: rows that decoded, without padding.
        bucket: the bucket that the step ran in.
        prefill_tokens: prompt tokens that the step ran, without padding; 0 for a decode step.
        started_ns: when the plan began, on the clock of `time.perf_counter_ns`.
        plan_ns: deciding what the step does.
        launch_ns: starting it, without what the device did meanwhile.
        commit_ns: taking in its tokens, without the wait for them.
        wait_ns: what the host waited for the device.
        device_ns: what the device worked on the step; None where that was not timed. A device that
            runs in the caller's thread works inside the launch: there this is taken out of
            `launch_ns`.
        steps: decode steps that were launched together, of whose tokens all of this is the time.
    """

    step: int
    rows: int
    bucket: int
    prefill_tokens: int
    started_ns: int
    plan_ns: int
    launch_ns: int
    commit_ns: int
    wait_ns: int
    device_ns: int | None
    steps: int = 1

    @property
    def host_ns(self) -> int:
        """What the host itself worked: plan + launch + commit, no waiting, no device."""
        return self.plan_ns + self.launch_ns + self.commit_ns


def _unpack(values: tuple[int, ...]) -> StepRecord:
    *times, device_ns, steps = values
    step, rows, bucket, prefill_tokens, started, plan, launch, commit, wait = times
    return StepRecord(
        step,
        rows,
        bucket,
        prefill_tokens,
        started,
        plan,
        launch,
        commit,
        wait,
        None if device_ns == _NOT_TIMED else device_ns,
        steps,
    )


class Timeline:
    """The last `capacity` steps, in memory taken once.

    `record` belongs to the one thread that runs the steps; `records` to the same thread.

    Args:
        capacity: number of steps that are kept (88 bytes each).

    Raises:
        ValueError: if `capacity` is not positive.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a timeline keeps at least one step")
        self._capacity = capacity
        self._buffer = bytearray(capacity * _LAYOUT.size)
        self._recorded = 0

    @property
    def capacity(self) -> int:
        """The number of steps that are kept."""
        return self._capacity

    @property
    def recorded(self) -> int:
        """The number of steps recorded since the start or the last `clear`, kept or not."""
        return self._recorded

    def __len__(self) -> int:
        return min(self._recorded, self._capacity)

    def record(
        self,
        step: int,
        rows: int,
        bucket: int,
        prefill_tokens: int,
        started_ns: int,
        plan_ns: int,
        launch_ns: int,
        commit_ns: int,
        wait_ns: int,
        device_ns: int | None = None,
        steps: int = 1,
    ) -> None:
        """Keep one step, in place of the oldest once the ring is full. See `StepRecord`.

        Raises:
            struct.error: if a value is no integer of 64 bits.
        """
        _LAYOUT.pack_into(
            self._buffer,
            self._recorded % self._capacity * _LAYOUT.size,
            step,
            rows,
            bucket,
            prefill_tokens,
            started_ns,
            plan_ns,
            launch_ns,
            commit_ns,
            wait_ns,
            _NOT_TIMED if device_ns is None else device_ns,
            steps,
        )
        self._recorded += 1

    def records(self) -> list[StepRecord]:
        """Return the kept steps, oldest first."""
        kept = memoryview(self._buffer)[: len(self) * _LAYOUT.size]
        ring = [_unpack(values) for values in _LAYOUT.iter_unpack(kept)]
        oldest = self._recorded % self._capacity if self._recorded > self._capacity else 0
        return ring[oldest:] + ring[:oldest]

    def clear(self) -> None:
        """Forget every step. A benchmark does so between its cases."""
        self._recorded = 0
