"""The autoscaling policy: queue time, cache usage and row usage. Serve's controller runs it.

It imports no Ray: `AutoscalingContext` and the delays around the policy are those of Ray Serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..health import ServiceSnapshot

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

__all__ = ["LOADS", "LoadPolicy", "load_stats"]

TOLERANCE = 0.1
"""Relative distance from a target within which nothing changes."""


LOADS: Mapping[str, str] = {
    "queue_seconds": "Wait of the oldest queued request.",
    "kv_usage": "Share of the cache's blocks that requests hold, 0 to 1.",
    "row_usage": "Share of the rows that have a request, 0 to 1.",
}
"""What a replica reports and `LoadPolicy` averages."""


def load_stats(snapshot: ServiceSnapshot) -> dict[str, float]:
    """Return the values of `LOADS` for an engine."""
    gauges = snapshot.gauges
    if gauges is None:
        return {"queue_seconds": snapshot.oldest_wait, "kv_usage": 0.0, "row_usage": 0.0}
    return {
        "queue_seconds": snapshot.oldest_wait,
        "kv_usage": gauges.held_blocks / gauges.usable_blocks,
        "row_usage": gauges.running / gauges.rows,
    }


class LoadPolicy:
    """Multiplies the replicas by the largest ratio of a mean load to its target."""

    def __init__(self, **targets: float) -> None:
        """Take a target for each of the values of `load_stats`."""
        self._targets = targets

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas and an empty state; Serve applies the limits."""
        present = context.current_num_replicas
        loads = {name: list(v.values()) for name, v in (context.aggregated_metrics or {}).items()}
        wanted = self.replicas(present, loads)
        return (context.target_num_replicas if wanted is None else wanted), {}

    def replicas(self, present: int, loads: Mapping[str, list[float]]) -> int | None:
        """Return the wanted number of replicas for loads by name, None without values."""
        ratios = [
            fmean(values) / self._targets[name]
            for name, values in loads.items()
            if values and name in self._targets
        ]
        if not ratios or not present:
            return None
        ratio = max(ratios)
        if abs(ratio - 1) <= TOLERANCE:
            return present
        return max(1, math.ceil(present * ratio))
