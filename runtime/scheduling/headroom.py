"""Blocks that admission reserves for running requests. Does not import torch."""

from __future__ import annotations

from ...cache.kv_cache import KVCache
from ..request import Request

__all__ = ["Headroom"]


class Headroom:
    """Number of layer groups of each running request that may still need another block.

    A request that holds all blocks that it can use has none.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._blocks: dict[Request, int] = {}  # no zeros
        self.num_releases = 0
        """Number of times a request's need fell. While it is unchanged, no sum has fallen."""

    def update(self, request: Request) -> None:
        """Update the need of a running request after its blocks changed.

        Its last possible token needs no slot: it is sampled, but its keys are never written.
        """
        longest = len(request.prompt_ids) + request.max_tokens - 1
        self._set(
            request, self._cache.growing_groups(request.id, longest, decodes=request.decoding)
        )

    def forget(self, request: Request) -> None:
        """Remove a request that lost its row."""
        self._set(request, 0)

    def before(self, order: tuple[int, int]) -> int:
        """Return the blocks to reserve for running requests that are served before `order`."""
        return sum(blocks for request, blocks in self._blocks.items() if request.order < order)

    def check_integrity(self, rows: dict[Request, int]) -> None:
        """Assert that all tracked requests have a row."""
        assert self._blocks.keys() <= rows.keys()

    def _set(self, request: Request, blocks: int) -> None:
        before = self._blocks.pop(request, 0)
        if blocks:
            self._blocks[request] = blocks
        self.num_releases += blocks < before
