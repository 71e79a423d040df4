"""The blocks of the host cache, and the preempted requests whose keys and values they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import BlockPool

__all__ = ["HostBlocks", "SwappedRequest"]


@dataclass(frozen=True, slots=True)
class SwappedRequest:
    """The keys and values of a preempted request in the host cache."""

    num_tokens: int
    """Tokens whose keys and values are kept."""
    blocks: list[tuple[int, int, int]]
    """(layer group, column of its block table, host block)."""


class HostBlocks:
    """The blocks `0 .. num_blocks - 1` of the host arena. The host has no null block."""

    def __init__(self, num_blocks: int) -> None:
        """Manage `num_blocks` blocks; 0 for no host cache."""
        # Host block i is block i + 1 of the pool, which never allocates its block 0.
        self._pool = BlockPool(num_blocks + 1) if num_blocks else None
        self._requests: dict[str, SwappedRequest] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return 0 if self._pool is None else self._pool.num_free

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return 0 if self._pool is None else self._pool.num_blocks - 1

    def find(self, request_id: str) -> SwappedRequest | None:
        """Return what the host cache holds of a request, or None."""
        return self._requests.get(request_id)

    def put(
        self, request_id: str, num_tokens: int, columns: Sequence[tuple[int, int]]
    ) -> list[int] | None:
        """Allocate a block for each (group, column) of a request; None if too few are free."""
        assert request_id not in self._requests, f"request {request_id} is swapped already"
        if len(columns) > self.num_free:
            return None
        taken = [] if self._pool is None else [b - 1 for b in self._pool.allocate(len(columns))]
        self._requests[request_id] = SwappedRequest(
            num_tokens,
            [(group, column, host) for (group, column), host in zip(columns, taken, strict=True)],
        )
        return taken

    def drop(self, request_id: str) -> None:
        """Free the host blocks of a request, if it has any."""
        swapped = self._requests.pop(request_id, None)
        if swapped is not None and self._pool is not None:
            self._pool.free(host + 1 for _, _, host in swapped.blocks)

    def check_integrity(self) -> None:
        """Assert that every block is free or belongs to one request."""
        if self._pool is None:
            return
        self._pool.check_integrity()
        held = [host + 1 for s in self._requests.values() for _, _, host in s.blocks]
        assert len(set(held)) == len(held), "a host block belongs to two swapped requests"
        assert all(self._pool.ref_count(block) == 1 for block in held), "a host block is shared"
        assert len(held) == self._pool.num_held, (
            f"{len(held)} host blocks belong to swapped requests, {self._pool.num_held} are held"
        )
