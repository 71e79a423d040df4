"""Assembles the steps of a profile from ranges, calls and activities. Standard library only.

A turn of the engine is a range `step` with ranges inside; it ends when the host is done, and the
device may work on the step long after that. The device's work for a step is therefore found
through the CUDA calls of the same thread within the range: a call and its activities share a
correlation id.
"""

import itertools
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .. import ranges
from ..stats import covered
from .export import Activity, Call, Export, ExportError, Range, in_order, process_of

__all__ = ["STEP_COLUMNS", "TracedStep", "TracedPart", "traced_steps"]

_PHASES: Final = {
    ranges.REPLAY: "decode",
    ranges.VERIFY: "verify",
    ranges.PREFILL: "prefill",
}
_WAITS: Final = re.compile(r"cu(da)?(Event|Stream|Device|Ctx)Synchronize")
_GRAPH_LAUNCH: Final = re.compile(r"cu(da)?GraphLaunch")
_LAUNCHES: Final = re.compile(r"cu(da)?(GraphLaunch|Launch(Cooperative)?Kernel)")


@dataclass(frozen=True, slots=True)
class TracedPart:
    """A range `replay`, `verify` or `prefill`: its phase, step numbers and device activities."""

    phase: str
    numbers: Mapping[str, int]
    activities: list[Activity]


@dataclass(slots=True)
class TracedStep:
    """One step. Times are in µs, None where the profile does not tell.

    docs/profiling.md, "Reading the report", describes `STEP_COLUMNS`; the other fields are

    Attributes:
        parts: what it launched: decoding, a chunk of prompts, or both in this order.
        around: activities that belong to neither: inputs, outputs, copies of blocks.
        device_ns: begin of the first and end of the last activity, on the clock of the trace.
    """

    thread: int
    step: int | None
    phase: str
    rows: int | None
    bucket: int | None
    tokens: int | None
    padding: int | None
    blocks_in_use: int | None
    host_us: float
    wait_us: float
    plan_us: float
    launch_us: float
    commit_us: float
    device_us: float | None
    busy_us: float | None
    gap_us: float | None
    step_us: float | None
    launches: int
    parts: list[TracedPart]
    around: list[Activity]
    device_ns: tuple[int, int] | None

    def activities(self) -> Iterator[Activity]:
        """All work of the device for the step."""
        return itertools.chain(self.around, *(part.activities for part in self.parts))


STEP_COLUMNS: Final = tuple(TracedStep.__dataclass_fields__)[:-3]
"""The columns of `--csv`, in order."""


def traced_steps(export: Export) -> tuple[list[TracedStep], list[str]]:
    """Assemble the complete steps of an export, thread after thread, and notes for the reader.

    Raises:
        ExportError: there is no complete step in it.
    """
    threads: dict[int, tuple[list[Range], list[Call]]] = defaultdict(lambda: ([], []))
    for found in export.ranges:
        threads[found.thread][0].append(found)
    for call in export.calls:
        if call.thread in threads:
            threads[call.thread][1].append(call)
    device = _Device(export.activities, in_thread=not export.calls and not export.activities)
    skipped: Counter[str] = Counter()
    by_thread: dict[int, list[TracedStep]] = {}
    for thread in sorted(threads):
        turns = list(_turns(*threads[thread], skipped))
        if turns:
            index = len(by_thread)
            by_thread[thread] = [_step(index, turn, device, skipped) for turn in turns]
            _relate(by_thread[thread])
    steps = [step for found_steps in by_thread.values() for step in found_steps]
    notes = [
        f"{_count(skipped[what], *words)}{text}"
        for what, words, text in (
            ("cut", ["step"], " left out: the profile ended before the step did"),
            ("stray", ["launch", "launches"], " left out: outside of a complete step"),
        )
        if skipped[what]
    ]
    if not steps:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise ExportError(
            f"{export.path} has no step in it{why}: profile a window in which an engine steps"
        )
    if skipped["idle"]:
        notes.append(f"{_count(skipped['idle'], 'turn')} that launched nothing left out")
    if skipped["hidden"]:
        notes.append(
            f"{_count(skipped['hidden'], 'graph launch', 'graph launches')} of these steps left no"
            " activity of the device in the export: their device times are too short, or missing"
        )
    processes = len({process_of(thread) for thread in by_thread})
    notes += _notes(export, steps, processes, in_thread=device.in_thread)
    return steps, notes


