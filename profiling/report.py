"""The command `stepgraph report`: where each step of an nsys profile spent its time.

It reads the SQLite file that nsys exports. The schema is in the user guide of NVIDIA Nsight Systems
("SQLite Schema Reference"). It differs between versions, and a table exists only where it has
rows: so no table and no column is taken for granted. Every query states its order, because nsys
promises none.

A turn of the engine is a range `step` with ranges inside; it ends when the host is done, and the
device may work on the step long after that. The device's work for a step is therefore found
through the CUDA calls of the same thread within the range: a call and its activities share a
correlation id.

Times are in µs. Standard library only.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import sqlite3
import struct
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from . import ranges
from .atomic_write import WriteError, write_file
from .command_line import CommandParser
from .kernel_names import (
    OTHER,
    SUFFIX,
    DeviceWork,
    KernelNames,
    NamesFileError,
    Node,
    load,
    nodes_of_replay,
)
from .markdown import aligned
from .nsys import GraphTrace, export_command
from .ranges import StepNumbers
from .roofline import floor_seconds
from .stats import Summary, covered

__all__ = ["ExportError", "Report", "Step", "main", "read_report", "report_text"]

SCHEMA_VERSION: Final = 1
MOST_ROWS: Final = 100
"""Maximum rows of a printed table; --json holds all."""

AROUND: Final = "around"
"""The phase of the device's work before and after the launches of a step: inputs, outputs."""
_PHASES: Final = {
    ranges.REPLAY: "decode",
    ranges.VERIFY: "verify",
    ranges.PREFILL: "prefill",
}
_ORDER: Final = (*_PHASES.values(), AROUND)

_WAITS: Final = re.compile(r"cu(da)?(Event|Stream|Device|Ctx)Synchronize")
_LAUNCHES: Final = re.compile(r"cu(da)?(GraphLaunch|Launch(Cooperative)?Kernel)")

_PUSH_POP, _START_END, _DOMAIN_CREATE = 59, 60, 75
"""`eventType` in NVTX_EVENTS."""
_SIGNATURE: Final = frozenset({ranges.STEP, ranges.PLAN, ranges.LAUNCH})
"""Ranges that identify the project's domain where its creation was not recorded, because it came
before the profile began."""
_COPY_KINDS: Final = {1: "host to device", 2: "device to host", 8: "device to device"}
"""`copyKind` (CUpti_ActivityMemcpyKind)."""
_KINDS: Final = {
    "KERNEL": "kernel",
    "MEMCPY": "memcpy",
    "MEMSET": "memset",
    "GRAPH_TRACE": "graph",
}
"""Suffix of the table of activities -> kind."""
_NUMBERS: Final = struct.Struct(f"<{len(StepNumbers._fields)}q")
_PAIRS: Final = re.compile(rf'"({"|".join(StepNumbers._fields)})": *(-?\d{{1,19}})\b')


class ExportError(ValueError):
    """A file that is not an export of nsys, or that holds nothing to report."""


class Range(NamedTuple):
    """A range of the project's domain, or a call of the CUDA API."""

    name: str
    start_ns: int
    end_ns: int
    value: int | None = None
    """Its integer payload; of a call its correlation id."""
    numbers: Mapping[str, int] = MappingProxyType({})
    """The fields of its structured payload by name, if the export holds it."""


class Activity(NamedTuple):
    """Work of the device."""

    start_ns: int
    """0 if CUPTI could not time it."""
    end_ns: int
    kind: str
    """A kernel, a copy, a fill, or "graph": a whole CUDA graph whose nodes were not traced."""
    name: str
    correlation: int
    node_id: int | None

    @property
    def is_timed(self) -> bool:
        """Whether CUPTI could time it."""
        return self.end_ns >= self.start_ns > 0


@dataclass(frozen=True, slots=True)
class Launch:
    """A range `replay`, `verify` or `prefill`, and its work on the device."""

    phase: str
    numbers: Mapping[str, int]
    activities: list[Activity]


