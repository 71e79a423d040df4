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
        self.watch = RankWatch(segment, rank, children)
        self.writer = RingWriter(segment, self.check)
        self.reader = RingReader(segment, rank, self.check)
        segment.of_rank[rank].process = os.getpid()
        self.watch.start()
        self._end = weakref.finalize(self, _abandon, self.watch, rank)

    def check(self) -> None:
        """Raise the reason why the group has ended, if it has."""
        if not self.segment.aborted:
            return
        record = self.watch.reason()
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
        while any(words.arrived < number for words in self.segment.of_rank):
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
        memory = open_shared(self.segment.of_rank[0].process, self.exchange(None)[0], nbytes)
        self.exchange(None)
        return memory

    def serve(self, timeout: float) -> None:
        """Let no rank stand still for longer than `timeout` seconds from now on."""
        self.timeout, self._serves = timeout, True
        self.watch.patience = timeout

    def check_commands_taken(self) -> None:
        """Rank 0: raise `RankError` if a rank has not read all commands. End the group then."""
        segment = self.segment
        for rank in range(1, self.ranks):
            if segment.of_rank[rank].consumed < segment.published:
                self.watch.abort(rank, f"it has not taken a command for {self.timeout:g} s")
        self.check()

    def check_in(self, tokens: bytes) -> None:
        """Add the tokens of a step to the checksum that rank 0 compares."""
        self._steps += 1
        self._checksum = crc32(tokens, self._checksum)
        self.watch.checksums[self._steps % KEPT_STEPS] = self._checksum
        progress = (self._steps & 0xFFFFFFFF) << 32 | self._checksum
        self.segment.of_rank[self.rank].progress = progress

    def fail(self, error: BaseException) -> None:
        """End the group because of an error on this rank, unless the error is that it has ended."""
        operators = self.watch.record_operators()
        if not (self.segment.aborted and (operators or isinstance(error, RankError))):
            kind = type(error).__name__
            known = kind in _SAME_ERRORS or isinstance(error, RankError)
            reason = str(error) if known else f"{kind}: {error}"
            self.watch.abort(self.rank, reason, kind=kind)

    def end(self, error: BaseException) -> BaseException:
        """End the group because an operation of this rank failed; return the failure to report.

        That is a `RankError` if the error follows from the failure of another rank.
        """
        follows = self.watch.record_operators() or self.segment.aborted
        self.fail(error)
        if not follows:
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
        self.watch.end_children(_GRACE_SECONDS if self.segment.aborted else self.timeout)


def _abandon(watch: RankWatch, rank: int) -> None:
    """End the group of an engine that was not closed."""
    if not watch.owned:
        return
    watch.abort(rank, "its engine was not closed")
    watch.stop()
    watch.end_children()


