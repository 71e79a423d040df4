"""Finds the tokens that an admitted request need not compute. Changes nothing.

There are three sources. The host cache comes first, then the one of the others with more tokens:

    swap     its own blocks are in the host cache: they are copied into new blocks
    fork     a sibling (same prompt, `n` > 1) has computed the prompt: its full blocks are shared,
             and the block that both will write to is copied
    prefix   blocks with the same contents are in the pool, held or cached: they are shared

`KVCache.admit` lists the copies; the runner makes all of them before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .allocators import GroupAllocator
from .blocks import NULL_BLOCK
from .prefix_hashes import PrefixHashes
from .swap import HostBlocks

__all__ = ["Admitted", "Reuse", "find_reuse"]


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

    It never contains all of them: the last one must be computed for its logits. `hashes` and
    `siblings` are those of `KVCache.admit`; at most `most_shared` tokens are shared with other
    requests.
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