@dataclass(slots=True)
class Step:
    """One step; None where the profile does not tell. docs/profiling.md describes the columns."""

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
    launches: int
    gap_us: float | None = None
    step_us: float | None = None
    parts: list[Launch] = field(default_factory=list, repr=False)
    """What it launched: decoding, a chunk of prompts, or both in this order."""
    around: list[Activity] = field(default_factory=list, repr=False)
    """Work of the device that belongs to neither: inputs, outputs, copies of blocks."""
    device_ns: tuple[int, int] | None = None
    """Begin of the first and end of the last activity, on the clock of the trace."""


STEP_COLUMNS: Final = tuple(Step.__dataclass_fields__)[:-3]
"""The fields of a step in the JSON."""


@dataclass(frozen=True, slots=True)
class Case:
    """The `n` steps of one phase and bucket, and their times in µs; None: not known of any step."""

    phase: str
    bucket: int | None
    n: int
    step_us: Summary | None
    device_us: Summary | None
    gap_us: Summary | None
    host_us: Summary | None


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation over all launches of a phase.

    Attributes:
        phase: "decode", "verify", "prefill" or "around".
        name: of the operation; of a kernel that no captured node matches in brackets.
        activities: mean number of kernels, copies and fills per launch.
        us: their total time per launch in µs, over the launches that have them.
        share: of the device time of these launches. Shares add up to less than 1 if the device is
            idle between activities, to more if some overlap.
        fraction: of the roofline: bytes to read ÷ bandwidth ÷ time; None where unknown.
    """

    phase: str
    name: str
    activities: float
    us: Summary
    share: float
    fraction: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """A profile.

    Attributes:
        trace: the export.
        graph_trace: how CUDA graphs were traced; None: none was.
        known: the names of captured nodes; empty without such a file.
        steps: thread after thread, in order.
        cases: by phase and bucket.
        operations: by phase, then the most expensive first.
        idle: by phase, the share of device time without any activity.
        notes: caveats about the numbers.
    """

    trace: Path
    graph_trace: GraphTrace | None
    known: KernelNames
    steps: list[Step]
    cases: list[Case]
    operations: list[Operation]
    idle: dict[str, float]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        known = self.known
        return {
            "schema_version": SCHEMA_VERSION,
            "trace": str(self.trace),
            "graph_trace": self.graph_trace,
            **{name: getattr(known, name) for name in ("model", "device", "bandwidth_gb_s")},
            "notes": self.notes,
            "cases": [asdict(case) for case in self.cases],
            "operations": [asdict(operation) for operation in self.operations],
            "idle": self.idle,
            "steps": [{name: getattr(step, name) for name in STEP_COLUMNS} for step in self.steps],
        }


def read_report(trace: Path, names_path: Path | None = None) -> Report:
    """Read an export and the names of captured nodes, and summarise them.

    Args:
        trace: the export, NAME.sqlite.
        names_path: the file of names; None: NAME.kernels.json, if it exists.

    Raises:
        ExportError: the export is missing or damaged, or has no step of an engine.
        NamesFileError: the file of names cannot be read, or is of another version.
    """
    default = trace.with_name(trace.stem + SUFFIX)
    path = default if names_path is None and default.exists() else names_path
    known = KernelNames() if path is None else load(path)
    export = _Export(trace)
    notes: list[str] = []
    steps = list(_steps(export, notes))
    tally = _Tally(known)
    for step in steps:
        tally.add(step)
    if tally.whole_graphs:
        notes.append(
            f"{tally.whole_graphs:,} launches were traced as whole graphs, so no operations of"
            " them: profile again with --graph-trace node"
        )
    if tally.activities and path is None:
        notes.append(
            "no names of captured nodes, so kernels go by their own: a profile of bench.py writes"
            f" them next to the trace (NAME{SUFFIX}), or give --names"
        )
    if tally.activities and path is not None and not tally.matched:
        notes.append(f"no kernel is one of a captured step of {path}: is it of another engine?")
    operations, idle = tally.operations(), tally.idle()
    cases = list(_cases(steps))
    return Report(trace, export.graph_trace, known, steps, cases, operations, idle, notes)


# The export --------------------------------------------------------------------------------------


def _process_of(identifier: int) -> int:
    """The process in a `globalTid` or `globalPid`: bits 24 to 47, below them the thread.

    The bits above (hardware, virtual machine) may be set in one of the two only.
    """
    return identifier & 0xFFFFFF000000


class _Export:
    """Ranges of the project's domain and CUDA calls by thread, activities by process and call.

    Each list is in the order of begin; of ranges that begin together the outer one comes first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranges: dict[int, list[Range]] = defaultdict(list)
        self.cut = 0
        """Steps that had not ended when the profile did."""
        self.calls: dict[int, list[Range]] = defaultdict(list)
        self.activities: dict[tuple[int, int], list[Activity]] = defaultdict(list)
        self.devices: set[int] = set()
        if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
            command = shlex.join(export_command(path))
            raise ExportError(f"{path} is a report of nsys; export it first: {command}")
        try:
            path.open("rb").close()
            uri = path.absolute().as_uri() + "?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                self._read(connection)
        except OSError as error:
            raise ExportError(f"cannot read {path}: {error.strerror}") from error
        # A damaged schema may be quoted in the message of an error, which then is not UTF-8.
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise ExportError(f"{path} is damaged, or not a SQLite file: {error}") from error
        kinds = {a.kind for found in self.activities.values() for a in found}
        replays = any("GraphLaunch" in c.name for found in self.calls.values() for c in found)
        traced = self.activities and replays
        self.graph_trace: GraphTrace | None = (
            "graph" if "graph" in kinds else "node" if traced else None
        )

    def work_of(self, thread: int, calls: Iterable[Range]) -> list[Activity]:
        """Return the work that some calls of a thread launched, in the order of its begin."""
        keys = [(_process_of(thread), call.value or 0) for call in calls]
        return _in_order(a for key in keys for a in self.activities.get(key, ()))

    def _read(self, connection: sqlite3.Connection) -> None:
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        columns: dict[str, set[str]] = defaultdict(set)
        for table, column in connection.execute(
            "SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c"
            " WHERE t.type = 'table' ORDER BY t.name"
        ):
            columns[table].add(column)
        if "NVTX_EVENTS" not in columns:
            raise ExportError(
                f"{self.path} is not an export of nsys with NVTX ranges: profile with -t cuda,nvtx"
            )

        def select(table: str, wanted: str) -> Iterator[tuple[Any, ...]]:
            """Rows in the order of their columns; NULL for columns that the table lacks."""
            known = columns.get(table)
            if known is None:
                return iter(())
            names = [f'"{name}"' if name in known else "NULL" for name in wanted.split()]
            by = ", ".join(names)
            return connection.execute(f'SELECT {by} FROM "{table}" ORDER BY {by}')

        strings: dict[Any, Any] = dict(select("StringIds", "id value"))

        def text(text: Any, text_id: Any) -> str:
            """A message: registered ones are ids of strings, others are in the row."""
            return str(strings.get(text_id, "" if text is None else text))

        domains: dict[tuple[int, int], str] = {}
        messages: dict[tuple[int, int], set[str]] = defaultdict(set)
        found: dict[tuple[int, int], list[tuple[int, Range]]] = defaultdict(list)
        for row in select(
            "NVTX_EVENTS",
            "start end globalTid domainId eventType text textId int64Value"
            " jsonText jsonTextId binaryData",
        ):
            start, end, thread, domain, event, *name, value, json_text, json_id, binary = row
            if not all(isinstance(number, int) for number in (start, thread, domain)):
                continue
            key = _process_of(thread), domain
            if event == _DOMAIN_CREATE:
                domains[key] = text(*name)
            elif event in (_PUSH_POP, _START_END):
                messages[key].add(text(*name))
                numbers = _step_numbers(text(json_text, json_id), binary)
                ended = end if isinstance(end, int) else -1
                one = Range(text(*name), start, ended, _integer(value), numbers)
                found[key].append((thread, one))
        ours = {key for key, name in domains.items() if name == ranges.DOMAIN} or {
            key  # domain 0 has the ranges without a domain
            for key, names in messages.items()
            if key[1] and key not in domains and names >= _SIGNATURE
        }
        if not ours:
            raise ExportError(f"{self.path} has no NVTX domain {ranges.DOMAIN!r}")
        for key in sorted(ours):
            for thread, one in found[key]:
                if one.end_ns >= 0:
                    self.ranges[thread].append(one)
                self.cut += one.end_ns < 0 and one.name == ranges.STEP
        for start, end, thread, correlation, name_id in select(
            "CUPTI_ACTIVITY_KIND_RUNTIME", "start end globalTid correlationId nameId"
        ):
            if all(isinstance(number, int) for number in (start, end, thread, correlation)):
                self.calls[thread].append(Range(text(None, name_id), start, end, correlation))
        for every in (self.ranges, self.calls):
            for of_thread in every.values():
                of_thread.sort(key=lambda one: (one.start_ns, -one.end_ns))
        for table, kind in _KINDS.items():
            for start, end, device, process, correlation, node, short, full, way in select(
                f"CUPTI_ACTIVITY_KIND_{table}",
                "start end deviceId globalPid correlationId graphNodeId"
                " shortName demangledName copyKind",
            ):
                if not all(isinstance(n, int) for n in (start, end, process, correlation)):
                    continue  # of no call: a page fault that moved managed memory
                copied = f"copy {_COPY_KINDS[way]}" if way in _COPY_KINDS else "copy"
                kernel = text(None, short) or text(None, full)
                shown = {"kernel": kernel, "memcpy": copied, "memset": "fill"}.get(kind, kind)
                activity = Activity(start, end, kind, shown, correlation, _integer(node) or None)
                self.activities[_process_of(process), correlation].append(activity)
                self.devices.add(_integer(device) or 0)


