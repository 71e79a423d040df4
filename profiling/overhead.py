"""What it costs to know where the time goes: ranges, scopes, timeline, the collector's watch.

`instrument_steps` makes the very calls that a steady decode step makes for the sake of being
observed, in their order, and nothing between them; a test holds it against the step of an engine.
`measure_overhead` times it in this process, so where somebody listens to the ranges the cost is
that of telling them. A tool is told of these in a domain of their own, or the thousands of steps
that nobody ran would stand in its trace beside those of an engine.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from . import ranges
from .attribution import operation
from .collector import CollectorWatch
from .emitters import Emitter
from .nvtx_tool import attached_domain
from .timeline import Timeline

__all__ = ["Overhead", "instrument_steps", "measure_overhead"]

DOMAIN = f"{ranges.DOMAIN}.overhead"
"""The NVTX domain of the steps that are timed here."""

# Rounds far shorter than the time that a busy system gives a process at once: some are undisturbed.
ROUNDS = 200
STEPS_PER_ROUND = 100
# A processor that is slow is so for longer than all rounds take: they are spread over some time.
ROUNDS_AT_ONCE = 20
PAUSE_SECONDS = 0.03
_ROWS = 8


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the observation of one launch of a steady decode step takes.

    Attributes:
        ns_per_launch: nanoseconds, of the fastest round: it is set against the fastest step, and
            what makes either slower are others on the machine.
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
    emitter: Emitter,
    *,
    scope: Callable[[str], AbstractContextManager[object, bool | None]] = operation,
    scopes: int = 0,
    begin: Callable[[], object] | None = None,
    elapsed_ns: Callable[[], int | None] | None = None,
) -> None:
    """Observe `count` steps in which nothing happens.

    Args:
        count: steps.
        timeline: where they are recorded.
        collector: the watch whose time is read.
        emitter: where the ranges go.
        scope: what a model says by which operation it launches.
        scopes: how often its code says so in a launch; a replayed graph runs none of it.
        begin: records the event from which a device's time is counted, where it is asked for;
            None: no such device.
        elapsed_ns: reads what the device worked on the step before; None where it was not timed.
    """
    clock = time.perf_counter_ns
    for number in range(count):
        with emitter.span(ranges.STEP, number):
            collected = collector.total_ns
            started = clock()
            with emitter.span(ranges.PLAN, number):
                pass
            planned = clock()
            with emitter.span(ranges.LAUNCH, _ROWS):
                if begin is not None:
                    begin()
                with emitter.step_span(ranges.REPLAY, number, _ROWS, _ROWS, _ROWS, 1, 0):
                    worked = clock()
                    for _ in range(scopes):
                        with scope("operation"):
                            pass
                    device_ns = clock() - worked
            launched = clock()
            with emitter.span(ranges.COMMIT, number):
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
    scope: Callable[[str], AbstractContextManager[object, bool | None]] = operation,
    scopes: int = 0,
    begin: Callable[[], object] | None = None,
    elapsed_ns: Callable[[], int | None] | None = None,
    rounds: int = ROUNDS,
    steps: int = STEPS_PER_ROUND,
) -> Overhead:
    """Time `instrument_steps` with a timeline and a watch of its own.

    Raises:
        ValueError: `rounds` or `steps` is less than 1.
    """
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds is {rounds} and steps is {steps}; both must be at least 1")
    emitter: Emitter = ranges.connect(attached_domain(DOMAIN)) if ranges.attached else ranges
    timeline, collector = Timeline(steps), CollectorWatch()
    try:
        times = []
        for number in range(rounds + 1):  # the first one warms up
            if number and number % ROUNDS_AT_ONCE == 0:
                time.sleep(PAUSE_SECONDS)
            started = time.perf_counter_ns()
            instrument_steps(
                steps,
                timeline,
                collector,
                emitter,
                scope=scope,
                scopes=scopes,
                begin=begin,
                elapsed_ns=elapsed_ns,
            )
            times.append((time.perf_counter_ns() - started) / steps)
    finally:
        collector.close()
    return Overhead(min(times[1:]), rounds, steps)
