"""The block pool: the free list, reference counts, and lookup of blocks by content key."""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK = 0
"""The block that padding reads and writes. No request gets it, so it is never shared or freed."""


class BlockPool:
    """Reference counts, a free list and content keys over the block ids `1 .. num_blocks - 1`.

    A full block may be published under a key, the bytes of its hash. It keeps the key, held or
    free, until it is allocated again. Free blocks with a key are the prefix cache.

    The free list is doubly linked through two preallocated arrays. Adding at either end, taking
    from the front and removing from the middle are O(1) and allocate no memory. The null block is
    the sentinel of the circular list: `next[0]` is the front, which is allocated first, and
    `prev[0]` the back. Blocks without a key are in front of blocks with a key, which are in the
    order in which they became free. So cached contents are evicted only if no other block is free,
    the least recently used first.

    No operation takes longer in a larger pool, not even in the worst case, except those marked
    O(blocks). Resizing one dictionary of a million keys would delay a step by a tenth of a second,
    so there are 256 dictionaries, by the first byte of the key. Numbers are in arrays, which
    Python's garbage collector does not visit.

    A double free, use of the null block, an invalid id and an allocation of more blocks than are
    free raise `AssertionError`.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of `num_blocks` blocks, the null block and at least one more."""
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none for tokens"
        self.num_blocks = num_blocks
        """All blocks, the null block included."""
        self.num_free = num_blocks - 1
        """Blocks that can be allocated now."""
        self.num_published = 0
        """Blocks that can be found by their key, held or free."""
        self.num_evictions = 0
        """Blocks with a key that were allocated again, which removed the key."""
        self._next = array("i", [*range(1, num_blocks), NULL_BLOCK])
        self._prev = array("i", [num_blocks - 1, *range(num_blocks - 1)])
        self._ref_counts = array("i", [0]) * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of: tuple[dict[bytes, int], ...] = tuple({} for _ in range(256))
        self._verified = bytearray(num_blocks)  # of published blocks

    @property
    def num_held(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - 1 - self.num_free

    def find(self, key: bytes) -> int | None:
        """Return the block that was published under `key`, or None."""
        return self._block_of[key[0]].get(key)

    def publish(self, block: int, key: bytes) -> bool:
        """Publish a held block under a key; return False if the block or the key is published.

        Of two blocks with the same contents, `find` returns the one that was published first. The
        contents must not change afterwards.
        """
        assert 0 < block < self.num_blocks, f"there is no block {block} to publish"
        assert self._ref_counts[block] > 0, f"free block {block} cannot be published"
        block_of = self._block_of[key[0]]
        if self._keys[block] is not None or key in block_of:
            return False
        block_of[key] = block
        self._keys[block] = key
        self.num_published += 1
        return True

    def verify(self, key: bytes) -> None:
        """Protect the block published under `key`, if any, from `withdraw`."""
        block = self.find(key)
        if block is not None:
            self._verified[block] = True

    def withdraw(self, key: bytes) -> None:
        """Unpublish the block under `key`, unless it is verified.

        Its holders keep it. If it has none, it moves to the front of the free list.
        """
        block = self.find(key)
        if block is None or self._verified[block]:
            return
        self._forget_key(block, key)
        if not self._ref_counts[block]:  # to the front, where blocks without a key are
            self.share((block,))
            self.free((block,))

    def _forget_key(self, block: int, key: bytes) -> None:
        del self._block_of[key[0]][key]
        self._keys[block] = None
        self._verified[block] = False
        self.num_published -= 1

    def forget_contents(self) -> None:
        """Unpublish every block; holders keep theirs. O(blocks)."""
        for block_of in self._block_of:
            for block in block_of.values():
                self._keys[block] = None
            block_of.clear()
        self._verified = bytearray(self.num_blocks)
        self.num_published = 0

    def ref_count(self, block: int) -> int:
        """Return how many holders `block` has; 0 if it is free."""
        assert 0 < block < self.num_blocks, f"there is no block {block} that can be held"
        return self._ref_counts[block]

    def count_free(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` have no holder."""
        ref_counts = self._ref_counts
        return sum(1 for block in blocks if not ref_counts[block])

    def allocate(self, n: int) -> list[int]:
        """Take the first `n` blocks of the free list, each with one holder. Callers check
        `num_free` first."""
        assert 0 <= n <= self.num_free, f"{n} blocks requested, {self.num_free} are free"
        next_block, ref_counts, keys = self._next, self._ref_counts, self._keys
        blocks: list[int] = []
        block = next_block[NULL_BLOCK]
        for _ in range(n):
            blocks.append(block)
            ref_counts[block] = 1
            key = keys[block]
            if key is not None:
                self._forget_key(block, key)
                self.num_evictions += 1
            block = next_block[block]
        next_block[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self.num_free -= n
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of `blocks`.

        A free block can be shared too, because it keeps its contents until it is allocated again.
        It is then removed from the free list.
        """
        next_block, prev_block, ref_counts = self._next, self._prev, self._ref_counts
        for block in blocks:
            assert 0 < block < self.num_blocks, f"there is no block {block} to share"
            count = ref_counts[block]
            if count == 0:
                before, after = prev_block[block], next_block[block]
                next_block[before] = after
                prev_block[after] = before
                self.num_free -= 1
            ref_counts[block] = count + 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each of `blocks`; those without holders become free.

        Blocks with a key go to the back of the free list, others to the front, in the given order.
        Pass the last blocks of a sequence first, so that they are evicted first: other requests are
        more likely to share its beginning.
        """
        next_block, prev_block, ref_counts = self._next, self._prev, self._ref_counts
        keys, front = self._keys, NULL_BLOCK
        for block in blocks:
            assert 0 < block < self.num_blocks, f"there is no block {block} to free"
            count = ref_counts[block] - 1
            assert count >= 0, f"block {block} is free already"
            ref_counts[block] = count
            if count == 0:
                if keys[block] is None:
                    before, front = front, block
                else:
                    before = prev_block[NULL_BLOCK]
                after = next_block[before]
                next_block[before] = prev_block[after] = block
                prev_block[block], next_block[block] = before, after
                self.num_free += 1

    def check_integrity(self) -> None:
        """Assert that the free list contains exactly the blocks without a holder. O(blocks)."""
        on_list: dict[int, bool] = {}  # in its order: whether a block has a key
        before, block = NULL_BLOCK, self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            assert block not in on_list, f"the free list meets block {block} twice"
            assert self._prev[block] == before, f"the links around free block {block} disagree"
            on_list[block] = self._keys[block] is not None
            before, block = block, self._next[block]
        assert self._prev[NULL_BLOCK] == before, "the back of the free list is not its last block"
        assert len(on_list) == self.num_free, (
            f"{len(on_list)} blocks on the free list, {self.num_free} counted as free"
        )
        assert self._ref_counts[NULL_BLOCK] == 0, "the null block has a holder"
        for block, count in enumerate(self._ref_counts[1:], 1):
            assert count >= 0, f"block {block} has {count} holders"
            assert (count == 0) == (block in on_list), (
                f"block {block} has {count} holders and is "
                f"{'on' if block in on_list else 'not on'} the free list"
            )
        assert self._keys[NULL_BLOCK] is None, "the null block is published"
        keyed = [(block, key) for block, key in enumerate(self._keys) if key is not None]
        for block, key in keyed:
            assert self._block_of[key[0]].get(key) == block, f"block {block} has the key of another"
        assert sum(map(len, self._block_of)) == len(keyed), "a block is found by a key it lost"
        assert len(keyed) == self.num_published, (
            f"{len(keyed)} blocks have a key, {self.num_published} are counted as published"
        )
        assert list(on_list.values()) == sorted(on_list.values()), (
            "a free block with a key would be handed out before one without"
        )
        if any(self._verified):
            verified = [block for block, flag in enumerate(self._verified) if flag]
            assert all(self._keys[block] for block in verified), "a block without a key is verified"


# The blocks of the host cache, and the preempted requests whose keys and values they hold.


@dataclass(frozen=True, slots=True)
class SwappedRequest:
    """The keys and values of a preempted request in the host cache."""

    num_tokens: int
    """Tokens whose keys and values are kept."""
    blocks: list[tuple[int, int, int]]
    """(layer group, column of its block table, host block)."""


class HostBlocks:
    """The blocks `0 .. num_blocks - 1` of the host arena. The host has no null block."""

    def __init__(self, num_blocks: int) -> None:
        """Manage `num_blocks` blocks; 0 for no host cache."""
        self.num_blocks = num_blocks
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._requests: dict[str, SwappedRequest] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    def find(self, request_id: str) -> SwappedRequest | None:
        """Return what the host cache holds of a request, or None."""
        return self._requests.get(request_id)

    def put(
        self, request_id: str, num_tokens: int, columns: Sequence[tuple[int, int]]
    ) -> list[int] | None:
        """Allocate a block for each (group, column) of a request; None if too few are free."""
        assert request_id not in self._requests, f"request {request_id} is swapped already"
        if len(columns) > self.num_free:
            return None
        taken = [self._free.pop() for _ in columns]
        self._requests[request_id] = SwappedRequest(
            num_tokens,
            [(group, column, host) for (group, column), host in zip(columns, taken, strict=True)],
        )
        return taken

    def drop(self, request_id: str) -> None:
        """Free the host blocks of a request, if it has any."""
        swapped = self._requests.pop(request_id, None)
        if swapped is not None:
            self._free.extend(host for _, _, host in swapped.blocks)

    def check_integrity(self) -> None:
        """Assert that every block is free or belongs to one request."""
        held = [host for s in self._requests.values() for _, _, host in s.blocks]
        assert sorted([*held, *self._free]) == list(range(self.num_blocks)), (
            "a host block is lost, or belongs to two swapped requests"
        )


# Chained block hashes: two blocks have the same hash if everything up to their end is the same.
#
#     hash of block i = BLAKE2b-256(hash of block i - 1, tokens of block i, other inputs in it)
#     hash before block 0 = BLAKE2b-256(salt), personalised, so that it never equals a block's
#
# The hash before block 0 contains a variant too, where equal tokens can have other keys and values.
#
# With 256 bits it is infeasible to construct two prompts with the same hash. Clients that do not
# know the salt cannot detect the prompts of others by their time to first token (CVE-2025-46570).

HASH_BYTES = 32


class PrefixHashes:
    """The hashes of the full blocks of one growing sequence."""

    def __init__(self, block_size: int, salt: str = "", variant: bytes = b"") -> None:
        """Begin an empty sequence.

        Only sequences with the same `salt` and `variant` have hashes in common.
        """
        self._block_size = block_size
        root = hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"salt")
        self._salted = root.digest()
        self._restart(variant)

    def __len__(self) -> int:
        """Full blocks hashed so far."""
        return len(self._hashes)

    def __getitem__(self, block: int) -> bytes:
        """Hash of the sequence up to the end of a block: `HASH_BYTES` bytes."""
        return self._hashes[block]

    def copy(self) -> PrefixHashes:
        """Return a copy that can be continued with other tokens."""
        other = copy.copy(self)
        other._hashes = self._hashes.copy()
        return other

    def restarted(self, variant: bytes) -> PrefixHashes:
        """Return an empty sequence with the same salt and another variant."""
        other = copy.copy(self)
        other._restart(variant)
        return other

    def _restart(self, variant: bytes) -> None:
        self._root, self._hashes = self._salted, list[bytes]()
        if variant:
            salted = self._salted + variant
            root = hashlib.blake2b(salted, digest_size=HASH_BYTES, person=b"variant")
            self._root = root.digest()

    def extend(
        self,
        tokens: Callable[[int, int], Sequence[int]],
        num_tokens: int,
        contents: Callable[[int, int], bytes] | None = None,
    ) -> None:
        """Hash the blocks that `num_tokens` tokens fill and that have no hash yet.

        Args:
            tokens: returns the token ids at positions start to stop - 1, each below 2^63.
            num_tokens: known tokens of the sequence.
            contents: returns bytes that identify other inputs at positions start to stop - 1, such
                as embeddings in the place of tokens; None if there are none.
        """
        size, hashes = self._block_size, self._hashes
        for block in range(len(hashes), num_tokens // size):
            start, stop = block * size, (block + 1) * size
            data = hashes[-1] if hashes else self._root
            data += array("q", tokens(start, stop)).tobytes()
            if contents is not None:
                data += contents(start, stop)
            hashes.append(hashlib.blake2b(data, digest_size=HASH_BYTES).digest())
