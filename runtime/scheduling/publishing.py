"""Publishes full blocks of running requests in the prefix cache, and withdraws invalid ones.

A block is published once launched steps have computed all of its tokens, before their logits are
known. A block is verified once finite logits were computed from it. When a request has non-finite
logits, the blocks that it computed since its last finite logits are withdrawn. So are the cached
blocks that it reused, unless a request has verified them.
"""

from __future__ import annotations

import sys

from ...cache.kv_cache import KVCache
from ..request import Request

__all__ = ["Publishing"]


class Publishing:
    """The next block that each running request publishes, and its last finite logits."""

    def __init__(self, cache: KVCache) -> None:
        self.num_prompts = 0
        """Number of times that blocks of a prompt were published."""
        self._cache = cache
        self._at: dict[Request, int] = {}  # computed tokens at which its next block is full
        self._known: dict[Request, int] = {}  # known tokens of running requests at admission

    def admit(self, request: Request) -> None:
        """Start tracking a request that got a row."""
        self._known[request] = request.num_tokens
        if request.prefix_hashes is not None:
            self._at[request] = self._cache.block_size

    def next_at(self, request: Request) -> int:
        """Return the number of computed tokens at which a request's next block is full."""
        return self._at.get(request, sys.maxsize)

    def publish(self, request: Request, *, ends: bool = False) -> None:
        """Publish the full blocks that launched steps have computed for a running request.

        With `ends`, the logits after its last token will not be read, so that token is excluded.
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
        """Withdraw the unverified blocks of a request with non-finite logits, and stop publishing.

        The request may have been preempted after the step with these logits was launched.
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
        """Stop tracking a request that loses its row."""
        self._at.pop(request, None)
        del self._known[request]

    def forget_contents(self) -> None:
        """Stop publishing blocks of the requests that run now."""
        self._at.clear()

    def check_integrity(self, rows: dict[Request, int]) -> None:
        """Assert that exactly the requests with a row are tracked."""
        assert self._at.keys() <= self._known.keys() == rows.keys()

    def _num_verified(self, request: Request) -> int:
        """Return the number of tokens before the request's last finite logits.

        0 if it has no row, or if no token was sampled since it got the row.
        """
        sampled = request.num_tokens > self._known.get(request, sys.maxsize)
        return request.num_tokens - 1 if sampled else 0
