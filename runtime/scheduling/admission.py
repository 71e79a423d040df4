"""Decides whether the first waiting request gets blocks, and what it shares. No torch."""

from __future__ import annotations

from ...cache.kv_cache import Admitted, KVCache
from ..request import Request
from .headroom import Headroom
from .publishing import Publishing
from .running import RunningRequests

__all__ = ["AdmissionControl"]


class AdmissionControl:
    """Allocates the blocks of waiting requests, unless running ones may need them.

    Running requests that are served before a waiting one must still be able to allocate the next
    block that they may need. Otherwise it would be preempted one step later. No block is reserved
    for requests that are served after it, because they are preempted first.
    """

    def __init__(
        self, cache: KVCache, running: RunningRequests, publishing: Publishing, headroom: Headroom
    ) -> None:
        self._cache = cache
        self._running = running
        self._publishing = publishing
        self._headroom = headroom
        # The request that was refused last, with the state at that time: siblings to fork from,
        # prompts published, headroom released, free blocks.
        self._refused: tuple[Request, int, int, int, int] | None = None

    def admit(self, head: Request, chunk: int) -> Admitted | None:
        """Allocate the blocks of the first waiting request; None if there are not enough.

        A refused request is not tried again until there are more cached tokens or free blocks.
        """
        siblings = self._siblings(head)
        free = self._cache.num_free_blocks
        state = (head, len(siblings), self._publishing.num_prompts, self._headroom.num_releases)
        if self._refused is not None and self._refused[:4] == state and free <= self._refused[4]:
            return None
        found = self._cache.admit(
            head.id,
            head.num_tokens,
            chunk=chunk,
            headroom=self._headroom.before(head.order),
            hashes=head.hashes_of(head.num_tokens),
            siblings=siblings,
            reusable_tokens=head.reusable_tokens,
        )
        self._refused = (*state, free) if found is None else None
        return found

    def waits_for_sibling(self, request: Request) -> bool:
        """Whether siblings are prefilling the request's prompt and none has finished."""
        shared = len(request.prompt_ids) - 1
        running = self._may_fork(request)
        return bool(running) and all(s.num_computed < shared for s in running)

    def _siblings(self, request: Request) -> list[tuple[str, int]]:
        """Return the sibling that has computed the request's prompt, and the tokens to share.

        Shares all tokens but the last, whose logits the request needs to sample its own token.
        """
        shared = len(request.prompt_ids) - 1
        return [(s.id, shared) for s in self._may_fork(request) if s.num_computed >= shared]

    def _may_fork(self, request: Request) -> list[Request]:
        """Return the running requests that a waiting request can fork from, now or later."""
        if (
            not request.may_fork
            or len(request.prompt_ids) == 1
            or request.reusable_tokens is not None
            or self._cache.is_swapped(request.id)
        ):
            return []
        return [
            sibling
            for sibling in request.siblings
            if sibling in self._running.rows and sibling.rope_length == request.rope_length
        ]
