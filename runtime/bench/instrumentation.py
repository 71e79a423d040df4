"""What it costs that an engine knows where its time goes, beside the steps of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...profiling import attribution, ranges
from ...profiling.overhead import Overhead, measure_overhead
from ..engine.engine import Engine
from ..operation_scopes import operation
from ..sampling_params import SamplingParams

__all__ = [
    "instrumentation_line",
    "instrumentation_to_json",
    "measure_instrumentation",
    "scopes_of_a_launch",
]


class _Scopes:
    """Counts the scopes of operations in each launch of a decode step, as it hears of them."""

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

    def leave(self, mark: object) -> None:
        pass

    def abandon(self, mark: object) -> None:
        pass


def scopes_of_a_launch(engine: Engine) -> int:
    """Return how often the code of a launch says which operation it launches: 0 in a replay.

    Runs a request of a few tokens on the engine, which is idle.
    """
    heard = _Scopes()
    steps = engine.config.steps_per_launch
    params = SamplingParams(max_tokens=1 + steps, temperature=0.0, ignore_eos=True)
    with ranges.listening(heard), attribution.listening(heard):
        engine.generate([[0]], params)
    return max(heard.counts)


def measure_instrumentation(engine: Engine) -> Overhead:
    """Measure what a launch of an engine takes to be observed. The engine is idle.

    Events of `Engine.device_timing` are not included: steps are timed on request only.
    """
    scopes = scopes_of_a_launch(engine)
    if not engine.config.is_async_device:
        return measure_overhead(scope=operation, scopes=scopes)
    return measure_overhead(
        scope=operation, scopes=scopes, begin=lambda: None, elapsed_ns=lambda: None
    )


def instrumentation_to_json(
    overhead: Overhead, step_ms: Sequence[float], steps_per_launch: int
) -> dict[str, float]:
    """Return `instrumentation` of a case: nanoseconds a step, and their share of the fastest."""
    ns_per_step = overhead.ns_per_launch / steps_per_launch
    return {"ns_per_step": ns_per_step, "fraction": ns_per_step / (1e6 * min(step_ms))}


def instrumentation_line(document: dict[str, Any]) -> str | None:
    """Return what the cases say of it in one line, if they do."""
    shown = [case["instrumentation"] for case in document["cases"] if "instrumentation" in case]
    if not shown:
        return None
    worst = max(shown, key=lambda entry: float(entry["fraction"]))
    return (
        f"ranges, scopes and timeline take at most {worst['fraction']:.2%} of the fastest step of a"
        f" case ({worst['ns_per_step']:,.0f} ns)"
    )
