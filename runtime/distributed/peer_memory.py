"""Collectives of GPUs as Triton kernels over memory that all ranks of a group have mapped.

The memory is `torch.distributed._symmetric_memory`: allocations of the CUDA driver, whose handles
the processes exchange, with a multicast mapping of all of them where NVLink Switch has one.

Inside code that torch.compile traces they are operators. These are declared to write to their
handle, so that compiled code keeps all of them, in their order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d as c10d

from ..kernels.ops.batch import Feedback
from ..kernels.ops.collectives import CollectiveFailure
from ..kernels.triton.all_reduce import Algorithm, all_reduce, fits_rows, sum_rows
from ..kernels.triton.linear import GpuNorm
from ..kernels.triton.peer_exchange import (
    ABORT,
    FAILURE,
    GAVE_UP_ON_ABORT,
    LIMIT,
    PROGRAMS,
    PeerRegions,
    flag_bytes,
    new_control,
    region_bytes,
)
from ..kernels.triton.peer_gather import gather_columns, largest, pick_of_ranks
from .process_group import OwnProcessGroup, raise_of_any_rank
from .rank_group import RankGroup

__all__ = ["PeerMemoryCollectives", "SumChoice", "open_peer_memory"]

_T = TypeVar("_T")


def open_peer_memory(
    group: RankGroup,
    processes: OwnProcessGroup,
    device: torch.device,
    slot_bytes: int,
    limit_seconds: float,
) -> PeerRegions:
    """Return the regions of all ranks, which call it together.

    Args:
        group: the ranks.
        processes: the same, as symmetric memory takes them; may be closed afterwards.
        device: of this rank, a CUDA device.
        slot_bytes: of each program that exchanges data; a multiple of 4096.
        limit_seconds: how long programs wait for their peers.

    Raises:
        RuntimeError: on all ranks, if the devices of some cannot access each other's memory; the
            message has each rank's reason.
    """
    allocate = partial(_allocate, group.ranks, device, slot_bytes)
    region = _on_all_ranks(group, allocate)  # the rendezvous would wait for a rank without one
    return _on_all_ranks(group, partial(_map, group, processes, region, slot_bytes, limit_seconds))


def _on_all_ranks(group: RankGroup, make: Callable[[], _T]) -> _T:
    """Return what `make` returns; raise RuntimeError on all ranks if it fails on some."""
    made = None
    error = None
    try:
        made = make()
    except Exception as failure:  # of the driver
        error = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
    raise_of_any_rank(group, error)
    assert made is not None
    return made


def _allocate(ranks: int, device: torch.device, slot_bytes: int) -> torch.Tensor:
    """Return the zeroed region of this rank."""
    assert slot_bytes % 4096 == 0, slot_bytes
    for index in range(torch.cuda.device_count()):
        if index < ranks and index != device.index:
            _require_peer_access(device.index, index)
    # An allocation of its own: `symmetric_memory.empty` may return a part of a pool.
    size = region_bytes(ranks, slot_bytes)
    region = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    region.zero_()
    torch.cuda.synchronize(device)
    return region


def _map(
    group: RankGroup,
    processes: OwnProcessGroup,
    region: torch.Tensor,
    slot_bytes: int,
    limit_seconds: float,
) -> PeerRegions:
    """Return the regions of all ranks."""
    device = region.device
    # A rendezvous returns when all ranks have come, so all flags are zero before the first launch.
    handle = symmetric_memory.rendezvous(region, c10d.GroupName(processes.name))
    if handle.buffer_ptrs[group.rank] != region.data_ptr():
        raise RuntimeError("symmetric memory has mapped other memory than was allocated")
    return PeerRegions(
        rank=group.rank,
        ranks=group.ranks,
        slot_bytes=slot_bytes,
        region=region,
        bases=torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
        epochs=torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
        control=new_control(limit_seconds, device),
        multicast=int(handle.multicast_ptr),
        owner=handle,
    )


def _require_peer_access(device: int, peer: int) -> None:
    if not torch.cuda.can_device_access_peer(device, peer):
        raise RuntimeError(f"device {device} cannot access the memory of device {peer}")


@dataclass(frozen=True, slots=True)
class SumChoice:
    """Which algorithm sums tensors of up to `most_bytes`."""

    most_bytes: float
    algorithm: Algorithm


class PeerMemoryCollectives:
    """The `Collectives` of one rank over peer memory.

    A launch that waits in vain for another rank ends nevertheless: `failure` says why, and results
    are undefined from then on.
    """

    def __init__(self, regions: PeerRegions, sums: Sequence[SumChoice]) -> None:
        """Algorithms of `sums` are in the order of their bytes."""
        self.rank, self.ranks = regions.rank, regions.ranks
        self.regions = regions
        self.sums = tuple(sums)
        _live[id(self)] = self
        # A tensor, so that compiled code does not depend on the number.
        self._handle = torch.tensor(id(self), device="cpu")

    def with_sums(self, sums: Sequence[SumChoice]) -> PeerMemoryCollectives:
        """Return the same collectives with other algorithms."""
        return PeerMemoryCollectives(self.regions, sums)

    def algorithm(self, nbytes: int) -> Algorithm:
        """Return what sums a tensor of `nbytes`."""
        for choice in self.sums:
            if nbytes <= choice.most_bytes:
                return choice.algorithm
        return self.sums[-1].algorithm

    def all_reduce(self, x_BF: Tensor) -> Tensor:
        """See `Collectives.all_reduce`; with `multimem` the order of additions is the switch's."""
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.stepgraph.peer_all_reduce.default(x_BF, self._handle)
            return out
        return all_reduce(self.regions, x_BF, self.algorithm(x_BF.nbytes))

    def gather(self, x_BF: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `Collectives.gather`."""
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.stepgraph.peer_gather.default(x_BF, list(sizes), self._handle)
            return out
        return gather_columns(self.regions, x_BF, sizes)

    def largest(self, values_B: Tensor, ids_B: Tensor) -> tuple[Tensor, Tensor]:
        """See `Collectives.largest`."""
        if torch.compiler.is_compiling():
            best: tuple[Tensor, Tensor] = torch.ops.stepgraph.peer_largest.default(
                values_B, ids_B, self._handle
            )
            return best
        return largest(self.regions, values_B, ids_B)

    def sums_rows(self, x_TD: Tensor) -> bool:
        """Whether `sum_rows` is the fastest for rows of this shape."""
        return fits_rows(self.regions, x_TD) and self.algorithm(x_TD.nbytes) == "one_shot"

    def sum_rows(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        post: GpuNorm | None,
        norm: GpuNorm | None,
        sum_TD: Tensor,
        out_TD: Tensor | None,
        *,
        scale: float = 1.0,
    ) -> None:
        """See `triton.all_reduce.sum_rows`."""
        sum_rows(self.regions, x_TD, residual_TD, post, norm, sum_TD, out_TD, scale=scale)

    def picks_rows(self, rows: int) -> bool:
        """Whether `pick_greedy` takes this number of rows."""
        return rows <= PROGRAMS

    def pick_greedy(
        self, maxima_TC: Tensor, ids_TC: Tensor, first: int, feed: Feedback | None = None
    ) -> Tensor:
        """See `triton.peer_gather.pick_of_ranks`."""
        return pick_of_ranks(self.regions, maxima_TC, ids_TC, first, feed)

    @property
    def timeout_seconds(self) -> float:
        """How long a launch waits for another rank. Can be set at any time, by replays too."""
        return int(self.regions.control[LIMIT]) / 1e9

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        self.regions.control[LIMIT] = int(seconds * 1e9)

    @property
    def failure(self) -> CollectiveFailure | None:
        """Why a launch gave up waiting for the others; None: none did."""
        code = int(self.regions.control[FAILURE])
        if code == 0:
            return None
        if code == GAVE_UP_ON_ABORT:
            reason = "found the group ended during a collective operation"
            return CollectiveFailure(self.rank, reason, ended_before=True)
        seconds = f"{self.timeout_seconds:g} s"
        return CollectiveFailure(
            code - 1, f"did not take part in a collective operation within {seconds}"
        )

    def abort(self) -> None:
        """Let all launches end, from any thread."""
        self.regions.control[ABORT] = 1

    def reset(self) -> None:
        """Reset the flags after a failure; no rank has an operation under way, or begins one."""
        regions = self.regions
        regions.region[: flag_bytes(self.ranks)].zero_()
        regions.epochs.zero_()
        regions.control[FAILURE] = 0
        if regions.region.is_cuda:
            torch.cuda.synchronize(regions.region.device)

    def close(self) -> None:
        """Nothing: captured graphs use the memory, which lives as long as this object."""


_live: weakref.WeakValueDictionary[int, PeerMemoryCollectives] = weakref.WeakValueDictionary()
"""By their handles."""


def _of(handle: Tensor) -> PeerMemoryCollectives:
    return _live[int(handle)]


def _define(name: str, schema: str, run: Callable[..., Any], like: Callable[..., Any]) -> None:
    torch.library.define(f"stepgraph::{name}", schema)
    torch.library.impl(f"stepgraph::{name}", ["cpu", "cuda"], run)
    torch.library.register_fake(f"stepgraph::{name}", like)


_define(
    "peer_all_reduce",
    "(Tensor x, Tensor(a!) group) -> Tensor",
    lambda x, group: _of(group).all_reduce(x),
    lambda x, group: x.new_empty(x.shape),
)
_define(
    "peer_gather",
    "(Tensor x, int[] sizes, Tensor(a!) group) -> Tensor",
    lambda x, sizes, group: _of(group).gather(x, sizes),
    lambda x, sizes, group: x.new_empty(x.shape[0], sum(sizes)),
)
_define(
    "peer_largest",
    "(Tensor values, Tensor ids, Tensor(a!) group) -> (Tensor, Tensor)",
    lambda values, ids, group: _of(group).largest(values, ids),
    lambda values, ids, group: (values.new_empty(values.shape), ids.new_empty(ids.shape)),
)
