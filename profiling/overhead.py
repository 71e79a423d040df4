"""Instrumentation overhead: ranges, scopes, timeline and the watch over the garbage collector.

`instrument_steps` makes the observing calls of a steady decode step, in their order, without the
work between them; a test compares them with those of an engine's step. `measure_overhead` times it
in this process, listeners included. An NVTX tool receives these ranges in a separate domain, so
that they do not mix with the steps of engines.
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

# A round is far shorter than a time slice, so some rounds are undisturbed on a busy system. They
# are spread over time, because a slow phase of a processor can outlast all of them.
ROUNDS = 200
STEPS_PER_ROUND = 100
ROUNDS_AT_ONCE = 20
PAUSE_SECONDS = 0.03
_ROWS = 8

Scope = Callable[[str], AbstractContextManager[object, bool | None]]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Instrumentation overhead of one launch of a steady decode step.

    Attributes:
        ns_per_launch: nanoseconds in the fastest round. It is compared with the fastest step, as
            other processes slow both down.
        rounds: number of rounds.
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
    is_async_device: bool = False,
) -> None:
    """Run the instrumentation of `count` empty steps.

    Args:
        count: number of steps.
        timeline: records them.
        collector: the watch whose time is read.
        scope: opens the scope of an operation.
        scopes: scopes per launch; a replayed graph has none.
        is_async_device: whether the host waits for the device and times the wait.
    """
    clock = time.perf_counter_ns
    for number in range(count):
        with ranges.span(ranges.STEP, number):
            collected = collector.total_ns
            started = clock()
            with ranges.span(ranges.PLAN, number):
                pass
            planned = clock()
            with (
                ranges.span(ranges.LAUNCH, _ROWS),
                ranges.step_span(ranges.REPLAY, number, _ROWS, _ROWS, _ROWS, 1, 0),
            ):
                worked = clock()
                for _ in range(scopes):
                    with scope("operation"):
                        pass
                device_ns = clock() - worked
            launched = clock()
            with ranges.span(ranges.COMMIT, number):
                waiting = clock() if is_async_device else 0
                arrived = clock()
                waited = arrived - waiting if is_async_device else 0
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
    is_async_device: bool = False,
    rounds: int = ROUNDS,
    steps: int = STEPS_PER_ROUND,
) -> Overhead:
    """Time `rounds` rounds of `instrument_steps` with `steps` steps each.

    Raises:
        ValueError: `rounds` or `steps` is less than 1.
    """
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds is {rounds} and steps is {steps}; both must be at least 1")
    timeline, collector = Timeline(steps), CollectorWatch()
    times = []
    try:
        with ranges.in_domain(DOMAIN):
            for number in range(rounds + 1):  # the first one warms up
                if number and number % ROUNDS_AT_ONCE == 0:
                    time.sleep(PAUSE_SECONDS)
                started = time.perf_counter_ns()
                instrument_steps(
                    steps,
                    timeline,
                    collector,
                    scope=scope,
                    scopes=scopes,
                    is_async_device=is_async_device,
                )
                times.append((time.perf_counter_ns() - started) / steps)
    finally:
        collector.close()
    return Overhead(min(times[1:]), rounds, steps)
