"""A trace of steps for Perfetto by torch's profiler, with the same names on host and device.

    with torch_trace("steps.trace.json.gz"):
        ...  # steps of an engine

The host's rows hold the ranges of `ranges` with their payloads, and torch's operators; on the
device's rows each kernel of a captured step has the name of the layer and the operation that it
was captured in (`attribution`).

torch writes a trace in the Chrome format (Google, "Trace Event Format"; Perfetto reads it), in
which

- a range of ours is a complete event of category `user_annotation`, whose name has the payload
  until the trace is written (`event_name`): torch's events have nothing else, and quotes in a name
  would break the trace;
- a call of the CUDA runtime and its work on the device have one `correlation` in common: all
  kernels of a replayed graph have the correlation of the `cudaGraphLaunch`;
- kernels that overlap, as they do with programmatic dependent launch, share a row. Perfetto shows
  them from version 57.1 on; earlier ones leave some out.

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
import threading
import warnings
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from . import attribution, ranges
from .atomic_write import check_writable, write_file
from .attribution import DeviceWork, KernelNames, Node, nodes_of_replay
from .timeline import StepRecord

SUFFIX = ".json.gz"
"""Suffix of a trace; viewers need it."""

Event = dict[str, Any]

DEVICE_CATEGORIES: Final = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "graph": "graph",
}
"""Categories of the events that are work of a device -> kind of the node of a graph. A `graph` is a
whole one whose nodes were not traced; torch's profiler has none."""

_PREFIX: Final = "stepgraph #"


class TraceError(ValueError):
    """A trace that cannot be recorded or read; the message names the file."""


@contextlib.contextmanager
def torch_trace(path: Path | str, names: KernelNames | None = None) -> Iterator[None]:
    """Record what runs inside, and write it as a compressed trace in the Chrome format.

    The device is synchronised at both ends, so that the trace holds the work that was launched
    inside. Recording costs some microseconds for each operator and range.

    Args:
        path: a name that ends in `.json.gz`; another trace of that name is replaced
            atomically. Where the body raises nothing is written.
        names: the nodes of captured steps (`attribution.recording`); without them kernels keep the
            names of their functions.

    Raises:
        WriteError: the file cannot be written.
        TraceError: its name ends otherwise, or torch's profiler is already running.
    """
    with trace_recording(path, names) as write:
        yield
    write()


