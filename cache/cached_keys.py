"""`CachedKeys`: the keys of a block pool at one moment, to be read outside of the step thread."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

__all__ = ["CachedKeys"]


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """Copies of what a `BlockPool` knows about its published blocks."""

    keys: list[bytes | None]
    """Key of each block; None for blocks that are not published."""
    prev: array[int]
    """The free list backwards: `prev[0]` is its back, the block that is evicted last."""
    ref_counts: array[int]
    """Holders of each block."""

    def latest(self, most: int, suffix: bytes = b"") -> list[bytes]:
        """Return up to `most` keys that end with `suffix`: held blocks, then the last evicted ones.

        The keys are without the suffix. O(blocks).
        """
        found = (key for key in self._in_order() if key.endswith(suffix))
        return [key[: len(key) - len(suffix)] for key in islice(found, most)]

    def _in_order(self) -> Iterator[bytes]:
        for key, holders in zip(self.keys, self.ref_counts, strict=True):
            if key is not None and holders:
                yield key
        block = self.prev[0]
        while block:
            key = self.keys[block]
            if key is None:  # those without a key are in front of those with one
                return
            yield key
            block = self.prev[block]
