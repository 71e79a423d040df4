"""What the bookkeeping of blocks costs, and whether that depends on how many blocks there are.

Requests of the same size do the same operations on pools of different sizes, taking turns, through
the face that the scheduler uses. Every block of the pools that `match`, `publish` and `evict` are
measured on is cached, and the free lists are in no order, as after a long time of service.

The work is the same in every pool, the memory is not: the working set of a small pool stays in the
processor's caches, a large one full of cached contents comes back to a block only after all the
others. What remains of a difference between pool sizes is that, and it is part of the result.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from ...cache.kv_cache import KVCache
from ...cache.prefix_hashes import PrefixHashes
from ...cache.spec import FullAttentionSpec, LayerGroup

__all__ = ["CacheOperation", "OperationCost", "measure_cache"]

CacheOperation = Literal["allocate", "free", "match", "publish", "evict", "step"]
"""Take blocks without contents; give them back; find cached blocks and hold them; make blocks
findable; take blocks that are cached, which forgets them. A step is the question whether a row that
decodes its next token needs or drops a block, when the answer is no."""

REQUESTS = 8
BLOCKS_PER_REQUEST = 32
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class OperationCost:
    """What one operation costs in a pool of one size."""

    operation: CacheOperation
    num_blocks: int
    """Blocks of the pool."""
    nanoseconds: float
    """Of one block, or of one row for `step`: the median over rounds of the mean within a round."""
    worst_nanoseconds: float
    """The same, of the slowest round."""
    n: int
    """Rounds."""


def measure_cache(
    pool_sizes: Sequence[int] = (1_000, 1_000_000), *, rounds: int = 200, seed: int = 0
) -> list[OperationCost]:
    """Measure every operation in a pool of each size; a pool of a million takes some seconds.

    Raises:
        ValueError: a pool has no room for the requests, or there is no round.
    """
    least = 2 * REQUESTS * BLOCKS_PER_REQUEST
    if not pool_sizes or min(pool_sizes) < least:
        raise ValueError(f"pool_sizes must be at least {least} blocks each, got {pool_sizes!r}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    benches = [_Bench(size, random.Random(seed)) for size in pool_sizes]
    for bench in benches:
        bench.round()  # warms up
        bench.samples = {operation: [] for operation in get_args(CacheOperation)}
    for number in range(rounds):
        # Nobody is always the one who finds the processor's caches full of another's blocks.
        for bench in benches if number % 2 else benches[::-1]:
            bench.round()
    return [
        OperationCost(operation, bench.size, statistics.median(samples), max(samples), len(samples))
        for operation in get_args(CacheOperation)
        for bench in benches
        for samples in (bench.samples[operation],)
    ]


class _Bench:
    """Two pools of one size, one empty and one full of cached contents."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self.size = size
        self.samples: dict[str, list[float]] = {op: [] for op in get_args(CacheOperation)}
        self._rng = rng
        self._num_sequences = 0
        self._empty, self._cached = (_make(size) for _ in range(2))
        self._fill(self._empty, publish=False)
        self._fill(self._cached, publish=True)

    def round(self) -> None:
        """Let `REQUESTS` requests do every operation once."""
        names = [f"request {i}" for i in range(REQUESTS)]
        tokens = BLOCKS_PER_REQUEST * BLOCK_SIZE
        empty, cached = self._empty, self._cached
        hashes = [self._hashes() for _ in names]

        admit = partial(empty.admit, num_tokens=tokens, chunk=1)
        self._time("allocate", [partial(admit, r) for r in names])
        self._time("step", [partial(_steps, empty, r, tokens) for r in names])
        self._time("free", [partial(empty.release, r) for r in names])

        admit = partial(cached.admit, num_tokens=tokens, chunk=1)
        self._time("evict", [partial(admit, r) for r in names])
        pairs = list(zip(names, hashes, strict=True))
        self._time("publish", [partial(cached.publish, r, h, tokens) for r, h in pairs])
        for name in names:
            cached.release(name)

        # The token after the cached ones is to be computed; it takes a block of its own.
        admit = partial(cached.admit, num_tokens=tokens + 1, chunk=1)
        evictions = cached.num_evictions
        self._time("match", [partial(admit, r, hashes=h) for r, h in pairs])
        assert cached.num_evictions - evictions == REQUESTS, "a match was no hit"
        for name, known in pairs:
            cached.publish(name, known, tokens + BLOCK_SIZE)
        self._rng.shuffle(names)
        for name in names:
            cached.release(name)

    def _time(self, operation: str, calls: Sequence[Callable[[], object]]) -> None:
        started = time.perf_counter_ns()
        for call in calls:
            call()
        elapsed = time.perf_counter_ns() - started
        self.samples[operation].append(elapsed / (len(calls) * BLOCKS_PER_REQUEST))

    def _fill(self, cache: KVCache, *, publish: bool) -> None:
        """Hold every block and give them back request by request, in random order."""
        names: list[str] = []
        while cache.num_free_blocks:
            name = f"filling {len(names)}"
            blocks = min(BLOCKS_PER_REQUEST, cache.num_free_blocks)
            cache.admit(name, blocks * BLOCK_SIZE, chunk=1)
            if publish:
                cache.publish(name, self._hashes(), blocks * BLOCK_SIZE)
            names.append(name)
        self._rng.shuffle(names)
        for name in names:
            cache.release(name)

    def _hashes(self) -> PrefixHashes:
        """Hashes of a sequence that nobody has had."""
        first = self._num_sequences << 32
        self._num_sequences += 1
        hashes = PrefixHashes(BLOCK_SIZE)
        hashes.extend(
            lambda start, stop: range(first + start, first + stop),
            (BLOCKS_PER_REQUEST + 1) * BLOCK_SIZE,
        )
        return hashes


def _make(num_blocks: int) -> KVCache:
    spec = FullAttentionSpec(num_kv_heads=1, head_dim=64, element_bytes=2)
    return KVCache([LayerGroup(0, spec, (0,))], num_blocks, BLOCK_SIZE)


def _steps(cache: KVCache, request_id: str, num_tokens: int) -> None:
    """Ask as often as there are blocks, so that costs are counted alike."""
    for _ in range(BLOCKS_PER_REQUEST):
        cache.slide(request_id, num_tokens - 1)
        cache.grow(request_id, num_tokens)
