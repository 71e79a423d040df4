"""What the steps of a trace were spent on: a row for each operation and each layer.

Reads what `trace.torch_trace` writes. Standard library only.
"""

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .markdown import aligned
from .roofline import floor_seconds
from .trace_events import DEVICE_CATEGORIES, TraceError, check_trace
from .trace_times import Event, OperationTime, busy, own_times, times_by_name

__all__ = ["OperationTime", "TraceOperations", "read_trace", "trace_operations"]

SCHEMA_VERSION: Final = 1
"""Of what a trace of ours says beside its events, under the key `stepgraph`."""

UNNAMED: Final = "(no operation)"
IDLE: Final = "(idle)"
OUTSIDE: Final = "(outside of operators)"
OUTSIDE_SCOPES: Final = "(outside of operations)"
MOST_ROWS: Final = 24
"""Of a printed table of operators: a step in eager mode has sixty kinds of them."""


@dataclass(frozen=True, slots=True)
class TraceOperations:
    """The steps of a trace, taken apart; times are means over the steps.

    Attributes:
        model: what ran, as far as the trace says.
        device: whether operations and layers are work of a device beside the host; else they are
            what the thread of the engine ran, each without what it called.
        steps: turns of the engine in the trace that began and ended in it.
        step_us: on a device, from the beginning of the first work of a step to the end of its last;
            else the length of the range `step`.
        operations: where the time went, the longest first; what lies in none of them is the last.
        layers: the same by layer, in order; empty where no layer is known.
        operators: of torch, without those that they call, where the host is the device.
        ranges: the ranges of the host, in the order of their first appearance.
    """

    model: str | None
    device: bool
    steps: int
    step_us: float
    operations: tuple[OperationTime, ...]
    layers: tuple[OperationTime, ...]
    operators: tuple[OperationTime, ...]
    ranges: tuple[OperationTime, ...]

    def markdown(self) -> str:
        """Return tables as text."""
        title = f"{self.steps} steps of {self.step_us:,.1f} µs on the"
        title += " device" if self.device else " host"
        parts = [title if self.model is None else f"{self.model}: {title}"]
        if self.operations:
            parts.append(_table("operation", self.operations, roofline=self.device))
        if self.layers:
            parts.append(_table("layer", self.layers))
        if self.operators:
            parts.append(_table("operator", _shortened(self.operators)))
        if self.ranges:
            parts.append(_table("range of the host", self.ranges))
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
        document = json.loads(data)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"cannot read {path}: it is no whole gzip file ({error})") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"cannot read {path}: it is no JSON ({error})") from error
    try:
        check_trace(document)
    except TraceError as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    assert isinstance(document, dict)
    return document


def trace_operations(trace: Mapping[str, Any] | Path | str) -> TraceOperations:
    """Take the steps of a trace apart.

    Args:
        trace: what `torch_trace` wrote, as `read_trace` returns it, or the file.

    Raises:
        TraceError: it cannot be read, is no trace, or has no range `step`.
    """
    document = read_trace(trace) if isinstance(trace, Path | str) else trace
    events = check_trace(document)
    ranges = [e for e in events if e["ph"] == "X" and e.get("cat") == "user_annotation"]
    turns = [e for e in ranges if e["name"] == "step"]
    if not turns:
        raise TraceError("the trace has no range `step`: no engine ran a step while it was taken")
    said = _said(document)
    work = [e for e in events if e["ph"] == "X" and e.get("cat") in DEVICE_CATEGORIES]
    span = sum(e["dur"] for e in turns)
    plain = [e for e in ranges if "operation" not in e.get("args", {})]
    of_ranges = times_by_name(plain, lambda e: e["name"], len(turns), span)
    if not work:
        operators = own_times(events, turns, _operator)
        scopes = own_times(events, turns, lambda e: _of_scope(e, "operation"))
        return TraceOperations(
            model=said["model"],
            device=False,
            steps=len(turns),
            step_us=span / len(turns),
            operations=_with_rest(scopes, OUTSIDE_SCOPES, len(turns), span) if scopes else (),
            layers=_in_order(own_times(events, turns, lambda e: _of_scope(e, "layer"))),
            operators=_with_rest(operators, OUTSIDE, len(turns), span),
            ranges=of_ranges,
        )
    return _device_operations(said, work, of_ranges)


