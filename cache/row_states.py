"""Recurrent state of requests: snapshots at block boundaries, and the inputs since. No tensors.

Column c of a request is about block c of its tokens, as in block tables: its snapshot is the state
before that block (column 0 needs none: the state is zero), its inputs are of the tokens of the
block. A request needs those around its next token only, so it holds two or three of each, whatever
its length:

    blocks of 4, next token 13        column      0    1    2    3
                                      snapshots   .    .    .    7      before position 12
                                      inputs      .    .    .    5      of position 12

A prompt is computed in chunks that cross many boundaries. Of these only the last snapshot is kept,
and one that a cached prefix would have needed (the junction). Snapshots that a request leaves
behind at the end of its prompt, at its end and at the junction stay cached under the hash of their
prefix, until others take their place, the least recently used first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .blocks import BlockPool, HostBlocks, PrefixHashes

Pair = tuple[int, int]
"""Source and destination of a copy."""


class Copies(NamedTuple):
    """What is copied for a request: (source, destination) of each kind."""

    blocks: list[Pair]
    snapshots: list[Pair]
    inputs: list[Pair]

    @staticmethod
    def none() -> Copies:
        """Return no copies, to which some may be added."""
        return Copies([], [], [])

    @property
    def total(self) -> int:
        """Copies of all kinds."""
        return len(self.blocks) + len(self.snapshots) + len(self.inputs)


@dataclass(frozen=True)
class RowPools:
    """Entries of the memory for recurrent state.

    Attributes:
        snapshots: entries for snapshots, entry 0 included.
        inputs: entries for the inputs of a block, entry 0 included.
        ahead: the most tokens of a row that a decode or verify step computes.
        host: entries of each kind on the host, for swapped requests.
    """

    snapshots: int
    inputs: int
    ahead: int
    host: int = 0

    @staticmethod
    def of(
        rows: int, prefill_rows: int, block_size: int, *, ahead: int, cached: int, host: int = 0
    ) -> RowPools:
        """Return what a number of rows needs, and room for `cached` more snapshots.

        A row that decodes holds the columns of `3 * ahead` tokens: from `ahead` before its next
        token on, as the last step may have begun there, to the end of the planned step, before
        which a step in flight may advance by `ahead`. A prompt holds the columns at the ends of two
        chunks, and the junction.
        """
        decode, end = most_columns(3 * ahead, block_size), most_columns(ahead, block_size)
        needed = 1 + rows * decode + prefill_rows * max(0, 2 * end + 1 - decode)
        return RowPools(needed + cached, needed, ahead, host)


def most_columns(tokens: int, block_size: int) -> int:
    """Return the most blocks that consecutive tokens can be part of."""
    return (tokens + block_size - 2) // block_size + 1


@dataclass(slots=True)
class _Held:
    """What a request holds, by column."""

    end: int
    """The last column of the tokens that it was admitted with: of its prompt."""
    last: int
    """Its last column."""
    junction: int = 0
    """Column whose snapshot a cached prefix lacked; 0: none."""
    snapshots: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)


class RowStateCache:
    """The snapshots and inputs that each request holds, and cached snapshots.

    Changes of a request's tables are (table, column, entry), table 0 being snapshots and 1 inputs.
    """

    def __init__(self, pools: RowPools, block_size: int) -> None:
        self.snapshots = BlockPool(pools.snapshots)
        self.inputs = BlockPool(pools.inputs)
        self.host = HostBlocks(pools.host), HostBlocks(pools.host)
        """Of swapped requests: snapshots and inputs."""
        self._size, self._ahead = block_size, pools.ahead
        self._held: dict[str, _Held] = {}

    def find(self, hashes: PrefixHashes, columns: int) -> int:
        """Return the most blocks, at most `columns`, whose end has a cached snapshot; or 0."""
        for column in range(columns, 0, -1):
            if self.snapshots.find(hashes[column - 1]) is not None:
                return column
        return 0

    def can_admit(self) -> bool:
        """Whether there is room for `admit`, and for `advance` to the end of the first chunk."""
        # A snapshot at the end of the reused tokens, one more of a swapped request or of the
        # junction, and the columns at the end of the chunk.
        return self._has_room(2 + most_columns(self._ahead, self._size))

    def admit(
        self,
        request_id: str,
        num_tokens: int,
        known: int,
        *,
        hashes: PrefixHashes | None = None,
        sibling: str | None = None,
        junction: int = 0,
    ) -> tuple[int, Copies]:
        """Hold what a request needs that reuses the first `num_tokens` of its `known` tokens.

        They are of a cached snapshot, found by `hashes`; of a `sibling`; or, with neither, none.

        Returns:
            The column whose snapshot is stored, and copies to make before the step.
        """
        assert request_id not in self._held, f"request {request_id} holds recurrent state already"
        column = num_tokens // self._size
        held = self._held[request_id] = _Held(self._end(known), column, junction)
        copies = Copies.none()
        (held.inputs[column],) = self.inputs.allocate(1)
        if sibling is not None:
            other = self._held[sibling]
            snapshot = other.snapshots.get(column)
            if num_tokens % self._size:
                copies.inputs.append((other.inputs[column], held.inputs[column]))
        else:
            assert num_tokens % self._size == 0, "snapshots are at block boundaries"
            snapshot = self.snapshots.find(hashes[column - 1]) if column and hashes else None
        if column:
            assert snapshot is not None, f"request {request_id} reuses tokens without a snapshot"
            self.snapshots.share((snapshot,))
            held.snapshots[column] = snapshot
        return column, copies

    def can_fork(self, sibling: str, num_tokens: int) -> bool:
        """Whether a sibling still holds the state after its first `num_tokens` tokens."""
        held, column = self._held[sibling], num_tokens // self._size
        return (column == 0 or column in held.snapshots) and (
            num_tokens % self._size == 0 or column in held.inputs
        )

    def can_advance(self, request_id: str, stop: int) -> bool:
        """Whether there is room for `advance`."""
        return self._has_room(len(self._new_columns(self._held[request_id], stop)))

    def advance(self, request_id: str, stop: int) -> list[tuple[int, int, int]]:
        """Hold the columns in which a step whose last token is at `stop` - 1 leaves state."""
        held = self._held[request_id]
        changes = []
        for column in self._new_columns(held, stop):
            if column:
                (held.snapshots[column],) = self.snapshots.allocate(1)
                changes.append((0, column, held.snapshots[column]))
            if column != held.junction or column >= self._first(stop):
                (held.inputs[column],) = self.inputs.allocate(1)
                changes.append((1, column, held.inputs[column]))
            held.last = column
        return changes

    def room(self, request_id: str) -> int:
        """Tokens that a request has columns for."""
        return (self._held[request_id].last + 1) * self._size

    def slide(self, request_id: str, position: int) -> list[tuple[int, int, int]]:
        """Free the columns that a step whose first token is at `position` does not read."""
        held, first = self._held[request_id], self._first(position)
        changes = []
        for table, (entries, pool) in enumerate(self._tables(held)):
            for column in sorted(column for column in entries if column < first):
                pool.free((entries.pop(column),))
                changes.append((table, column, 0))
        return changes

    def table_of(self, request_id: str) -> list[tuple[int, int, int]]:
        """Return all entries of a request."""
        tables = enumerate(self._tables(self._held[request_id]))
        return [(table, *entry) for table, (entries, _) in tables for entry in entries.items()]

    def release(self, request_id: str) -> None:
        """Free everything that a request holds, if it holds anything."""
        held = self._held.pop(request_id, None)
        if held is not None:
            for entries, pool in self._tables(held):
                pool.free(entries[column] for column in sorted(entries))

    # Cached snapshots.

    def publish(
        self, request_id: str, hashes: PrefixHashes, num_tokens: int, *, leaves: bool
    ) -> None:
        """Cache snapshots of a request whose first `num_tokens` tokens launched steps compute.

        These are the last one of its prompt, the junction, and if it `leaves`, the last one.
        A snapshot is stored by the step that computes the token after it.
        """
        held = self._held[request_id]
        stored = [column for column in held.snapshots if column * self._size < num_tokens]
        last = max(stored, default=0) if leaves else 0
        for column in stored:
            if column in (held.end, held.junction, last):
                self.snapshots.publish(held.snapshots[column], hashes[column - 1])

    def verify(self, request_id: str, hashes: PrefixHashes, num_tokens: int) -> None:
        """Protect snapshots from `withdraw`: the logits after `num_tokens` tokens are finite."""
        for column in self._held[request_id].snapshots:
            if column * self._size < num_tokens:
                self.snapshots.verify(hashes[column - 1])

    def withdraw(self, hashes: PrefixHashes, num_tokens: int) -> None:
        """Stop sharing unverified snapshots after more than `num_tokens` tokens."""
        for block in range(num_tokens // self._size, len(hashes)):
            self.snapshots.withdraw(hashes[block])

    # Preempted requests.

    def swap_out(self, request_id: str, num_tokens: int) -> Copies | None:
        """Reserve places on the host for the state after `num_tokens` tokens, which are computed.

        Returns the copies to make; None if the host has too little room, and nothing has changed.
        The caller releases the request.
        """
        held, column = self._held[request_id], num_tokens // self._size
        # Where the step that stores the snapshot of the last block may not have been launched, that
        # of the block before is kept with all of its inputs.
        base = column - 1 if column - 1 in held.inputs else column
        snapshots = [base] if base else []
        inputs = range(base, column + (num_tokens % self._size > 0))
        host_snapshots, host_inputs = self.host
        placed = [(0, own) for own in snapshots]
        to_snapshots = host_snapshots.put(request_id, num_tokens, placed)
        if to_snapshots is None:
            return None
        to_inputs = host_inputs.put(request_id, num_tokens, [(0, own) for own in inputs])
        if to_inputs is None:
            host_snapshots.drop(request_id)
            return None
        return Copies(
            [],
            list(zip((held.snapshots[own] for own in snapshots), to_snapshots, strict=True)),
            list(zip((held.inputs[own] for own in inputs), to_inputs, strict=True)),
        )

    def swap_in(self, request_id: str, known: int) -> tuple[int, Copies]:
        """Hold what a swapped request needs; returns as `admit`, with copies from the host."""
        own_snapshots, own_inputs = (host.find(request_id) for host in self.host)
        assert own_snapshots is not None, f"request {request_id} has no state on the host"
        assert own_inputs is not None
        column = own_snapshots.num_tokens // self._size
        held = self._held[request_id] = _Held(self._end(known), column)
        copies = Copies.none()
        for at, pool, entries, pairs in (
            (own_snapshots, self.snapshots, held.snapshots, copies.snapshots),
            (own_inputs, self.inputs, held.inputs, copies.inputs),
        ):
            for _, own, host in at.blocks:
                (entries[own],) = pool.allocate(1)
                pairs.append((host, entries[own]))
        base = min((*held.snapshots, *held.inputs), default=column)
        for own in range(base, column + 1):
            if own not in held.inputs:
                (held.inputs[own],) = self.inputs.allocate(1)
            if own and own not in held.snapshots:
                (held.snapshots[own],) = self.snapshots.allocate(1)
        self.drop(request_id)
        return base, copies

    def drop(self, request_id: str) -> None:
        """Free what a request has on the host."""
        for host in self.host:
            host.drop(request_id)

    def check_integrity(self) -> None:
        """Assert that pools and requests agree."""
        for table, pool in enumerate((self.snapshots, self.inputs)):
            pool.check_integrity()
            counts: dict[int, int] = {}
            for held in self._held.values():
                entries = self._tables(held)[table][0]
                assert all(column <= held.last for column in entries)
                for entry in entries.values():
                    counts[entry] = counts.get(entry, 0) + 1
            assert len(counts) == pool.num_held, "an entry is taken, but no request holds it"
            for entry, count in counts.items():
                assert pool.ref_count(entry) == count, f"entry {entry} has {count} holders"
        for host in self.host:
            host.check_integrity()

    def _first(self, position: int) -> int:
        """First column that a step whose first token is at `position` may read."""
        return max(0, position - self._ahead) // self._size

    def _end(self, known: int) -> int:
        """Column of the last of a request's tokens."""
        return (known - 1) // self._size

    def _new_columns(self, held: _Held, stop: int) -> list[int]:
        """Columns to add: the junction, if a chunk passes it, and those at the end of the step."""
        columns = list(range(max(held.last + 1, self._first(stop)), self._end(stop) + 1))
        return [*[held.junction] * (held.last < held.junction < min(columns, default=0)), *columns]

    def _has_room(self, entries: int) -> bool:
        return min(self.snapshots.num_free, self.inputs.num_free) >= entries

    def _tables(self, held: _Held) -> tuple[tuple[dict[int, int], BlockPool], ...]:
        return (held.snapshots, self.snapshots), (held.inputs, self.inputs)
