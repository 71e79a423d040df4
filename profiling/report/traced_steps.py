"""A step of an engine as a profile shows it: what the host did, and what the device did for it.

Standard library only.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .export import Activity

__all__ = ["Phase", "TracedLaunch", "TracedStep", "covered_ns", "in_order", "is_timed", "relate"]

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class TracedLaunch:
    """A decode step, or a chunk of prompts, on the device: a range `replay` or `prefill`.

    Attributes:
        phase: which of the two.
        numbers: its structured payload (`dictionary.STEP_NUMBERS`); empty where the export has
            none.
        activities: what the device did for it, in the order of their begin.
    """

    phase: Phase
    numbers: Mapping[str, int]
    activities: tuple[Activity, ...]


@dataclass(slots=True)
class TracedStep:
    """One step; times in nanoseconds, None where the profile does not tell.

    Attributes:
        thread: that ran it, process included.
        number: of the step.
        launches: on the device: decoding, a chunk of prompts, or both in this order.
        started_ns, ended_ns: of the turn, on the clock of the trace.
        plan_ns, launch_ns, commit_ns: of the turn; what it commits may be an earlier step.
        wait_ns: that the host waited for the device (`cudaEventSynchronize` and the like).
        calls: of the host that started kernels or graphs.
        around: activities that belong to no launch: inputs, outputs, copies of blocks.
        devices: numbers of the devices that worked on it.
        device_started_ns, device_ended_ns: of the first and the last activity.
        busy_ns: of these, with at least one activity.
        in_thread_ns: that the device, where it is the CPU, worked in the thread itself.
        gap_ns: that the device had nothing to do between the step before and this one.
        step_ns: from the end of the step before to the end of this one, on the device.
    """

    thread: int
    number: int | None
    launches: tuple[TracedLaunch, ...]
    started_ns: int
    ended_ns: int
    plan_ns: int
    launch_ns: int
    commit_ns: int
    wait_ns: int
    calls: int
    around: tuple[Activity, ...]
    devices: tuple[int, ...] = ()
    device_started_ns: int | None = None
    device_ended_ns: int | None = None
    busy_ns: int | None = None
    in_thread_ns: int = 0
    gap_ns: int | None = None
    step_ns: int | None = None

    @property
    def phase(self) -> str:
        """What it ran."""
        return "+".join(launch.phase for launch in self.launches)

    @property
    def host_ns(self) -> int:
        """What the host itself worked."""
        return self.ended_ns - self.started_ns - self.wait_ns - self.in_thread_ns

    @property
    def device_ns(self) -> int | None:
        """From the first activity to the last one."""
        if self.device_started_ns is None or self.device_ended_ns is None:
            return None
        return self.device_ended_ns - self.device_started_ns

    def sum_of(self, name: str) -> int | None:
        """Return a number of the payload, summed over its launches."""
        values = [launch.numbers[name] for launch in self.launches if name in launch.numbers]
        return sum(values) if values else None

    def first_of(self, name: str) -> int | None:
        """Return a number of the payload, of its first launch that has it."""
        for launch in self.launches:
            if name in launch.numbers:
                return launch.numbers[name]
        return None

    def activities(self) -> Iterator[Activity]:
        """All that the device did for it."""
        for launch in self.launches:
            yield from launch.activities
        yield from self.around

    def time_in_thread(self, work: Sequence[tuple[int, int]]) -> None:
        """Set what the device did where it is the CPU: begin and end of each launch, in order."""
        self.device_started_ns, self.device_ended_ns = work[0][0], work[-1][1]
        self.busy_ns = self.in_thread_ns = sum(end - start for start, end in work)
        self.launch_ns -= self.in_thread_ns

    def time_device(self) -> None:
        """Set what its activities say of the device."""
        timed = in_order(filter(is_timed, self.activities()))
        self.devices = tuple(sorted({activity.device for activity in timed}))
        if timed:
            self.device_started_ns = timed[0].start_ns
            self.device_ended_ns = max(activity.end_ns for activity in timed)
            self.busy_ns = covered_ns(timed)


def relate(steps: Sequence[TracedStep]) -> None:
    """Set what needs the step before, of the steps of one thread in their order.

    Behind another engine's step, and behind one that was left out, nothing is set.
    """
    for before, step in itertools.pairwise(steps):
        if before.number is not None and step.number != before.number + 1:
            continue
        if (
            before.device_ended_ns is not None
            and step.device_ended_ns is not None
            and step.device_started_ns is not None
        ):
            step.gap_ns = max(0, step.device_started_ns - before.device_ended_ns)
            step.step_ns = step.device_ended_ns - before.device_ended_ns


def covered_ns(activities: Iterable[Activity]) -> int:
    """Return how long at least one of some activities ran, given in the order of their begin."""
    total, until = 0, 0
    for activity in activities:
        begin = max(activity.start_ns, until)
        if activity.end_ns > begin:
            total += activity.end_ns - begin
            until = activity.end_ns
    return total


def is_timed(activity: Activity) -> bool:
    """Return whether the tool could time an activity: CUPTI says 0 for both ends if not."""
    return activity.end_ns >= activity.start_ns > 0


def in_order(activities: Iterable[Activity]) -> list[Activity]:
    """Return activities in the order of their begin."""
    return sorted(activities, key=lambda a: (a.start_ns, a.end_ns, a.node_id or 0, a.name))
