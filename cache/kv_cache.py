"""`KVCache`: the scheduler's interface to the cache. No tensors.

It tracks the blocks that requests hold, and their reuse: shared prefixes, forks of siblings
(completions of the same prompt) and the host cache. `find_reuse` finds the tokens that an admitted
request need not compute.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .blocks import NULL_BLOCK, BlockPool, CachedKeys, HostBlocks, PrefixHashes
from .spec import LayerGroup

__all__ = ["Admitted", "GroupAllocator", "KVCache", "TableChange"]


# The block tables of one layer group: allocation, sliding windows and sharing.


class GroupAllocator:
    """The block tables of one layer group.

    Token `i` of a request lives in block `table[i // block_size]` at offset `i % block_size`:
    columns are absolute positions, with a sliding window too. Blocks that have left the window are
    freed, and the null block takes their place:

        window 8, blocks of 4, next token 13: it reads positions 6 to 13
        table [ 0 | 7 | 3 | 9 ]      column 0 (positions 0 to 3) is no longer read

    A request without blocks has an empty table.
    """

    def __init__(self, pool: BlockPool, group: LayerGroup, block_size: int) -> None:
        """Allocate from `pool` in blocks of `block_size` slots."""
        self._pool = pool
        self.block_size = block_size
        self.index = group.index
        self.spec = group.spec
        self.slides = group.spec.window is not None
        self.key_suffix = group.index.to_bytes(2, "little")
        """What this group appends to the hashes of its blocks."""
        self._tables: dict[str, list[int]] = {}
        self._firsts: dict[str, int] = {}  # columns before it have left the window

    @property
    def tables(self) -> Mapping[str, Sequence[int]]:
        """The block ids of each request that holds any, in position order."""
        return self._tables

    def table(self, request_id: str) -> Sequence[int]:
        """The block ids of a request, in position order. Not a copy: it changes later."""
        return self._tables.get(request_id, ())

    def live_columns(self, request_id: str) -> range:
        """The columns of a request's table that contain a block other than the null block."""
        return range(self._firsts.get(request_id, 0), len(self.table(request_id)))

    def columns(self, num_tokens: int) -> int:
        """Columns of the table of a request of `num_tokens` tokens."""
        assert num_tokens >= 0, f"a request cannot have {num_tokens} tokens"
        return -(-num_tokens // self.block_size)

    def first_live_column(self, num_tokens: int) -> int:
        """First column that the token after the first `num_tokens` of a request reads."""
        return min(self.spec.first_column(num_tokens, self.block_size), self.columns(num_tokens))

    def lacking(self, request_id: str, num_tokens: int) -> int:
        """Return how many more blocks a request needs for tokens 0 to `num_tokens` - 1."""
        return max(0, self.columns(num_tokens) - len(self.table(request_id)))

    def grows(self, request_id: str, num_tokens: int, chunk: int) -> bool:
        """Whether a request may hold more blocks than now before it has `num_tokens` tokens.

        `chunk` is the maximum number of its tokens that one step computes. With a sliding window
        it may allocate blocks without holding more of them, because it frees others first.
        """
        most = self.spec.most_blocks(num_tokens, self.block_size, chunk)
        held = len(self.live_columns(request_id))
        return held < most and self.lacking(request_id, num_tokens) > 0

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Allocate and return the blocks that a request still needs for `num_tokens` tokens.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
        """
        lacking = self.lacking(request_id, num_tokens)
        if lacking == 0:
            return []
        blocks = self._pool.allocate(lacking)
        self._tables.setdefault(request_id, []).extend(blocks)
        return blocks

    def slide(self, request_id: str, position: int) -> range:
        """Free the blocks that the tokens from `position` on do not read.

        Returns the columns that now hold the null block.
        """
        table = self._tables.get(request_id, [])
        begin = self._firsts.get(request_id, 0)
        end = min(self.spec.first_column(position, self.block_size), len(table))
        if end <= begin:
            return range(0)
        self._pool.free(reversed(table[begin:end]))
        table[begin:end] = [NULL_BLOCK] * (end - begin)
        self._firsts[request_id] = end
        return range(begin, end)

    def slides_next(self, request_id: str) -> int:
        """Return the first position at which `slide` frees a block; needs a window."""
        window = self.spec.window
        assert window is not None, f"layer group {self.index} has no window"
        return (self._firsts.get(request_id, 0) + 1) * self.block_size + window - 1

    def find(self, hashes: PrefixHashes, column: int) -> int | None:
        """Return the published block with the contents of a sequence in `column`, or None."""
        return self._pool.find(hashes[column] + self.key_suffix)

    def find_all(self, hashes: PrefixHashes, begin: int, end: int) -> list[int]:
        """Return the blocks that `find` returns from column `begin` on, up to the first miss."""
        pool_find, suffix = self._pool.find, self.key_suffix
        blocks: list[int] = []
        for column in range(begin, end):
            block = pool_find(hashes[column] + suffix)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def shareable(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Return a table for another request that has the same first `num_tokens` tokens.

        The caller must copy its last block if `num_tokens` tokens fill it only in part. None if
        this request has freed blocks that the next token reads.
        """
        count = self.columns(num_tokens)
        first = self.first_live_column(num_tokens)
        table = self.table(request_id)
        if len(table) < count or (first < count and self._firsts.get(request_id, 0) > first):
            return None
        return [NULL_BLOCK] * first + list(table[first:count])

    def adopt(self, request_id: str, table: Sequence[int]) -> None:
        """Start a request's table with shared blocks, held by other requests or cached.

        Null blocks, if any, come first.
        """
        assert not self.table(request_id), f"request {request_id} holds blocks already"
        if not table:
            return
        first = 0
        while first < len(table) and table[first] == NULL_BLOCK:
            first += 1
        self._pool.share(table[first:])
        self._tables[request_id] = list(table)
        self._firsts[request_id] = first

    def publish(self, request_id: str, hashes: PrefixHashes, begin: int, end: int) -> None:
        """Publish the blocks in columns `begin` to `end` - 1, which are full."""
        table, publish, suffix = self._tables[request_id], self._pool.publish, self.key_suffix
        for column in range(max(begin, self._firsts.get(request_id, 0)), end):
            publish(table[column], hashes[column] + suffix)

    def verify(self, hashes: PrefixHashes, begin: int, end: int) -> None:
        """Protect the blocks of a sequence in columns `begin` to `end` - 1 from `withdraw`."""
        for column in range(begin, end):
            self._pool.verify(hashes[column] + self.key_suffix)

    def withdraw(self, hashes: PrefixHashes, begin: int) -> None:
        """Unpublish the blocks of a sequence from column `begin` on, except verified ones."""
        for column in range(begin, len(hashes)):
            self._pool.withdraw(hashes[column] + self.key_suffix)

    def forget(self, request_id: str) -> tuple[range, Sequence[int]]:
        """Drop a request's table and return its live columns and the table.

        The blocks stay held: the caller frees them, in one order for all groups.
        """
        live = self.live_columns(request_id)
        self._firsts.pop(request_id, None)
        return live, self._tables.pop(request_id, [])


TableChange = tuple[int, int, int]

"""(group, column, block): an entry of a request's block tables that has changed."""


@dataclass(slots=True)
class _Held:
    """State of a request over all groups, so that most steps need not check each group."""

    room: int = 0
    """Tokens that the request's blocks can hold, in every group."""
    slides_next: int = sys.maxsize
    """First position at which a group frees a block."""
    published: int = 0
    """Full blocks that `KVCache.publish` has processed."""
    verified: int = 0
    """Full blocks that `KVCache.verify` has processed."""


# Finds the tokens that an admitted request need not compute. Changes nothing.
#
# There are three sources. The host cache comes first, then the one of the others with more tokens:
#
#     swap     its own blocks are in the host cache: they are copied into new blocks
#     fork     a sibling (same prompt, `n` > 1) has computed the prompt: its full blocks are shared,
#              and the block that both will write to is copied
#     prefix   blocks with the same contents are in the pool, held or cached: they are shared
#
# `KVCache.admit` lists the copies; the runner makes all of them before the step.


@dataclass(frozen=True, slots=True)
class Admitted:
    """What an admitted request reuses."""

    num_tokens: int
    """Tokens whose keys and values need not be computed."""
    source: Literal["nothing", "swap", "fork", "prefix"] = "nothing"
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block) to copy within the arena before the step."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, block) to copy from the host before the step."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """The reusable prefix of a request, and block tables with its blocks."""

    found: Admitted
    """`KVCache.admit` adds the copies, because it allocates their destinations."""
    tables: list[list[int]]
    """For each group: blocks to share, and null blocks in columns that are not read."""
    copied: list[int] = field(default_factory=list)
    """For each group the sibling's partly filled block, to be copied; empty if there is none."""


