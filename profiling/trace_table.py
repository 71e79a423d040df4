"""Time of the steps of a trace, by operation, kernel, layer and range.

Reads the files of `trace.torch_trace`. Times are µs. Standard library only.
"""

import gzip
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .markdown import aligned
from .roofline import floor_seconds
from .stats import covered
from .trace_events import DEVICE_CATEGORIES, Event, TraceError, end_of, events_of

__all__ = ["OperationTime", "TraceOperations", "read_trace", "trace_operations"]

SCHEMA_VERSION: Final = 1
"""Version of the entry `stepgraph` in a trace."""

UNNAMED: Final = "(no operation)"
IDLE: Final = "(idle)"
OUTSIDE: Final = "(outside of operations)"


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Mean time of an operation, kernel, layer or range per step.

    Attributes:
        name: of the operation; of a layer its number.
        us: microseconds per step. Overlapping work counts in full for each.
        share: of the time of a step.
        launches: per step.
        fraction: of the roofline: bytes to read ÷ bandwidth ÷ `us`; None where unknown.
    """

    name: str
    us: float
    share: float
    launches: float
    fraction: float | None = None


Rows = tuple[OperationTime, ...]


@dataclass(frozen=True, slots=True)
class TraceOperations:
    """Breakdown of the steps of a trace; times are means over the steps.

    Attributes:
        model: name of the model, if the trace has it.
        device: True: operations and layers are device work. False: they are scopes of the engine's
            thread, each without the scopes inside it.
        steps: steps in the trace.
        step_us: with a device, from the begin of the first work of a step to the end of its last;
            else the length of the range `step`.
        operations: the longest first; the last row is time without any of them.
        kernels: of the device by the name of the function, copies and fills by their kind, the
            longest first; empty without a device.
        layers: in order; empty where no layer is known.
        ranges: of the host, in the order of their first appearance.
    """

    model: str | None
    device: bool
    steps: int
    step_us: float
    operations: Rows
    kernels: Rows
    layers: Rows
    ranges: Rows

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        where = "device" if self.device else "host"
        title = f"{self.steps} steps of {self.step_us:,.1f} µs on the {where}"
        parts = [title if self.model is None else f"{self.model}: {title}"]
        for what, rows in (
            ("operation", self.operations),
            ("layer", self.layers),
            ("range of the host", self.ranges),
        ):
            if rows:
                parts.append(_table(what, rows, roofline=self.device and what == "operation"))
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the `profile` of a case of the benchmark's JSON."""
        gap = next((row.us for row in self.operations if row.name == IDLE), None)
        return {
            "steps": self.steps,
            "step_us": self.step_us,
            "gap_us": gap,
            "operations": [_entry(row) for row in self.operations if row.name != IDLE],
            "kernels": [_entry(row) for row in self.kernels],
        }


def _entry(row: OperationTime) -> dict[str, Any]:
    return {"name": row.name, "launches": row.launches, "us": row.us}


def read_trace(path: Path | str) -> dict[str, Any]:
    """Read a trace, compressed or not.

    Raises:
        TraceError: the file cannot be read, or holds no trace.
    """
    try:
        data = Path(path).read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        document: dict[str, Any] = json.loads(data)
        events_of(document)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(f"cannot read {path}: it is no trace ({error})") from error
    return document


def trace_operations(trace: Mapping[str, Any] | Path | str) -> TraceOperations:
    """Break down the steps of a trace.

    Args:
        trace: as `read_trace` returns it, or the file.

    Raises:
        TraceError: it cannot be read, is no trace, or has no range `step`.
    """
    document = read_trace(trace) if isinstance(trace, Path | str) else trace
    events = [event for event in events_of(document) if event.get("ph") == "X"]
    events.sort(key=lambda event: event["ts"])
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    turns = [event for event in ranges if event["name"] == "step"]
    if not turns:
        raise TraceError("the trace has no range `step`: no engine ran a step while it was taken")
    about = document.get("stepgraph", {})
    of_host = _Steps(len(turns), sum(turn["dur"] for turn in turns))
    plain = [event for event in ranges if "operation" not in event.get("args", {})]
    of_ranges = of_host.rows(_total(plain, lambda event: str(event["name"])))
    by_step: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in DEVICE_CATEGORIES:
            by_step[event.get("args", {}).get("step")].append(event)
    if not by_step:
        own, layers = (_self_times(events, name) for name in (_scope_operation, _scope_layer))
        return TraceOperations(
            model=about.get("model"),
            device=False,
            steps=of_host.count,
            step_us=of_host.us / of_host.count,
            operations=of_host.with_rest(own, OUTSIDE) if own else (),
            kernels=(),
            layers=_by_number(of_host.rows(layers)),
            ranges=of_ranges,
        )
    by_step.pop(None, None)  # copies between steps
    if not by_step:
        raise TraceError("no work of the device in the trace belongs to a step")
    spans = [[(e["ts"], end_of(e)) for e in work] for work in by_step.values()]
    of_device = _Steps(
        len(by_step), sum(max(end for _, end in work) - work[0][0] for work in spans)
    )
    work = [event for of_step in by_step.values() for event in of_step]
    of_layers = [event for event in work if "layer" in event["args"]]
    operations = of_device.rows(_total(work, _operation), _floors(about))
    kernels = of_device.rows(_total(work, _kernel))
    idle_us = of_device.us - sum(map(covered, spans))
    return TraceOperations(
        model=about.get("model"),
        device=True,
        steps=of_device.count,
        step_us=of_device.us / of_device.count,
        operations=(
            *sorted(operations, key=lambda row: -row.us),
            *of_device.rows({IDLE: (idle_us, 0)}),
        ),
        kernels=tuple(sorted(kernels, key=lambda row: -row.us)),
        layers=_by_number(of_device.rows(_total(of_layers, lambda e: str(e["args"]["layer"])))),
        ranges=of_ranges,
    )


