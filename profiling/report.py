"""The command `stepgraph report`: where each step of a profile spent its time.

It reads traces of torch's profiler (`trace.torch_trace`) and the SQLite file that nsys exports. The
schema of the latter is in the user guide of NVIDIA Nsight Systems ("SQLite Schema Reference"). It
differs between versions, and a table exists only where it has rows: so no table and no column is
taken for granted. Every query states its order, because nsys promises none.

Both become events as `trace` has them, with times in ns, and are named by the same functions. A
step is a range `step` that launched something; it ends when the host is done, and the device may
work on the step long after that. The device's work for a step is therefore found through the CUDA
calls of the same thread within the range: a call and its activities share a correlation id.

Times are in µs. Standard library only.
"""

import contextlib
import itertools
import json
import re
import sqlite3
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from . import ranges
from .atomic_write import WriteError, write_file
from .attribution import OTHER, SUFFIX, KernelNames, NamesFileError, load
from .command_line import CommandParser, aligned, print_text
from .nsys import GraphTrace, export_command
from .ranges import StepNumbers
from .stats import Summary, covered
from .trace import DEVICE_CATEGORIES, Event, Scopes, TraceError, end_of, name_work, read_trace

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

_WAITS: Final = re.compile(r"cu(da)?(Event|Stream|Device|Ctx)Synchronize")
_LAUNCHES: Final = re.compile(r"cu(da)?(GraphLaunch|Launch(Cooperative)?Kernel)")

_PUSH_POP: Final = 59
"""`eventType` in NVTX_EVENTS."""
_SIGNATURE: Final = frozenset({ranges.STEP, ranges.PLAN, ranges.LAUNCH})
"""Ranges that identify the project's domain: its creation, which has the name, may come before the
profile begins."""
_COPY_KINDS: Final = {1: " host to device", 2: " device to host", 8: " device to device"}
"""`copyKind` (CUpti_ActivityMemcpyKind)."""
_CATEGORIES: Final = {
    "RUNTIME": "cuda_runtime",
    "KERNEL": "kernel",
    "MEMCPY": "gpu_memcpy",
    "MEMSET": "gpu_memset",
    "GRAPH_TRACE": "graph",
}
"""Suffix of the table of activities -> category of an event: calls of CUDA and work of the devices;
`graph` is a whole CUDA graph whose nodes were not traced."""
_NUMBERS: Final = struct.Struct(f"<{len(StepNumbers._fields)}q")

Spans = list[tuple[int, int]]
"""Begin and end of events in ns, in the order of their begin."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step; None where the profile does not tell. docs/profiling.md describes the columns."""

    thread: int
    step: int | None
    phase: str
    rows: int | None
    bucket: int | None
    tokens: int | None
    padding: int | None
    host_us: float
    wait_us: float
    device_us: float | None
    gap_us: float | None
    step_us: float | None
    launches: int


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
    """An operation over all launches of a phase; on a CPU over all steps of it."""

    phase: str
    """"decode", "verify", "prefill", or "around" a launch; on a CPU the phase of the step."""
    name: str
    """Of the operation; in brackets of a kernel that no captured node matches; in parentheses of a
    range of the host, for its time outside of operations."""
    activities: float
    """Mean number of kernels, copies and fills per launch."""
    us: Summary
    """Their total time per launch in µs, over the launches that have them."""
    share: float
    """Of the device time of these launches. Shares add up to less than 1 if the device is idle
    between activities, to more if some overlap."""
    fraction: float | None
    """Of the roofline: bytes to read ÷ bandwidth ÷ time; None where unknown."""


@dataclass(frozen=True, slots=True)
class Report:
    """A profile: the document of `--json`."""

    trace: str
    graph_trace: GraphTrace | None
    """How CUDA graphs were traced; None: none was."""
    model: str
    """As the names of captured nodes have it, like `device` and `bandwidth_gb_s`."""
    device: str
    bandwidth_gb_s: float | None
    notes: list[str]
    """Caveats about the numbers."""
    cases: list[Case]
    """By phase and bucket."""
    operations: list[Operation]
    """By phase, then the most expensive first."""
    idle: dict[str, float]
    """By phase, the share of device time without any activity."""
    steps: list[Step]
    """Thread after thread, in order."""


