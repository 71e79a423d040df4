"""`KVCache`: the block tables of all requests, as the scheduler uses them. No tensors.

`reuse.py` finds the tokens that an admitted request need not compute.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .allocators import GroupAllocator
from .blocks import NULL_BLOCK, BlockPool
from .prefix_hashes import PrefixHashes
from .reuse import Admitted, find_reuse
from .spec import LayerGroup
from .swap import HostBlocks

__all__ = ["Admitted", "KVCache", "TableChange"]

TableChange = tuple[int, int, int]
"""(group, column, block): an entry of a request's block tables that has changed."""


@dataclass(slots=True)
class _Held:
    """State of a request that every step checks, so that most steps need not visit the groups."""

    room: int = 0
    """Tokens that the blocks have room for, in every group."""
    slides_next: int = sys.maxsize
    """First position at which a group frees a block."""
    published: int = 0
    """Full blocks that `publish` has processed."""
    verified: int = 0
    """Full blocks that `verify` has processed."""


class KVCache:
    """The blocks that each request holds in each layer group; all groups share one pool.

    Operations are atomic over the groups: a request grows in all of them or in none. It holds
    blocks from `admit` on, until `release` or `swap_out`.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: int,
        block_size: int,
        *,
        chunk: int = 1,
        host_blocks: int = 0,
    ) -> None:
        """Manage `num_blocks` blocks (the null block included) of `block_size` slots.

        Args:
            groups: the layer groups of the model.
            num_blocks: blocks of the arena.
            block_size: slots of a block.
            chunk: the most tokens of a request that one step computes.
            host_blocks: blocks of the host cache.

        Raises:
            ValueError: no group, `num_blocks < 2` or `block_size < 1`.
        """
        if not groups:
            raise ValueError("a cache needs at least one layer group, got none")
        self._pool = BlockPool(num_blocks)
        self._allocators = tuple(GroupAllocator(self._pool, g, block_size) for g in groups)
        self._sliding = tuple(a for a in self._allocators if a.slides)
        self._block_size = block_size
        self._chunk = chunk
        self.host = HostBlocks(host_blocks)
        self._held: dict[str, _Held] = {}
        self.counts = dict.fromkeys(
            ("queried_tokens", "hit_tokens", "forks", "copied_blocks", "swapped_out", "swapped_in"),
            0,
        )
        """Tokens queried and found at first admissions, forks, blocks copied for forks, and blocks
        swapped. Updated by `count_admission` and `count_swapped_out`.
        """

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self._block_size

    @property
    def num_groups(self) -> int:
        """Layer groups, each with a block table of its own."""
        return len(self._allocators)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, including those with cached contents."""
        return self._pool.num_free

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests hold."""
        return self._pool.num_held

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, held or free, whose contents can be shared."""
        return self._pool.num_published

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were allocated again, losing their contents."""
        return self._pool.num_evictions

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self._pool.num_blocks - 1

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks, over all groups, that a request of `num_tokens` tokens holds at once."""
        return sum(
            a.spec.most_blocks(num_tokens, self._block_size, self._chunk) for a in self._allocators
        )

    def admit(
        self,
        request_id: str,
        num_tokens: int,
        *,
        chunk: int,
        headroom: int = 0,
        hashes: PrefixHashes | None = None,
        siblings: Sequence[tuple[str, int]] = (),
    ) -> Admitted | None:
        """Allocate the blocks that a request needs to start, or to resume after preemption.

        Args:
            request_id: a request that holds no blocks.
            num_tokens: its known tokens. At least the last of them will be computed.
            chunk: the most tokens that the next step computes.
            headroom: blocks that must stay free for other requests.
            hashes: of its known tokens; None if it shares no blocks by content.
            siblings: (request, tokens) of requests that have computed the same first tokens.

        Returns:
            What the cache holds of the request; None if too few blocks are free, in which case
            nothing has changed. Groups with full attention get blocks for all known tokens, those
            with a sliding window for the next chunk.
        """
        assert num_tokens > 0, f"request {request_id} has no token to compute"
        assert chunk > 0, f"a step computes {chunk} tokens of a request"
        assert chunk <= self._chunk or not self._sliding, (
            f"a step computes {chunk} tokens of a request, the cache was made for {self._chunk}"
        )
        assert request_id not in self._held, f"request {request_id} holds blocks already"
        reuse = find_reuse(self._allocators, self.host, request_id, num_tokens, hashes, siblings)
        found = reuse.found
        stop = min(num_tokens, found.num_tokens + chunk)
        lengths = [a.columns(stop if a.slides else num_tokens) for a in self._allocators]
        needed = self._needed(num_tokens, lengths, reuse.tables)
        if needed + headroom > self._pool.num_free:
            return None
        for allocator, table in zip(self._allocators, reuse.tables, strict=True):
            allocator.adopt(request_id, table)
        for i, (allocator, length) in enumerate(zip(self._allocators, lengths, strict=True)):
            new = allocator.grow(request_id, length * self._block_size)
            if reuse.copied:
                found.copies.append((reuse.copied[i], new[0]))
        if found.source == "swap":
            self._take_swapped(request_id, found.swap_in)
        held = self._held[request_id] = _Held(room=min(lengths) * self._block_size)
        held.slides_next = self._slides_next(request_id)
        if found.source == "prefix":
            held.published = found.num_tokens // self._block_size
        return found

    def count_admission(self, found: Admitted, num_tokens: int, *, first: bool) -> None:
        """Count an admission once it is final and its copies are queued.

        Args:
            found: what `admit` returned.
            num_tokens: the request's known tokens at that time.
            first: whether it is the first admission of the request. Only those count in the hit
                rate: later ones find what the request has computed itself.
        """
        if first:
            self.counts["queried_tokens"] += num_tokens
            self.counts["hit_tokens"] += found.num_tokens
        self.counts["forks"] += found.source == "fork"
        self.counts["copied_blocks"] += len(found.copies)
        self.counts["swapped_in"] += len(found.swap_in)

    def count_swapped_out(self, num_blocks: int) -> None:
        """Count blocks whose copies to the host have been queued."""
        self.counts["swapped_out"] += num_blocks

    def grow(self, request_id: str, num_tokens: int) -> list[TableChange] | None:
        """Allocate what tokens 0 to `num_tokens` - 1 need in all groups; never shrinks.

        Returns:
            The changed entries of the request's block tables (often none); None if too few blocks
            are free, in which case nothing has changed.
        """
        held = self._held[request_id]
        if num_tokens <= held.room:
            return []
        if self.lacking(request_id, num_tokens) > self._pool.num_free:
            return None
        changes: list[TableChange] = []
        for allocator in self._allocators:
            column = len(allocator.table(request_id))
            for block in allocator.grow(request_id, num_tokens):
                changes.append((allocator.index, column, block))
                column += 1
        held.room = -(-num_tokens // self._block_size) * self._block_size
        return changes

    def lacking(self, request_id: str, num_tokens: int) -> int:
        """Return how many blocks `grow` would allocate, over all groups."""
        lacking = 0
        for allocator in self._allocators:
            lacking += allocator.lacking(request_id, num_tokens)
        return lacking

    def growing_groups(self, request_id: str, num_tokens: int, *, decodes: bool) -> int:
        """Count the groups in which a request may need more blocks to reach `num_tokens` tokens.

        `decodes`: whether a step computes one token of it, and not up to a chunk.
        """
        chunk = 1 if decodes else self._chunk
        return sum(a.grows(request_id, num_tokens, chunk) for a in self._allocators)

    def quiet_until(self, request_id: str) -> int:
        """Return the first position at which `slide` or `grow` changes a block table."""
        held = self._held[request_id]
        return min(held.room, held.slides_next)

    def slide(self, request_id: str, position: int) -> list[TableChange]:
        """Free the blocks that the next token, at `position`, no longer reads.

        Returns the entries that are now the null block.
        """
        held = self._held[request_id]
        if position < held.slides_next:
            return []
        changes: list[TableChange] = []
        for allocator in self._sliding:
            dropped = allocator.slide(request_id, position)
            changes += [(allocator.index, column, NULL_BLOCK) for column in dropped]
        held.slides_next = self._slides_next(request_id)
        return changes

    def publish(self, request_id: str, hashes: PrefixHashes, num_tokens: int) -> None:
        """Make the blocks that the request's first `num_tokens` tokens fill shareable.

        Those tokens are hashed, and computed by steps launched before any step that reads them.
        """
        held, end = self._held[request_id], num_tokens // self._block_size
        if end > held.published:
            for allocator in self._allocators:
                allocator.publish(request_id, hashes, held.published, end)
            held.published = end

    def verify(self, request_id: str, hashes: PrefixHashes, num_tokens: int) -> None:
        """Protect blocks from `withdraw`: the logits after `num_tokens` tokens are finite.

        Applies to the full blocks that those logits were computed from; not to blocks that had left
        a sliding window by then.
        """
        assert num_tokens > 0, f"request {request_id} has no token to verify"
        held, end = self._held[request_id], num_tokens // self._block_size
        if end > held.verified:
            for allocator in self._allocators:
                first = allocator.first_live_column(num_tokens - 1)
                allocator.verify(hashes, max(held.verified, first), end)
            held.verified = end

    def withdraw(self, hashes: PrefixHashes, num_tokens: int) -> None:
        """Stop sharing the blocks that hold tokens after the first `num_tokens` of a sequence.

        Blocks that any request has verified stay shareable. Requests keep the blocks they hold. The
        sequence itself need not hold any.
        """
        for allocator in self._allocators:
            allocator.withdraw(hashes, num_tokens // self._block_size)

    def release(self, request_id: str) -> None:
        """Free every block of a request, in all groups.

        A cached block is useful only together with all blocks before it. So the last blocks are
        freed first, and evicted first.
        """
        self._held.pop(request_id, None)
        forgotten = [allocator.forget(request_id) for allocator in self._allocators]
        longest = max(live.stop for live, _ in forgotten)
        self._pool.free(
            table[column]
            for column in range(longest - 1, -1, -1)
            for live, table in forgotten
            if column in live
        )

    def forget_contents(self) -> None:
        """Drop all cached contents. Requests keep the blocks they hold."""
        self._pool.forget_contents()

    def num_blocks_of(self, request_id: str, num_tokens: int) -> int:
        """Return how many blocks `swap_out` copies for `num_tokens` computed tokens."""
        return len(self._computed(request_id, num_tokens))

    def swap_out(self, request_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
        """Release a request and reserve host blocks for its `num_tokens` computed tokens.

        Returns:
            (block, host block) to copy before the blocks are written again; None if the host cache
            has too few free blocks, in which case nothing has changed.
        """
        blocks = self._computed(request_id, num_tokens)
        hosts = self.host.put(request_id, num_tokens, [(g, column) for g, column, _ in blocks])
        if hosts is None:
            return None
        self.release(request_id)
        return [(block, host) for (_, _, block), host in zip(blocks, hosts, strict=True)]

    def is_swapped(self, request_id: str) -> bool:
        """Whether the host cache holds a request."""
        return self.host.find(request_id) is not None

    def forget_swapped(self, request_id: str) -> None:
        """Free the host blocks of a request, if it has any: its tokens will be recomputed."""
        self.host.drop(request_id)

    def block_table(self, request_id: str, group: int = 0) -> Sequence[int]:
        """The block ids of a request in one group, in position order. Not a copy."""
        return self._allocators[group].table(request_id)

    def table_of(self, request_id: str) -> list[TableChange]:
        """Return the entries of a request's tables that hold a block, in all groups."""
        return [
            (a.index, column, a.table(request_id)[column])
            for a in self._allocators
            for column in a.live_columns(request_id)
        ]

    def _needed(
        self, num_tokens: int, lengths: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> int:
        """Return how many blocks must be free to admit a request of `num_tokens` tokens.

        In each group these are the blocks to allocate now, for a table of `lengths` columns, or at
        the request's peak if that is more, and the shared blocks of `tables` without a holder,
        which leave the free list too.
        """
        needed = 0
        for allocator, length, table in zip(self._allocators, lengths, tables, strict=True):
            shared = [block for block in table if block != NULL_BLOCK]
            peak = allocator.spec.most_blocks(num_tokens, self._block_size, self._chunk)
            needed += max(length - len(table), peak - len(shared))
            needed += self._pool.count_free(shared)
        return needed

    def _computed(self, request_id: str, num_tokens: int) -> list[TableChange]:
        """Return the table entries that the token after the first `num_tokens` reads."""
        return [
            (a.index, column, a.table(request_id)[column])
            for a in self._allocators
            for column in range(a.first_live_column(num_tokens), a.columns(num_tokens))
        ]

    def _slides_next(self, request_id: str) -> int:
        return min((a.slides_next(request_id) for a in self._sliding), default=sys.maxsize)

    def _take_swapped(self, request_id: str, swap_in: list[tuple[int, int]]) -> None:
        swapped = self.host.find(request_id)
        assert swapped is not None, f"request {request_id} is not on the host"
        for group, column, host in swapped.blocks:
            swap_in.append((host, self._allocators[group].table(request_id)[column]))
        self.host.drop(request_id)

    def check_integrity(self) -> None:
        """Assert that pool and tables agree: every block is free or held as often as counted."""
        self._pool.check_integrity()
        held: Counter[int] = Counter()
        for allocator in self._allocators:
            for request_id, table in allocator.tables.items():
                live = allocator.live_columns(request_id)
                assert all(block == NULL_BLOCK for block in table[: live.start])
                held.update(table[live.start :])
        assert NULL_BLOCK not in held, "a block table holds the null block"
        for block in range(1, self._pool.num_blocks):
            assert self._pool.ref_count(block) == held[block], (
                f"block {block} is in {held[block]} block tables, "
                f"the pool counts {self._pool.ref_count(block)} holders"
            )
        first, *others = (a.tables.keys() for a in self._allocators)
        for requests in others:
            assert requests == first, "a request holds blocks in one group and not in another"
        full = [a for a in self._allocators if not a.slides]
        for request_id in first:
            assert len({len(a.table(request_id)) for a in full}) <= 1, (
                "a request grew in one group and not in another"
            )
            held_now = self._held[request_id]
            room = min(len(a.table(request_id)) for a in self._allocators) * self._block_size
            assert held_now.room == room, (
                f"request {request_id} counts room for {held_now.room} tokens, it has {room}"
            )
            assert held_now.slides_next == self._slides_next(request_id), (
                f"request {request_id} would not slide at the right time"
            )
        assert self._held.keys() == first, "a request is known that holds no table"
        self.host.check_integrity()
        assert not any(self.host.find(r) for r in first), "a swapped request holds blocks"
