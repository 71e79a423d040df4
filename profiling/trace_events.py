"""Gives the events of a torch profile the names of stepgraph: ranges, layers, operations.

torch writes a trace in the Chrome format (Google, "Trace Event Format"; Perfetto reads it), in
which

- a range of ours is a complete event of category `user_annotation`; what it says is in the log of
  the emitter, and its name there is an index into that log (`annotation`);
- a call of the CUDA runtime and what it made the device do have one `correlation` in common: all
  kernels of a replayed graph have that of the `cudaGraphLaunch`;
- kernels that overlap, as they do with programmatic dependent launch, share a row. Viewers draw
  rows as stacks, and leave out what neither follows nor lies within what is on the row.

`annotate` makes of that one document in which both sides carry the same names. Standard library
only.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from .kernel_matching import find_step
from .kernel_names import KernelNames, Node

__all__ = [
    "DEVICE_CATEGORIES",
    "Annotation",
    "TraceError",
    "annotate",
    "annotation",
    "check_trace",
]

Event = dict[str, Any]

DEVICE_CATEGORIES: Final = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
"""Categories of the events that are work of a device -> kind of the node of a graph."""

_PREFIX: Final = "stepgraph #"
_CALLS: Final = ("cuda_runtime", "cuda_driver")
_NODE_ID: Final = "graph node id"
_PHASES: Final = {"replay": "decode", "prefill": "prefill"}
"""Ranges that hand one step to the device -> the phase of that step."""
_JITTER_US: Final = 1e-3
"""Clocks of traces have a resolution of a nanosecond; so much overlap is none."""


class TraceError(ValueError):
    """A trace that cannot be written or read; the message names the file."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """One push of a range, a mark or a scope of an operation, as a listener noted it."""

    name: str
    payload: Mapping[str, int | str]
    instant: bool = False


def annotation(index: int) -> str:
    """Return the name under which an annotation stands in the trace that torch writes."""
    return f"{_PREFIX}{index}"


def check_trace(document: Any) -> list[Event]:
    """Return the events of a trace in the Chrome format, after a look at each.

    Raises:
        TraceError: it is no trace, or an event lacks what viewers need.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise TraceError("this is no trace: it has no list `traceEvents`")
    for index, event in enumerate(events):
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            raise TraceError(f"event {index} of the trace has no phase `ph`")
        needed = ("name", "pid", "tid") if event["ph"] != "M" else ("name", "pid")
        for key in needed:
            if key not in event:
                raise TraceError(f"event {index} ({event['ph']!r}) of the trace has no {key!r}")
        times = {"X": ("ts", "dur"), "M": ()}.get(event["ph"], ("ts",))
        for key in times:
            value = event.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise TraceError(
                    f"event {index} ({event['name']!r}) of the trace has {key!r} {value!r}; it must"
                    " be a number of microseconds"
                )
        if not isinstance(event.get("args", {}), dict):
            raise TraceError(f"event {index} ({event['name']!r}) of the trace has no object `args`")
    return events


def annotate(
    document: dict[str, Any],
    log: Mapping[int, Annotation] = MappingProxyType({}),
    names: KernelNames | None = None,
) -> None:
    """Rename the events of a trace, in place, and say in their `args` what they belong to.

    Args:
        document: a trace that torch wrote.
        log: what the emitter noted, by the indices that annotations are named by.
        names: the nodes of the captured steps; without them kernels keep their names.

    Raises:
        TraceError: the document is no trace.
    """
    events = check_trace(document)
    events[:] = [event for event in events if _name_range(event, log)]
    ranges = _Ranges(events)
    calls = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
    }
    launched: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in DEVICE_CATEGORIES:
            # Without a correlation an event is alone, and nobody can say who launched it.
            launched[event.get("args", {}).get("correlation", id(event))].append(event)
    for correlation, work in launched.items():
        work.sort(key=lambda event: event["ts"])
        call = calls.get(correlation)
        around = {} if call is None else ranges.around(call)
        ids = [_node_id(event) for event in work]
        replayed = any(ids) if call is None else "GraphLaunch" in str(call["name"])
        nodes = _nodes_of(work, ids, around, names if replayed else None)
        for event, node in zip(work, nodes, strict=True):
            _name_work(event, node, around, replayed=replayed)
    _separate_overlaps(events)


def _name_range(event: Event, log: Mapping[int, Annotation]) -> bool:
    """Give an annotation of ours its name and payload; return whether the event stays."""
    name = event["name"]
    if not (isinstance(name, str) and name.startswith(_PREFIX)):
        return True
    noted = log[int(name.removeprefix(_PREFIX))]
    event["name"] = noted.name
    event["args"] = {**noted.payload, **event.get("args", {})}
    if noted.instant:
        event.pop("dur", None)
        event.update(ph="i", s="t")
        return event.get("cat") == "user_annotation"  # on the device nothing happened
    return True