@contextlib.contextmanager
def trace_recording(
    path: Path | str, names: KernelNames | None = None
) -> Iterator[Callable[[], None]]:
    """Record as `torch_trace`, and yield the function that writes the trace after the block.

    One thread enters and leaves the block; any thread may write.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIX):
        raise TraceError(f"cannot write {path}: the name of a trace ends in {SUFFIX}")
    check_writable(path)
    import torch
    from torch.profiler import ProfilerActivity, profile

    if torch.autograd.profiler._is_profiler_enabled:  # a second one would silently replace it
        raise TraceError(f"cannot write {path}: torch's profiler runs already: end it first")
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    # An engine may run in another thread.
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=activities, experimental_config=config)
    if on_cuda:
        torch.cuda.synchronize()
    with warnings.catch_warnings():  # accumulated events (torch 2.11 warns without) delay `stop`
        warnings.simplefilter("ignore")
        profiler.start()
    recorder = _Recorder()

    def write() -> None:
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(exported))
            document = json.loads(exported.read_bytes())
        annotate(document, names)
        document["traceName"] = path.name  # not the file in the folder it was exported to
        write_file(path, gzip.compress(json.dumps(document, separators=(",", ":")).encode()))

    try:
        with ranges.listening(recorder), attribution.listening(recorder):
            yield write
        if on_cuda:
            torch.cuda.synchronize()
    finally:
        profiler.stop()


def timeline_trace(records: Iterable[StepRecord]) -> dict[str, Any]:
    """Return the steps of a timeline as a trace in the Chrome format, with their phases.

    Times are on the clock of `time.perf_counter_ns`. The device time of an asynchronous device is
    an argument of its step only, since the timeline does not say when it began.
    """
    row = {"pid": 1, "tid": 1}
    events: list[Event] = [{"ph": "M", "name": "thread_name", "args": {"name": "steps"}, **row}]

    def add(name: str, began_ns: int, ns: int, args: dict[str, Any]) -> int:
        times = {"ts": began_ns / 1e3, "dur": ns / 1e3}
        events.append({"ph": "X", "name": name, "args": args, **times, **row})
        return began_ns + ns

    for record in records:
        now = record.started_ns
        add(ranges.STEP, now, record.ended_ns - now, asdict(record))
        for phase in ("plan", "launch", "device", "wait", "commit"):
            duration = getattr(record, f"{phase}_ns")
            if duration and not (phase == "device" and record.is_async_device):
                now = add(phase, now, duration, {})
    return {"traceEvents": events}


def event_name(name: str, payload: Mapping[str, int | str]) -> str:
    """Return the name of a range or a scope in the trace that torch writes."""
    return ";".join([f"{_PREFIX}{name}", *(f"{key}={value}" for key, value in payload.items())])


class _Recorder:
    """Forwards ranges and scopes to torch's profiler; their payloads are a part of the names."""

    def __init__(self) -> None:
        from torch.profiler import record_function

        self._record = record_function
        self._open = _Open()

    def push(self, name: str, payload: ranges.Payload) -> None:
        """A range began on the calling thread."""
        fields = {"payload": payload} if isinstance(payload, int) else payload._asdict()
        self._begin(name, fields)

    def pop(self) -> None:
        """The innermost range or scope of the calling thread ended."""
        self._open.events.pop().__exit__(None, None, None)

    def enter(self, name: str, layer: int | None) -> None:
        """The scope of an operation began; without a layer, the layer of the scope around it."""
        layers = self._open.layers
        if layer is None and layers:
            layer = layers[-1]
        layers.append(layer)
        label = name if layer is None else f"{layer}/{name}"
        fields: dict[str, int | str] = {"operation": name}
        self._begin(label, fields if layer is None else fields | {"layer": layer})

    def leave(self, *, failed: bool) -> None:
        """The innermost scope of the calling thread ended."""
        self._open.layers.pop()
        self.pop()

    def _begin(self, name: str, payload: Mapping[str, int | str]) -> None:
        event = self._record(event_name(name, payload))
        event.__enter__()
        self._open.events.append(event)