class RankWatch:
    """Watches a group for one of its ranks."""

    def __init__(self, segment: SharedSegment, rank: int, children: Sequence[RankProcess]) -> None:
        """Watch from `start` to `stop`; `children` are the other ranks, which rank 0 started."""
        self.collectives: Any = None
        """This rank's; their `failure` names the rank that they timed out on. None at first."""
        self.checksums = [0] * KEPT_STEPS
        """Rank 0: the checksum after step n at index n modulo `KEPT_STEPS`."""
        self.on_abort: Callable[[], None] | None = None
        """Called in this thread once the group has ended, unless the watch was stopped before."""
        self.patience = START_PATIENCE
        """With each rank, from its next heartbeat on: the last one before may be old, since a rank
        that starts can stand still for long."""
        self._segment = segment
        self._rank = rank
        self._children = children
        self._reason: dict[str, Any] | None = None
        self._lock = threading.Lock()
        """Of the reason and the processes, which two threads look for."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepgraph-ranks", daemon=True)
        self._owner, self._parent = os.getpid(), os.getppid()

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

    def end_children(self, grace: float = _GRACE_SECONDS) -> None:
        """Kill the children that have not ended by themselves in `grace` seconds. Idempotent."""
        if not self.owned:
            return
        until = time.monotonic() + grace
        for child in self._children:
            ended = child.wait(max(0.0, until - time.monotonic()))
            if not (ended or self._segment.aborted):
                logger.warning("rank %d did not end and is killed", child.rank)
            child.end()

    def abort(self, rank: int, reason: str, **more: object) -> None:
        """End the group because of a rank, and wake those that wait."""
        self._segment.abort(self._rank, {"rank": rank, "reason": reason, **more})
        wake_all(self._segment.messages_address)

    def record_operators(self) -> bool:
        """Return whether operators of this rank have failed; record the rank they waited for."""
        failure: CollectiveFailure | None = getattr(self.collectives, "failure", None)
        if failure is not None and not failure.ended_before:
            self.abort(failure.rank, failure.reason, waited=True)
        return failure is not None

    def reason(self) -> dict[str, Any]:
        """Return why the group has ended. Rank 0 looks for the cause for a moment, once.

        A rank that operators waited for may have ended, or may say what failed.
        """
        with self._lock:
            until = time.monotonic() + (0.0 if self._rank else _EXPLAIN_SECONDS)
            while self._reason is None:
                self._reason = self._find_reason(late=time.monotonic() > until)
                if self._reason is None:
                    time.sleep(_EXPLAIN_SECONDS / 20)
            return self._reason

    def _find_reason(self, *, late: bool) -> dict[str, Any] | None:
        """Return the record of the cause, or if it is late the best guess."""
        ended = [(child, failure) for child in self._children if (failure := child.failure())]
        for child, failure in ended:
            if not child.ended_by_itself:
                return {"rank": child.rank, "reason": failure}
        self.record_operators()
        records = self._segment.abort_records()
        found = [record for record in records if "waited" not in record]
        if late:  # ranks also end by themselves once the group is aborted
            found += [*records, *({"rank": child.rank, "reason": text} for child, text in ended)]
            reason = "gave up waiting for another rank in an operation"
            found.append({"rank": self._segment.aborted_by, "reason": reason})
        return found[0] if found else None

    def _run(self) -> None:
        try:
            self._watch_all()
        except Exception as error:
            logger.exception("the thread that watches the ranks failed")
            self.abort(self._rank, f"its watch failed: {type(error).__name__}: {error}")
        if not self._stopped.is_set():
            self.reason()
            wake_all(self._segment.messages_address)
            self.end_children()
            if self.on_abort is not None:
                self.on_abort()

    def _watch_all(self) -> None:
        """Watch until `stop`, or the end of the group."""
        segment = self._segment
        before = time.monotonic()
        watched = range(1, segment.ranks) if self._rank == 0 else (0,)
        ranks = {rank: _Seen(0, before, START_PATIENCE) for rank in watched}
        while not (self._stopped.wait(_TICK_SECONDS) or segment.aborted):
            now = time.monotonic()
            segment.of_rank[self._rank].heartbeat += 1
            if now - before > 10 * _TICK_SECONDS:  # this process itself stood still
                for seen in ranks.values():
                    seen.since = seen.stepped = now
            before = now
            with self._lock:
                for child in self._children:
                    if (failure := child.failure()) is not None:
                        self.abort(child.rank, failure)
            if self._rank and os.getppid() != self._parent:
                self.abort(0, f"process {segment.of_rank[0].process} has ended")
            for rank, seen in ranks.items():
                self._watch(rank, seen, now)
                if self._rank == 0:
                    self._compare(rank, seen, now)

    def _watch(self, rank: int, seen: _Seen, now: float) -> None:
        """End the group if the heartbeat of a rank has stood still for long."""
        words = self._segment.of_rank[rank]
        if words.heartbeat != seen.beat:
            seen.beat, seen.since, seen.patience = words.heartbeat, now, self.patience
            return
        process, patience = words.process, seen.patience
        if not process:
            patience = max(patience, _JOIN_SECONDS)
        if now - seen.since > patience:
            what = f"process {process}" if process else "its process"
            self.abort(rank, f"{what} has not responded for {patience:g} s")

    def _compare(self, rank: int, seen: _Seen, now: float) -> None:
        """End the group if a rank has checked in other tokens than rank 0, or fewer for long."""
        own = self._segment.of_rank[0].progress >> 32
        step, checksum = divmod(self._segment.of_rank[rank].progress, 1 << 32)
        if step and own - KEPT_STEPS // 2 < step <= own:
            expected = self.checksums[step % KEPT_STEPS]
            if checksum != expected:
                self.abort(
                    rank,
                    f"its tokens differ from rank 0's at step {step}: checksum"
                    f" {checksum:08x}, and {expected:08x} on rank 0",
                )
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