def _with_rest(
    rows: tuple[OperationTime, ...], name: str, steps: int, span: float
) -> tuple[OperationTime, ...]:
    """Return the rows, and last what the steps took beside them."""
    rest = span - steps * sum(row.us for row in rows)
    return (*rows, OperationTime(name, rest / steps, rest / span if span else 0.0, 0.0))


def _device_operations(
    said: Mapping[str, Any], work: Sequence[dict[str, Any]], ranges: tuple[OperationTime, ...]
) -> TraceOperations:
    by_step: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in work:
        by_step[event.get("args", {}).get("step")].append(event)
    # What belongs to no step (copies between steps) stands in nobody's share.
    by_step.pop(None, None)
    if not by_step:
        raise TraceError("no work of the device in the trace belongs to a step")
    span = idle = 0.0
    for events in by_step.values():
        length = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
        span += length
        idle += length - busy(events)
    known = [event for events in by_step.values() for event in events]
    steps = len(by_step)
    operations = times_by_name(known, _operation, steps, span, _floors(said))
    pause = OperationTime(IDLE, idle / steps, idle / span if span else 0.0, 0.0)
    layers = times_by_name(
        [e for e in known if "layer" in e["args"]], lambda e: str(e["args"]["layer"]), steps, span
    )
    return TraceOperations(
        model=said["model"],
        device=True,
        steps=steps,
        step_us=span / steps,
        operations=(*sorted(operations, key=lambda row: -row.us), pause),
        layers=_in_order(layers),
        operators=(),
        ranges=ranges,
    )


def _said(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the trace says beside its events: `model`, `bandwidth_gb_s` and `costs`, or None."""
    said = document.get("stepgraph")
    said = said if isinstance(said, dict) else {}
    bandwidth, model = said.get("bandwidth_gb_s"), said.get("model")
    known = isinstance(bandwidth, int | float) and bandwidth > 0
    return {
        "model": model if isinstance(model, str) else None,
        "bandwidth_gb_s": bandwidth if known else None,
        "costs": said.get("costs") or (),
    }


def _floors(said: Mapping[str, Any]) -> dict[str, float]:
    """Return of operations whose bytes are known the microseconds that a step must take at them."""
    if said["bandwidth_gb_s"] is None:
        return {}
    floors: defaultdict[str, float] = defaultdict(float)
    try:
        for cost in said["costs"]:
            seconds = floor_seconds(cost["launches"] * cost["bytes"], 1e9 * said["bandwidth_gb_s"])
            floors[cost["operation"]] += 1e6 * seconds
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"the costs in the trace cannot be read: {error}") from error
    return dict(floors)


def _in_order(layers: Iterable[OperationTime]) -> tuple[OperationTime, ...]:
    return tuple(sorted(layers, key=lambda row: int(row.name)))


def _operator(event: Event) -> str | None:
    return str(event["name"]) if event.get("cat") == "cpu_op" else None


def _of_scope(event: Event, key: str) -> str | None:
    """Return the operation or the layer that a scope on the host is of."""
    if event.get("cat") != "user_annotation" or "operation" not in event.get("args", {}):
        return None
    value = event["args"].get(key)
    return None if value is None else str(value)


def _operation(event: Mapping[str, Any]) -> str:
    args = event.get("args", {})
    if "operation" in args:
        return str(args["operation"])
    return UNNAMED if event["cat"] == "kernel" else DEVICE_CATEGORIES[event["cat"]]


def _shortened(rows: tuple[OperationTime, ...]) -> tuple[OperationTime, ...]:
    """Return the first rows, and the others but the very last in one."""
    *others, last = rows[MOST_ROWS:] or (None,)
    if len(others) < 2 or last is None:
        return rows
    together = OperationTime(
        f"({len(others)} others)",
        sum(row.us for row in others),
        sum(row.share for row in others),
        sum(row.launches for row in others),
    )
    return (*rows[:MOST_ROWS], together, last)


def _table(what: str, rows: Sequence[OperationTime], *, roofline: bool = False) -> str:
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
