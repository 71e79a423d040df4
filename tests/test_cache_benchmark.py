"""The benchmark of the bookkeeping, and that its work does not grow with the pool."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import get_args

from stepgraph.cache.kv_cache import KVCache
from stepgraph.cache.prefix_hashes import PrefixHashes
from stepgraph.cache.spec import FullAttentionSpec, LayerGroup, SlidingWindowSpec
from stepgraph.runtime.bench.scenarios.cache_bookkeeping import CacheOperation, measure_cache

BLOCK_SIZE = 4


def test_every_operation_is_measured_in_every_pool() -> None:
    costs = measure_cache((600, 2000), rounds=3)
    assert [(c.operation, c.num_blocks) for c in costs] == [
        (operation, size) for operation in get_args(CacheOperation) for size in (600, 2000)
    ]
    for cost in costs:
        assert 0 < cost.nanoseconds <= cost.worst_nanoseconds < 1e7
        assert cost.n == 3


@contextmanager
def counted_lines() -> Iterator[Counter[str]]:
    """Count the executed lines of each function: work, whatever the machine is busy with."""
    lines: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: object) -> object:
        if "cache" not in frame.f_code.co_filename:
            return None
        lines[frame.f_code.co_name] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def lines_of_a_life(num_blocks: int) -> Counter[str]:
    """Admit, grow, slide, publish and release requests in a pool that is full of cached blocks."""
    sizes = {"num_kv_heads": 1, "head_dim": 2, "element_bytes": 2}
    specs = [FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, window=10)]
    groups = [LayerGroup(i, spec, (i,)) for i, spec in enumerate(specs)]
    cache = KVCache(groups, num_blocks, BLOCK_SIZE, chunk=8)

    def run(request_id: str, first_token: int) -> int:
        hashes = PrefixHashes(BLOCK_SIZE)
        hashes.extend(lambda a, b: range(first_token + a, first_token + b), 40)
        found = cache.admit(request_id, 40, chunk=8, hashes=hashes)
        assert found is not None
        for position in range(found.num_tokens, 40, 8):
            cache.slide(request_id, position)
            assert cache.grow(request_id, min(position + 8, 40)) is not None
            cache.publish(request_id, hashes, min(position + 8, 40))
        cache.release(request_id)
        return found.num_tokens

    number = 0
    while cache.num_evictions == 0:
        run("filling", 1000 * number)
        number += 1
    with counted_lines() as lines:
        for i in range(5):
            assert run("new", 1000 * (number + i)) == 0
            assert run("again", 1000 * (number + i)) == 36
    assert cache.num_evictions > 20
    return lines


def test_no_operation_does_more_in_a_larger_pool() -> None:
    small, large = lines_of_a_life(100), lines_of_a_life(10_000)
    assert small["allocate"] > 100
    for name in small | large:
        assert large[name] <= 1.1 * small[name] + 20, f"{name} depends on the size of the pool"