def _notes(
    export: Export, steps: Sequence[TracedStep], processes: int, *, in_thread: bool
) -> Iterator[str]:
    """What a reader must know of the steps."""
    threads = len({step.thread for step in steps})
    if threads > 1:
        yield (
            f"steps of {_count(threads, 'thread')} in {_count(processes, 'process', 'processes')}:"
            " gaps are between steps of one thread, the summary is of all"
        )
    timed = [activity.is_timed for step in steps for activity in step.activities()]
    devices = sorted({a.device for step in steps for a in step.activities() if a.is_timed})
    if len(devices) > 1:
        yield f"activities on devices {', '.join(map(str, devices))}: the times of a step span them"
    if in_thread:
        yield (
            "no CUDA in this profile: what the device did is what ran within the ranges"
            f" {', '.join(_PHASES)}, in the engine's own thread"
        )
    elif not export.activities:
        yield "no activity of a device in this profile, though there are CUDA calls"
    if not all(timed):
        untimed = _count(timed.count(False), "activity", "activities")
        yield f"{untimed} without a time: not in device times"
    if not any(part.numbers for step in steps for part in step.parts):
        yield (
            "no structured payloads, so no rows, bucket and tokens:"
            " export the report with nsys export --include-blobs=true"
        )


class _Turn:
    """A complete range `step`, and the ranges and calls of its thread within it."""

    def __init__(self, found: Range, end_ns: int) -> None:
        self.range = found
        self.end_ns = end_ns
        self.inside: list[tuple[Range, int]] = []
        """Ranges and their ends."""
        self.calls: list[Call] = []

    @property
    def launches(self) -> list[tuple[Range, int]]:
        """The ranges that launch decoding or a chunk of prompts."""
        return [(found, end) for found, end in self.inside if found.name in _PHASES]


def _turns(own: Sequence[Range], calls: Sequence[Call], skipped: Counter[str]) -> Iterator[_Turn]:
    """Return the turns of one thread that launch something; counts the others in `skipped`."""
    steps = [found for found in own if found.name == ranges.STEP]
    turns = [_Turn(found, found.end_ns) for found in steps if found.end_ns is not None]
    starts = [turn.range.start_ns for turn in turns]
    skipped["cut"] += len(steps) - len(turns)

    def enclosing(start_ns: int, end_ns: int) -> _Turn | None:
        index = bisect_right(starts, start_ns) - 1
        return turns[index] if index >= 0 and end_ns <= turns[index].end_ns else None

    for found in own:
        if found.name == ranges.STEP or found.end_ns is None:
            continue
        turn = enclosing(found.start_ns, found.end_ns)
        if turn is not None:
            turn.inside.append((found, found.end_ns))
        elif found.name in _PHASES:
            skipped["stray"] += 1
    for call in calls:
        turn = enclosing(call.start_ns, call.end_ns)
        if turn is not None:
            turn.calls.append(call)
    for turn in turns:
        if turn.launches:
            yield turn
        else:
            skipped["idle"] += 1


class _Device:
    """The activities of the device, by the calls that launched them."""

    def __init__(self, activities: Iterable[Activity], *, in_thread: bool) -> None:
        self.in_thread = in_thread
        """Whether there is no device but the engine's own thread."""
        self._activities: dict[tuple[int | None, int], list[Activity]] = defaultdict(list)
        for activity in activities:
            self._activities[activity.process, activity.correlation].append(activity)

    def work_of(self, calls: Iterable[Call]) -> list[Activity]:
        """Return the work that some calls launched, in the order of its begin."""
        return in_order(
            [
                activity
                for call in calls
                for process in (process_of(call.thread), None)
                for activity in self._activities.get((process, call.correlation), ())
            ]
        )


