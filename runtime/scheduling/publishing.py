"""What running requests share by content: blocks are published early and withdrawn if need be.

A block is published when launched steps have computed all of its tokens, before anything is known
of their logits. Blocks that finite logits were read from are verified. When the logits of a request
are not finite, whatever it computed since its last finite ones is withdrawn, and so is what it
found in the cache, unless some request has verified it: what such a request wrote, or began with,
is not found again.
"""

from __future__ import annotations

import sys

from ...cache.kv_cache import KVCache
from ..request import Request

__all__ = ["Publishing"]


class Publishing:
    """When each running request publishes its next block, and what is known of its logits."""

    def __init__(self, cache: KVCache) -> None:
        self.num_prompts = 0
        """How often blocks of a prompt became findable."""
        self._cache = cache
        self._at: dict[Request, int] = {}  # computed tokens that fill its next block
        self._known: dict[Request, int] = {}  # known tokens of running requests at admission

    def admit(self, request: Request) -> None:
        """Begin for a request that got a row."""
        self._known[request] = request.num_tokens
        if request.prefix_hashes is not None:
            self._at[request] = self._cache.block_size

    def next_at(self, request: Request) -> int:
        """Return how many computed tokens fill the next block that a request shares."""
        return self._at.get(request, sys.maxsize)

    def publish(self, request: Request, *, ends: bool = False) -> None:
        """Let others share what launched steps computed of a running request's known tokens.

        If it `ends`, the logits after its last token will not be read: that token is left out.
        """
        if request not in self._at:
            return
        known = min(request.least_computed, request.num_tokens)
        verified = self._num_verified(request)
        if ends and verified:
            known = min(known, verified)
        hashes = request.hashes_of(known)
        if hashes is None:
            return
        size = self._cache.block_size
        self._cache.publish(request.id, hashes, known)
        if verified:
            self._cache.verify(request.id, hashes, verified)
        if known < len(request.prompt_ids) + size:
            self.num_prompts += 1
        self._at[request] = (known // size + 1) * size

    def withdraw(self, request: Request) -> None:
        """Publish nothing more of a request whose newest logits are not finite, and see above.

        It may have lost its row since the step that computed them was launched.
        """
        verified = self._num_verified(request)
        hashes = request.hashes_of(verified)
        if hashes is None:
            return
        self._at.pop(request, None)
        if verified:
            self._cache.verify(request.id, hashes, verified)
        self._cache.withdraw(hashes, verified)

    def leave(self, request: Request) -> None:
        """End for a request that loses its row."""
        self._at.pop(request, None)
        del self._known[request]

    def forget_contents(self) -> None:
        """Publish nothing of the requests that run now."""
        self._at.clear()

    def check_integrity(self, rows: dict[Request, int]) -> None:
        """Assert that it knows of the requests that hold a row, and of no other."""
        assert self._at.keys() <= self._known.keys() == rows.keys()

    def _num_verified(self, request: Request) -> int:
        """Return how many tokens its newest finite logits follow.

        0 if it has no row, or if no token was sampled for it since it got the row.
        """
        sampled = request.num_tokens > self._known.get(request, sys.maxsize)
        return request.num_tokens - 1 if sampled else 0
