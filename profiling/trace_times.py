"""Sums of the events of a trace: by name, without what lies within them, without overlaps.

Times are microseconds, those of a step are means over the steps. Standard library only.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .roofline import fraction

__all__ = ["Event", "OperationTime", "busy", "own_times", "times_by_name"]

Event = Mapping[str, Any]


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


def times_by_name(
    events: Iterable[Event],
    name: Callable[[Event], str],
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


def own_times(
    events: Sequence[Event], turns: Sequence[Event], name: Callable[[Event], str | None]
) -> tuple[OperationTime, ...]:
    """Sum events that lie within the turns of the engine, each without those within it.

    Args:
        events: of the whole trace.
        turns: the ranges `step`.
        name: what an event is summed as; None: it does not count.

    Returns:
        The longest first.
    """
    own: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    known = {id(turn) for turn in turns}
    threads: defaultdict[tuple[Any, Any], list[tuple[Event, str | None]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            called = None if id(event) in known else name(event)
            if called is not None or id(event) in known:
                threads[event["pid"], event["tid"]].append((event, called))
    for thread in threads.values():
        thread.sort(key=lambda entry: (entry[0]["ts"], -entry[0]["dur"], entry[1] is not None))
        stack: list[tuple[Event, str | None]] = []
        for event, called in thread:
            while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= event["ts"]:
                stack.pop()
            if called is not None:
                if not stack:
                    continue  # outside of every turn
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


def busy(events: Iterable[Event]) -> float:
    """Return the microseconds in which at least one of the events ran."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(event["ts"], until))
        until = max(until, end)
    return total