def _step(thread: int, turn: _Turn, device: _Device, skipped: Counter[str]) -> TracedStep:
    """Assemble the step of a turn; counts graph launches without activities in `skipped`."""
    parts = [
        TracedPart(
            _PHASES[found.name],
            found.numbers,
            device.work_of(call for call in turn.calls if _within(call, found.start_ns, end)),
        )
        for found, end in turn.launches
    ]
    # The device's work for an earlier step's commit is no part of this one.
    commits = [(r.start_ns, end) for r, end in turn.inside if r.name == ranges.COMMIT]
    own = [call for call in turn.calls if not any(_within(call, *commit) for commit in commits)]
    taken = {id(activity) for part in parts for activity in part.activities}
    around = [activity for activity in device.work_of(own) if id(activity) not in taken]
    for call in _outermost(own, _GRAPH_LAUNCH):
        skipped["hidden"] += not device.work_of([call])
    range_ns: Counter[str] = Counter()
    for found, end in turn.inside:
        range_ns[found.name] += end - found.start_ns
    wait_ns = sum(call.end_ns - call.start_ns for call in _outermost(turn.calls, _WAITS))
    in_thread_ns = sum(range_ns[name] for name in _PHASES) if device.in_thread else 0
    if device.in_thread:
        spans = [(found.start_ns, end) for found, end in turn.launches]
    else:
        every = in_order([*around, *(a for part in parts for a in part.activities)])
        spans = [(a.start_ns, a.end_ns) for a in every if a.is_timed]
    device_ns = (spans[0][0], max(end for _, end in spans)) if spans else None

    def values(name: str) -> list[int]:
        return [part.numbers[name] for part in parts if name in part.numbers]

    def first(name: str) -> int | None:
        return next(iter(values(name)), None)

    def total(name: str) -> int | None:
        return sum(values(name)) if values(name) else None

    return TracedStep(
        thread=thread,
        step=first("step") if turn.range.value is None else turn.range.value,
        phase="+".join(part.phase for part in parts),
        rows=total("rows"),
        bucket=first("bucket"),
        tokens=total("tokens"),
        padding=total("padding"),
        blocks_in_use=first("blocks_in_use"),
        host_us=(turn.end_ns - turn.range.start_ns - wait_ns - in_thread_ns) / 1e3,
        wait_us=wait_ns / 1e3,
        plan_us=range_ns[ranges.PLAN] / 1e3,
        launch_us=(range_ns[ranges.LAUNCH] - in_thread_ns) / 1e3,
        commit_us=range_ns[ranges.COMMIT] / 1e3,
        device_us=None if device_ns is None else (device_ns[1] - device_ns[0]) / 1e3,
        busy_us=covered(spans) / 1e3 if spans else None,
        gap_us=None,
        step_us=None,
        launches=len(_outermost(own, _LAUNCHES)),
        parts=parts,
        around=around,
        device_ns=device_ns,
    )


def _relate(steps: Sequence[TracedStep]) -> None:
    """Set gap and length, of the steps of one thread in order; not across a missing step."""
    for before, step in itertools.pairwise(steps):
        follows = before.step is None or step.step == before.step + 1
        if follows and before.device_ns is not None and step.device_ns is not None:
            step.gap_us = max(0, step.device_ns[0] - before.device_ns[1]) / 1e3
            step.step_us = (step.device_ns[1] - before.device_ns[1]) / 1e3


def _within(call: Call, start_ns: int, end_ns: int) -> bool:
    return start_ns <= call.start_ns and call.end_ns <= end_ns


def _outermost(calls: Iterable[Call], names: re.Pattern[str]) -> list[Call]:
    """The calls of these names, but for those within another one."""
    found: list[Call] = []
    for call in calls:
        if names.match(call.name) and not (found and call.start_ns < found[-1].end_ns):
            found.append(call)
    return found


def _count(number: int, what: str, several: str | None = None) -> str:
    return f"{number:,} {what if number == 1 else several or what + 's'}"
