"""The processes of a tensor-parallel engine, as one of them sees the group, and their watch.

`RankWatch` is a thread of each rank that watches the others: whether they live, move and agree.
Rank 0 watches all others, and they watch rank 0. A rank that ends, or whose heartbeat stands still,
ends the group: the watch sets the abort word, which all waiting loops look at. Only time in which
this process itself runs counts as standing still, so that stopping the whole group does no harm.

Rank 0 also compares the progress of the others with its own: the checksums of all tokens up to the
same step.

Operators that give up set the abort word without a record. The watch then finds the reason before
it ends a process: a rank has ended, or one did not take part.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from ..kernels.ops.collectives import CollectiveFailure
from .command_ring import RingReader, RingWriter
from .rank_processes import RankProcess
from .segment import SharedSegment, open_shared, shared_memory, wake_all

__all__ = ["START_PATIENCE", "RankGroup", "RankWatch"]

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

_TICK_SECONDS = 0.1
_JOIN_SECONDS = 120.0
"""A process may take so long to import and open the segment."""
_GRACE_SECONDS = 0.3
"""After the end of a group its other processes may take so long to end by themselves."""

_EXPLAIN_SECONDS = 0.5
"""After an operator gave up, a process may take so long to end, or a rank to say what failed."""

KEPT_STEPS = 8192
"""Steps whose checksums rank 0 keeps for the comparison."""


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
        wake_all(self.segment.messages_address)

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
            children: the processes of the other ranks, which rank 0 started.
        """
        self.collectives: Any = None
        """This rank's; their `failure` names the rank that they timed out on. None at first."""
        self.checksums = [0] * KEPT_STEPS
        """Rank 0: the checksum after step n at index n modulo `KEPT_STEPS`."""
        self.on_abort: Callable[[], None] | None = None
        """Called in this thread once the group has ended, unless the watch was stopped before."""
        self._patience = self._start_patience = patience
        self._segment = segment
        self._rank = rank
        self._children = children
        self._watched = tuple(range(1, segment.ranks)) if rank == 0 else (0,)
        self._handles: dict[int, int] = {}  # rank -> pidfd
        self._seen: dict[int, _Seen] = {}
        self._lock = threading.Lock()
        """Of everything that reads the state of processes; `explain` is called in two threads."""
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

    def abort(self, rank: int, reason: str, *, decided: bool = True) -> None:
        """End the group because of a rank, and wake those that wait."""
        record = {"rank": rank, "reason": reason}
        self._segment.abort(self._rank, record, decided=decided)
        wake_all(self._segment.messages_address)

    def serve(self, patience: float) -> None:
        """Use another patience with each rank, from its next heartbeat on.

        The last one before may be old: a rank that starts can stand still for long.
        """
        with self._lock:
            self._patience = patience

    def explain(self) -> None:
        """Find the reason of an aborted group that has no record yet, and record it.

        Rank 0 decides; the others record whom they waited for, if they did.
        """
        with self._lock:
            segment = self._segment
            if self._rank:
                if segment.abort_record() is None and (own := self._own_failure()) is not None:
                    self.abort(*own, decided=False)
                return
            until = time.monotonic() + _EXPLAIN_SECONDS
            while segment.abort_record(decided=True) is None:
                late = time.monotonic() > until
                if (found := self._lost_rank(ended_by_itself=late)) is not None:
                    self.abort(*found)
                elif late:
                    self.abort(*self._waited_for())
                else:
                    time.sleep(_EXPLAIN_SECONDS / 20)

    def _lost_rank(self, *, ended_by_itself: bool) -> tuple[int, str] | None:
        """Return a rank whose process has ended, and how.

        Ranks end by themselves once the group is aborted, which explains nothing: such an end
        counts if `ended_by_itself` is set and no operator waited for anyone.
        """
        for child in self._children:
            if (failure := child.failure()) is not None:
                if not child.ended_by_itself:
                    return child.rank, failure
                if ended_by_itself and self._blamed() is None:
                    return child.rank, failure
        blamed = self._blamed()
        if blamed is not None and self._has_ended(blamed[0]):
            return blamed[0], f"process {self._segment.process(blamed[0])} has ended"
        return None

    def _blamed(self) -> tuple[int, str] | None:
        """Return the rank for which operators waited in vain, here or on another rank."""
        record = self._segment.abort_record()
        if record is not None:
            return record["rank"], record["reason"]
        return self._own_failure()

    @property
    def collectives_failed(self) -> bool:
        """Whether operators of this rank have failed."""
        return self._failure is not None

    def _own_failure(self) -> tuple[int, str] | None:
        """Return the rank for which operators of this rank waited in vain, and what that did."""
        failure = self._failure
        if failure is None or failure.ended_before:
            return None
        return failure.rank, failure.reason

    @property
    def _failure(self) -> CollectiveFailure | None:
        return getattr(self.collectives, "failure", None)

    def _waited_for(self) -> tuple[int, str]:
        blamed = self._blamed()
        if blamed is not None:
            return blamed
        return self._segment.aborted_by, "gave up waiting for another rank in an operation"

    def _run(self) -> None:
        try:
            self._watch_all()
        except Exception as error:
            logger.exception("the thread that watches the ranks failed")
            self.abort(self._rank, f"its watch failed: {type(error).__name__}: {error}")
        if not self._stopped.is_set():
            self.explain()
            wake_all(self._segment.messages_address)
            self.end_children()
            if self.on_abort is not None:
                self.on_abort()

    def _watch_all(self) -> None:
        """Watch until `stop`, or the end of the group."""
        segment = self._segment
        before = time.monotonic()
        self._seen = {rank: _Seen(0, before, self._start_patience) for rank in self._watched}
        while not self._stopped.wait(_TICK_SECONDS):
            now = time.monotonic()
            segment.beat(self._rank)
            with self._lock:
                if now - before > 10 * _TICK_SECONDS:  # this process itself stood still
                    for seen in self._seen.values():
                        seen.since = seen.stepped = now
                before = now
                for child in self._children:
                    child.drain()
                for rank in self._watched:
                    if not segment.aborted:
                        self._watch(rank, self._seen[rank], now)
                if not segment.aborted and self._rank == 0:
                    self._compare(now)
            if segment.aborted:
                return

    def _watch(self, rank: int, seen: _Seen, now: float) -> None:
        """Check one rank."""
        segment = self._segment
        for child in self._children:
            if child.rank == rank and (failure := child.failure()) is not None:
                self.abort(rank, failure)
        if self._has_ended(rank):
            self.abort(rank, f"process {segment.process(rank)} has ended")
        if segment.heartbeat(rank) != seen.beat:
            seen.beat, seen.since, seen.patience = segment.heartbeat(rank), now, self._patience
            return
        process, patience = segment.process(rank), seen.patience
        if not process:
            patience = max(patience, _JOIN_SECONDS)
        if now - seen.since > patience:
            what = f"process {process}" if process else "its process"
            self.abort(rank, f"{what} has not responded for {patience:g} s")

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
        poll = select.poll()  # select() takes no descriptors from 1024 on
        poll.register(self._handles[rank], select.POLLIN)
        return bool(poll.poll(0))

    def _compare(self, now: float) -> None:
        """End the group if a rank has checked in other tokens than this one, or fewer for long."""
        own = self._segment.progress(0) >> 32
        for rank in self._watched:
            step, checksum = divmod(self._segment.progress(rank), 1 << 32)
            if step and own - KEPT_STEPS // 2 < step <= own:
                expected = self.checksums[step % KEPT_STEPS]
                if checksum != expected:
                    self.abort(
                        rank,
                        f"its tokens differ from rank 0's at step {step}: checksum"
                        f" {checksum:08x}, and {expected:08x} on rank 0",
                    )
            seen = self._seen[rank]
            if step >= own or step != seen.step:
                seen.step, seen.stepped = step, now
            elif now - seen.stepped > seen.patience:
                self.abort(
                    rank,
                    f"it has not ended step {step + 1} within {seen.patience:g} s after rank 0 did",
                )


@dataclass(slots=True)
class _Seen:
    """What the watch has seen of a rank."""

    beat: int
    since: float
    """When the heartbeat changed, or this process stood still; by `time.monotonic`."""
    patience: float
    """Seconds that the heartbeat may stand still."""
    step: int = 0
    stepped: float = 0.0
    """When the rank had last caught up with rank 0, or checked in a step."""
