"""Blocks that admission leaves free for requests that are running already. No torch."""

from __future__ import annotations

from ...cache.kv_cache import KVCache
from ..request import Request

__all__ = ["Headroom"]


class Headroom:
    """How many layer groups of each running request may still need another block.

    A request that holds all the blocks it can ever use counts for nothing.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._blocks: dict[Request, int] = {}  # without zeros
        self.num_releases = 0
        """How often the need of a request fell: until it changes, no sum of needs has fallen."""

    def update(self, request: Request) -> None:
        """Note what a running request may need, after its blocks changed.

        The last token that it may have is sampled and never written.
        """
        longest = len(request.prompt_ids) + request.max_tokens - 1
        self._set(
            request, self._cache.growing_groups(request.id, longest, decodes=request.decoding)
        )

    def forget(self, request: Request) -> None:
        """Note that a request has no row any more."""
        self._set(request, 0)

    def before(self, order: tuple[int, int]) -> int:
        """Return the blocks to keep for running requests that are served before `order`."""
        return sum(blocks for request, blocks in self._blocks.items() if request.order < order)

    def check_integrity(self, rows: dict[Request, int]) -> None:
        """Assert that it knows of no request without a row."""
        assert self._blocks.keys() <= rows.keys()

    def _set(self, request: Request, blocks: int) -> None:
        before = self._blocks.pop(request, 0)
        if blocks:
            self._blocks[request] = blocks
        self.num_releases += blocks < before