def _in_order(activities: Iterable[Activity]) -> list[Activity]:
    """Return activities in the order of their begin."""
    return sorted(activities, key=lambda a: (a.start_ns, a.end_ns, a.node_id or 0, a.name))


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _step_numbers(text: str, binary: Any) -> dict[str, int]:
    """Return the step numbers in a structured payload: JSON, or bytes.

    Bytes (`nsys export --include-blobs=true`) are a header followed by the struct.
    """
    if isinstance(binary, bytes) and len(binary) >= _NUMBERS.size:
        values = _NUMBERS.unpack_from(binary, len(binary) - _NUMBERS.size)
        return dict(zip(StepNumbers._fields, values, strict=True))
    return {name: int(value) for name, value in _PAIRS.findall(text)}


# Steps -------------------------------------------------------------------------------------------


def _steps(export: _Export, notes: list[str]) -> Iterator[Step]:
    """Yield the complete steps of an export that launched something, thread after thread.

    Raises:
        ExportError: it has no complete step.
    """
    in_thread = not export.calls and not export.activities
    """Whether the engine's own thread is the device."""
    threads = stray = 0
    steps: list[Step] = []
    for thread, found in sorted(export.ranges.items()):
        turns = [one for one in found if one.name == ranges.STEP]
        starts = [turn.start_ns for turn in turns]
        inside: list[list[Range]] = [[] for _ in turns]
        calls: list[list[Range]] = [[] for _ in turns]
        for one, collected in itertools.chain(
            ((one, inside) for one in found if one.name != ranges.STEP),
            ((call, calls) for call in export.calls.get(thread, ())),
        ):
            index = bisect_right(starts, one.start_ns) - 1
            if index >= 0 and one.end_ns <= turns[index].end_ns:
                collected[index].append(one)
            else:
                stray += collected is inside and one.name in _PHASES
        own = [
            _step(export, thread, threads, *turn, in_thread=in_thread)
            for turn in zip(turns, inside, calls, strict=True)
            if any(one.name in _PHASES for one in turn[1])
        ]
        for before, step in itertools.pairwise(own):
            follows = before.step is None or step.step == before.step + 1
            if follows and before.device_ns is not None and step.device_ns is not None:
                step.gap_us = max(0, step.device_ns[0] - before.device_ns[1]) / 1e3
                step.step_us = (step.device_ns[1] - before.device_ns[1]) / 1e3
        threads += bool(own)
        steps += own
    if not steps:
        raise ExportError(
            f"{export.path} has no complete step in it: profile a window in which an engine steps"
        )
    if export.cut:
        notes.append(f"{export.cut} steps left out: the profile ended before the step did")
    if stray:
        notes.append(f"{stray} launches left out: outside of a complete step")
    if threads > 1:
        notes.append(f"steps of {threads} threads: gaps are between steps of one thread")
    if len(export.devices) > 1:
        notes.append(f"activities on {len(export.devices)} devices: the times of a step span them")
    if in_thread:
        notes.append(
            "no CUDA in this profile: what the device did is what ran within the ranges"
            f" {', '.join(_PHASES)}, in the engine's own thread"
        )
    every = [a for step in steps for a in _activities(step)]
    if not in_thread and not every:
        notes.append("no activity of a device in this profile, though there are CUDA calls")
    if untimed := sum(not activity.is_timed for activity in every):
        notes.append(f"{untimed} activities without a time: not in device times")
    if not any(part.numbers for step in steps for part in step.parts):
        notes.append(
            "no structured payloads, so no rows, bucket and tokens:"
            " export the report with nsys export --include-blobs=true"
        )
    return iter(steps)


