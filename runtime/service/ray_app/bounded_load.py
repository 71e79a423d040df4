"""Chooses the replica for a prompt: most cached blocks, within a bound on its load.

The bound is that of Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads
(SODA 2018): with m requests on n replicas none gets more than ceil(c · m / n), for c of at least 1.
A popular prefix so spreads to as many replicas as its load needs. Standard library only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import TypeVar

__all__ = ["by_preference"]

T = TypeVar("T")


def by_preference(
    loads: Mapping[T, int],
    num_cached: Callable[[T], int],
    *,
    load_bound: float,
    spare_requests: int,
) -> list[T]:
    """Return the replicas, the one that should get the next request first.

    Those within the bound come first, by cached blocks; of equal ones the one with fewer requests,
    then a random one. Overloaded ones follow by their load.

    Args:
        loads: requests of each replica that have not ended.
        num_cached: returns how many blocks of the prompt a replica caches.
        load_bound: c above.
        spare_requests: a replica with fewer requests is never overloaded.
    """
    bound = math.ceil(load_bound * (sum(loads.values()) + 1) / max(len(loads), 1))

    def rank(replica: T) -> tuple[bool, int, int, float]:
        load = loads[replica]
        overloaded = load + 1 > bound and load >= spare_requests
        cached = 0 if overloaded else num_cached(replica)
        return overloaded, -cached, load, random.random()

    return sorted(loads, key=rank)
