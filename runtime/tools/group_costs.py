"""Costs of a decode step that the ranks of a tensor-parallel group compute together.

They are derived from the plan of each rank: its kernels as `step_costs.py` counts them, and its
collective operations as in `link_costs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..kernels.ops.layer_plan import ModelPlan
from ..kernels.triton.fusion import fusion_obstacle
from ..kernels.triton.splits import choose_splits
from ..models.sharding import shard_plan
from .link_costs import Collective, Link, step_collectives
from .step_costs import (
    DEPENDENT_EDGE_SECONDS,
    KernelCost,
    Parts,
    StoredSizes,
    floor_bytes,
    kernel_costs,
    predicted_seconds,
)

__all__ = ["MULTIPROCESSORS", "GroupStep", "check_kernels", "group_step", "rank_plans"]

MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM)."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A decode step of a group. One rank is a model on one device."""

    ranks: tuple[tuple[KernelCost, ...], ...]
    """The kernels of each rank."""
    collectives: tuple[Collective, ...]
    """Equal on all ranks; none on one device."""

    @property
    def slowest(self) -> tuple[KernelCost, ...]:
        """The kernels of the rank that moves the most bytes: the others wait for it."""
        return max(
            self.ranks, key=lambda kernels: sum(cost.launches * cost.bytes for cost in kernels)
        )

    @property
    def floor_bytes(self) -> int:
        """Bytes of weights and cache that a rank reads, at most."""
        return max(map(floor_bytes, self.ranks))

    def replicated_bytes(self, single: GroupStep) -> int:
        """Return the bytes that the ranks read in addition to those of one device."""
        return sum(map(floor_bytes, self.ranks)) - floor_bytes(single.slowest)

    def collective_seconds(self, link: Link) -> float:
        """Return the seconds of all collective operations."""
        return sum(collective.seconds(link) for collective in self.collectives)

    def seconds(
        self,
        bandwidth_bytes_per_s: float,
        link: Link,
        edge_seconds: float = DEPENDENT_EDGE_SECONDS,
    ) -> float:
        """Return the predicted seconds: the kernels of the slowest rank, and the collectives.

        The kernel of a collective operation adds no edge: its latency is the time of a kernel.
        """
        kernels = predicted_seconds(self.slowest, bandwidth_bytes_per_s, edge_seconds)
        return kernels + self.collective_seconds(link)


def rank_plans(plan: ModelPlan, ranks: int) -> tuple[ModelPlan, ...]:
    """Return the plan of each rank of a group; of one rank, the whole plan.

    Raises:
        ConfigError: the model cannot be divided by so many ranks, as for an engine, or as
            `check_kernels`.
    """
    plans = tuple(shard_plan(plan, rank, ranks) for rank in range(ranks))
    check_kernels(plans[0])
    return plans


def check_kernels(plan: ModelPlan) -> None:
    """Refuse a model, or a rank of one, whose layers are made of other kernels.

    Raises:
        ConfigError: names what those kernels do not compute.
    """
    if (obstacle := fusion_obstacle(plan)) is not None:
        raise ConfigError(
            f"the layers of a model with {obstacle} are not made of the kernels that are counted"
            " here"
        )


def group_step(
    plans: tuple[ModelPlan, ...], sizes: StoredSizes, parts: Parts, *, rows: int, context: int
) -> GroupStep:
    """Return the costs of a decode step.

    Args:
        plans: of each rank (`rank_plans`).
        sizes: bytes of stored tensors.
        parts: implementation of the products for more than four rows.
        rows: that decode.
        context: tokens of each, the newest included.
    """
    kernels = tuple(
        kernel_costs(
            plan,
            sizes,
            rows=rows,
            context=context,
            splits=choose_splits(rows, plan.layers[0].attend.kv_heads, context, MULTIPROCESSORS),
            parts=parts,
        )
        for plan in plans
    )
    exchanged = step_collectives(
        plans[0], tokens=rows, rows=rows, element_bytes=sizes.element_bytes
    )
    return GroupStep(kernels, exchanged)