class _Open(threading.local):
    """The ranges and scopes of one thread that have not ended, outermost first."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.layers: list[int | None] = []


# Names -------------------------------------------------------------------------------------------


def annotate(document: dict[str, Any], names: KernelNames | None = None) -> None:
    """Rename the events of a trace, in place, and state in their `args` what they belong to.

    Args:
        document: a trace that torch wrote.
        names: the nodes of the captured steps; without them kernels keep their names.

    Raises:
        TraceError: the document is not a trace.
    """
    events = _events_of(document)
    for event in events:
        name = event.get("name")
        if isinstance(name, str) and name.startswith(_PREFIX):
            event["name"], *pairs = name.removeprefix(_PREFIX).split(";")
            payload = dict(pair.split("=", 1) for pair in pairs)
            numbers = {k: int(v) for k, v in payload.items() if v.removeprefix("-").isdecimal()}
            event["args"] = {**payload, **numbers, **event.get("args", {})}
    for _ in name_work(events, Scopes(events), names):
        pass


def name_work(
    events: Iterable[Event], scopes: Scopes, names: KernelNames | None
) -> Iterator[tuple[Event | None, list[Event], list[Event]]]:
    """Name the work of devices by its captured node, or by the scope of its launch.

    Yields each call of CUDA, the ranges and scopes that enclose it, the innermost first, and the
    work that it launched, in the order of its begin. Work of unknown calls comes with None.
    """
    calls: dict[Any, Event] = {}
    launched: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[correlation] = event
        elif event.get("cat") in DEVICE_CATEGORIES:
            # Without a correlation id, the call that launched it is unknown.
            launched[id(event) if correlation is None else correlation].append(event)
    for correlation in dict.fromkeys([*calls, *launched]):
        call, work = calls.get(correlation), launched.get(correlation, [])
        work.sort(key=lambda event: event["ts"])
        enclosing = [] if call is None else list(scopes.enclosing(call))
        around = _described(enclosing)
        listed = [DeviceWork(DEVICE_CATEGORIES[event["cat"]], str(event["name"])) for event in work]
        replayed = call is not None and "GraphLaunch" in str(call["name"])
        found = nodes_of_replay(names, listed, around.get("bucket")) if replayed and names else None
        nodes: Sequence[Node | None] = [None] * len(work) if found is None else found
        for event, node in zip(work, nodes, strict=True):
            _name_work(event, node, around, replayed=replayed)
        yield call, enclosing, work


def _events_of(document: Any) -> list[Event]:
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError("this is not a trace: it has no list `traceEvents` of events")
    return events


def end_of(event: Event) -> Any:
    """When a complete event ended, in the unit of its trace."""
    return event["ts"] + event["dur"]


class Scopes:
    """The ranges and scopes of the host by thread, each with the index of its parent, or -1."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.threads: defaultdict[tuple[Any, Any], list[Event]] = defaultdict(list)
        for event in events:
            if event.get("ph") == "X" and event.get("cat") == "user_annotation":
                self.threads[event["pid"], event["tid"]].append(event)
        self.parents: dict[tuple[Any, Any], list[int]] = {}
        for thread, scopes in self.threads.items():
            scopes.sort(key=lambda event: (event["ts"], -event["dur"]))
            parents, stack = self.parents.setdefault(thread, []), list[int]()
            for index, event in enumerate(scopes):
                while stack and end_of(scopes[stack[-1]]) <= event["ts"]:
                    stack.pop()
                parents.append(stack[-1] if stack else -1)
                stack.append(index)

    def enclosing(self, event: Event) -> Iterator[Event]:
        """Yield what is open on the thread of an event when it begins, the innermost first."""
        thread = event["pid"], event["tid"]
        scopes = self.threads.get(thread, [])
        index = bisect_right(scopes, event["ts"], key=lambda scope: scope["ts"]) - 1
        while index >= 0:
            if event["ts"] < end_of(scopes[index]):
                yield scopes[index]
            index = self.parents[thread][index]


def _described(enclosing: Iterable[Event]) -> dict[str, Any]:
    """Return what encloses a call: step, rows, bucket; label, operation, layer."""
    found: dict[str, Any] = {}
    for event in enclosing:
        args, wanted = event["args"], tuple[str, ...]()
        if event["name"] in ranges.STEP_RANGES:
            wanted = ("step", "rows", "bucket")
        elif "operation" in args and "label" not in found:  # the innermost
            found["label"] = event["name"]
            wanted = ("operation", "layer")
        elif event["name"] == ranges.STEP and "payload" in args:
            found.setdefault("step", args["payload"])
        found.update({key: args[key] for key in wanted if key in args})
    return found


def _name_work(
    event: Event, node: Node | None, around: Mapping[str, Any], *, replayed: bool
) -> None:
    """Name work by its node; work that is launched by itself by the scope of its launch."""
    args = event.setdefault("args", {})
    if "operation" in args:  # a trace that was written with names
        return
    args.update({key: around[key] for key in ("step", "rows", "bucket") if key in around})
    if node is not None:
        around = {"label": node.label, "operation": node.operation, "layer": node.layer}
    elif replayed or "label" not in around:
        return
    args["kernel"] = event["name"]
    event["name"] = around["label"]
    for key in ("operation", "layer"):
        if around.get(key) is not None:
            args[key] = around[key]


def read_trace(path: Path | str) -> dict[str, Any]:
    """Read a trace, compressed or not.

    Raises:
        TraceError: the file cannot be read, or does not hold a trace.
    """
    try:
        data = Path(path).read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        document: dict[str, Any] = json.loads(data)
        _events_of(document)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(f"cannot read {path}: it is not a trace ({error})") from error
    return document
