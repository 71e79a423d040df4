"""Ranks as forked processes over shared memory, which return what they computed."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

from stepgraph.runtime.distributed.shared_memory_collectives import SharedMemoryCollectives
from stepgraph.runtime.kernels import limit_threads, load_cpu_ops

from .forked_ranks import ForkedRanks

_ABORT_BYTES = 128
"""Of which the first four are the abort word; what follows is aligned."""


class RankGroup(ForkedRanks):
    """Processes of a group, with memory of their own; they exchange `part_bytes` at once."""

    def __init__(self, ranks: int, part_bytes: int = 1 << 16) -> None:
        super().__init__()
        load_cpu_ops()
        self.ranks = ranks
        lines = ranks * 128
        self.memory = mmap.mmap(-1, _ABORT_BYTES + lines + 2 * ranks * part_bytes)
        poisoned = memoryview(self.memory)[_ABORT_BYTES + lines :]
        poisoned[:] = b"\xff" * len(poisoned)

    def start(
        self,
        body: Callable[[SharedMemoryCollectives], Any],
        *,
        timeout: float = 60.0,
        threads: int = 1,
    ) -> None:
        """Run `body` on each rank, with so many threads."""

        def run(rank: int) -> Any:
            limit_threads(threads)
            memory = memoryview(self.memory)
            return body(
                SharedMemoryCollectives(
                    memory[_ABORT_BYTES:],
                    rank,
                    self.ranks,
                    abort=memory[:4],
                    timeout_seconds=timeout,
                )
            )

        self.fork(self.ranks, run)

    def abort_word(self) -> int:
        return int.from_bytes(self.memory[:4], "little")


def run_ranks(
    ranks: int,
    body: Callable[[SharedMemoryCollectives], Any],
    *,
    part_bytes: int = 1 << 16,
    threads: int = 1,
) -> list[Any]:
    """Return what `body` returns on each rank; raises what a rank raised."""
    group = RankGroup(ranks, part_bytes)
    group.start(body, threads=threads)
    return group.returned()