def _activities(step: Step) -> Iterator[Activity]:
    return itertools.chain(step.around, *(part.activities for part in step.parts))


def _step(
    export: _Export,
    thread: int,
    number: int,
    turn: Range,
    inside: Sequence[Range],
    calls: Sequence[Range],
    *,
    in_thread: bool,
) -> Step:
    """Assemble a step from a range `step` of a thread, and the ranges and calls within it."""
    launched = [one for one in inside if one.name in _PHASES]
    parts = [
        Launch(
            _PHASES[one.name],
            one.numbers,
            export.work_of(thread, [call for call in calls if _within(call, one)]),
        )
        for one in launched
    ]
    # The device's work for an earlier step's commit does not belong to this one.
    commits = [one for one in inside if one.name == ranges.COMMIT]
    own = [call for call in calls if not any(_within(call, commit) for commit in commits)]
    taken = {activity for part in parts for activity in part.activities}
    around = [a for a in export.work_of(thread, own) if a not in taken]
    range_ns: Counter[str] = Counter()
    for one in inside:
        range_ns[one.name] += one.end_ns - one.start_ns
    wait_ns = sum(call.end_ns - call.start_ns for call in _outermost(calls, _WAITS))
    in_thread_ns = sum(range_ns[name] for name in _PHASES) if in_thread else 0
    work = _in_order([*around, *(a for part in parts for a in part.activities)])
    spans = [(a.start_ns, a.end_ns) for a in work if a.is_timed]
    if in_thread:
        spans = [(one.start_ns, one.end_ns) for one in launched]
    device_ns = (spans[0][0], max(end for _, end in spans)) if spans else None
    numbers = [part.numbers for part in parts if part.numbers]
    first: Mapping[str, int] = numbers[0] if numbers else {}

    def total(name: str) -> int | None:
        return sum(found.get(name, 0) for found in numbers) if numbers else None

    return Step(
        thread=number,
        step=first.get("step") if turn.value is None else turn.value,
        phase="+".join(part.phase for part in parts),
        rows=total("rows"),
        bucket=first.get("bucket"),
        tokens=total("tokens"),
        padding=total("padding"),
        blocks_in_use=first.get("blocks_in_use"),
        host_us=(turn.end_ns - turn.start_ns - wait_ns - in_thread_ns) / 1e3,
        wait_us=wait_ns / 1e3,
        plan_us=range_ns[ranges.PLAN] / 1e3,
        launch_us=(range_ns[ranges.LAUNCH] - in_thread_ns) / 1e3,
        commit_us=range_ns[ranges.COMMIT] / 1e3,
        device_us=None if device_ns is None else (device_ns[1] - device_ns[0]) / 1e3,
        busy_us=covered(spans) / 1e3 if spans else None,
        launches=len(_outermost(own, _LAUNCHES)),
        parts=parts,
        around=around,
        device_ns=device_ns,
    )