Totals = Mapping[str, tuple[float, int]]
"""Microseconds and launches of all steps, by name."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of a trace: how many, and their time in all."""

    count: int
    us: float

    def rows(self, totals: Totals, floors: Mapping[str, float] | None = None) -> Rows:
        """Return a row for each name; `floors` has the microseconds that a step must take."""
        return tuple(
            OperationTime(
                name,
                us / self.count,
                us / self.us if self.us else 0.0,
                launches / self.count,
                floors[name] / (us / self.count) if floors and us and floors.get(name) else None,
            )
            for name, (us, launches) in totals.items()
        )

    def with_rest(self, totals: Totals, name: str) -> Rows:
        """Return the rows, the longest first, and at the end the time that is in none of them."""
        rest = self.us - sum(us for us, _ in totals.values())
        longest = sorted(totals.items(), key=lambda item: -item[1][0])
        return self.rows({**dict(longest), name: (rest, 0)})


def _total(events: Iterable[Event], name: Callable[[Event], str]) -> Totals:
    """Sum events by name, in the order given."""
    totals: dict[str, tuple[float, int]] = {}
    for event in events:
        us, launches = totals.get(name(event), (0.0, 0))
        totals[name(event)] = us + event["dur"], launches + 1
    return totals


def _self_times(events: Iterable[Event], name: Callable[[Event], str | None]) -> Totals:
    """Sum events within the ranges `step`, each without the named events inside it.

    Args:
        events: of the whole trace.
        name: under which an event is summed; None: it is ignored.
    """
    us: defaultdict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    threads: defaultdict[tuple[Any, Any], list[tuple[Event, str | None]]] = defaultdict(list)
    for event in events:
        is_turn = event.get("cat") == "user_annotation" and event["name"] == "step"
        label = None if is_turn else name(event)
        if is_turn or label is not None:
            threads[event["pid"], event["tid"]].append((event, label))
    for thread in threads.values():
        thread.sort(key=lambda entry: (entry[0]["ts"], -entry[0]["dur"], entry[1] is not None))
        stack: list[tuple[Event, str | None]] = []
        for event, label in thread:
            while stack and end_of(stack[-1][0]) <= event["ts"]:
                stack.pop()
            if label is not None:
                if not stack:
                    continue  # outside of every step
                us[label] += event["dur"]
                launches[label] += 1
                around = stack[-1][1]
                if around is not None:
                    us[around] -= event["dur"]
            stack.append((event, label))
    return {label: (us[label], launches[label]) for label in us}


def _floors(about: Mapping[str, Any]) -> dict[str, float]:
    """Return for operations whose bytes are known the microseconds that a step must take."""
    floors: defaultdict[str, float] = defaultdict(float)
    if about.get("bandwidth_gb_s") is not None:
        for cost in about.get("costs") or ():
            seconds = floor_seconds(cost["launches"] * cost["bytes"], 1e9 * about["bandwidth_gb_s"])
            floors[cost["operation"]] += 1e6 * seconds
    return floors


def _by_number(layers: Rows) -> Rows:
    return tuple(sorted(layers, key=lambda row: int(row.name)))


def _scope_operation(event: Event) -> str | None:
    args = event.get("args", {})
    return args.get("operation") if event.get("cat") == "user_annotation" else None


def _scope_layer(event: Event) -> str | None:
    layer = event.get("args", {}).get("layer")
    known = layer is not None and _scope_operation(event) is not None
    return str(layer) if known else None


def _operation(event: Event) -> str:
    unnamed = UNNAMED if event["cat"] == "kernel" else DEVICE_CATEGORIES[event["cat"]]
    return str(event["args"].get("operation", unnamed))


def _kernel(event: Event) -> str:
    kind = DEVICE_CATEGORIES[event["cat"]]
    return str(event["args"].get("kernel", event["name"])) if kind == "kernel" else kind


def _table(what: str, rows: Rows, *, roofline: bool) -> str:
    """Return a table in Markdown."""
    head = (what, "µs a step", "share", "launches a step", *(("roofline",) if roofline else ()))
    cells = [
        (
            row.name,
            f"{row.us:,.1f}",
            f"{row.share:.1%}",
            f"{row.launches:,.1f}".removesuffix(".0") if row.launches else "-",
            *(("-" if row.fraction is None else f"{row.fraction:.0%}",) if roofline else ()),
        )
        for row in rows
    ]
    return "\n".join(aligned(head, cells, 1))
