"""What the steps of a trace were spent on: a row for each operation and each layer.

Reads what `trace.torch_trace` writes. Standard library only.
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

from .roofline import floor_seconds, fraction
from .trace_events import DEVICE_CATEGORIES, TraceError, check_trace

__all__ = ["OperationTime", "TraceOperations", "read_trace", "trace_operations"]

SCHEMA_VERSION: Final = 1
"""Of what a trace of ours says beside its events, under the key `stepgraph`."""

UNNAMED: Final = "(no operation)"
IDLE: Final = "(idle)"
OUTSIDE: Final = "(outside of operators)"
MOST_ROWS: Final = 24
"""Of a printed table of operators: a step in eager mode has sixty kinds of them."""


@dataclass(frozen=True, slots=True)
class OperationTime:
    """What one operation, layer, operator or range took of a step, on average.

    Attributes:
        name: of the operation; of a layer its number.
        us: microseconds of a step. Work that overlaps counts for each that does it.
        share: of the time of a step.
        launches: in a step.
        fraction: bytes that must be read at the device's bandwidth over `us`; None where one of
            them is not known.
    """

    name: str
    us: float
    share: float
    launches: float
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class TraceOperations:
    """The steps of a trace, taken apart; times are means over the steps.

    Attributes:
        model: what ran, as far as the trace says.
        device: whether the time is that of a device beside the host; else it is that of operators
            in the thread of the engine, without what they called.
        steps: turns of the engine in the trace that began and ended in it.
        step_us: on a device, from the beginning of the first work of a step to the end of its last;
            else the length of the range `step`.
        operations: where the time went, the longest first.
        layers: the same by layer, in order; empty where no layer is known.
        ranges: the ranges of the host, in the order of their first appearance.
    """

    model: str | None
    device: bool
    steps: int
    step_us: float
    operations: tuple[OperationTime, ...]
    layers: tuple[OperationTime, ...]
    ranges: tuple[OperationTime, ...]

    def markdown(self) -> str:
        """Return tables as text."""
        what, where = ("operation", "device") if self.device else ("operator", "host")
        title = f"{self.steps} steps of {self.step_us:,.1f} µs on the {where}"
        if self.model is not None:
            title = f"{self.model}: {title}"
        parts = [title, _table(what, _shortened(self.operations), roofline=self.device)]
        if self.layers:
            parts.append(_table("layer", self.layers, roofline=False))
        if self.ranges:
            parts.append(_table("range of the host", self.ranges, roofline=False))
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
    of_ranges = _times(ranges, lambda e: e["name"], len(turns), span)
    if not work:
        operators, step_us = _operators(events, turns)
        return TraceOperations(
            model=said["model"],
            device=False,
            steps=len(turns),
            step_us=step_us,
            operations=operators,
            layers=(),
            ranges=of_ranges,
        )
    return _device_operations(said, work, of_ranges)


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
        idle += length - _busy(events)
    known = [event for events in by_step.values() for event in events]
    steps = len(by_step)
    operations = _times(known, _operation, steps, span, _floors(said))
    pause = OperationTime(IDLE, idle / steps, idle / span if span else 0.0, 0.0)
    layers = _times(
        [e for e in known if "layer" in e["args"]], lambda e: str(e["args"]["layer"]), steps, span
    )
    return TraceOperations(
        model=said["model"],
        device=True,
        steps=steps,
        step_us=span / steps,
        operations=(*sorted(operations, key=lambda row: -row.us), pause),
        layers=tuple(sorted(layers, key=lambda row: int(row.name))),
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


def _operation(event: Mapping[str, Any]) -> str:
    args = event.get("args", {})
    if "operation" in args:
        return str(args["operation"])
    return UNNAMED if event["cat"] == "kernel" else DEVICE_CATEGORIES[event["cat"]]


def _times(
    events: Iterable[Mapping[str, Any]],
    name: Callable[[Mapping[str, Any]], str],
    steps: int,
    span: float,
    floors: Mapping[str, float] = MappingProxyType({}),
) -> tuple[OperationTime, ...]:
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


def _operators(
    events: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]
) -> tuple[tuple[OperationTime, ...], float]:
    """Return the operators within the ranges `step`, without what they called, and the step's µs.

    What is in no operator is the interpreter's. Threads that an operator computes in are its own.
    """
    own: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    threads = {(turn["pid"], turn["tid"]) for turn in turns}
    steps_of = {id(turn) for turn in turns}
    for thread in threads:
        ours = sorted(
            (
                event
                for event in events
                if event["ph"] == "X"
                and (event["pid"], event["tid"]) == thread
                and (event.get("cat") == "cpu_op" or id(event) in steps_of)
            ),
            key=lambda event: (event["ts"], -event["dur"]),
        )
        stack: list[Mapping[str, Any]] = []
        for event in ours:
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if event.get("cat") == "cpu_op" and not stack:
                continue  # outside of every step
            own[event["name"]] += event["dur"]
            calls[event["name"]] += 1
            if stack:
                own[stack[-1]["name"]] -= event["dur"]
            stack.append(event)
    span = sum(turn["dur"] for turn in turns)
    rest = own.pop("step")
    steps = len(turns)
    rows = [
        OperationTime(name, us / steps, us / span if span else 0.0, calls[name] / steps)
        for name, us in sorted(own.items(), key=lambda item: -item[1])
    ]
    rows.append(OperationTime(OUTSIDE, rest / steps, rest / span if span else 0.0, 0.0))
    return tuple(rows), span / steps


def _busy(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the microseconds in which at least one of the events ran."""
    busy, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(event["ts"], until))
        until = max(until, end)
    return busy


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


def _table(what: str, rows: Sequence[OperationTime], *, roofline: bool) -> str:
    """Return a table in Markdown."""
    heads = [what, "µs a step", "share", "launches a step", *(["roofline"] if roofline else [])]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        cells = [
            row.name.replace("|", "\\|"),
            f"{row.us:,.1f}",
            f"{100 * row.share:.1f} %",
            f"{row.launches:,.1f}".removesuffix(".0") if row.launches else "-",
        ]
        if roofline:
            cells.append("-" if row.fraction is None else f"{100 * row.fraction:.0f} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