def _within(call: Range, one: Range) -> bool:
    return one.start_ns <= call.start_ns and call.end_ns <= one.end_ns


def _outermost(calls: Iterable[Range], names: re.Pattern[str]) -> list[Range]:
    """The calls of these names, but for those within another one."""
    found: list[Range] = []
    for call in calls:
        if names.match(call.name) and not (found and call.start_ns < found[-1].end_ns):
            found.append(call)
    return found


def _cases(steps: Iterable[Step]) -> Iterator[Case]:
    groups: dict[tuple[str, int], list[Step]] = defaultdict(list)
    for step in steps:
        groups[step.phase, -1 if step.bucket is None else step.bucket].append(step)
    for (phase, _), group in sorted(groups.items()):
        times = {}
        for name in ("step_us", "device_us", "gap_us", "host_us"):
            known = [getattr(step, name) for step in group if getattr(step, name) is not None]
            times[name] = Summary.of(known) if known else None
        yield Case(phase, group[0].bucket, len(group), **times)


# Operations --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Phase:
    """Sums over the launches of a phase."""

    launches: int = 0
    steps: int = 0
    """Decode steps: a launch may run several."""
    device_ns: int = 0
    """From the first to the last activity of each launch."""
    busy_ns: float = 0.0
    """With an activity running."""
    samples: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """For each launch that has the operation, the time of its activities in ns."""
    counts: Counter[str] = field(default_factory=Counter)
    """Activities of all launches by operation."""


