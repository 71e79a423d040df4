"""What a request that is admitted finds there already. Nothing is changed here.

It comes from one of three places: the host first, then whichever of the others has more:

    swap     its own blocks wait in the host cache: new blocks, and a copy from the host
    fork     a sibling (same prompt, `n` > 1) has computed the prompt: its full blocks are shared,
             and the one that both will write into is copied
    prefix   blocks with the same content are in the pool, held by others or cached: shared

The cache says which copies that takes; the runner makes them, all at once, before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .allocators import GroupAllocator
from .blocks import NULL_BLOCK
from .prefix import PrefixHashes
from .swap import HostBlocks

__all__ = ["Admitted", "Reuse", "find_reuse"]


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a request found when it was admitted."""

    num_tokens: int
    """Tokens whose keys and values need not be computed."""
    source: Literal["nothing", "swap", "fork", "prefix"] = "nothing"
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block) to copy within the arena before the step."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, block) to copy from the host before the step."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What an admission can build on."""

    found: Admitted
    """Its copies are listed by whoever allocates their destinations."""
    tables: list[list[int]]
    """Of each group: blocks to share, null blocks where nothing will be read."""
    copied: list[int] = field(default_factory=list)
    """Of each group the sibling's partly filled block, to be copied; empty if there is none."""


def find_reuse(
    allocators: Sequence[GroupAllocator],
    host: HostBlocks,
    request_id: str,
    num_tokens: int,
    hashes: PrefixHashes | None,
    siblings: Sequence[tuple[str, int]],
) -> Reuse:
    """Return the most that a request of `num_tokens` known tokens can build on.

    Never all of them: the last one is to be computed, since its logits are wanted. `hashes` and
    `siblings` are those of `KVCache.admit`.
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
        if shared_tokens > best.found.num_tokens:
            best = _fork(allocators, sibling, shared_tokens) or best
    size = allocators[0].block_size
    most = (num_tokens - 1) // size
    if hashes is not None and most * size > best.found.num_tokens:
        tables = _match(allocators, hashes, min(most, len(hashes)))
        found = len(tables[0]) * size
        if found > best.found.num_tokens:
            best = Reuse(Admitted(found, "prefix"), tables)
    return best


def _fork(allocators: Sequence[GroupAllocator], sibling: str, num_tokens: int) -> Reuse | None:
    """Return how to go on from a sibling, or None if it has given back what that takes."""
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
    """Return tables of the blocks, at most `count`, that a sequence can begin with as they are.

    Groups with full attention need all of them, those with a window what the next token reads. A
    block that is missing there bounds the count, and what was seen behind it is of no use any more:
    one pass, from the end, over the columns that some group needs.
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
