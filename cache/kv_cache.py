"""`KVCache`: the scheduler's interface to the cache. No tensors.

It tracks the blocks that requests hold, and their reuse: shared prefixes, forks of siblings
(completions of the same prompt) and the host cache.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .blocks import NULL_BLOCK, BlockPool, HostBlocks, PrefixHashes
from .row_states import Copies, RowPools, RowStateCache
from .spec import LayerGroup

TableChange = tuple[int, int, int]
"""(group, column, block): an entry of a request's block tables that has changed. After the
layer groups come the tables of snapshots and of inputs, if the model has recurrent state."""


@dataclass(slots=True)
class _Held:
    """The blocks of a request, and numbers so that most steps need not check each group.

    Token `i` of a request lives in block `table[i // block_size]` at offset `i % block_size`:
    columns are absolute positions, with a sliding window too. Blocks that have left the window are
    freed, and the null block takes their place:

        window 8, blocks of 4, next token 13: it reads positions 6 to 13
        table [ 0 | 7 | 3 | 9 ]      column 0 (positions 0 to 3) is no longer read
    """

    tables: list[list[int]]
    """The block table of each layer group, in position order."""
    firsts: list[int]
    """In each group: the columns before it have left the window."""
    room: int = 0
    """Tokens that the blocks can hold, in every group."""
    slides_next: int = sys.maxsize
    """First position at which a group with a window frees a block. Recurrent state that a request
    has left behind waits for its next growth."""
    published: int = 0
    """Full blocks that `KVCache.publish` has processed."""
    verified: int = 0
    """Full blocks that `KVCache.verify` has processed."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What an admitted request reuses."""

    num_tokens: int
    """Tokens whose keys and values need not be computed."""
    source: Literal["nothing", "swap", "fork", "prefix"] = "nothing"
    copies: Copies = field(default_factory=Copies.none)
    """To make within the arena before the step."""
    swap_in: Copies = field(default_factory=Copies.none)
    """To make from the host before the step."""
    stored: int = 0
    """The last column whose snapshot of recurrent state is stored."""