class _Tally:
    """Times of operations, launch by launch."""

    def __init__(self, names: KernelNames) -> None:
        self._names = names
        self._phases: dict[str, _Phase] = defaultdict(_Phase)
        self.matched = self.activities = self.whole_graphs = 0

    def add(self, step: Step) -> None:
        """Add the launches of a step, and what belongs to none of them."""
        for part in step.parts:
            timed = [activity for activity in part.activities if activity.is_timed]
            if any(activity.kind == "graph" for activity in timed):
                self.whole_graphs += 1
            elif timed:
                phase = self._phases[part.phase]
                phase.device_ns += max(a.end_ns for a in timed) - timed[0].start_ns
                phase.busy_ns += covered((a.start_ns, a.end_ns) for a in timed)
                nodes, steps = self._nodes(part)
                phase.steps += steps
                self.activities += len(nodes)
                self.matched += sum(node is not None for node in nodes)
                self._add_launch(phase, part.activities, nodes)
        if step.device_ns is not None and step.around:
            phase = self._phases[AROUND]
            phase.device_ns += step.device_ns[1] - step.device_ns[0]
            self._add_launch(phase, step.around, [None] * len(step.around))

    def _add_launch(
        self, phase: _Phase, activities: Sequence[Activity], nodes: Sequence[Node | None]
    ) -> None:
        times: Counter[str] = Counter()
        for activity, node in zip(activities, nodes, strict=True):
            named = node is not None and node.operation != OTHER
            name = node.operation if node is not None and named else f"[{activity.name}]"
            times[name] += max(0, activity.end_ns - activity.start_ns)
            phase.counts[name] += 1
        phase.launches += 1
        for name, ns in times.items():
            phase.samples[name].append(ns)

    def _nodes(self, part: Launch) -> tuple[list[Node | None], int]:
        """Return the node of each activity, and how many decode steps the launch runs."""
        by_call: dict[int, list[Activity]] = defaultdict(list)
        for activity in part.activities:
            by_call[activity.correlation].append(activity)
        nodes: dict[Activity, Node | None] = {}
        steps = 1
        for activities in by_call.values():
            work = [DeviceWork(a.kind, a.name, a.node_id) for a in activities]
            found = nodes_of_replay(self._names, work, part.numbers.get("bucket"))
            if found is not None:
                steps = max(steps, found[0].steps)
                nodes.update(zip(activities, found[1], strict=True))
        return [nodes.get(activity) for activity in part.activities], steps

    def operations(self) -> list[Operation]:
        """Return the operations by phase, the most expensive first."""
        read: Counter[str] = Counter()
        for cost in self._names.costs:
            read[cost.operation] += cost.launches * cost.bytes
        bandwidth = self._names.bandwidth_gb_s
        rows: list[Operation] = []
        for name in sorted(self._phases, key=_ORDER.index):
            phase = self._phases[name]
            times = sorted(phase.samples.items(), key=lambda item: (-sum(item[1]), item[0]))
            for operation, samples in times:
                fraction = None
                if name == "decode" and read[operation] and sum(samples) and bandwidth is not None:
                    floor = floor_seconds(read[operation], 1e9 * bandwidth)
                    fraction = floor * phase.steps / (sum(samples) / 1e9)
                rows.append(
                    Operation(
                        name,
                        operation,
                        phase.counts[operation] / phase.launches,
                        Summary.of(ns / 1e3 for ns in samples),
                        sum(samples) / phase.device_ns if phase.device_ns else 0.0,
                        fraction,
                    )
                )
        return rows

    def idle(self) -> dict[str, float]:
        """Return by phase the share of device time in which no activity ran."""
        return {
            name: 1 - phase.busy_ns / phase.device_ns
            for name, phase in sorted(self._phases.items())
            if name != AROUND and phase.device_ns
        }


