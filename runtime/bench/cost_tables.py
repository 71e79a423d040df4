"""Tables of host costs, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ...profiling.markdown import aligned
from .cache_bookkeeping import CacheTiming
from .cells import percentiles
from .host import HostCost

__all__ = ["cache_table", "host_table"]


def cache_table(costs: Sequence[CacheTiming]) -> str:
    """Return what the bookkeeping of the cache costs for each size of its pool, as Markdown."""
    sizes = sorted({cost.num_blocks for cost in costs})
    by_operation: dict[str, dict[int, CacheTiming]] = {}
    for cost in costs:
        by_operation.setdefault(cost.operation, {})[cost.num_blocks] = cost
    head = ["operation", *(f"ns, {size:,} blocks" for size in sizes), "ratio"]
    cells = [
        [
            operation,
            *(f"{of_size[size].nanoseconds:.0f}" for size in sizes),
            f"{of_size[sizes[-1]].nanoseconds / of_size[sizes[0]].nanoseconds:.2f}",
        ]
        for operation, of_size in by_operation.items()
    ]
    unit = f"nanoseconds a block (a row for `step`), n = {costs[0].n}"
    return "\n".join([*aligned(head, cells, 1), "", unit])


def host_table(costs: Sequence[HostCost]) -> str:
    """Return what the host takes for a step, as Markdown.

    The ratio is that of the medians, to the first line of as many rows.
    """
    head = ["rows", "queued", "blocks", "host µs p50 / p90 / p99", "min", "ratio"]
    first: dict[int, float] = {}
    cells = [
        [
            str(cost.rows),
            f"{cost.queued:,}",
            f"{cost.num_blocks:,}",
            percentiles(cost.host_us.to_json()),
            f"{cost.host_us.min:.1f}",
            f"{cost.host_us.p50 / first.setdefault(cost.rows, cost.host_us.p50):.2f}",
        ]
        for cost in costs
    ]
    unit = f"microseconds of a step, outputs included, n = {costs[0].host_us.n}"
    return "\n".join([*aligned(head, cells, 0), "", unit])