class _Ranges:
    """The ranges of the host, by thread, to be asked which of them are around a call."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._threads: defaultdict[tuple[Any, Any], list[Event]] = defaultdict(list)
        for event in events:
            if event["ph"] == "X" and event.get("cat") == "user_annotation":
                self._threads[event["pid"], event["tid"]].append(event)
        for ranges in self._threads.values():
            ranges.sort(key=lambda event: (event["ts"], -event["dur"]))
        self._parents = {key: _parents(ranges) for key, ranges in self._threads.items()}

    def around(self, call: Event) -> dict[str, Any]:
        """Return what the ranges around a call say: step, rows, bucket, phase; operation, layer."""
        key = call["pid"], call["tid"]
        ranges = self._threads.get(key, [])
        index = bisect_right(ranges, call["ts"], key=lambda event: event["ts"]) - 1
        found: dict[str, Any] = {}
        while index >= 0:
            event = ranges[index]
            if call["ts"] < event["ts"] + event["dur"]:
                args = event["args"]
                if event["name"] in _PHASES:
                    found["phase"] = _PHASES[event["name"]]
                    found.update({k: args[k] for k in ("step", "rows", "bucket") if k in args})
                elif "operation" in args and "label" not in found:  # the innermost
                    found["label"] = event["name"]
                    found.update({k: args[k] for k in ("operation", "layer") if k in args})
                elif event["name"] == "step" and "payload" in args:
                    found.setdefault("step", args["payload"])
            index = self._parents[key][index]
        return found


def _parents(ranges: Sequence[Event]) -> list[int]:
    """Return of each range of a thread the index of the one around it, or -1."""
    parents, stack = [], list[int]()
    for index, event in enumerate(ranges):
        while stack and ranges[stack[-1]]["ts"] + ranges[stack[-1]]["dur"] <= event["ts"]:
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(index)
    return parents


def _nodes_of(
    work: Sequence[Event],
    ids: Sequence[int | None],
    around: Mapping[str, Any],
    names: KernelNames | None,
) -> Sequence[Node | None]:
    """Return of each event of a replay the node that it ran, as far as one can tell."""
    nodes: list[Node | None] = [None] * len(work)
    if names is None:
        return nodes
    of_kind = {
        kind: [index for index, event in enumerate(work) if event["cat"] == category]
        for category, kind in DEVICE_CATEGORIES.items()
    }
    kernels = of_kind.pop("kernel")
    found = None
    # Where no range says which step it was, any of them may be it.
    for phase in [around["phase"]] if "phase" in around else _PHASES.values():
        found = found or find_step(
            names,
            phase,
            around.get("bucket"),
            [str(work[index]["name"]) for index in kernels],
            [ids[index] for index in kernels],
        )
    if found is None:
        return nodes
    step, matched = found
    for index, node in zip(kernels, matched, strict=True):
        nodes[index] = node
    for kind, indices in of_kind.items():
        # Copies have no name to go by: by their ids, else by their order where none is missing.
        those = [node for node in step.nodes if node.kind == kind]
        by_id = {node.tools_id: node for node in those if node.tools_id is not None}
        for place, index in enumerate(indices):
            node_id = ids[index]
            if node_id is not None and node_id in by_id:
                nodes[index] = by_id[node_id]
            elif not by_id and len(those) == len(indices):
                nodes[index] = those[place]
    return nodes


def _node_id(event: Event) -> int | None:
    """CUPTI's id of the node that an event ran; 0 stands for none."""
    value = event.get("args", {}).get(_NODE_ID)
    return value if isinstance(value, int) and value > 0 else None


def _name_work(
    event: Event, node: Node | None, around: Mapping[str, Any], *, replayed: bool
) -> None:
    """Name work by its node; what is launched by itself by the scope that it was launched in."""
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
    """Move work that begins before the work on its row has ended to a row beside it."""
    rows: defaultdict[tuple[Any, Any], list[Event]] = defaultdict(list)
    arrows = {}  # an arrow from a call ends where the work of the device begins
    taken: defaultdict[Any, int] = defaultdict(int)
    for event in events:
        pid, tid = event["pid"], event.get("tid")
        if isinstance(tid, int):
            taken[pid] = max(taken[pid], tid)
        if event.get("cat") in DEVICE_CATEGORIES:
            rows[pid, tid].append(event)
        elif event["ph"] == "f":
            arrows[pid, tid, event.get("id")] = event
    for (pid, tid), work in rows.items():
        ends: list[float] = []  # of the row itself and of those beside it
        beside: list[int] = []
        for event in sorted(work, key=lambda event: event["ts"]):
            begins, until = event["ts"] + _JITTER_US, event["ts"] + event["dur"]
            row = next((row for row, end in enumerate(ends) if end <= begins), len(ends))
            ends[row : row + 1] = [until]
            if row == 0:
                continue
            if row > len(beside):
                taken[pid] += 1
                beside.append(taken[pid])
                name = f"stream {tid}, overlapping"
                events.append(_of_row(pid, beside[-1], "thread_name", name=name))
                if isinstance(tid, int):
                    events.append(_of_row(pid, beside[-1], "thread_sort_index", sort_index=tid))
            arrow = arrows.get((pid, tid, event.get("args", {}).get("correlation")))
            for moved in (event, arrow):
                if moved is not None and moved["ts"] == event["ts"]:
                    moved["tid"] = beside[row - 1]


def _of_row(pid: Any, tid: int, what: str, **args: Any) -> Event:
    """Return an event that tells something of a row."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