# The command -------------------------------------------------------------------------------------

_PROGRAM: Final = "stepgraph report"
_TRACING: Final = {
    "graph": "CUDA graphs were traced whole (graph): step times are undisturbed",
    "node": "CUDA graphs were traced node by node (node): that perturbs the timing; take step"
    " times from a profile with --graph-trace graph",
    None: "no CUDA graph was traced",
}
_STEPS: Final = (
    "step", "phase", "rows", "bucket", "tokens", "padding", "host µs", "wait µs", "device µs",
    "gap µs", "step µs", "launches",
)  # fmt: skip
_CASES: Final = (
    "phase", "bucket", "steps", "step µs p50/p90/p99", "device µs p50/p90/p99",
    "gap µs p50/p90/p99", "host µs p50/p90/p99",
)  # fmt: skip
_OPERATIONS: Final = (
    "phase", "operation", "activities", "µs p50", "µs p99", "n", "share", "of roofline",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        report = read_report(options.trace, options.names)
        if options.json is not None:
            if options.json.resolve() == options.trace.resolve():
                raise WriteError(options.json, "it is the trace")
            write_file(options.json, json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
    except (ExportError, NamesFileError, WriteError) as error:
        print(f"{_PROGRAM}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack µ, or a path's bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(report_text(report), flush=True)
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=_PROGRAM, description="Report where each step of an nsys profile spent its time."
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE.sqlite", help="an export of nsys")
    names = "names of captured nodes (default: TRACE.kernels.json, if it exists)"
    add("--names", type=Path, metavar="FILE", help=names)
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    return parser


def report_text(report: Report) -> str:
    """Return the report as Markdown."""
    lines = [f"# {report.trace}", "", f"- {_TRACING[report.graph_trace]}"]
    lines += [f"- note: {note}" for note in report.notes]
    cases = [
        [case.phase, _cell(case.bucket), str(case.n)]
        + [_percentiles(s) for s in (case.step_us, case.device_us, case.gap_us, case.host_us)]
        for case in report.cases
    ]
    lines += ["", "## Steps by phase and bucket", "", *aligned(_CASES, cases, 1)]
    if report.operations:
        operations = [
            [
                *(row.phase, row.name, f"{row.activities:.4g}", _cell(row.us.p50)),
                *(_cell(row.us.p99), str(row.us.n), f"{row.share:.1%}"),
                "-" if row.fraction is None else f"{row.fraction:.1%}",
            ]
            for row in report.operations
        ]
        lines += ["", "## Operations of a launch", "", *_table(_OPERATIONS, operations, 2), ""]
        lines += [
            f"- {phase}: no activity ran in {share:.1%} of the device time"
            for phase, share in report.idle.items()
        ]
    head = ("thread", *_STEPS) if any(step.thread for step in report.steps) else _STEPS
    names = [name.replace(" µs", "_us") for name in head]
    steps = [[_cell(getattr(step, name)) for name in names] for step in report.steps]
    return "\n".join([*lines, "", "## Steps", "", *_table(head, steps, 0)])


def _table(head: Sequence[str], cells: Sequence[Sequence[str]], text_columns: int) -> list[str]:
    left = len(cells) - MOST_ROWS
    more = ["", f"{left:,} more: --json FILE holds them all"] if left > 0 else []
    return [*aligned(head, cells[:MOST_ROWS], text_columns), *more]


def _percentiles(summary: Summary | None) -> str:
    """Return p50 / p90 / p99, with a dash where there are too few samples."""
    if summary is None:
        return "-"
    return " / ".join(map(_cell, (summary.p50, summary.p90, summary.p99)))


def _cell(value: float | str | None) -> str:
    """Return a time with one digit, integers and texts unchanged, a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
