"""`KVCache`: the scheduler's interface to the cache. No tensors.

`block_tables.py` tracks the blocks that requests hold. This module adds their reuse: shared
prefixes, forks of siblings (completions of the same prompt) and the host cache. `reuse.py` finds
the tokens that an admitted request need not compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from .block_tables import BlockTables, TableChange
from .blocks import NULL_BLOCK
from .cached_keys import CachedKeys
from .prefix_hashes import PrefixHashes
from .reuse import Admitted, find_reuse
from .spec import LayerGroup
from .swap import HostBlocks

__all__ = ["Admitted", "KVCache", "TableChange"]


class KVCache(BlockTables):
    """The blocks that each request holds in each layer group, and their reuse.

    A request holds blocks from `admit` on, until `release` or `swap_out`.
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

        Raises:
            ValueError: no group, `num_blocks < 2` or `block_size < 1`.
        """
        super().__init__(groups, num_blocks, block_size, chunk)
        self.host = HostBlocks(host_blocks)
        self.counts = dict.fromkeys(
            ("queried_tokens", "hit_tokens", "forks", "copied_blocks", "swapped_out", "swapped_in"),
            0,
        )
        """Tokens queried and found at first admissions, forks, blocks copied for forks, and blocks
        swapped. Updated by `count_admission` and `count_swapped_out`.
        """

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, held or free, whose contents can be shared."""
        return self._pool.num_published

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were allocated again, losing their contents."""
        return self._pool.num_evictions

    def cached_keys(self) -> tuple[CachedKeys, bytes]:
        """Return the keys of the cached blocks, and the suffix of those of one layer group.

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
        new = self._start(request_id, reuse.tables, lengths)
        if reuse.copied:
            found.copies.extend(zip(reuse.copied, (blocks[0] for blocks in new), strict=True))
        if found.source == "swap":
            self._take_swapped(request_id, found.swap_in)
        if found.source == "prefix":
            self._held[request_id].published = found.num_tokens // self._block_size
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

    def _computed(self, request_id: str, num_tokens: int) -> list[TableChange]:
        """Return the table entries that the token after the first `num_tokens` reads."""
        return [
            (a.index, column, a.table(request_id)[column])
            for a in self._allocators
            for column in range(a.first_live_column(num_tokens), a.columns(num_tokens))
        ]

    def _take_swapped(self, request_id: str, swap_in: list[tuple[int, int]]) -> None:
        swapped = self.host.find(request_id)
        assert swapped is not None, f"request {request_id} is not on the host"
        for group, column, host in swapped.blocks:
            swap_in.append((host, self._allocators[group].table(request_id)[column]))
        self.host.drop(request_id)

    def check_integrity(self) -> None:
        """Assert that pool, tables and host blocks agree; no swapped request holds blocks."""
        super().check_integrity()
        self.host.check_integrity()
        assert not any(self.host.find(r) for r in self._held), "a swapped request holds blocks"
