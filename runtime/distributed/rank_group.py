"""The processes of a tensor-parallel engine, as one of them sees the group."""

from __future__ import annotations

import json
import logging
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from ...cache.memory.handler import MemoryBudgetError
from ..errors import (
    CheckpointError,
    ConfigError,
    KernelBuildError,
    KernelSelfTestError,
    RankError,
)
from . import futex
from .command_ring import RingReader, RingWriter
from .rank_processes import RankProcess
from .rank_watch import KEPT_STEPS, RankWatch
from .segment import SharedSegment, open_shared, shared_memory

__all__ = ["START_PATIENCE", "RankGroup"]

logger = logging.getLogger("stepgraph.runtime")

START_PATIENCE = 60.0
"""Seconds that a rank may not respond while the engine starts: libraries hold the GIL for long."""

_SAME_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        *(CheckpointError, ConfigError, KernelBuildError, KernelSelfTestError),
        *(MemoryBudgetError,),
    )
}
"""Errors of a rank that rank 0 raises as they are, while the engine starts."""


class RankGroup:
    """Rank `rank` of `ranks`: exchanges at start, commands from rank 0, and the end of the group.

    Raises of all waiting methods:
        RankError: a rank ended, did not respond in time, failed or disagrees.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        ranks: int,
        children: Sequence[RankProcess] = (),
    ) -> None:
        """Join a group whose segment is mapped at `memory`, and begin to watch it."""
        self.rank = rank
        self.ranks = ranks
        self.segment = segment = SharedSegment(memory, ranks)
        self._exchanges = 0
        self._steps = self._checksum = 0
        self.timeout = START_PATIENCE
        self._serves = False
        self.watch = RankWatch(segment, rank, START_PATIENCE, children)
        self._children = children
        self.writer = RingWriter(segment, self.check)
        self.reader = RingReader(segment, rank, self.check)
        segment.join(rank)
        self.watch.start()
        self._end = weakref.finalize(self, _abandon, self.watch, rank)

    def check(self) -> None:
        """Raise the reason why the group has ended, if it has."""
        if not self.segment.aborted:
            return
        record = self.segment.abort_record(decided=self.rank == 0)
        if record is None:
            self.watch.explain()
            record = self.segment.abort_record()
        if record is None:
            raise RankError("a rank gave up waiting for the others in a collective operation")
        kind: type[Exception] = RankError
        if not self._serves:
            kind = _SAME_ERRORS.get(record.get("kind", ""), RankError)
        raise kind(f"rank {record['rank']}: {record['reason']}")

    def exchange(self, value: Any) -> list[Any]:
        """Send a JSON value to all ranks, and return the values of all, in the order of ranks.

        All ranks call it in the same order.
        """
        self._exchanges += 1
        number = self._exchanges
        self.segment.send(self.rank, number, json.dumps(value).encode())
        pause = 50e-6
        while any(self.segment.arrived(rank) < number for rank in range(self.ranks)):
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        return [json.loads(self.segment.received(rank, number)) for rank in range(self.ranks)]

    def agree_on(self, items: dict[str, Any]) -> None:
        """Check that all ranks have the same values; raise `RankError` with both if not."""
        values = self.exchange(items)
        for rank, others in enumerate(values):
            for what, expected in values[0].items():
                if (other := others.get(what)) != expected:
                    raise RankError(
                        f"rank {rank} has another {what} than rank 0: {_shown(other)} and"
                        f" {_shown(expected)}"
                    )

    def shared_memory(self, nbytes: int) -> mmap.mmap:
        """Return memory that all ranks share, zeroed at first. All ranks call it.

        It lives until the last rank releases it.
        """
        if self.rank == 0:
            memory, descriptor = shared_memory(nbytes)
            self.exchange(descriptor)
            self.exchange(None)  # all have opened it
            os.close(descriptor)
            return memory
        memory = open_shared(self.segment.process(0), self.exchange(None)[0], nbytes)
        self.exchange(None)
        return memory

    def serve(self, timeout: float) -> None:
        """Let no rank stand still for longer than `timeout` seconds from now on."""
        self.timeout, self._serves = timeout, True
        self.watch.serve(timeout)

    def check_commands_taken(self) -> None:
        """Rank 0: raise `RankError` if a rank has not read all commands. End the group then."""
        segment = self.segment
        for rank in range(1, self.ranks):
            if segment.consumed(rank) < segment.published:
                self.watch.abort(rank, f"it has not taken a command for {self.timeout:g} s")
        self.check()

    def check_in(self, tokens: bytes) -> None:
        """Add the tokens of a step to the checksum that rank 0 compares."""
        self._steps += 1
        self._checksum = crc32(tokens, self._checksum)
        self.watch.checksums[self._steps % KEPT_STEPS] = self._checksum
        self.segment.set_progress(self.rank, (self._steps & 0xFFFFFFFF) << 32 | self._checksum)

    def fail(self, error: BaseException) -> None:
        """End the group because of an error on this rank, unless the error is that it has ended."""
        if self.watch.collectives_failed or (self.segment.aborted and isinstance(error, RankError)):
            self.watch.explain()
            if self.segment.aborted:
                return
        kind = type(error).__name__
        known = kind in _SAME_ERRORS or isinstance(error, RankError)
        reason = str(error) if known else f"{kind}: {error}"
        self.segment.abort(self.rank, {"rank": self.rank, "reason": reason, "kind": kind})
        futex.wake_all(self.segment.messages_address)

    def end(self, error: BaseException) -> BaseException:
        """End the group because an operation of this rank failed; return the failure to report.

        That is a `RankError` if the error follows from the failure of another rank.
        """
        if not self.segment.aborted:
            self.fail(error)
            if not self.watch.collectives_failed:
                return error
        try:
            self.check()
        except Exception as reason:
            if str(reason) != str(error):
                reason.__cause__ = error
            return reason
        raise AssertionError("an aborted group has a reason")

    def close(self) -> None:
        """End the processes that this one started. Idempotent.

        Commands must have told them to end: those that have not within the timeout are killed.
        """
        if not self._end.alive:
            return
        self._end.detach()
        self.watch.stop()
        until = time.monotonic() + (0.0 if self.segment.aborted else self.timeout)
        for child in self._children:
            if not child.wait(max(0.0, until - time.monotonic())):
                logger.warning("rank %d did not end and is killed", child.rank)
        self.watch.end_children()


def _abandon(watch: RankWatch, rank: int) -> None:
    """End the group of an engine that was not closed."""
    if not watch.owned:
        return
    watch.abort(rank, "its engine was not closed")
    watch.stop()
    watch.end_children()


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"