def find_reuse(
    allocators: Sequence[GroupAllocator],
    host: HostBlocks,
    request_id: str,
    num_tokens: int,
    hashes: PrefixHashes | None,
    siblings: Sequence[tuple[str, int]],
    most_shared: int,
) -> Reuse:
    """Return the longest reusable prefix of a request of `num_tokens` known tokens.

    It never contains all of them: the last one must be computed for its logits. For `hashes` and
    `siblings` see `KVCache.admit`; at most `most_shared` tokens are shared with other requests.
    """
    swapped = host.find(request_id)
    if swapped is not None:
        count = swapped.num_tokens
        assert count < num_tokens, f"request {request_id} has no token left to compute"
        tables = [[NULL_BLOCK] * a.first_live_column(count) for a in allocators]
        return Reuse(Admitted(count, "swap"), tables)
    best = Reuse(Admitted(0), [[] for _ in allocators])
    for sibling, shared_tokens in siblings:
        assert shared_tokens < num_tokens, f"request {request_id} has no token left to compute"
        if best.found.num_tokens < shared_tokens <= most_shared:
            best = _fork(allocators, sibling, shared_tokens) or best
    size = allocators[0].block_size
    most = most_shared // size
    if hashes is not None and most * size > best.found.num_tokens:
        tables = _match(allocators, hashes, min(most, len(hashes)))
        found = len(tables[0]) * size
        if found > best.found.num_tokens:
            best = Reuse(Admitted(found, "prefix"), tables)
    return best


