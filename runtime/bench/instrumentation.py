"""Instrumentation overhead of a decode step: ranges, operation scopes and the timeline."""

from __future__ import annotations

from collections.abc import Sequence

from ...profiling import attribution, ranges
from ...profiling.overhead import Overhead, measure_overhead
from ..engine.engine import Engine
from ..operation_scopes import operation
from .workload import greedy

__all__ = ["instrumentation_to_json", "measure_instrumentation", "scopes_of_a_launch"]


class _ScopeCounter:
    """A listener that counts the scopes of operations in each launch of a decode step."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._ranges: list[str] = []

    def push(self, name: str, payload: ranges.Payload) -> None:
        self._ranges.append(name)
        if name == ranges.REPLAY:
            self.counts.append(0)

    def pop(self) -> None:
        self._ranges.pop()

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        pass

    def enter(self, name: str, layer: int | None) -> None:
        if ranges.REPLAY in self._ranges:
            self.counts[-1] += 1

    def leave(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def scopes_of_a_launch(engine: Engine) -> int:
    """Return how many operation scopes the code of a launch enters: 0 in a replay.

    Runs a request of a few tokens on the engine, which must be idle.
    """
    counter = _ScopeCounter()
    params = greedy(1 + engine.config.steps_per_launch)
    with ranges.listening(counter), attribution.listening(counter):
        engine.generate([[0]], params)
    return max(counter.counts)


def measure_instrumentation(engine: Engine) -> Overhead:
    """Measure the instrumentation of a launch of an idle engine.

    Events of `Engine.device_timing` are not included: steps are timed on request only.
    """
    return measure_overhead(
        scope=operation,
        scopes=scopes_of_a_launch(engine),
        is_async_device=engine.config.is_async_device,
    )


def instrumentation_to_json(engine: Engine, step_ms: Sequence[float]) -> dict[str, float]:
    """Return `instrumentation` of a case: nanoseconds a step, and their share of the fastest."""
    launch = measure_instrumentation(engine)
    ns_per_step = launch.ns_per_launch / engine.config.steps_per_launch
    return {"ns_per_step": ns_per_step, "fraction": ns_per_step / (1e6 * min(step_ms))}
