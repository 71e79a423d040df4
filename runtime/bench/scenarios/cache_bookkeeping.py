"""Cost of block bookkeeping, and whether it depends on the size of the pool.

Requests of one size do the same operations on pools of different sizes, in turns, through the
interface that the scheduler uses. All blocks of the pools for `match`, `publish` and `evict` are
cached, and the free lists are shuffled, as after a long time of service.

The work is the same in every pool, the memory is not: the working set of a small pool stays in the
processor's caches, while a large one full of cached contents reuses a block only after all others.
The remaining difference between pool sizes is that effect, and it is part of the result.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from ....cache.kv_cache import KVCache
from ....cache.prefix_hashes import PrefixHashes
from ....cache.spec import FullAttentionSpec, LayerGroup
from ..workload import interleave

__all__ = ["CacheOperation", "BookkeepingCost", "measure_cache"]

CacheOperation = Literal["allocate", "free", "match", "publish", "evict", "step"]
"""allocate: take empty blocks; free: return them; match: find and hold cached blocks; publish: add
blocks to the prefix cache; evict: take cached blocks; step: check whether the next token of a row
needs or drops a block, when it does not."""

REQUESTS = 8
BLOCKS_PER_REQUEST = 32
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class BookkeepingCost:
    """Cost of an operation in a pool of one size."""

    operation: CacheOperation
    num_blocks: int
    """Blocks of the pool."""
    nanoseconds: float
    """Of a block, or of a row for `step`: the median over rounds of the mean of a round."""
    worst_nanoseconds: float
    """The same, of the slowest round."""
    n: int
    """Rounds."""


def measure_cache(
    pool_sizes: Sequence[int] = (1_000, 1_000_000), *, rounds: int = 200, seed: int = 0
) -> list[BookkeepingCost]:
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
    # No pool always follows the same other in the CPU caches.
    interleave([bench.round for bench in benches], rounds)
    return [
        BookkeepingCost(
            operation, bench.size, statistics.median(samples), max(samples), len(samples)
        )
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
        """Do every operation once for `REQUESTS` requests."""
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

        # The token after the cached ones is computed; it takes a block of its own.
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
        """Hold every block and return them request by request, in random order."""
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
        """Return the hashes of a new sequence."""
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
    """Check once per block of a request, so that costs are divided by the same number."""
    for _ in range(BLOCKS_PER_REQUEST):
        cache.slide(request_id, num_tokens - 1)
        cache.grow(request_id, num_tokens)