def _fork(allocators: Sequence[GroupAllocator], sibling: str, num_tokens: int) -> Reuse | None:
    """Return the reuse of a sibling's tokens, or None if it has freed blocks of them."""
    tables: list[list[int]] = []
    for allocator in allocators:
        table = allocator.shareable(sibling, num_tokens)
        if table is None:
            return None
        tables.append(table)
    partial = num_tokens % allocators[0].block_size != 0
    copied = [table.pop() for table in tables] if partial else []
    return Reuse(Admitted(num_tokens, "fork"), tables, copied)


def _match(
    allocators: Sequence[GroupAllocator], hashes: PrefixHashes, count: int
) -> list[list[int]]:
    """Return tables of the published blocks, at most `count` columns, that a sequence starts with.

    Groups with full attention need every column, groups with a window only the columns that the
    next token reads. A missing block limits the match to the columns before it. One backward pass
    visits the columns that some group needs.
    """
    size = allocators[0].block_size
    sliding = [allocator for allocator in allocators if allocator.slides]
    tables: list[list[int]] = [[] for _ in allocators]
    for i, allocator in enumerate(allocators):
        if not allocator.slides:
            tables[i] = allocator.find_all(hashes, 0, count)
            count = len(tables[i])
    column, needing = count, sliding
    while column > 0 and needing:
        column -= 1
        needing = [a for a in sliding if a.first_live_column(count * size) <= column]
        if any(a.find(hashes, column) is None for a in needing):
            count = column
    for i, allocator in enumerate(allocators):
        if allocator.slides:
            first = allocator.first_live_column(count * size)
            tables[i] = [NULL_BLOCK] * first + allocator.find_all(hashes, first, count)
        del tables[i][count:]
    return tables


