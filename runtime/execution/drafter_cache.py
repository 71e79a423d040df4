"""The drafter of an engine, with the keys and values it stores.

They lie in an arena of its own. A block id means the same block in both arenas: whatever happens to
a block of the target's cache (shared, copied, swapped, freed) happens to the drafter's too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...cache.arena import Arena, HostArena
from ...cache.blocks import NULL_BLOCK
from ..models.drafters.drafter import Drafter
from ..scheduling.plan import StepPlan

__all__ = ["DrafterCache", "new_blocks"]


@dataclass(frozen=True)
class DrafterCache:
    """A drafter, and its arenas."""

    drafter: Drafter
    arena: Arena
    host: HostArena | None
    """For swapped requests; None: no swapping."""
    group: int
    """The layer group of the target whose block tables it uses."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own parameters."""
        return self.drafter.weight_bytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of its arena for swapped requests."""
        return 0 if self.host is None else self.host.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of its arena on the device."""
        return self.arena.nbytes

    def addresses(self) -> Mapping[str, int]:
        """Return the addresses that captured steps contain."""
        host = {} if self.host is None else {"drafter host arena": self.host.address}
        return {"drafter arena": self.arena.address, **host}

    def close(self) -> None:
        """Release the drafter, and unpin the arena for swapped requests."""
        self.drafter.close()
        if self.host is not None:
            self.host.close()

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks, in all layers, so that nothing of their last request is left."""
        pinned = self.arena.tensor.is_cuda  # see `Arena.copy_blocks`
        ids = torch.tensor(blocks, pin_memory=pinned)
        self.arena.tensor.index_fill_(2, ids.to(self.arena.tensor.device, non_blocking=True), 0)


def new_blocks(plan: StepPlan, group: int, block_size: int) -> list[int]:
    """Return the blocks of a layer group that a plan gives to rows and that hold nothing yet."""
    kept = {admission.row: admission.found.num_tokens for admission in plan.admitted}
    return [
        update.block
        for update in plan.table_updates
        if update.group == group
        and update.block != NULL_BLOCK
        and update.column * block_size >= kept.get(update.row, 0)
    ]