def read_report(trace: Path, names: KernelNames | None = None) -> Report:
    """Read a trace of torch's profiler, or an export of nsys, and summarise it.

    Args:
        trace: NAME.trace.json.gz or NAME.sqlite.
        names: of captured nodes; None: those in NAME.kernels.json, if it exists.

    Raises:
        TraceError: the trace is missing or damaged, or has no step of an engine.
        NamesFileError: the file of names cannot be read, or is of another version.
    """
    of_torch = trace.name.endswith((".json", ".json.gz"))
    path = trace.with_name(re.sub(r"(\.trace)?\.(json|json\.gz|sqlite)$", "", trace.name) + SUFFIX)
    named = names is not None or path.exists()
    known = names or (load(path) if named else KernelNames())
    notes: list[str] = []
    events = _read_torch(trace) if of_torch else _read_export(trace, notes)
    graph_trace: GraphTrace | None = None
    if any(event["cat"] == "graph" for event in events):
        graph_trace = "graph"
    elif any("GraphLaunch" in event["name"] for event in events):
        graph_trace = "node"
    in_thread = all(event["cat"] == "user_annotation" for event in events)
    if not (turns := _turns(events, known, notes, in_thread=in_thread)):
        raise TraceError(
            f"{trace} has no complete step in it: profile a window in which an engine steps"
        )
    if in_thread:
        notes.append(
            "no CUDA in this profile: what the device did is what ran within the ranges"
            f" {', '.join(_PHASES)}, in the engine's own thread"
        )
    launched = [work for turn in turns for key, work in turn.work.items() if key is not None]
    whole = sum(any(one["cat"] == "graph" for one in work) for work in launched)
    if whole:
        notes.append(
            f"{whole:,} launches were traced as whole graphs, so no operations of them: profile"
            " again with --graph-trace node"
        )
    nodes = [one for work in launched for one in work if one["cat"] != "graph"]
    if nodes and not any("operation" in one["args"] for one in nodes):
        notes.append(
            f"no kernel is one of a captured step of {path}: is it of another engine?"
            if named
            else f"no names of captured nodes in {path}, so kernels go by their own: a profile of"
            " bench.py writes them"
        )
    steps = list(_steps(turns, in_thread=in_thread))
    operations, idle = _operations(turns, known)
    return Report(
        trace=str(trace),
        graph_trace=graph_trace,
        model=known.model,
        device=known.device,
        bandwidth_gb_s=known.bandwidth_gb_s,
        notes=notes,
        cases=list(_cases(steps)),
        operations=operations,
        idle=idle,
        steps=steps,
    )


# Events ------------------------------------------------------------------------------------------


