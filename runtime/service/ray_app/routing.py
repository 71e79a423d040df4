"""Routing by prefix: which replicas cache how much of a prompt, and which one gets it.

What a replica caches is estimated from the prompts that were sent to it. A prompt is hashed in
chunks of its JSON, each with those before it, without a tokenizer. A chunk's fingerprint is the
first 4 bytes of its hash: two with the same one cost the router a worse choice.

The bound on the load of a replica follows Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing
with Bounded Loads (SODA 2018): with m requests on n replicas none gets more than ceil(c · m / n),
for c of at least 1. A popular prefix so spreads to as many replicas as its load needs.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_SENT = 1 << 15
"""Fingerprints that are kept for a replica before older ones are dropped, as in an LRU cache: the
prompts of the last `MAX_SENT` to 2 * `MAX_SENT` are known."""


def read_fingerprints(data: bytes) -> Sequence[int]:
    """Return fingerprints as numbers, in their order."""
    return array("I", data)


class CachedPrefixes:
    """The chunks that each replica caches, as far as they were sent to it."""

    def __init__(self) -> None:
        self._sent: dict[Hashable, tuple[set[int], set[int]]] = {}  # before, and lately

    def keep(self, replicas: Iterable[Hashable]) -> None:
        """Forget all replicas but these."""
        self._sent = {id: self._sent[id] for id in replicas if id in self._sent}

    def sent(self, replica: Hashable, prompt: Sequence[int]) -> None:
        """Note that a replica computes a prompt."""
        before, lately = self._sent.get(replica, (set(), set()))
        if len(lately) > MAX_SENT:
            before, lately = lately, set()
        lately.update(prompt)
        self._sent[replica] = before, lately

    def num_cached(self, replica: Hashable, prompt: Sequence[int]) -> int:
        """Return how many of the first chunks of a prompt a replica caches. O(log chunks).

        A cached chunk has its predecessors in the cache: the last ones of a prompt are evicted
        first.
        """
        before, lately = self._sent.get(replica, (set(), set()))
        return bisect_left(
            prompt, True, key=lambda chunk: chunk not in lately and chunk not in before
        )


def by_preference(
    loads: Mapping[T, int],
    num_cached: Callable[[T], int],
    *,
    load_bound: float,
    spare_requests: int,
) -> list[T]:
    """Return the replicas, the one that should get the next request first.

    Those within the bound come first, by cached chunks; of equal ones the one with fewer requests,
    then a random one. Overloaded ones follow by their load: `load_bound` is c above, and a replica
    with fewer than `spare_requests` is never overloaded.
    """
    bound = math.ceil(load_bound * (sum(loads.values()) + 1) / max(len(loads), 1))

    def rank(replica: T) -> tuple[bool, int, int, float]:
        load = loads[replica]
        overloaded = load + 1 > bound and load >= spare_requests
        return overloaded, 0 if overloaded else -num_cached(replica), load, random.random()

    return sorted(loads, key=rank)
