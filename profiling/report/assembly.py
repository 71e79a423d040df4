"""Puts the steps of a profile together out of ranges, calls and activities.

A turn of the engine is a range `step` with ranges inside; it ends when the host is done, and the
device may work on the step long after that. What the device did for a step is therefore found
through the CUDA calls of the same thread within the range: a call and its activities share an id.
Standard library only.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from .. import dictionary
from .export import Activity, Call, Export, ExportError, Range, process_of
from .traced_steps import Phase, TracedLaunch, TracedStep, in_order, is_timed, relate

__all__ = ["TracedSteps", "traced_steps"]

_PHASES: Final[Mapping[str, Phase]] = {
    dictionary.REPLAY: "decode",
    dictionary.PREFILL: "prefill",
}
_WAITS: Final = re.compile(r"cu(da)?(Event|Stream|Device|Ctx)Synchronize")
_GRAPH_LAUNCH: Final = re.compile(r"cu(da)?GraphLaunch")
_LAUNCHES: Final = re.compile(r"cu(da)?(GraphLaunch|Launch(Cooperative)?Kernel)")


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """The complete steps of a profile, and what is to be said of the others.

    Attributes:
        steps: thread after thread, each in the order of its begin.
        graph_trace: how CUDA graphs were traced; None: none was.
        notes: sentences for the reader of the report.
    """

    steps: tuple[TracedStep, ...]
    graph_trace: Literal["graph", "node"] | None
    notes: tuple[str, ...]


def traced_steps(export: Export) -> TracedSteps:
    """Put the steps of an export together.

    Raises:
        ExportError: there is no complete step in it.
    """
    notes: list[str] = []
    activities: dict[tuple[int | None, int], list[Activity]] = defaultdict(list)
    for activity in export.activities:
        activities[activity.process, activity.correlation].append(activity)
    ranges_of: dict[int, list[Range]] = defaultdict(list)
    for found in export.ranges:
        ranges_of[found.thread].append(found)
    calls_of: dict[int, list[Call]] = defaultdict(list)
    for call in export.calls:
        calls_of[call.thread].append(call)

    in_thread = not export.calls and not export.activities
    steps: list[TracedStep] = []
    cut = stray = idle = hidden = 0
    for thread in sorted(ranges_of):
        turns = _Turns(ranges_of[thread], calls_of[thread], activities, in_thread=in_thread)
        found_steps = list(turns.steps())
        relate(found_steps)
        steps += found_steps
        cut, stray = cut + turns.cut, stray + turns.stray
        idle, hidden = idle + turns.idle, hidden + turns.hidden
    if cut:
        notes.append(f"{_count(cut, 'step')} left out: the profile ended before the step did")
    if stray:
        notes.append(f"{_count(stray, 'launch', 'launches')} left out: outside of a complete step")
    if not steps:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise ExportError(
            f"{export.path} has no step in it{why}: profile a window in which an engine steps"
        )
    if idle:
        notes.append(f"{_count(idle, 'turn')} that launched nothing left out")
    if hidden:
        notes.append(
            f"{_count(hidden, 'graph launch', 'graph launches')} of these steps left no activity of"
            " the device in the export: their device times are too short, or missing"
        )
    notes += _notes(export, steps)
    return TracedSteps(tuple(steps), export.graph_trace, tuple(notes))


def _notes(export: Export, steps: Sequence[TracedStep]) -> Iterator[str]:
    """What is to be said of the steps as they are."""
    threads = {step.thread for step in steps}
    processes = {process_of(thread) for thread in threads}
    if len(threads) > 1:
        where = _count(len(processes), "process", "processes")
        yield (
            f"steps of {_count(len(threads), 'thread')} in {where}:"
            " gaps are between steps of one thread, the summary is of all"
        )
    devices = sorted({device for step in steps for device in step.devices})
    if len(devices) > 1:
        yield f"activities on devices {', '.join(map(str, devices))}: the times of a step span them"
    if any(step.in_thread_ns for step in steps):
        yield (
            "no CUDA in this profile: what the device did is what ran within the ranges"
            f" {' and '.join(_PHASES)}, in the engine's own thread"
        )
    elif not export.activities:
        yield "no activity of a device in this profile, though there are CUDA calls"
    untimed = sum(not is_timed(activity) for step in steps for activity in step.activities())
    if untimed:
        yield f"{_count(untimed, 'activity', 'activities')} without a time: not in device times"
    if not any(launch.numbers for step in steps for launch in step.launches):
        yield (
            "no structured payloads, so no rows, bucket and tokens:"
            " export the report with nsys export --include-blobs=true"
        )


class _Turns:
    """The turns of the engine on one thread."""

    def __init__(
        self,
        ranges: Sequence[Range],
        calls: Sequence[Call],
        activities: Mapping[tuple[int | None, int], Sequence[Activity]],
        *,
        in_thread: bool,
    ) -> None:
        steps = [found for found in ranges if found.name == dictionary.STEP]
        self._steps = [(found, found.end_ns) for found in steps if found.end_ns is not None]
        self._starts = [found.start_ns for found, _ in self._steps]
        self._activities = activities
        self._in_thread = in_thread
        self._inside: list[list[tuple[Range, int]]] = [[] for _ in self._steps]
        self._calls: list[list[Call]] = [[] for _ in self._steps]
        self.cut = len(steps) - len(self._steps)
        self.stray = self.idle = self.hidden = 0
        """Launches outside of every complete step; turns that launch nothing; launches of graphs
        without activities. The latter two are counted while `steps` runs."""
        for found in ranges:
            if found.name == dictionary.STEP or found.end_ns is None:
                continue
            index = self._enclosing(found.start_ns, found.end_ns)
            if index is not None:
                self._inside[index].append((found, found.end_ns))
            elif found.name in _PHASES:
                self.stray += 1
        for call in calls:
            index = self._enclosing(call.start_ns, call.end_ns)
            if index is not None:
                self._calls[index].append(call)

    def _enclosing(self, start_ns: int, end_ns: int) -> int | None:
        """The step that something happened in."""
        index = bisect_right(self._starts, start_ns) - 1
        return index if index >= 0 and end_ns <= self._steps[index][1] else None

    def steps(self) -> Iterator[TracedStep]:
        """The turns that launch something."""
        for (turn, ended_ns), inside, calls in zip(
            self._steps, self._inside, self._calls, strict=True
        ):
            if not any(found.name in _PHASES for found, _ in inside):
                self.idle += 1
                continue
            yield self._step(turn, ended_ns, inside, calls)

    def _step(
        self,
        turn: Range,
        ended_ns: int,
        inside: Sequence[tuple[Range, int]],
        calls: Sequence[Call],
    ) -> TracedStep:
        launches = tuple(
            TracedLaunch(
                _PHASES[found.name],
                found.numbers,
                tuple(in_order(self._of(_between(calls, found.start_ns, end)))),
            )
            for found, end in inside
            if found.name in _PHASES
        )
        commits = [
            (found.start_ns, end) for found, end in inside if found.name == dictionary.COMMIT
        ]
        # What an earlier step's commit does on the device is no part of this one.
        own = [call for call in calls if not any(_within(call, *commit) for commit in commits)]
        taken = {id(activity) for launch in launches for activity in launch.activities}
        around = [activity for activity in self._of(own) if id(activity) not in taken]
        self.hidden += sum(
            _GRAPH_LAUNCH.match(call.name) is not None and not list(self._of([call]))
            for call in _outermost(own, _GRAPH_LAUNCH)
        )
        numbers = [launch.numbers["step"] for launch in launches if "step" in launch.numbers]
        step = TracedStep(
            turn.thread,
            turn.value if turn.value is not None else next(iter(numbers), None),
            launches,
            turn.start_ns,
            ended_ns,
            _total(inside, dictionary.PLAN),
            _total(inside, dictionary.LAUNCH),
            _total(inside, dictionary.COMMIT),
            sum(call.end_ns - call.start_ns for call in _outermost(calls, _WAITS)),
            len(list(_outermost(own, _LAUNCHES))),
            tuple(in_order(around)),
        )
        if self._in_thread:
            step.time_in_thread(
                [(found.start_ns, end) for found, end in inside if found.name in _PHASES]
            )
        else:
            step.time_device()
        return step

    def _of(self, calls: Iterable[Call]) -> Iterator[Activity]:
        """What the device did for some calls."""
        for call in calls:
            for process in (process_of(call.thread), None):
                yield from self._activities.get((process, call.correlation), ())


def _within(call: Call, start_ns: int, end_ns: int) -> bool:
    return start_ns <= call.start_ns and call.end_ns <= end_ns


def _between(calls: Iterable[Call], start_ns: int, end_ns: int) -> Iterator[Call]:
    return (call for call in calls if _within(call, start_ns, end_ns))


def _outermost(calls: Iterable[Call], names: re.Pattern[str]) -> Iterator[Call]:
    """The calls of these names, but for those that one of them makes itself."""
    until = 0
    for call in calls:
        if call.start_ns >= until and names.match(call.name):
            until = call.end_ns
            yield call


def _total(inside: Iterable[tuple[Range, int]], name: str) -> int:
    return sum(end - found.start_ns for found, end in inside if found.name == name)


def _count(number: int, what: str, several: str | None = None) -> str:
    return f"{number:,} {what if number == 1 else several or what + 's'}"
