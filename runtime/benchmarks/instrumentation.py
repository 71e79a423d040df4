"""What it costs that an engine knows where its time goes, beside the steps of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...profiling.overhead import Overhead, measure_overhead
from ..engine import Engine
from ..launch import timed_event

__all__ = ["instrumentation_line", "instrumentation_to_json", "measure_instrumentation"]


def measure_instrumentation(engine: Engine) -> Overhead:
    """Measure what a launch of the engine's kind of device takes to be observed."""
    if engine.config.device.type != "cuda":
        return measure_overhead()
    with torch.cuda.device(engine.config.device):
        # The end of a step is waited for anyway; its begin, and the time between, are for us.
        began, ended, again = timed_event(), timed_event(), timed_event()
        began.record()
        ended.record()
        ended.synchronize()
        return measure_overhead(
            begin=again.record, elapsed_ns=lambda: round(1e6 * float(began.elapsed_time(ended)))
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
    nanoseconds = max(entry["ns_per_step"] for entry in shown)
    fraction = max(entry["fraction"] for entry in shown)
    return (
        f"ranges and timeline take {nanoseconds:,.0f} ns a step,"
        f" at most {fraction:.2%} of the fastest step"
    )
