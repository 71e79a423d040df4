"""Predicts decode steps of tensor-parallel groups on GPUs as text, without loading the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...profiling.markdown import aligned
from ...profiling.roofline import floor_seconds
from ..config import EngineConfig
from .group_costs import MULTIPROCESSORS, GroupStep, group_step, rank_plans
from .link_costs import NVLINK_4, Collective, Link
from .step_costs import EDGE_SECONDS, predicted_seconds
from .step_report import describe_point, read_model, stored_sizes, untuned_parts

__all__ = ["explain_groups"]


def explain_groups(
    source: str | Path,
    config: EngineConfig,
    *,
    ranks: Sequence[int],
    rows: int,
    context: int,
    bandwidth: float,
    link: Link = NVLINK_4,
) -> str:
    """Return greedy decode steps of groups of GPUs as text: bytes, collectives, times, speed-up.

    Args:
        source: as `Engine.from_pretrained`; only the configuration is read.
        config: dtypes of the model, its weights and its cache; nothing else of it counts.
        ranks: sizes of the groups. One device is added for comparison.
        rows: that decode.
        context: tokens of each.
        bandwidth: bytes that each device reads in a second.
        link: between the devices.

    Raises:
        CheckpointError: as `Engine.from_pretrained`.
        ConfigError: as `explain_step`, or a number of ranks does not divide the model.
    """
    model, plan, resolved = read_model(source, config, context)
    sizes = stored_sizes(resolved, model.head_dim)
    parts = untuned_parts(resolved, rows, MULTIPROCESSORS)
    steps = {
        count: group_step(rank_plans(plan, count), sizes, parts, rows=rows, context=context)
        for count in sorted({1, *ranks})
    }
    return "\n".join(
        [
            f"{describe_point(source, resolved, rows, context, bandwidth)} a device, links of"
            f" {link.bytes_per_s / 1e9:,.0f} GB/s and {link.latency_s * 1e6:g} µs",
            "",
            *_reads(steps, bandwidth),
            "",
            *_exchanges(steps, link),
            "",
            *_times(steps, bandwidth, link),
        ]
    )


def _reads(steps: dict[int, GroupStep], bandwidth: float) -> list[str]:
    """What a rank reads."""
    head = ["ranks", "weights MB", "cache MB", "MB a rank", "replicated MB, all ranks", "floor µs"]
    cells = []
    for count, step in steps.items():
        weights, cache = (
            sum(cost.launches * getattr(cost, field) for cost in step.slowest)
            for field in ("weight_bytes", "cache_bytes")
        )
        replicated = step.replicated_bytes(steps[1])
        floor = floor_seconds(step.floor_bytes, bandwidth)
        megabytes = (f"{n / 1e6:,.1f}" for n in (weights, cache, step.floor_bytes, replicated))
        cells.append([str(count), *megabytes, f"{floor * 1e6:,.0f}"])
    return aligned(head, cells, 0)


def _exchanges(steps: dict[int, GroupStep], link: Link) -> list[str]:
    """The collective operations of a step."""
    head = ["collective", "ranks", "algorithm", "count", "KB", "KB received", "µs", "µs a step"]

    def row(collective: Collective) -> list[str]:
        transfer = collective.transfer(link)
        return [
            collective.name,
            str(collective.ranks),
            transfer.algorithm,
            str(collective.count),
            f"{collective.size_bytes / 1e3:,.2f}",
            f"{transfer.received_bytes / 1e3:,.2f}",
            f"{transfer.seconds * 1e6:.2f}",
            f"{collective.seconds(link) * 1e6:,.1f}",
        ]

    return aligned(head, [row(each) for step in steps.values() for each in step.collectives], 3)


def _times(steps: dict[int, GroupStep], bandwidth: float, link: Link) -> list[str]:
    """Predicted times, with and without dependent launch."""
    head = ["ranks", "kernels µs", "collectives µs", "predicted µs", "speed-up", "efficiency"]
    head += ["floor / predicted", "without dependent launch µs"]
    single = steps[1].seconds(bandwidth, link)
    cells = []
    for count, step in steps.items():
        seconds = step.seconds(bandwidth, link)
        cells.append(
            [
                str(count),
                f"{predicted_seconds(step.slowest, bandwidth) * 1e6:,.0f}",
                f"{step.collective_seconds(link) * 1e6:,.0f}",
                f"{seconds * 1e6:,.0f}",
                f"{single / seconds:.2f}",
                f"{single / seconds / count:.0%}",
                f"{floor_seconds(step.floor_bytes, bandwidth) / seconds:.0%}",
                f"{step.seconds(bandwidth, link, EDGE_SECONDS) * 1e6:,.0f}",
            ]
        )
    return aligned(head, cells, 0)
