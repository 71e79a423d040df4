"""Gives the events of a torch profile the names of stepgraph: ranges, layers, operations.

torch writes a trace in the Chrome format (Google, "Trace Event Format"; Perfetto reads it), in
which

- a range of ours is a complete event of category `user_annotation`; its name is an index into the
  log of the recorder (`event_name`), which holds its name and payload;
- a call of the CUDA runtime and its work on the device have one `correlation` in common: all
  kernels of a replayed graph have that of the `cudaGraphLaunch`;
- kernels that overlap, as they do with programmatic dependent launch, share a row. Viewers draw
  rows as stacks, and leave out what neither follows nor lies within what is on the row.

Standard library only.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from .kernel_names import DeviceWork, KernelNames, Node, nodes_of_replay
from .ranges import STEP_RANGES

__all__ = [
    "DEVICE_CATEGORIES",
    "Recorded",
    "TraceError",
    "annotate",
    "end_of",
    "event_name",
    "events_of",
]

Event = dict[str, Any]

DEVICE_CATEGORIES: Final = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
"""Categories of the events that are work of a device -> kind of the node of a graph."""

_PREFIX: Final = "stepgraph #"
_JITTER_US: Final = 1e-3
"""The resolution of the clocks: an overlap of that length is none."""


class TraceError(ValueError):
    """A trace that cannot be written or read; the message names the file."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A range, a mark or a scope of an operation, as a listener received it."""

    name: str
    payload: Mapping[str, int | str]
    instant: bool = False


def event_name(index: int) -> str:
    """Return the name of an entry of the log in the trace that torch writes."""
    return f"{_PREFIX}{index}"


def events_of(document: Any) -> list[Event]:
    """Return the events of a trace in the Chrome format.

    Raises:
        TraceError: it is no trace.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError("this is no trace: it has no list `traceEvents` of events")
    return events


def annotate(
    document: dict[str, Any],
    log: Mapping[int, Recorded] = MappingProxyType({}),
    names: KernelNames | None = None,
) -> None:
    """Rename the events of a trace, in place, and state in their `args` what they belong to.

    Args:
        document: a trace that torch wrote.
        log: the entries that events are named by.
        names: the nodes of the captured steps; without them kernels keep their names.

    Raises:
        TraceError: the document is no trace.
    """
    events = events_of(document)
    events[:] = [event for event in events if _name_range(event, log)]
    scopes = _Scopes(events)
    calls: dict[Any, Event] = {}
    launched: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[correlation] = event
        elif event.get("cat") in DEVICE_CATEGORIES:
            # Without a correlation id, the call that launched it is unknown.
            launched[id(event) if correlation is None else correlation].append(event)
    for correlation, work in launched.items():
        work.sort(key=lambda event: event["ts"])
        call = calls.get(correlation)
        around = {} if call is None else scopes.around(call)
        ids = [_node_id(event) for event in work]
        replayed = any(ids) if call is None else "GraphLaunch" in str(call["name"])
        nodes: Sequence[Node | None] = [None] * len(work)
        if replayed and names is not None:
            nodes = _nodes_of(work, ids, around, names)
        for event, node in zip(work, nodes, strict=True):
            _name_work(event, node, around, replayed=replayed)
    _separate_overlaps(events)


def _name_range(event: Event, log: Mapping[int, Recorded]) -> bool:
    """Give a range of ours its name and payload; return whether the event stays."""
    name = event.get("name")
    if not (isinstance(name, str) and name.startswith(_PREFIX)):
        return True
    recorded = log[int(name.removeprefix(_PREFIX))]
    event["name"] = recorded.name
    event["args"] = {**recorded.payload, **event.get("args", {})}
    if recorded.instant:
        event.pop("dur", None)
        event.update(ph="i", s="t")
        return event.get("cat") == "user_annotation"  # not its copy on the device's rows
    return True


class _Scopes:
    """The ranges of the host by thread, each with the index of the one around it, or -1."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._threads: defaultdict[tuple[Any, Any], list[Event]] = defaultdict(list)
        for event in events:
            if event.get("ph") == "X" and event.get("cat") == "user_annotation":
                self._threads[event["pid"], event["tid"]].append(event)
        self._parents: dict[tuple[Any, Any], list[int]] = {}
        for thread, ranges in self._threads.items():
            ranges.sort(key=lambda event: (event["ts"], -event["dur"]))
            parents, stack = self._parents.setdefault(thread, []), list[int]()
            for index, event in enumerate(ranges):
                while stack and end_of(ranges[stack[-1]]) <= event["ts"]:
                    stack.pop()
                parents.append(stack[-1] if stack else -1)
                stack.append(index)

    def around(self, call: Event) -> dict[str, Any]:
        """Return what encloses a call: step, rows, bucket; label, operation, layer."""
        thread = call["pid"], call["tid"]
        ranges = self._threads.get(thread, [])
        index = bisect_right(ranges, call["ts"], key=lambda event: event["ts"]) - 1
        found: dict[str, Any] = {}
        while index >= 0:
            event = ranges[index]
            if call["ts"] < end_of(event):
                args, wanted = event["args"], tuple[str, ...]()
                if event["name"] in STEP_RANGES:
                    wanted = ("step", "rows", "bucket")
                elif "operation" in args and "label" not in found:  # the innermost
                    found["label"] = event["name"]
                    wanted = ("operation", "layer")
                elif event["name"] == "step" and "payload" in args:
                    found.setdefault("step", args["payload"])
                found.update({key: args[key] for key in wanted if key in args})
            index = self._parents[thread][index]
        return found