@dataclass(slots=True)
class _Reuse:
    """The reusable prefix of a request, and block tables with its blocks."""

    found: Admitted
    """`KVCache.admit` adds the copies, because it allocates their destinations."""
    tables: list[list[int]]
    """For each group: blocks to share, and null blocks in columns that are not read."""
    copied: list[int] = field(default_factory=list)
    """For each group the sibling's partly filled block, to be copied; empty if there is none."""
    sibling: str | None = None
    """The request whose recurrent state it shares."""
    junction: int = 0
    """Blocks that are cached where the recurrent state after them is not; 0: the state limits
    nothing."""


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
        row_pools: RowPools | None = None,
    ) -> None:
        """Manage `num_blocks` blocks (the null block included) of `block_size` slots.

        Args:
            groups: the layer groups of the model.
            num_blocks: blocks of the arena.
            block_size: slots of a block.
            chunk: maximum tokens of a request that one step computes.
            host_blocks: blocks of the host cache.
            row_pools: memory for recurrent state; None if the model has none.
        """
        self.pool = BlockPool(num_blocks)
        self.states = None if row_pools is None else RowStateCache(row_pools, block_size)
        self._groups = tuple(groups)
        self._windows = [
            (group.index, group.window) for group in groups if group.window is not None
        ]
        # What each group appends to the hashes of its blocks.
        self._suffixes = [group.index.to_bytes(2, "little") for group in groups]
        self.block_size = block_size
        self._chunk = chunk
        self._held: dict[str, _Held] = {}
        self.host = HostBlocks(host_blocks)
        self.counts = dict.fromkeys(
            ("queried_tokens", "hit_tokens", "forks", "copied_blocks", "swapped_out", "swapped_in"),
            0,
        )
        """Tokens queried and found at first admissions, forks, blocks copied for forks, and blocks
        swapped. The loop counts them, once their copies are queued.
        """

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.pool.num_held

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.pool.num_blocks - 1

    def num_shareable(
        self, num_tokens: int, hashes: PrefixHashes, reusable_tokens: int | None
    ) -> int:
        """Return how many of a new request's first tokens `admit` would find by content now."""
        return self._find_reuse("", num_tokens, hashes, (), reusable_tokens).found.num_tokens

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
        assert chunk <= self._chunk or not self._windows, (
            f"a step computes {chunk} tokens of a request, the cache was made for {self._chunk}"
        )
        assert request_id not in self._held, f"request {request_id} holds blocks already"
        reuse = self._find_reuse(request_id, num_tokens, hashes, siblings, reusable_tokens)
        found, tables, size = reuse.found, reuse.tables, self.block_size
        stop = min(num_tokens, found.num_tokens + chunk)
        lengths = [
            self._columns(num_tokens if group.window is None else stop) for group in self._groups
        ]
        if self._needed(num_tokens, lengths, tables) + headroom > self.pool.num_free:
            return None
        if self.states is not None and not self.states.can_admit():
            return None
        firsts = [sum(block == NULL_BLOCK for block in table) for table in tables]
        for table, first in zip(tables, firsts, strict=True):
            self.pool.share(table[first:])
        new = [
            self.pool.allocate(max(0, length - len(table)))
            for table, length in zip(tables, lengths, strict=True)
        ]
        for table, blocks in zip(tables, new, strict=True):
            table += blocks
        held = self._held[request_id] = _Held(tables, firsts, min(lengths) * size)
        if reuse.copied:
            pairs = zip(reuse.copied, (blocks[0] for blocks in new), strict=True)
            found.copies.blocks.extend(pairs)
        if found.source == "swap":
            swapped = self.host.find(request_id)
            assert swapped is not None, f"request {request_id} is not on the host"
            for group, column, host in swapped.blocks:
                found.swap_in.blocks.append((host, tables[group][column]))
            self.host.drop(request_id)
        if found.source == "prefix":
            held.published = found.num_tokens // size
        if self.states is not None:
            found = self._admit_state(request_id, num_tokens, reuse, hashes)
            held.room = min(held.room, self.states.room(request_id))
        held.slides_next = self._slides_next(request_id)
        return found

    def _admit_state(
        self,
        request_id: str,
        num_tokens: int,
        reuse: _Reuse,
        hashes: PrefixHashes | None,
    ) -> Admitted:
        """Hold the recurrent state that an admitted request reuses."""
        found, states = reuse.found, self.states
        assert states is not None
        if found.source == "swap":
            stored, copies = states.swap_in(request_id, num_tokens)
            found = replace(found, stored=stored)
            found.swap_in.snapshots.extend(copies.snapshots)
            found.swap_in.inputs.extend(copies.inputs)
        else:
            stored, copies = states.admit(
                request_id,
                found.num_tokens,
                num_tokens,
                hashes=hashes,
                sibling=reuse.sibling,
                junction=reuse.junction,
            )
            found = replace(found, stored=stored)
            found.copies.inputs.extend(copies.inputs)
        return found

    def grow(self, request_id: str, num_tokens: int, drafted: int = 0) -> list[TableChange] | None:
        """Allocate the missing blocks of tokens 0 to `num_tokens` - 1 in all groups.

        The last `drafted` tokens belong to a drafter, which has no recurrent state.

        Returns:
            The changed entries of the request's block tables (often none); None if too few blocks
            are free, in which case nothing has changed.
        """
        held = self._held[request_id]
        if num_tokens <= held.room:
            return []
        columns = self._columns(num_tokens)
        missing = [max(0, columns - len(table)) for table in held.tables]
        if sum(missing) > self.pool.num_free:
            return None
        stop = num_tokens - drafted
        if self.states is not None and not self.states.can_advance(request_id, stop):
            return None
        changes: list[TableChange] = []
        for group, (table, count) in enumerate(zip(held.tables, missing, strict=True)):
            for block in self.pool.allocate(count):
                changes.append((group, len(table), block))
                table.append(block)
        held.room = min(map(len, held.tables)) * self.block_size
        if self.states is not None:
            changes += self._of_states(self.states.advance(request_id, stop))
            held.room = min(held.room, self.states.room(request_id))
        return changes

    def _of_states(self, changes: list[TableChange]) -> list[TableChange]:
        """Number the tables of recurrent state after the layer groups."""
        first = len(self._groups)
        return [(first + table, column, entry) for table, column, entry in changes]

    def growing_groups(self, request_id: str, num_tokens: int, *, decodes: bool) -> int:
        """Count the groups in which a request may hold more blocks before it has `num_tokens`.

        With a sliding window it may allocate blocks without holding more of them, because it frees
        others first. `decodes`: whether a step computes one token of the request, not up to a
        chunk.
        """
        held, size, chunk = self._held[request_id], self.block_size, 1 if decodes else self._chunk
        columns, growing = self._columns(num_tokens), 0
        for group, table, first in zip(self._groups, held.tables, held.firsts, strict=True):
            most = group.most_blocks(num_tokens, size, chunk)
            growing += len(table) - first < most and len(table) < columns
        return growing

    def quiet_until(self, request_id: str) -> int:
        """Return the first position at which `slide` or `grow` changes a block table."""
        held = self._held[request_id]
        return min(held.room, held.slides_next)

    def slide(self, request_id: str, position: int) -> list[TableChange]:
        """Free the blocks that the next token, at `position`, no longer reads.

        Returns the entries that are now the null block.
        """
        held, changes = self._held[request_id], list[TableChange]()
        for group, _ in self._windows if position >= held.slides_next else ():
            table, begin = held.tables[group], held.firsts[group]
            end = min(self._first_column(group, position), len(table))
            if begin < end:
                self.pool.free(reversed(table[begin:end]))
                table[begin:end] = [NULL_BLOCK] * (end - begin)
                held.firsts[group] = end
                changes += [(group, column, NULL_BLOCK) for column in range(begin, end)]
        if self.states is not None:
            changes += self._of_states(self.states.slide(request_id, position))
        held.slides_next = self._slides_next(request_id)
        return changes

    def release(self, request_id: str) -> None:
        """Free every block of a request, in all groups.

        A cached block is useful only together with all blocks before it. So the last blocks are
        freed first, and evicted first.
        """
        held = self._held.pop(request_id, None)
        if self.states is not None:
            self.states.release(request_id)
        if held is not None:
            self.pool.free(
                table[column]
                for column in range(max(map(len, held.tables)) - 1, -1, -1)
                for table, first in zip(held.tables, held.firsts, strict=True)
                if first <= column < len(table)
            )

    def block_table(self, request_id: str, group: int = 0) -> Sequence[int]:
        """The block ids of a request in one group, in position order. Not a copy."""
        held = self._held.get(request_id)
        return () if held is None else held.tables[group]

    def table_of(self, request_id: str) -> list[TableChange]:
        """Return the entries of a request's tables that hold a block, in all groups."""
        states = [] if self.states is None else self.states.table_of(request_id)
        return [
            (group, column, block)
            for group, table in enumerate(self._held[request_id].tables)
            for column, block in enumerate(table)
            if block != NULL_BLOCK
        ] + self._of_states(states)

    def find(self, hashes: PrefixHashes, column: int, group: int) -> int | None:
        """Return the published block of a group with the contents of a sequence in a column."""
        return self.pool.find(hashes[column] + self._suffixes[group])

    def publish(
        self, request_id: str, hashes: PrefixHashes, num_tokens: int, *, leaves: bool = False
    ) -> None:
        """Make the full blocks of the request's first `num_tokens` tokens shareable.

        `hashes` must cover these tokens. Steps that compute them must be launched before any step
        that reads them. `leaves`: whether the request is about to lose its blocks.
        """
        if self.states is not None:
            self.states.publish(request_id, hashes, num_tokens, leaves=leaves)
        held, end = self._held[request_id], num_tokens // self.block_size
        if end > held.published:
            for suffix, table, first in zip(self._suffixes, held.tables, held.firsts, strict=True):
                for column in range(max(held.published, first), end):
                    self.pool.publish(table[column], hashes[column] + suffix)
            held.published = end

    def verify(self, request_id: str, hashes: PrefixHashes, num_tokens: int) -> None:
        """Protect blocks from `withdraw`: the logits after `num_tokens` tokens are finite.

        Protects the full blocks that those logits were computed from, not blocks that had already
        left a sliding window.
        """
        assert num_tokens > 0, f"request {request_id} has no token to verify"
        held, end = self._held[request_id], num_tokens // self.block_size
        if self.states is not None:
            self.states.verify(request_id, hashes, num_tokens)
        if end > held.verified:
            for group, suffix in enumerate(self._suffixes):
                first = self._first_column(group, num_tokens - 1)
                for column in range(max(held.verified, first), end):
                    self.pool.verify(hashes[column] + suffix)
            held.verified = end

    def withdraw(self, hashes: PrefixHashes, num_tokens: int) -> None:
        """Stop sharing the blocks that hold tokens after the first `num_tokens` of a sequence.

        Blocks that any request has verified remain shareable. Requests keep the blocks they hold.
        """
        for suffix in self._suffixes:
            for column in range(num_tokens // self.block_size, len(hashes)):
                self.pool.withdraw(hashes[column] + suffix)
        if self.states is not None:
            self.states.withdraw(hashes, num_tokens)

    def forget_contents(self) -> None:
        """Stop sharing everything that is cached."""
        self.pool.forget_contents()
        if self.states is not None:
            self.states.snapshots.forget_contents()

    def drop_swapped(self, request_id: str) -> None:
        """Free what a preempted request has on the host, if it has anything."""
        self.host.drop(request_id)
        if self.states is not None:
            self.states.drop(request_id)

    def swap_out(self, request_id: str, num_tokens: int) -> Copies | None:
        """Release a request and reserve host blocks for its `num_tokens` computed tokens.

        Returns:
            What to copy, to the host, before it is written again; None if the host cache has too
            few free blocks, in which case nothing has changed.
        """
        places = [  # that the next token reads
            (group, column)
            for group in range(len(self._groups))
            for column in range(self._first_column(group, num_tokens), self._columns(num_tokens))
        ]
        hosts = self.host.put(request_id, num_tokens, places)
        if hosts is None:
            return None
        copies: Copies | None = Copies.none()
        if self.states is not None:
            copies = self.states.swap_out(request_id, num_tokens)
            if copies is None:
                self.host.drop(request_id)
                return None
        assert copies is not None
        tables = self._held[request_id].tables
        blocks = [tables[group][column] for group, column in places]
        copies.blocks.extend(zip(blocks, hosts, strict=True))
        self.release(request_id)
        return copies

    def _columns(self, num_tokens: int) -> int:
        """Columns of the table of a request of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def _first_column(self, group: int, position: int) -> int:
        """First column that the token at `position` reads or writes in a group."""
        return self._groups[group].first_column(position, self.block_size)

    def _slides_next(self, request_id: str) -> int:
        """Return the first position at which `slide` frees a block."""
        firsts = self._held[request_id].firsts
        windows = (
            (firsts[group] + 1) * self.block_size + window - 1 for group, window in self._windows
        )
        return min(windows, default=sys.maxsize)

    # Finds the tokens that an admitted request need not compute. Changes nothing.
    #
    # There are three sources. The host cache comes first, then the one of the others with more
    # tokens:
    #
    #     swap     its own blocks are in the host cache: they are copied into new blocks
    #     fork     a sibling (same prompt, `n` > 1) has computed the prompt: its full blocks are
    #              shared, and the block that both will write to is copied
    #     prefix   blocks with the same contents are in the pool, held or cached: they are shared
    #
    # `admit` lists the copies; the runner makes all of them before the step.

    def _find_reuse(
        self,
        request_id: str,
        num_tokens: int,
        hashes: PrefixHashes | None,
        siblings: Sequence[tuple[str, int]],
        reusable_tokens: int | None,
    ) -> _Reuse:
        """Return the longest reusable prefix of a request; see `admit` for the arguments.

        It never contains all tokens: the last one must be computed for its logits.
        """
        swapped, groups = self.host.find(request_id), range(len(self._groups))
        if swapped is not None:
            count = swapped.num_tokens
            assert count < num_tokens, f"request {request_id} has no token left to compute"
            tables = [[NULL_BLOCK] * self._first_live(group, count) for group in groups]
            return _Reuse(Admitted(count, "swap"), tables)
        most = num_tokens - 1 if reusable_tokens is None else min(num_tokens - 1, reusable_tokens)
        best = _Reuse(Admitted(0), [[] for _ in groups])
        for sibling, shared_tokens in siblings:
            assert shared_tokens < num_tokens, f"request {request_id} has no token left to compute"
            if best.found.num_tokens < shared_tokens <= most:
                best = self._fork(sibling, shared_tokens) or best
        columns = most // self.block_size
        if hashes is not None and columns * self.block_size > best.found.num_tokens:
            tables = self._match(hashes, min(columns, len(hashes)))
            junction = 0
            if self.states is not None:  # of the longest prefix whose state is cached too
                cached = len(tables[0])
                while (count := self.states.find(hashes, len(tables[0]))) < len(tables[0]):
                    junction, tables = cached, self._match(hashes, count)
            found = len(tables[0]) * self.block_size
            if found > best.found.num_tokens:
                best = _Reuse(Admitted(found, "prefix"), tables, junction=junction)
            else:
                best.junction = junction
        return best

    def _first_live(self, group: int, num_tokens: int) -> int:
        """First column that the token after the first `num_tokens` of a request reads."""
        return min(self._first_column(group, num_tokens), self._columns(num_tokens))

    def _fork(self, sibling: str, num_tokens: int) -> _Reuse | None:
        """Return the reuse of a sibling's tokens, or None if it has freed blocks of them."""
        held, count, tables = self._held[sibling], self._columns(num_tokens), []
        if self.states is not None and not self.states.can_fork(sibling, num_tokens):
            return None
        for group, (table, kept) in enumerate(zip(held.tables, held.firsts, strict=True)):
            first = self._first_live(group, num_tokens)
            if len(table) < count or first < min(count, kept):
                return None
            tables.append([NULL_BLOCK] * first + table[first:count])
        partial = num_tokens % self.block_size != 0
        copied = [table.pop() for table in tables] if partial else []
        return _Reuse(Admitted(num_tokens, "fork"), tables, copied, sibling)

    def _match(self, hashes: PrefixHashes, count: int) -> list[list[int]]:
        """Return tables of the published blocks, at most `count` columns, a sequence starts with.

        Groups with full attention need every column, groups with a window only the columns that the
        next token reads. A missing block limits the match to the columns before it. One backward
        pass visits the columns that some group needs.
        """
        tables: list[list[int]] = [[] for _ in self._groups]
        for group, own in enumerate(self._groups):
            if own.window is None:
                tables[group] = self._found(hashes, range(count), group)
                count = len(tables[group])
        needing = [group for group, _ in self._windows]
        column = count
        while column > 0 and needing:
            column -= 1
            tokens = count * self.block_size
            needing = [g for g, _ in self._windows if self._first_live(g, tokens) <= column]
            if any(self.find(hashes, column, group) is None for group in needing):
                count = column
        for group, _ in self._windows:
            first = self._first_live(group, count * self.block_size)
            tables[group] = [NULL_BLOCK] * first
            tables[group] += self._found(hashes, range(first, count), group)
        for table in tables:
            del table[count:]
        return tables

    def _found(self, hashes: PrefixHashes, columns: range, group: int) -> list[int]:
        """Return the blocks that `find` returns for columns, up to the first miss."""
        found: list[int] = []
        for column in columns:
            block = self.find(hashes, column, group)
            if block is None:
                break
            found.append(block)
        return found

    def _needed(
        self, num_tokens: int, lengths: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> int:
        """Return how many blocks must be free to admit a request of `num_tokens` tokens.

        In each group these are the new blocks of a table of `lengths` columns, or those at the
        request's peak if that is more. Shared blocks of `tables` without a holder count too,
        because they are removed from the free list.
        """
        needed = 0
        for group, length, table in zip(self._groups, lengths, tables, strict=True):
            shared = [block for block in table if block != NULL_BLOCK]
            peak = group.most_blocks(num_tokens, self.block_size, self._chunk)
            needed += max(length - len(table), peak - len(shared))
            needed += self.pool.count_free(shared)
        return needed

    def check_integrity(self) -> None:
        """Assert that pool, tables and host blocks agree; no swapped request holds blocks."""
        self.pool.check_integrity()
        holders: Counter[int] = Counter()
        for request_id, held in self._held.items():
            for table, first in zip(held.tables, held.firsts, strict=True):
                assert all(block == NULL_BLOCK for block in table[:first])
                holders.update(table[first:])
            full = [t for t, g in zip(held.tables, self._groups, strict=True) if not g.window]
            assert len({*map(len, full)}) <= 1, "a request grew in one group and not in another"
            room = min(map(len, held.tables)) * self.block_size
            if self.states is not None:
                room = min(room, self.states.room(request_id))
            assert held.room == room, (
                f"request {request_id} counts room for {held.room} tokens, it has {room}"
            )
            assert held.slides_next == self._slides_next(request_id), (
                f"request {request_id} would not slide at the right time"
            )
        assert NULL_BLOCK not in holders, "a block table holds the null block"
        for block, count in holders.items():
            assert self.pool.ref_count(block) == count, (
                f"block {block} is in {count} block tables, "
                f"the pool counts {self.pool.ref_count(block)} holders"
            )
        assert len(holders) == self.num_held_blocks, (
            f"{len(holders)} blocks are in block tables, {self.num_held_blocks} are held"
        )
        self.host.check_integrity()
        if self.states is not None:
            self.states.check_integrity()
        assert not any(self.host.find(r) for r in self._held), "a swapped request holds blocks"