class KVCache:
    """The blocks that each request holds in each layer group, and their reuse.

    All layer groups allocate from one pool. A request holds blocks from `admit` on, until `release`
    or `swap_out`, and grows in all groups or in none.
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
            chunk: maximum tokens of a request that one step computes.
            host_blocks: blocks of the host cache.
        """
        self._pool = BlockPool(num_blocks)
        self._allocators = tuple(GroupAllocator(self._pool, g, block_size) for g in groups)
        self._sliding = tuple(a for a in self._allocators if a.slides)
        self._block_size = block_size
        self._chunk = chunk
        self._held: dict[str, _Held] = {}
        self.host = HostBlocks(host_blocks)
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
        """Number of layer groups; each has its own block table."""
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
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self._pool.num_blocks - 1

    def most_blocks(self, num_tokens: int) -> int:
        """Maximum blocks, over all groups, that a request of `num_tokens` tokens holds at once."""
        return sum(
            a.spec.most_blocks(num_tokens, self._block_size, self._chunk) for a in self._allocators
        )

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, held or free, whose contents can be shared."""
        return self._pool.num_published

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were allocated again, losing their contents."""
        return self._pool.num_evictions

    def cached_keys(self) -> tuple[CachedKeys, bytes]:
        """Return the keys of the cached blocks, with the suffix of one layer group.

        It is the first group with full attention, which has a block for every column of a cached
        prefix; without such a group the first one.
        """
        full = next((a for a in self._allocators if not a.slides), self._allocators[0])
        return self._pool.cached_keys(), full.key_suffix

    def num_shareable(
        self, num_tokens: int, hashes: PrefixHashes, reusable_tokens: int | None
    ) -> int:
        """Return how many of a new request's first tokens `admit` would find by content now."""
        most = num_tokens - 1 if reusable_tokens is None else min(num_tokens - 1, reusable_tokens)
        found = find_reuse(self._allocators, self.host, "", num_tokens, hashes, (), most).found
        return found.num_tokens

    def admit(
        self,
        request_id: str,
        num_tokens: int,
        *,
        chunk: int,
        headroom: int = 0,
        hashes: PrefixHashes | None = None,
        siblings: Sequence[tuple[str, int]] = (),
        reusable_tokens: int | None = None,
    ) -> Admitted | None:
        """Allocate the blocks that a request needs to start, or to resume after preemption.

        Args:
            request_id: a request that holds no blocks.
            num_tokens: its known tokens. At least the last of them will be computed.
            chunk: maximum tokens of the request that the next step computes.
            headroom: blocks that must stay free for other requests.
            hashes: block hashes of its known tokens; None to share no blocks by content.
            siblings: (request, tokens) of requests that have computed the same first tokens.
            reusable_tokens: the most tokens to take from shared blocks; None: no limit. The
                request's own swapped blocks are always taken.

        Returns:
            What the request reuses; None if too few blocks are free, and nothing has changed. In
            groups with full attention the request gets blocks for all known tokens, in groups with
            a sliding window for the next chunk.
        """
        assert num_tokens > 0, f"request {request_id} has no token to compute"
        assert chunk > 0, f"a step computes {chunk} tokens of a request"
        assert chunk <= self._chunk or not self._sliding, (
            f"a step computes {chunk} tokens of a request, the cache was made for {self._chunk}"
        )
        assert request_id not in self._held, f"request {request_id} holds blocks already"
        most = num_tokens - 1 if reusable_tokens is None else min(num_tokens - 1, reusable_tokens)
        reuse = find_reuse(
            self._allocators, self.host, request_id, num_tokens, hashes, siblings, most
        )
        found = reuse.found
        stop = min(num_tokens, found.num_tokens + chunk)
        lengths = [a.columns(stop if a.slides else num_tokens) for a in self._allocators]
        needed = self._needed(num_tokens, lengths, reuse.tables)
        if needed + headroom > self._pool.num_free:
            return None
        for allocator, table in zip(self._allocators, reuse.tables, strict=True):
            allocator.adopt(request_id, table)
        new = [
            allocator.grow(request_id, length * self._block_size)
            for allocator, length in zip(self._allocators, lengths, strict=True)
        ]
        held = self._held[request_id] = _Held(room=min(lengths) * self._block_size)
        held.slides_next = self._slides_next(request_id)
        if reuse.copied:
            found.copies.extend(zip(reuse.copied, (blocks[0] for blocks in new), strict=True))
        if found.source == "swap":
            swapped = self.host.find(request_id)
            assert swapped is not None, f"request {request_id} is not on the host"
            for group, column, host in swapped.blocks:
                found.swap_in.append((host, self.block_table(request_id, group)[column]))
            self.host.drop(request_id)
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
        """Allocate the missing blocks of tokens 0 to `num_tokens` - 1 in all groups.

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

        `decodes`: whether a step computes one token of the request, not up to a chunk.
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

    def _slides_next(self, request_id: str) -> int:
        return min((a.slides_next(request_id) for a in self._sliding), default=sys.maxsize)

    def publish(self, request_id: str, hashes: PrefixHashes, num_tokens: int) -> None:
        """Make the full blocks of the request's first `num_tokens` tokens shareable.

        `hashes` must cover these tokens. Steps that compute them must be launched before any step
        that reads them.
        """
        held, end = self._held[request_id], num_tokens // self._block_size
        if end > held.published:
            for allocator in self._allocators:
                allocator.publish(request_id, hashes, held.published, end)
            held.published = end

    def verify(self, request_id: str, hashes: PrefixHashes, num_tokens: int) -> None:
        """Protect blocks from `withdraw`: the logits after `num_tokens` tokens are finite.

        Protects the full blocks that those logits were computed from, not blocks that had already
        left a sliding window.
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

        Blocks that any request has verified remain shareable. Requests keep the blocks they hold.
        """
        for allocator in self._allocators:
            allocator.withdraw(hashes, num_tokens // self._block_size)

    def forget_contents(self) -> None:
        """Drop all cached contents. Requests keep the blocks they hold."""
        self._pool.forget_contents()

    def swap_out(self, request_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
        """Release a request and reserve host blocks for its `num_tokens` computed tokens.

        Returns:
            (block, host block) to copy before the blocks are written again; None if the host cache
            has too few free blocks, in which case nothing has changed.
        """
        blocks = [  # that the next token reads
            (a.index, column, a.table(request_id)[column])
            for a in self._allocators
            for column in range(a.first_live_column(num_tokens), a.columns(num_tokens))
        ]
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

    def _needed(
        self, num_tokens: int, lengths: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> int:
        """Return how many blocks must be free to admit a request of `num_tokens` tokens.

        In each group these are the new blocks of a table of `lengths` columns, or those at the
        request's peak if that is more. Shared blocks of `tables` without a holder count too,
        because they are removed from the free list.
        """
        needed = 0
        for allocator, length, table in zip(self._allocators, lengths, tables, strict=True):
            shared = [block for block in table if block != NULL_BLOCK]
            peak = allocator.spec.most_blocks(num_tokens, self._block_size, self._chunk)
            needed += max(length - len(table), peak - len(shared))
            needed += self._pool.count_free(shared)
        return needed

    def check_integrity(self) -> None:
        """Assert that pool, tables and host blocks agree; no swapped request holds blocks."""
        self._pool.check_integrity()
        held: Counter[int] = Counter()
        for allocator in self._allocators:
            for request_id, table in allocator.tables.items():
                live = allocator.live_columns(request_id)
                assert all(block == NULL_BLOCK for block in table[: live.start])
                held.update(table[live.start :])
        assert NULL_BLOCK not in held, "a block table holds the null block"
        for block, count in held.items():
            assert self._pool.ref_count(block) == count, (
                f"block {block} is in {count} block tables, "
                f"the pool counts {self._pool.ref_count(block)} holders"
            )
        assert len(held) == self._pool.num_held, (
            f"{len(held)} blocks are in block tables, {self._pool.num_held} are held"
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
        assert not any(self.host.find(r) for r in self._held), "a swapped request holds blocks"