def end_of(event: Event) -> float:
    """Return when a complete event ended, in microseconds."""
    return float(event["ts"] + event["dur"])


def _nodes_of(
    work: Sequence[Event], ids: Sequence[int | None], around: Mapping[str, Any], names: KernelNames
) -> Sequence[Node | None]:
    """Return for each event of a replay the node that it ran, or None where that is not certain."""
    listed = [
        DeviceWork(DEVICE_CATEGORIES[event["cat"]], str(event["name"]), node_id)
        for event, node_id in zip(work, ids, strict=True)
    ]
    found = nodes_of_replay(names, listed, around.get("bucket"))
    return [None] * len(work) if found is None else found[1]


def _node_id(event: Event) -> int | None:
    """CUPTI's id of the node that an event ran; 0 stands for none."""
    value = event.get("args", {}).get("graph node id")
    return value if isinstance(value, int) and value > 0 else None


def _name_work(
    event: Event, node: Node | None, around: Mapping[str, Any], *, replayed: bool
) -> None:
    """Name work by its node; work that is launched by itself by the scope of its launch."""
    args = event.setdefault("args", {})
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


def _separate_overlaps(events: list[Event]) -> None:
    """Move work that begins before the work on its row has ended to a row of its own."""
    rows: defaultdict[tuple[Any, Any], list[Event]] = defaultdict(list)
    arrows = {}  # an arrow from a call ends where the work of the device begins
    highest: defaultdict[Any, int] = defaultdict(int)
    for event in events:
        pid, tid = event.get("pid"), event.get("tid")
        if isinstance(tid, int):
            highest[pid] = max(highest[pid], tid)
        if event.get("cat") in DEVICE_CATEGORIES:
            rows[pid, tid].append(event)
        elif event.get("ph") == "f":
            arrows[pid, tid, event.get("id")] = event
    for (pid, tid), work in rows.items():
        ends: list[float] = []  # of the row itself and of the added ones
        added = [tid]
        for event in sorted(work, key=lambda event: event["ts"]):
            begins = event["ts"] + _JITTER_US
            row = next((row for row, end in enumerate(ends) if end <= begins), len(ends))
            ends[row : row + 1] = [end_of(event)]
            if row == len(added):
                highest[pid] += 1
                added.append(highest[pid])
                row_metadata = {"ph": "M", "pid": pid, "tid": added[-1], "ts": 0}
                name = {"name": f"stream {tid}, overlapping"}
                events.append({**row_metadata, "name": "thread_name", "args": name})
                if isinstance(tid, int):
                    order = {"sort_index": tid}
                    events.append({**row_metadata, "name": "thread_sort_index", "args": order})
            arrow = arrows.get((pid, tid, event.get("args", {}).get("correlation")))
            for moved in (event, arrow) if row else ():
                if moved is not None and moved["ts"] == event["ts"]:
                    moved["tid"] = added[row]
