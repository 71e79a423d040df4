"""Memory of the GPUs of a machine that all ranks of a group have mapped.

It is `torch.distributed._symmetric_memory`: allocations of the CUDA driver, whose handles the
processes exchange, with a multicast mapping of all of them where NVLink Switch has one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d as c10d

from ..kernels.triton.peer_exchange import PROGRAMS, PeerRegions, new_control, region_bytes
from .own_process_group import OwnProcessGroup, raise_of_any_rank
from .rank_group import RankGroup

__all__ = ["open_peer_memory"]

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
