"""Instrumentation overhead: ranges, scopes, timeline and the watch over the garbage collector.

`instrument_steps` makes the calls that a steady decode step makes for the sake of being observed,
in their order, and nothing between them; a test compares them with those of an engine's step.
`measure_overhead` times it in this process, listeners included. An NVTX tool receives these ranges
in a domain of their own, apart from the steps of engines.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from . import ranges
from .attribution import operation
from .collector import CollectorWatch
from .timeline import Timeline

__all__ = ["Overhead", "instrument_steps", "measure_overhead"]

DOMAIN = f"{ranges.DOMAIN}.overhead"

# Rounds far shorter than a time slice of a busy system: some are undisturbed. They are spread over
# some time, because a processor that is slow stays slow for longer than all rounds take.
ROUNDS = 200
STEPS_PER_ROUND = 100
ROUNDS_AT_ONCE = 20
PAUSE_SECONDS = 0.03
_ROWS = 8

Scope = Callable[[str], AbstractContextManager[object, bool | None]]


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the observation of one launch of a steady decode step takes.

    Attributes:
        ns_per_launch: nanoseconds, of the fastest round: it is compared with the fastest step, and
            other processes make either slower.
        rounds: how often it was timed.
        launches_per_round: launches of each round, timed together.
    """

    ns_per_launch: float
    rounds: int
    launches_per_round: int


def instrument_steps(
    count: int,
    timeline: Timeline,
    collector: CollectorWatch,
    *,
    scope: Scope = operation,
    scopes: int = 0,
    begin: Callable[[], object] | None = None,
    elapsed_ns: Callable[[], int | None] | None = None,
) -> None:
    """Observe `count` steps in which nothing happens.

    Args:
        count: steps.
        timeline: records them.
        collector: the watch whose time is read.
        scope: names the operation that a model launches.
        scopes: how many scopes a launch has; a replayed graph has none.
        begin: records the event that a device's time is counted from; None: no such device.
        elapsed_ns: reads what the device worked on the step before; None where it was not timed.
    """
    clock = time.perf_counter_ns
    for number in range(count):
        with ranges.span(ranges.STEP, number):
            collected = collector.total_ns
            started = clock()
            with ranges.span(ranges.PLAN, number):
                pass
            planned = clock()
            with ranges.span(ranges.LAUNCH, _ROWS):
                if begin is not None:
                    begin()
                with ranges.step_span(ranges.REPLAY, number, _ROWS, _ROWS, _ROWS, 1, 0):
                    worked = clock()
                    for _ in range(scopes):
                        with scope("operation"):
                            pass
                    device_ns = clock() - worked
            launched = clock()
            with ranges.span(ranges.COMMIT, number):
                waiting = 0 if elapsed_ns is None else clock()
                arrived = clock()
                waited = 0 if elapsed_ns is None else arrived - waiting
                elapsed = None if elapsed_ns is None else elapsed_ns()
                if elapsed is not None:
                    timeline.set_device_ns(number - 1, elapsed)
            timeline.record(
                number,
                _ROWS,
                _ROWS,
                0,
                started,
                planned - started,
                launched - planned - device_ns,
                clock() - launched - waited,
                waited,
                device_ns,
                1,
                0,
                1,
                collector.total_ns - collected,
            )


def measure_overhead(
    *,
    scope: Scope = operation,
    scopes: int = 0,
    begin: Callable[[], object] | None = None,
    elapsed_ns: Callable[[], int | None] | None = None,
    rounds: int = ROUNDS,
    steps: int = STEPS_PER_ROUND,
) -> Overhead:
    """Time `instrument_steps`; the arguments are those.

    Raises:
        ValueError: `rounds` or `steps` is less than 1.
    """
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds is {rounds} and steps is {steps}; both must be at least 1")
    timeline, collector = Timeline(steps), CollectorWatch()
    options = {"scope": scope, "scopes": scopes, "begin": begin, "elapsed_ns": elapsed_ns}
    times = []
    try:
        with ranges.in_domain(DOMAIN):
            for number in range(rounds + 1):  # the first one warms up
                if number and number % ROUNDS_AT_ONCE == 0:
                    time.sleep(PAUSE_SECONDS)
                started = time.perf_counter_ns()
                instrument_steps(steps, timeline, collector, **options)  # type: ignore[arg-type]
                times.append((time.perf_counter_ns() - started) / steps)
    finally:
        collector.close()
    return Overhead(min(times[1:]), rounds, steps)
