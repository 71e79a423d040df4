"""Ranks as forked processes whose kernels, interpreted, exchange data in memory that they share."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch
from stepgraph.runtime.kernels.triton.peer_exchange import (
    PROGRAMS,
    PeerRegions,
    flag_bytes,
    new_control,
    region_bytes,
)

from .forked_ranks import ForkedRanks

SLOT_BYTES = 8192


class PeerRanks(ForkedRanks):
    """Processes of a group. What their slots hold at first is NaN of any dtype."""

    def __init__(self, ranks: int, slot_bytes: int = SLOT_BYTES) -> None:
        super().__init__()
        self.ranks, self.slot_bytes = ranks, slot_bytes
        size = region_bytes(ranks, slot_bytes)
        self.memory = mmap.mmap(-1, ranks * size + 4096)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.regions = [whole[rank * size : (rank + 1) * size] for rank in range(ranks)]
        for region in self.regions:
            region[flag_bytes(ranks) :] = 255
        self.controls = whole[ranks * size :].view(torch.int64)[: ranks * 3].view(ranks, 3)

    def of_rank(self, rank: int, limit_seconds: float = 60.0) -> PeerRegions:
        """The regions as a rank sees them."""
        self.controls[rank] = new_control(limit_seconds, torch.device("cpu"))
        return PeerRegions(
            rank=rank,
            ranks=self.ranks,
            slot_bytes=self.slot_bytes,
            region=self.regions[rank],
            bases=torch.tensor([region.data_ptr() for region in self.regions]),
            epochs=torch.zeros(PROGRAMS, dtype=torch.int32),
            control=self.controls[rank],
        )

    def start(self, body: Callable[[PeerRegions], Any], limit_seconds: float = 60.0) -> None:
        """Run `body` on each rank."""
        self.fork(self.ranks, lambda rank: body(self.of_rank(rank, limit_seconds)))


def run_peers(ranks: int, body: Callable[[PeerRegions], Any], **sizes: int) -> list[Any]:
    """Return what `body` returns on each rank; raises what a rank raised."""
    group = PeerRanks(ranks, **sizes)
    group.start(body)
    return group.returned()
