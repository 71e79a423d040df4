"""For tests of the cache: specs, requests as a scheduler keeps them, and what the slots hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stepgraph.cache.blocks import BlockPool, PrefixHashes
from stepgraph.cache.kv_cache import Admitted, KVCache, TableChange
from stepgraph.cache.spec import LayerGroup, PagedState

Content = tuple[int, str, tuple[int, ...]] | None
"""(layer group, salt, all tokens up to the position of the slot); None: nothing."""

Windows = Sequence[int | None]
"""The window of each layer group, in tokens; None: full attention."""


@dataclass(eq=False)
class Job:
    """A request as the scheduler would keep it."""

    id: str
    salt: str
    tokens: list[int]
    """Known ones, and at the end perhaps one that only the device knows yet."""
    prompt: int
    family: list[Job]
    known: int = 0
    computed: int = 0
    hashes: PrefixHashes = field(default_factory=lambda: PrefixHashes(1))

    def content(self, group: int, position: int) -> Content:
        return (group, self.salt, tuple(self.tokens[: position + 1]))


@dataclass
class Plan:
    """What the next launch does, in the order of the fields."""

    swap_out: list[tuple[Job, list[tuple[int, int]]]] = field(default_factory=list)
    admitted: list[tuple[Job, Admitted]] = field(default_factory=list)
    chunks: dict[Job, int] = field(default_factory=dict)
    preempted: list[Job] = field(default_factory=list)


def layer_group(index: int, window: int | None, layers: int = 1) -> LayerGroup:
    numbers = range(index * layers, (index + 1) * layers)
    return LayerGroup(index, tuple(numbers), (PagedState(2, 8, window),) * layers)


def hashes_of(tokens: Sequence[int], block_size: int, salt: str = "") -> PrefixHashes:
    hashes = PrefixHashes(block_size, salt)
    hashes.extend(lambda start, stop: tokens[start:stop], len(tokens))
    return hashes


class Memory:
    """The contents of all slots, on the device and on the host, and the device's block tables."""

    def __init__(self, windows: Windows, num_blocks: int, host_blocks: int, size: int) -> None:
        self.windows = windows
        self.size = size
        self.blocks: list[list[Content]] = [[None] * size for _ in range(num_blocks)]
        self.host: list[list[Content]] = [[None] * size for _ in range(host_blocks)]
        self.tables: dict[Job, list[dict[int, int]]] = {}

    def change_tables(self, job: Job, changes: list[TableChange]) -> None:
        for group, column, block in changes:
            self.tables[job][group][column] = block

    def copy_in(self, admitted: list[tuple[Job, Admitted]]) -> None:
        copies = [pair for _, found in admitted for pair in found.copies.blocks]
        copied = [list(self.blocks[source]) for source, _ in copies]
        for (_, destination), contents in zip(copies, copied, strict=True):
            self.blocks[destination] = contents
        for _, found in admitted:
            for host, block in found.swap_in.blocks:
                self.blocks[block] = list(self.host[host])

    def write(self, chunks: dict[Job, int], pool: BlockPool) -> None:
        """Compute the next tokens of each request."""
        written: set[tuple[int, int]] = set()
        for job, count in chunks.items():
            for group in range(len(self.windows)):
                for position in range(job.computed, job.computed + count):
                    block = self.tables[job][group][position // self.size]
                    slot = (block, position % self.size)
                    assert block != 0, "a token is written to the null block"
                    assert slot not in written, "two tokens are written to one slot"
                    assert pool.ref_count(block) == 1, "a shared block is written"
                    assert not is_published(pool, block), "a published block is written"
                    written.add(slot)
                    self.blocks[block][slot[1]] = job.content(group, position)

    def check_reads(self, job: Job, position: int, stop: int) -> None:
        """Assert that the token at `position` finds its own past, up to `stop` - 1."""
        for group, window in enumerate(self.windows):
            start = 0 if window is None else max(0, position - window + 1)
            for p in range(start, stop):
                block = self.tables[job][group][p // self.size]
                assert self.blocks[block][p % self.size] == job.content(group, p)


def brute_force_match(cache: KVCache, windows: Windows, job: Job) -> int:
    """The most tokens, in full blocks, that all groups have of what the next token reads."""
    size = cache.block_size
    for count in range((job.known - 1) // size, 0, -1):
        position = count * size
        if all(
            cache.find(job.hashes, p // size, group) is not None
            for group, window in enumerate(windows)
            for p in range(0 if window is None else max(0, position - window + 1), position)
        ):
            return position
    return 0


def is_published(pool: BlockPool, block: int) -> bool:
    """Whether a block can be found by its contents."""
    return pool._keys[block] is not None


def record_allocations(pool: BlockPool) -> list[int]:
    """A list that the blocks are added to which the pool hands out from now on."""
    fresh: list[int] = []
    allocate = pool.allocate

    def recording(n: int) -> list[int]:
        blocks = allocate(n)
        fresh.extend(blocks)
        return blocks

    pool.allocate = recording  # type: ignore[method-assign]
    return fresh
