"""Copies blocks of the cache within the device, to the host and back, on all ranks.

Blocks that rows get are zeroed in the cache of a drafter, before the drafter or a copy reads them
next: while the drafter rests, decode steps do not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...cache.arena import Arena, HostArena
from ...profiling import ranges
from ..scheduling.plan import StepPlan
from .drafter_cache import DrafterCache
from .rank_commands import BlockCopy, CommandSender

__all__ = ["BlockCopies"]


class BlockCopies:
    """The copies of preempted and admitted requests: in the cache, and in that of a drafter."""

    def __init__(
        self,
        arena: Arena,
        host: HostArena | None,
        drafter: DrafterCache | None,
        commands: CommandSender | None,
    ) -> None:
        """Copy blocks of these arenas; see `Runner`."""
        self._arenas = [(arena, host)]
        if drafter is not None:
            self._arenas.append((drafter.arena, drafter.host))
        self._drafter, self._commands = drafter, commands
        self._new: dict[int, None] = {}
        """Blocks to be zeroed in the cache of the drafter."""

    def add_new(self, blocks: Iterable[int]) -> None:
        """Note blocks that hold nothing of the drafter yet."""
        self._new.update(dict.fromkeys(blocks))

    def zero_new(self) -> None:
        """Issue the zeroing of all blocks noted, on all ranks."""
        if not self._new:
            return
        blocks = list(self._new)
        self._new.clear()
        if self._commands is not None:
            self._commands.clear_drafter(blocks)
        self.clear_drafter(blocks)

    def clear_drafter(self, blocks: Sequence[int]) -> None:
        """Zero blocks of the drafter's cache on this rank."""
        assert self._drafter is not None, "steps propose nothing"
        self._drafter.clear(blocks)

    def swap_out(self, plan: StepPlan) -> None:
        """Issue the copies of preempted requests to the host, before any write to the blocks."""
        if not plan.preempted:
            return
        pairs = [pair for preemption in plan.preempted for pair in preemption.swap_out or ()]
        if pairs:
            with ranges.span(ranges.SWAP, len(pairs)):
                self.copy("to_host", pairs)

    def copy_in(self, plan: StepPlan) -> None:
        """Issue the copies for admitted requests: forked blocks, and blocks from the host."""
        if not plan.admitted:
            return
        copies = [pair for admission in plan.admitted for pair in admission.found.copies]
        if copies:
            with ranges.span(ranges.FORK, len(copies)):
                self.copy("within", copies)
        pairs = [pair for admission in plan.admitted for pair in admission.found.swap_in]
        if pairs:
            with ranges.span(ranges.SWAP, len(pairs)):
                self.copy("from_host", pairs)

    def copy(self, kind: BlockCopy, pairs: Sequence[tuple[int, int]]) -> None:
        """Issue the copies of (source, destination) blocks."""
        self.zero_new()
        if self._commands is not None:
            self._commands.copy_blocks(kind, pairs)
        for arena, host in self._arenas:
            if kind == "within":
                arena.copy_blocks(pairs)
                continue
            assert host is not None, "requests are swapped without a host arena"
            if kind == "to_host":
                host.swap_out(pairs)
            else:
                host.swap_in(pairs)
