"""A thread of each rank that watches the others: whether they live, move and agree.

Rank 0 watches all others, and they watch rank 0. A rank that ends, or whose heartbeat stands still,
ends the group: the watch sets the abort word, which all waiting loops look at. Only time in which
this process itself runs counts as standing still, so that stopping the whole group does no harm.

Rank 0 also compares the progress of the others with its own: the checksums of all tokens up to the
same step.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from . import futex
from .rank_processes import RankProcess
from .segment import SharedSegment

__all__ = ["KEPT_STEPS", "RankWatch"]

_TICK_SECONDS = 0.1
_JOIN_SECONDS = 120.0
"""A process may take so long to import and open the segment."""
_GRACE_SECONDS = 0.3
"""After the end of a group its other processes may take so long to end by themselves."""

KEPT_STEPS = 8192
"""Steps whose checksums rank 0 keeps for the comparison."""


class RankWatch:
    """Watches a group for one of its ranks."""

    def __init__(
        self, segment: SharedSegment, rank: int, patience: float, children: Sequence[RankProcess]
    ) -> None:
        """Watch from `start` to `stop`.

        Args:
            segment: of the group.
            rank: of this process.
            patience: seconds that a heartbeat may stand still.
            children: rank 0's own processes; ranks that torchrun started are watched by heartbeat.
        """
        self.patience = patience
        self.checksums = [0] * KEPT_STEPS
        """Rank 0: the checksum after step n at index n modulo `KEPT_STEPS`."""
        self.on_abort: Callable[[], None] | None = None
        """Called in this thread once the group has ended, unless the watch was stopped before."""
        self._segment = segment
        self._rank = rank
        self._children = children
        self._watched = tuple(range(1, segment.ranks)) if rank == 0 else (0,)
        self._handles: dict[int, int] = {}  # rank -> pidfd
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepgraph-ranks", daemon=True)
        self._owner = os.getpid()

    @property
    def owned(self) -> bool:
        """Whether this is the process that watches, and no forked child of it."""
        return self._owner == os.getpid()

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer. Idempotent; does nothing in a forked child."""
        if not self.owned:
            return
        self._stopped.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def end_children(self) -> None:
        """Kill the children that have not ended by themselves. Idempotent."""
        if not self.owned:
            return
        until = time.monotonic() + _GRACE_SECONDS
        for child in self._children:
            child.wait(max(0.0, until - time.monotonic()))
            child.end()

    def abort(self, rank: int, reason: str) -> None:
        """End the group because of a rank, and wake those that wait."""
        self._segment.abort(self._rank, {"rank": rank, "reason": reason})
        futex.wake_all(self._segment.messages_address)

    def _run(self) -> None:
        segment, started = self._segment, time.monotonic()
        seen = dict.fromkeys(self._watched, (0, started))
        before = started
        while not self._stopped.wait(_TICK_SECONDS):
            now = time.monotonic()
            segment.beat(self._rank)
            if now - before > 10 * _TICK_SECONDS:  # this process itself stood still
                seen = {rank: (beat, now) for rank, (beat, _) in seen.items()}
            before = now
            for child in self._children:
                child.drain()
            if not segment.aborted:
                for rank in self._watched:
                    seen[rank] = self._watch(rank, seen[rank], now)
            if not segment.aborted and self._rank == 0:
                self._compare()
            if segment.aborted:
                break
        if not self._stopped.is_set():
            futex.wake_all(segment.messages_address)
            self.end_children()
            if self.on_abort is not None:
                self.on_abort()

    def _watch(self, rank: int, seen: tuple[int, float], now: float) -> tuple[int, float]:
        """Check one rank; return its heartbeat and when that last changed."""
        segment = self._segment
        for child in self._children:
            if child.rank == rank and (failure := child.failure()) is not None:
                self.abort(rank, failure)
        if self._has_ended(rank):
            self.abort(rank, f"process {segment.process(rank)} has ended")
        beat, since = seen
        if segment.heartbeat(rank) != beat:
            return segment.heartbeat(rank), now
        patience = self.patience if segment.process(rank) else max(self.patience, _JOIN_SECONDS)
        if now - since > patience:
            what = f"process {segment.process(rank)}" if segment.process(rank) else "its process"
            self.abort(rank, f"{what} has not responded for {patience:g} s")
        return seen

    def _has_ended(self, rank: int) -> bool:
        process = self._segment.process(rank)
        if not process:
            return False
        if rank not in self._handles:
            try:
                self._handles[rank] = os.pidfd_open(process)
            except ProcessLookupError:
                return True
            except OSError:  # an old kernel or a sandbox: heartbeats remain
                return False
        readable, _, _ = select.select([self._handles[rank]], [], [], 0)
        return bool(readable)

    def _compare(self) -> None:
        """End the group if a rank has checked in other tokens than this one."""
        for rank in self._watched:
            step, checksum = divmod(self._segment.progress(rank), 1 << 32)
            own = self._segment.progress(0) >> 32
            if step and own - KEPT_STEPS // 2 < step <= own:
                expected = self.checksums[step % KEPT_STEPS]
                if checksum != expected:
                    self.abort(
                        rank,
                        f"its tokens differ from those of rank 0 at step {step}: checksum"
                        f" {checksum:08x}, and {expected:08x} on rank 0",
                    )
