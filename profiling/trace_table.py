"""Where the time of the steps of a trace went: a row for each operation, layer and range.

Reads the files of `trace.torch_trace`. Times are µs. Standard library only.
"""

import gzip
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from .markdown import aligned
from .roofline import floor_seconds, fraction
from .trace_events import DEVICE_CATEGORIES, Event, TraceError, events_of

__all__ = ["OperationTime", "TraceOperations", "read_trace", "trace_operations"]

SCHEMA_VERSION: Final = 1
"""Of the key `stepgraph` of a trace."""

UNNAMED: Final = "(no operation)"
IDLE: Final = "(idle)"
OUTSIDE: Final = "(outside of operators)"
OUTSIDE_SCOPES: Final = "(outside of operations)"
MOST_ROWS: Final = 24
"""Of a printed table of operators: a step in eager mode has sixty kinds of them."""


@dataclass(frozen=True, slots=True)
class OperationTime:
    """What one operation, layer, operator or range took of a step, on average.

    Attributes:
        name: of the operation; of a layer its number.
        us: microseconds of a step. Work that overlaps counts in full for each.
        share: of the time of a step.
        launches: in a step.
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
    """The steps of a trace, taken apart; times are means over the steps.

    Attributes:
        model: what ran, as far as the trace says.
        device: whether operations and layers are work of a device; else they are scopes of the
            engine's thread, each without what it called.
        steps: steps in the trace.
        step_us: on a device, from the begin of the first work of a step to the end of its last;
            else the length of the range `step`.
        operations: the longest first; time in none of them is the last.
        layers: in order; empty where no layer is known.
        operators: of torch, without those that they call, where the host is the device.
        ranges: of the host, in the order of their first appearance.
    """

    model: str | None
    device: bool
    steps: int
    step_us: float
    operations: Rows
    layers: Rows
    operators: Rows
    ranges: Rows

    def markdown(self) -> str:
        """Return tables as text."""
        title = f"{self.steps} steps of {self.step_us:,.1f} µs on the"
        title += " device" if self.device else " host"
        parts = [title if self.model is None else f"{self.model}: {title}"]
        for what, rows in (
            ("operation", self.operations),
            ("layer", self.layers),
            ("operator", _shortened(self.operators)),
            ("range of the host", self.ranges),
        ):
            if rows:
                parts.append(_table(what, rows, roofline=self.device and what == "operation"))
        return "\n\n".join(parts)


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
    """Take the steps of a trace apart.

    Args:
        trace: as `read_trace` returns it, or the file.

    Raises:
        TraceError: it cannot be read, is no trace, or has no range `step`.
    """
    document = read_trace(trace) if isinstance(trace, Path | str) else trace
    events = [event for event in events_of(document) if event.get("ph") == "X"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    turns = [event for event in ranges if event["name"] == "step"]
    if not turns:
        raise TraceError("the trace has no range `step`: no engine ran a step while it was taken")
    about = document.get("stepgraph", {})
    model, steps, span = about.get("model"), len(turns), sum(turn["dur"] for turn in turns)
    plain = [event for event in ranges if "operation" not in event.get("args", {})]
    of_ranges = _times_by_name(plain, lambda event: str(event["name"]), steps, span)
    if not any(event.get("cat") in DEVICE_CATEGORIES for event in events):
        scopes = _own_times(events, turns, lambda event: _of_scope(event, "operation"))
        operators = _own_times(events, turns, _operator)
        return TraceOperations(
            model=model,
            device=False,
            steps=steps,
            step_us=span / steps,
            operations=_with_rest(scopes, OUTSIDE_SCOPES, steps, span) if scopes else (),
            layers=_in_order(_own_times(events, turns, lambda event: _of_scope(event, "layer"))),
            operators=_with_rest(operators, OUTSIDE, steps, span),
            ranges=of_ranges,
        )
    by_step: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in DEVICE_CATEGORIES:
            by_step[event.get("args", {}).get("step")].append(event)
    by_step.pop(None, None)  # copies between steps
    if not by_step:
        raise TraceError("no work of the device in the trace belongs to a step")
    lengths = [max(map(_end, w)) - min(e["ts"] for e in w) for w in by_step.values()]
    span, steps = sum(lengths), len(by_step)
    idle = span - sum(map(_busy, by_step.values()))
    work = [event for of_step in by_step.values() for event in of_step]
    of_layers = [event for event in work if "layer" in event["args"]]
    operations = _times_by_name(work, _operation, steps, span, _floors(about))
    layers = _times_by_name(of_layers, lambda event: str(event["args"]["layer"]), steps, span)
    return TraceOperations(
        model=model,
        device=True,
        steps=steps,
        step_us=span / steps,
        operations=(
            *sorted(operations, key=lambda row: -row.us),
            OperationTime(IDLE, idle / steps, idle / span if span else 0.0, 0.0),
        ),
        layers=_in_order(layers),
        operators=(),
        ranges=of_ranges,
    )


def _times_by_name(
    events: Iterable[Event],
    name: Callable[[Event], str],
    steps: int,
    span: float,
    floors: Mapping[str, float] = MappingProxyType({}),
) -> Rows:
    """Sum events by name, in the order of their first appearance; `span` is that of all steps."""
    us: defaultdict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for event in sorted(events, key=lambda event: event["ts"]):
        us[name(event)] += event["dur"]
        launches[name(event)] += 1
    return tuple(
        OperationTime(
            key,
            us[key] / steps,
            us[key] / span if span else 0.0,
            launches[key] / steps,
            fraction(floors[key], us[key] / steps) if floors.get(key) and us[key] else None,
        )
        for key in us
    )


def _own_times(
    events: Iterable[Event], turns: Sequence[Event], name: Callable[[Event], str | None]
) -> Rows:
    """Sum events within the ranges `step`, each without the events inside it, the longest first.

    Args:
        events: of the whole trace.
        turns: the ranges `step`.
        name: what an event is summed as; None: it does not count.
    """
    own: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    threads: defaultdict[tuple[Any, Any], list[tuple[Event, str | None]]] = defaultdict(list)
    known = {id(turn) for turn in turns}
    for event in events:
        called = None if id(event) in known else name(event)
        if called is not None or id(event) in known:
            threads[event["pid"], event["tid"]].append((event, called))
    for thread in threads.values():
        thread.sort(key=lambda entry: (entry[0]["ts"], -entry[0]["dur"], entry[1] is not None))
        stack: list[tuple[Event, str | None]] = []
        for event, called in thread:
            while stack and _end(stack[-1][0]) <= event["ts"]:
                stack.pop()
            if called is not None:
                if not stack:
                    continue  # outside of every step
                own[called] += event["dur"]
                calls[called] += 1
                around = stack[-1][1]
                if around is not None:
                    own[around] -= event["dur"]
            stack.append((event, called))
    steps, span = len(turns), sum(turn["dur"] for turn in turns)
    return tuple(
        OperationTime(key, us / steps, us / span if span else 0.0, calls[key] / steps)
        for key, us in sorted(own.items(), key=lambda item: -item[1])
    )


def _with_rest(rows: Rows, name: str, steps: int, span: float) -> Rows:
    """Return the rows, and last the time of the steps that is in none of them."""
    rest = span - steps * sum(row.us for row in rows)
    return (*rows, OperationTime(name, rest / steps, rest / span if span else 0.0, 0.0))


def _busy(events: Iterable[Event]) -> float:
    """Return the microseconds in which at least one of the events ran."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        total += max(0.0, _end(event) - max(event["ts"], until))
        until = max(until, _end(event))
    return total


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _floors(about: Mapping[str, Any]) -> dict[str, float]:
    """Return for operations whose bytes are known the microseconds that a step must take."""
    floors: defaultdict[str, float] = defaultdict(float)
    if about.get("bandwidth_gb_s") is not None:
        for cost in about.get("costs") or ():
            seconds = floor_seconds(cost["launches"] * cost["bytes"], 1e9 * about["bandwidth_gb_s"])
            floors[cost["operation"]] += 1e6 * seconds
    return dict(floors)


def _in_order(layers: Rows) -> Rows:
    return tuple(sorted(layers, key=lambda row: int(row.name)))


def _operator(event: Event) -> str | None:
    return str(event["name"]) if event.get("cat") == "cpu_op" else None


def _of_scope(event: Event, key: str) -> str | None:
    """Return the operation or the layer of a scope on the host."""
    if event.get("cat") != "user_annotation" or "operation" not in event.get("args", {}):
        return None
    value = event["args"].get(key)
    return None if value is None else str(value)


def _operation(event: Event) -> str:
    unnamed = UNNAMED if event["cat"] == "kernel" else DEVICE_CATEGORIES[event["cat"]]
    return str(event["args"].get("operation", unnamed))


def _shortened(rows: Rows) -> Rows:
    """Return the first rows, and the others but the last in one."""
    others = rows[MOST_ROWS:-1]
    if len(others) < 2:
        return rows
    together = OperationTime(
        f"({len(others)} others)",
        sum(row.us for row in others),
        sum(row.share for row in others),
        sum(row.launches for row in others),
    )
    return (*rows[:MOST_ROWS], together, rows[-1])


def _table(what: str, rows: Sequence[OperationTime], *, roofline: bool) -> str:
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