def _read_torch(path: Path) -> list[Event]:
    """Return the ranges and scopes, the CUDA calls and the work of the devices."""
    wanted = {"user_annotation", "cuda_runtime", "cuda_driver", *DEVICE_CATEGORIES}
    return [
        event | {"ts": round(1e3 * event["ts"]), "dur": round(1e3 * event["dur"])}
        for event in read_trace(path)["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in wanted
    ]


def _read_export(path: Path, notes: list[str]) -> list[Event]:
    """Return the ranges of the project's domain, the CUDA calls and the work of the devices.

    Calls and work have `args["correlation"]` in common. Work that was not timed is left out.
    """
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise TraceError(f"{path} is a report of nsys; export it first: {export_command(path)}")
    try:
        path.open("rb").close()
        uri = path.absolute().as_uri() + "?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            strings = dict(_select(connection, "StringIds", "id value"))
            events = _read_ranges(connection, strings, notes)
            if not events:
                raise TraceError(
                    f"{path} is not an export of nsys with the NVTX ranges of stepgraph: profile"
                    " with -t cuda,nvtx"
                )
            return [*events, *_read_activities(connection, strings)]
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    # A damaged schema may be quoted in the message of an error, which then is not UTF-8.
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is damaged, or not a SQLite file: {error}") from error


def _select(connection: sqlite3.Connection, table: str, wanted: str) -> list[tuple[Any, ...]]:
    """Return the sorted rows; NULL for columns that the table lacks."""
    known = {row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')}
    if not known:
        return []
    by = ", ".join(f'"{name}"' if name in known else "NULL" for name in wanted.split())
    return connection.execute(f'SELECT {by} FROM "{table}" ORDER BY {by}').fetchall()


def _read_ranges(
    connection: sqlite3.Connection, strings: dict[Any, Any], notes: list[str]
) -> list[Event]:
    """Return the ranges of the project's domain in all processes, but for those without an end."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    cut: Counter[tuple[int, int]] = Counter()
    for start, end, thread, domain, kind, text, text_id, value, binary in _select(
        connection,
        "NVTX_EVENTS",
        "start end globalTid domainId eventType text textId int64Value binaryData",
    ):
        # Domain 0 has the ranges without a domain.
        if kind != _PUSH_POP or not (_integers(start, thread, domain) and domain):
            continue
        name = str(strings.get(text_id, text))
        if _integers(end):
            args = _step_numbers(binary)
            if _integers(value):
                args["payload"] = value
            event = _event("user_annotation", name, start, end, thread, args)
            found[_process_of(thread), domain].append(event)
        elif name == ranges.STEP:
            cut[_process_of(thread), domain] += 1
    ours = {key: e for key, e in found.items() if {event["name"] for event in e} >= _SIGNATURE}
    if ended := sum(cut[key] for key in ours):
        notes.append(f"{ended} steps left out: the profile ended before the step did")
    return list(itertools.chain.from_iterable(ours.values()))


def _read_activities(connection: sqlite3.Connection, strings: dict[Any, Any]) -> Iterator[Event]:
    for table, category in _CATEGORIES.items():
        whose = "globalTid nameId" if table == "RUNTIME" else "globalPid shortName"
        wanted = f"start end correlationId {whose} demangledName copyKind"
        for start, end, correlation, owner, short, full, way in _select(
            connection, f"CUPTI_ACTIVITY_KIND_{table}", wanted
        ):
            # Without a correlation id: a page fault that moved managed memory.
            if not (_integers(start, end, owner, correlation) and end >= start > 0):
                continue
            name = str(strings.get(short) or strings.get(full, ""))
            copied = f"copy{_COPY_KINDS.get(way, '')}"
            fixed = {"gpu_memcpy": copied, "gpu_memset": "fill", "graph": "graph"}
            args = {"correlation": (_process_of(owner), correlation)}
            yield _event(category, fixed.get(category, name), start, end, owner, args)


def _event(cat: str, name: str, start: int, end: int, thread: int, args: dict[str, Any]) -> Event:
    where = {"pid": _process_of(thread), "tid": thread, "ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, **where, "args": args}


def _process_of(identifier: int) -> int:
    """The process in a `globalTid` or `globalPid`: bits 24 to 47, below them the thread.

    The bits above (hardware, virtual machine) may be set in one of the two only.
    """
    return identifier & 0xFFFFFF000000


def _integers(*values: object) -> bool:
    return all(isinstance(value, int) for value in values)


def _step_numbers(binary: Any) -> dict[str, int]:
    """Return the step numbers in the bytes of a structured payload: a header and the struct.

    There are none without `nsys export --include-blobs=true`.
    """
    if not isinstance(binary, bytes) or len(binary) < _NUMBERS.size:
        return {}
    values = _NUMBERS.unpack_from(binary, len(binary) - _NUMBERS.size)
    return dict(zip(StepNumbers._fields, values, strict=True))


# Steps -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Turn:
    """A range `step` that launched something."""

    range: Event
    launches: dict[int, Event] = field(default_factory=dict)
    """The ranges `replay`, `verify` and `prefill` by their `id`: decoding, a chunk of prompts, or
    both in this order."""
    work: dict[int | None, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """Work of the device by the `id` of its launch. None: of none, such as inputs, outputs and
    copies of blocks; the commit of an earlier step is left out."""
    host: list[Event] = field(default_factory=list)
    """Without CUDA: the ranges and scopes in it, each with its time without those inside it."""
    wait_ns: int = 0
    """In calls that wait for the device, also in the commit of an earlier step."""
    calls: int = 0
    """Calls that started kernels or graphs."""

    @property
    def phase(self) -> str:
        return "+".join(_PHASES[launch["name"]] for launch in self.launches.values())


def _turns(
    events: list[Event], names: KernelNames, notes: list[str], *, in_thread: bool
) -> list[_Turn]:
    """Return the complete steps that launched something, thread after thread, and name the work."""
    scopes = Scopes(events)
    turns: dict[int, _Turn] = {}
    stray = 0
    for thread, found in sorted(scopes.threads.items()):
        own = [event["dur"] for event in found]
        inside: list[_Turn | None] = []
        for event, parent in zip(found, scopes.parents[thread], strict=True):
            turn = inside[parent] if parent >= 0 else None
            if event["name"] == ranges.STEP:
                turn = turns[id(event)] = _Turn(event)
            elif event["name"] in _PHASES and turn is not None:
                turn.launches[id(event)] = event
            stray += event["name"] in _PHASES and turn is None
            inside.append(turn)
            if parent >= 0:
                own[parent] -= event["dur"]
        for event, turn, ns in zip(found, inside, own, strict=True):
            if in_thread and turn is not None:
                name = event["args"].get("operation", f"({event['name']})")
                turn.host.append(event | {"dur": ns, "args": {"operation": name}})
    for call, enclosing, work in name_work(events, scopes, names):
        turn = next((turns[id(e)] for e in enclosing if id(e) in turns), None)
        if call is None or turn is None:
            continue
        launch = next((id(e) for e in enclosing if id(e) in turn.launches), None)
        turn.wait_ns += call["dur"] if _WAITS.match(call["name"]) else 0
        if all(event["name"] != ranges.COMMIT for event in enclosing):
            turn.calls += bool(_LAUNCHES.match(call["name"]))
            turn.work[launch] += work
    found_turns = [turn for turn in turns.values() if turn.launches]
    for turn in found_turns:
        for work in turn.work.values():
            work.sort(key=lambda event: (event["ts"], end_of(event)))
    if stray:
        notes.append(f"{stray} launches left out: outside of a complete step")
    if not any("rows" in event["args"] for turn in found_turns for event in turn.launches.values()):
        notes.append(
            "no structured payloads, so no rows, bucket and tokens:"
            " export the report with nsys export --include-blobs=true"
        )
    return found_turns


def _steps(turns: Sequence[_Turn], *, in_thread: bool) -> Iterator[Step]:
    """Yield the columns of each step; `in_thread`: the engine's own thread is the device."""
    threads = list(dict.fromkeys(turn.range["tid"] for turn in turns))
    before: tuple[Step, int] | None = None
    """The step before in this thread, and when its device work ended."""
    for turn in turns:
        launches = list(turn.launches.values())
        launched = sum(one["dur"] for one in launches) if in_thread else 0
        spans = _spans(launches if in_thread else itertools.chain(*turn.work.values()))
        begin, end = (spans[0][0], max(end for _, end in spans)) if spans else (0, 0)
        numbers = [one["args"] for one in launches if "rows" in one["args"]]
        first = numbers[0] if numbers else {}
        number = turn.range["args"].get("payload", first.get("step"))
        thread = threads.index(turn.range["tid"])
        gap = between = None
        if spans and before is not None:
            follows = before[0].step is None or number == before[0].step + 1
            if before[0].thread == thread and follows:
                gap, between = max(0, begin - before[1]) / 1e3, (end - before[1]) / 1e3
        totals = {
            name: sum(found.get(name, 0) for found in numbers) if numbers else None
            for name in ("rows", "tokens", "padding")
        }
        step = Step(
            thread=thread,
            step=number,
            phase=turn.phase,
            **totals,
            bucket=first.get("bucket"),
            host_us=(turn.range["dur"] - turn.wait_ns - launched) / 1e3,
            wait_us=turn.wait_ns / 1e3,
            device_us=(end - begin) / 1e3 if spans else None,
            launches=turn.calls,
            gap_us=gap,
            step_us=between,
        )
        yield step
        before = (step, end) if spans else None


def _spans(events: Iterable[Event]) -> Spans:
    return sorted((event["ts"], end_of(event)) for event in events)


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


def _operations(
    turns: Sequence[_Turn], names: KernelNames
) -> tuple[list[Operation], dict[str, float]]:
    """Return the operations by phase, the most expensive first, and the idle shares."""
    phases: dict[str, list[tuple[list[Event], Spans]]] = defaultdict(list)
    for turn in turns:
        whole = _spans(itertools.chain(*turn.work.values()))
        for key, launch in turn.launches.items():
            work = turn.work.get(key, [])
            if work and all(one["cat"] != "graph" for one in work):
                phases[_PHASES[launch["name"]]].append((work, _spans(work)))
        if turn.work.get(None):
            phases[AROUND].append((turn.work[None], whole))
        if turn.host:
            phases[turn.phase].append((turn.host, _spans([turn.range])))
    rows: list[Operation] = []
    idle: dict[str, float] = {}
    order = [*_PHASES.values(), AROUND]
    for phase in sorted(phases, key=lambda name: order.index(name) if name in order else -1):
        activities: Counter[str] = Counter()
        samples: dict[str, list[int]] = defaultdict(list)  # for each launch with the operation
        for work, _ in phases[phase]:
            times: Counter[str] = Counter()
            for one in work:
                name = one["args"].get("operation", OTHER)
                name = f"[{one['args'].get('kernel', one['name'])}]" if name == OTHER else name
                times[name] += one["dur"]
                activities[name] += 1
            for name, ns in times.items():
                samples[name].append(ns)
        all_spans = [spans for _, spans in phases[phase]]
        device_ns = sum(max(end for _, end in spans) - spans[0][0] for spans in all_spans)
        if device_ns and phase != AROUND and not turns[0].host:
            idle[phase] = 1 - sum(map(covered, all_spans)) / device_ns
        for name in sorted(samples, key=lambda name: (-sum(samples[name]), name)):
            total, fraction = sum(samples[name]), None
            read = names.bytes_read.get(name) if phase == "decode" else None
            if read and total and names.bandwidth_gb_s:
                fraction = read / names.bandwidth_gb_s * len(all_spans) / total
            count = activities[name] / len(all_spans)
            us = Summary.of(ns / 1e3 for ns in samples[name])
            share = total / device_ns if device_ns else 0.0
            rows.append(Operation(phase, name, count, us, share, fraction))
    return rows, idle


# The command -------------------------------------------------------------------------------------

_PROGRAM: Final = "stepgraph report"
_TRACING: Final = {
    "graph": "CUDA graphs were traced whole (graph): step times are undisturbed",
    "node": "CUDA graphs were traced node by node (node): that perturbs the timing; take step"
    " times from a profile with --graph-trace graph",
    None: "no CUDA graph was traced",
}
_TIMES: Final = ("step", "device", "gap", "host")
_OPERATIONS: Final = (
    "phase", "operation", "activities", "µs p50", "µs p99", "n", "share", "of roofline",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = CommandParser(
        prog=_PROGRAM,
        description="Report where each step of a profile spent its time.",
        epilog="NAME.kernels.json next to the trace has the names of captured nodes, if it exists.",
    )
    add = parser.add_argument
    what = "an export of nsys (NAME.sqlite) or a trace of torch (NAME.trace.json.gz)"
    add("trace", type=Path, metavar="TRACE", help=what)
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    options = parser.parse_args(arguments)
    try:
        report = read_report(options.trace)
        if options.json is not None:
            if options.json.resolve() == options.trace.resolve():
                raise WriteError(options.json, "it is the trace")
            document = {"schema_version": SCHEMA_VERSION, **asdict(report)}
            write_file(options.json, json.dumps(document, indent=1, allow_nan=False) + "\n")
    except (TraceError, NamesFileError, WriteError) as error:
        print(f"{_PROGRAM}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 1
    print_text(report_text(report))
    return 0


def report_text(report: Report) -> str:
    """Return the report as Markdown."""
    lines = [f"# {report.trace}", "", f"- {_TRACING[report.graph_trace]}"]
    lines += [f"- note: {note}" for note in report.notes]
    cases = []
    for case in report.cases:
        summaries = [getattr(case, f"{name}_us") for name in _TIMES]
        times = ["-" if s is None else _cells(" / ", s.p50, s.p90, s.p99) for s in summaries]
        cases.append([case.phase, _cells("", case.bucket), str(case.n), *times])
    head = ["phase", "bucket", "steps", *(f"{name} µs p50/p90/p99" for name in _TIMES)]
    lines += ["", "## Steps by phase and bucket", "", *aligned(head, cases, 1)]
    if report.operations:
        operations = [
            [
                *(row.phase, row.name, f"{row.activities:.4g}", _cells("", row.us.p50)),
                *(_cells("", row.us.p99), str(row.us.n), f"{row.share:.1%}"),
                "-" if row.fraction is None else f"{row.fraction:.1%}",
            ]
            for row in report.operations
        ]
        lines += ["", "## Operations of a launch", "", *_table(_OPERATIONS, operations, 2), ""]
        lines += [
            f"- {phase}: no activity ran in {share:.1%} of the device time"
            for phase, share in report.idle.items()
        ]
    names = [one.name for one in fields(Step)]
    if not any(step.thread for step in report.steps):
        names.remove("thread")
    columns = [name.replace("_us", " µs") for name in names]
    steps = [[_cells("", getattr(step, name)) for name in names] for step in report.steps]
    return "\n".join([*lines, "", "## Steps", "", *_table(columns, steps, 0)])


def _table(head: Sequence[str], cells: Sequence[Sequence[str]], text_columns: int) -> list[str]:
    left = len(cells) - MOST_ROWS
    more = ["", f"{left:,} more: --json FILE holds them all"] if left > 0 else []
    return [*aligned(head, cells[:MOST_ROWS], text_columns), *more]


def _cells(separator: str, *values: float | str | None) -> str:
    """Join times with one digit, integers and texts unchanged, and a dash for None."""
    return separator.join(
        "-" if v is None else f"{v:,.1f}" if isinstance(v, float) else str(v) for v in values
    )
