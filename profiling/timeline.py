"""A ring buffer of the times of the last steps. Standard library only."""

import mmap
import struct
from dataclasses import dataclass, fields
from typing import Final

# A record is thirteen 64-bit integers in one buffer: no object for the garbage collector to visit,
# however long the engine runs. Native order and alignment, which the struct module packs faster.
_LAYOUT = struct.Struct("@13q")
_INTEGER = struct.Struct("@q")
_DEVICE_NS = 9 * _INTEGER.size  # where in a record it is
NOT_TIMED: Final = -1
"""`device_ns` of a packed record without a device time."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Times of one step in nanoseconds; no time is counted twice."""

    step: int
    rows: int
    """Decoding rows, without padding."""
    bucket: int
    prefill_tokens: int
    """Computed prompt tokens, without padding."""
    started_ns: int
    """Start of the plan phase, on the clock of `time.perf_counter_ns`."""
    plan_ns: int
    launch_ns: int
    """Time to launch the step, without device time."""
    commit_ns: int
    """Time to process tokens; with a step in flight, the previous step's."""
    wait_ns: int
    """Time that the host waited for the device in this step."""
    device_ns: int | None
    """None if not timed, or not yet known: an asynchronous device is timed on request only
    (`Engine.device_timing`). A CPU runs the step during the launch; that time is in here alone."""
    joined: int = 0
    """Admitted requests."""
    blocks_in_use: int = 0
    """Cache blocks held by requests at the launch."""
    collected_ns: int = 0
    """Time of Python's garbage collector, included in the phases that it interrupted."""
    is_async_device: bool = False
    """If so, `device_ns` is not part of the time from start to end."""

    @property
    def ended_ns(self) -> int:
        """End of the commit phase, when outputs are ready, on the clock of `started_ns`."""
        device_ns = 0 if self.is_async_device or self.device_ns is None else self.device_ns
        return self.started_ns + self.host_ns + self.wait_ns + device_ns

    @property
    def host_ns(self) -> int:
        """Host time in nanoseconds: plan + launch + commit, without wait and device time."""
        return self.plan_ns + self.launch_ns + self.commit_ns


RECORD_FIELDS: Final = tuple(f.name for f in fields(StepRecord) if f.name != "is_async_device")
"""The values of a packed record, in order (see `Timeline.copy_since`); -1 for no `device_ns`."""


class Timeline:
    """The last `capacity` steps (112 bytes each), in memory that is reserved at once.

    The operating system provides its pages when steps first write to them, one in 36 steps: all of
    them take milliseconds, which the start of an engine would wait for.

    Not thread-safe, except `copy_since` and `last`: call the other methods in the thread that runs
    the steps, or between steps.
    """

    def __init__(self, capacity: int, *, is_async_device: bool = False) -> None:
        self.capacity = capacity
        self.is_async_device = is_async_device
        # A forked process has its own copy.
        self._buffer = mmap.mmap(-1, capacity * _LAYOUT.size, flags=mmap.MAP_PRIVATE)
        self._recorded = 0

    @property
    def recorded(self) -> int:
        """The number of steps recorded since the start or the last `clear`, kept or not."""
        return self._recorded

    def __len__(self) -> int:
        return min(self._recorded, self.capacity)

    def record(self, *values: int) -> None:
        """Append one step, the values of `RECORD_FIELDS`; replaces the oldest if the ring is full.

        Raises:
            struct.error: a value is not a 64-bit integer.
        """
        _LAYOUT.pack_into(self._buffer, self._recorded % self.capacity * _LAYOUT.size, *values)
        self._recorded += 1

    def set_device_ns(self, step: int, device_ns: int) -> None:
        """Set the device time of a recorded step; ignored if its record has been overwritten.

        The search begins at the latest record, because steps in flight are the latest ones.

        Raises:
            struct.error: `device_ns` is not a 64-bit integer.
        """
        for age in range(1, len(self) + 1):
            record = (self._recorded - age) % self.capacity * _LAYOUT.size
            (number,) = _INTEGER.unpack_from(self._buffer, record)
            if number <= step:
                if number == step:
                    _INTEGER.pack_into(self._buffer, record + _DEVICE_NS, device_ns)
                return

    def records(self) -> list[StepRecord]:
        """Return the kept steps, oldest first."""
        return [*map(self._unpack, _LAYOUT.iter_unpack(self._copied(len(self), self._recorded)))]

    def latest(self) -> StepRecord | None:
        """Return the last step, or None before the first."""
        end = self._recorded
        return self._unpack(_LAYOUT.unpack(self._copied(1, end))) if end else None

    def copy_since(self, recorded: int) -> tuple[int, bytes]:
        """Copy the steps after the first `recorded` ones, at most `capacity` - 1. For any thread.

        Returns:
            The value of `recorded` up to which it copied; and the steps, oldest first, each as
            64-bit integers in native order, named by `RECORD_FIELDS`.
        """
        end = self._recorded
        count = min(max(end - recorded, 0), self.capacity)
        copied = self._copied(count, end)
        # Steps recorded meanwhile have replaced the oldest; one of them may be uncounted yet.
        replaced = self._recorded + 1 - self.capacity - (end - count)
        return end, copied[max(replaced, 0) * _LAYOUT.size :]

    def last(self, count: int) -> list[StepRecord]:
        """Return at most the last `count` steps, oldest first. For any thread."""
        _, copied = self.copy_since(max(self._recorded - count, 0))
        return [*map(self._unpack, _LAYOUT.iter_unpack(copied))]

    def _copied(self, count: int, end: int) -> bytes:
        """Return the records of the last `count` of the first `end` steps, oldest first."""
        first, size = (end - count) % self.capacity * _LAYOUT.size, count * _LAYOUT.size
        ring = memoryview(self._buffer)
        return bytes(ring[first : first + size]) + bytes(ring[: max(first + size - len(ring), 0)])

    def _unpack(self, values: tuple[int, ...]) -> StepRecord:
        *before, device_ns, joined, blocks_in_use, collected_ns = values
        timed = None if device_ns == NOT_TIMED else device_ns
        after = (joined, blocks_in_use, collected_ns, self.is_async_device)
        return StepRecord(*before, timed, *after)  # type: ignore[call-arg,arg-type]

    def clear(self) -> None:
        """Remove all records."""
        self._recorded = 0
