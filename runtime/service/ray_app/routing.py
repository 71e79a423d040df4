"""Routing by prefix: which replicas cache how much of a prompt, and which one gets it.

Blocks are named by fingerprints, the first 4 bytes of their 256-bit hashes. Two blocks with the
same fingerprint cost a router a worse choice; the engines compare whole hashes.

The bound on the load of a replica follows Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing
with Bounded Loads (SODA 2018): with m requests on n replicas none gets more than ceil(c · m / n),
for c of at least 1. A popular prefix so spreads to as many replicas as its load needs. Standard
library only.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

MAX_SENT = 1 << 16
"""Fingerprints of routed prompts that are kept for a replica that reports nothing."""


def fingerprints(hashes: Iterable[bytes]) -> bytes:
    """Return the fingerprints of block hashes, 4 bytes each."""
    return b"".join(key[:4] for key in hashes)


def read_fingerprints(data: bytes) -> Sequence[int]:
    """Return fingerprints as numbers, in their order."""
    return array("I", data)


@dataclass(slots=True)
class _Replica:
    report: bytes = b""
    known: list[set[int]] = field(default_factory=lambda: [set(), set(), set()])
    """Blocks in its last report; of prompts sent before that report; of prompts sent since."""

    def end_generation(self) -> None:
        self.known[1:] = self.known[2], set()


class CachedPrefixes:
    """The cached blocks of each replica: those in its last report and those sent to it since.

    A prompt that was sent counts as cached until the second report after it, since it may have come
    too late for the first one. So eviction is noticed within two reports.
    """

    def __init__(self) -> None:
        self._replicas: dict[Hashable, _Replica] = {}

    def keep(self, replicas: Iterable[Hashable]) -> None:
        """Forget all replicas but these, and begin to track new ones."""
        self._replicas = {id: self._replicas.get(id) or _Replica() for id in replicas}

    def report(self, replica: Hashable, blocks: bytes) -> None:
        """Take a replica's list of cached blocks; the same bytes again are the same report."""
        found = self._replicas.setdefault(replica, _Replica())
        if found.report != blocks:
            found.report, found.known[0] = blocks, set(read_fingerprints(blocks))
            found.end_generation()

    def sent(self, replica: Hashable, prompt: Sequence[int]) -> None:
        """Note that a replica computes a prompt."""
        found = self._replicas.setdefault(replica, _Replica())
        found.known[2].update(prompt)
        if len(found.known[2]) > MAX_SENT:
            found.end_generation()

    def num_cached(self, replica: Hashable, prompt: Sequence[int]) -> int:
        """Return how many of the first blocks of a prompt a replica caches. O(log blocks).

        A cached block has its predecessors in the cache: the last blocks of a sequence are evicted
        first.
        """
        known = self._replicas.get(replica, _Replica()).known
        return bisect_left(prompt, True, key=lambda block: not any(block in s for s in known))


def by_preference(
    loads: Mapping[T, int],
    num_cached: Callable[[T], int],
    *,
    load_bound: float,
    spare_requests: int,
) -> list[T]:
    """Return the replicas, the one that should get the next request first.

    Those within the bound come first, by cached blocks; of equal ones the one with fewer requests,
    then a random one. Overloaded ones follow by their load: `load_bound` is c above, and a replica
    with fewer than `spare_requests` is never overloaded.
    """
    bound = math.ceil(load_bound * (sum(loads.values()) + 1) / max(len(loads), 1))

    def rank(replica: T) -> tuple[bool, int, int, float]:
        load = loads[replica]
        overloaded = load + 1 > bound and load >= spare_requests
        return overloaded, 0 if overloaded else -num_cached(replica), load, random.random()

    return sorted(loads, key=rank)
