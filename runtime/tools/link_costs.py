"""Time of the collective operations of a tensor-parallel group on links of equal bandwidth.

Each device has a full-duplex link into a switch, and a message of n bytes takes latency +
n / bandwidth (Hockney, The communication challenge for MPP, Parallel Computing 20, 1994). For N
ranks and a value of S bytes:

    one-shot   each rank reads the values of all others:     latency + (N - 1) S / bandwidth
    two-shot   reduce-scatter, then all-gather:          2 * latency + 2 (N - 1) / N S / bandwidth

(Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005,
with the steps of each phase at the same time.) One-shot is faster for small values, and always for
two ranks. Adding and rounding take no time here, and all ranks arrive at the same time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # it needs torch
    from ..kernels.ops.layer_plan import ModelPlan

__all__ = ["NVLINK_4", "Collective", "Link", "Transfer", "all_reduce", "step_collectives"]

_FLOAT32 = 4
_INT64 = 8


class Link(NamedTuple):
    """The connection of a device with the other devices of its group."""

    bytes_per_s: float
    """Of one direction."""
    latency_s: float
    """Seconds of a collective operation of one phase and no bytes, its kernel included."""


NVLINK_4 = Link(320e9, 5e-6)
"""Of an H100 or H200 (SXM): fitted to times of a one-shot kernel that vLLM's pull request 24111
reports for six H100, 13 to 70 µs for 0.5 to 4 MiB, within 3 %. NVIDIA specifies 450 GB/s a
direction."""


class Transfer(NamedTuple):
    """One collective operation of one rank."""

    algorithm: str
    received_bytes: float
    """Bytes that pass its link in each direction."""
    seconds: float


def all_reduce(size_bytes: float, ranks: int, link: Link) -> Transfer:
    """Return the faster algorithm for the sum of a value over `ranks` ranks.

    Raises:
        ValueError: there are fewer than two ranks, the size or the latency is negative, or the
            bandwidth is not positive.
    """
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}; a collective operation needs at least 2")
    if not size_bytes >= 0:  # NaN fails too
        raise ValueError(f"size_bytes is {size_bytes}; it must not be negative")
    if not (link.bytes_per_s > 0 and link.latency_s >= 0):
        raise ValueError(f"{link} must have a positive bandwidth and no negative latency")
    one = (ranks - 1) * size_bytes
    two = 2 * (ranks - 1) / ranks * size_bytes
    one_shot = Transfer("one-shot", one, link.latency_s + one / link.bytes_per_s)
    two_shot = Transfer("two-shot", two, 2 * link.latency_s + two / link.bytes_per_s)
    return min(one_shot, two_shot, key=lambda transfer: transfer.seconds)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation of a step."""

    name: str
    """`all_reduce`, or `largest`, which chooses greedy tokens."""
    count: int
    """Of a step."""
    ranks: int
    size_bytes: int
    """Of the value of one rank."""

    def transfer(self, link: Link) -> Transfer:
        """Return what one of them moves, and its time."""
        return all_reduce(self.size_bytes, self.ranks, link)

    def seconds(self, link: Link) -> float:
        """Return the seconds of all of them."""
        return self.count * self.transfer(link).seconds


def step_collectives(
    plan: ModelPlan, *, tokens: int, rows: int, element_bytes: int
) -> tuple[Collective, ...]:
    """Return the collective operations of a step with greedy sampling; none of a whole model.

    They are the `AllReduce` operations of the layers, one for the embeddings, the sums of squares
    of norms over the heads of all ranks, two float32 values of each token, and the choice among the
    largest logits of all ranks, a float32 value and an int64 id of each row.

    Args:
        plan: of one rank.
        tokens: of the step.
        rows: that sample a token.
        element_bytes: of an activation.
    """
    from ..kernels.ops.layer_operations import AllReduce, QKNorm  # needs torch

    if plan.shard is None:
        return ()
    ranks = plan.shard.ranks
    sizes = Counter([plan.hidden_size * element_bytes])
    for op in (op for layer in plan.layers for op in layer.operations):
        if isinstance(op, AllReduce):
            sizes[op.features * element_bytes] += 1
        elif isinstance(op, QKNorm) and op.ranks > 1:
            sizes[2 * _FLOAT32] += 1
    sums = (Collective("all_reduce", count, ranks, tokens * size) for size, count in sizes.items())
    return (*sums, Collective("largest", 1, ranks, rows * (_FLOAT32 + _INT64)))
