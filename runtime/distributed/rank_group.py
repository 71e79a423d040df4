"""The processes of a tensor-parallel engine: rank 0 starts the others and sends them messages.

Rank 0 has a socket to every other rank, over which they exchange values while the engine starts,
and a pipe for messages, because a pipe is faster. A rank without a message spins briefly, because
the next one of a busy engine follows within microseconds, and then sleeps.

Every message contains the checksum of the tokens that rank 0 has read so far. The other ranks
compare it with the checksum of their own tokens.

Rank 0 finds out why a group fails: a process has ended (a thread looks ten times a second), a rank
has sent an error, or an operation has waited for a rank in vain. It ends the operations that wait,
and kills the other processes.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple
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

logger = logging.getLogger("stepgraph.runtime")

WORKER = "stepgraph.runtime.engine.startup"
GROUP_ENDED = 1
"""Status of a rank that ends because of a failure of the group, its own included."""
START_SECONDS = 600.0
"""A rank waits so long for others while engines start: compilers take different times."""

_SAME_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        *(CheckpointError, ConfigError, KernelBuildError, KernelSelfTestError),
        *(MemoryBudgetError,),
    )
}
"""Errors of a rank that rank 0 raises as they are, while the engine starts."""

_TICK_SECONDS = 0.1
_SPIN_SECONDS = 300e-6
"""More than the host's part of a step of 64 rows: waking a rank takes tens of microseconds."""
_EXPLAIN_SECONDS = 0.5
"""After an operation gave up, a process may take so long to end, or a rank to say what failed."""
_STDERR = 2


class _Failure(NamedTuple):
    """What a rank sends before it ends because of an error."""

    kind: str
    reason: str
    waited: CollectiveFailure | None
    """Why its operations gave up; None: they did not."""


class Link(NamedTuple):
    """The ends of what connects rank 0 with another rank, in one of them."""

    connection: Connection
    pipe: int
    """Descriptor: rank 0 writes messages, the other rank reads them."""

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Return rank 0's ends and the other rank's."""
        (ours, theirs), (read, write) = Pipe(), os.pipe()
        os.set_blocking(write, False)  # a rank may have stopped
        return cls(ours, write), cls(theirs, read)

    def close(self) -> None:
        """Close these ends."""
        self.connection.close()
        os.close(self.pipe)


def start_rank(
    rank: int, ranks: int, cores: Sequence[int] | None = None
) -> tuple[Link, subprocess.Popen[bytes]]:
    """Start the process of a rank, with the import path of this one; return the link to it.

    It writes to the stderr of this process. `cores`: CPUs that it may use; None: all of this
    process.

    Raises:
        ConfigError: this process has no Python executable that could be started, or the system
            starts no more processes.
    """
    if not sys.executable:
        raise ConfigError(
            "tensor_parallel starts processes of sys.executable, which is not set here"
        )
    ours, theirs = Link.pair()
    passed = theirs.connection.fileno(), theirs.pipe
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, *map(str, (*passed, rank, ranks))],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            stderr=_STDERR,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            pass_fds=passed,
        )
    except OSError as error:
        ours.close()
        raise ConfigError(
            f"the process of rank {rank} cannot be started: {error}. tensor_parallel needs one"
            " for each rank"
        ) from error
    finally:
        theirs.close()
    if cores is not None:
        try:
            os.sched_setaffinity(process.pid, cores)
        except OSError as error:
            logger.info("rank %d has no cores of its own: %s", rank, error)
    return ours, process


class RankGroup:
    """Rank `rank` of `ranks`: exchanges between all ranks, messages from rank 0, and their end.

    Raises of all waiting methods:
        RankError: a rank ended, did not respond in time, failed or disagrees.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        links: Sequence[Link],
        processes: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        """Join a group.

        Args:
            rank: of this process.
            ranks: of the group.
            links: rank 0: to all others, in their order; other ranks: to rank 0.
            processes: rank 0: of the others, which it watches.
        """
        self.rank, self.ranks = rank, ranks
        self._owner = os.getpid()
        self.collectives: Any = None
        """This rank's; their `failure` names the rank that they timed out on. None at first."""
        self.steps = self.checksum = 0
        """Steps whose tokens were checked in, and the CRC32 of these tokens."""
        self.timeout = START_SECONDS
        self._serves = False
        self._links, self._processes = links, processes
        self._failed, self._closed = threading.Event(), threading.Event()
        self._failures: dict[int, _Failure] = {}
        self._suspect: tuple[int, str] | None = None
        self._reason: tuple[type[Exception], str] | None = None
        self._lock = threading.Lock()  # two threads may look for the reason
        self._arrivals = select.poll()
        self._unread = bytearray()
        if rank:
            self._arrivals.register(links[0].pipe, select.POLLIN)
        else:
            self._end = weakref.finalize(self, _kill, processes, os.getpid())
            self._watch = threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self._closed),
                name="stepgraph-ranks",
                daemon=True,
            )
            self._watch.start()

    @property
    def failed(self) -> bool:
        """Rank 0: whether the group has failed."""
        return self._failed.is_set()

    def check(self) -> None:
        """Raise the reason why the group has failed, if it has."""
        if self._failed.is_set():
            raise self._find_reason()

    def exchange(self, value: Any) -> list[Any]:
        """Send a value to all ranks, and return the values of all, in the order of ranks.

        All ranks call it in the same order.
        """
        values: list[Any] = [value]
        if self.rank:
            try:
                self._links[0].connection.send(value)
                values = self._links[0].connection.recv()
            except (EOFError, OSError) as error:
                raise RankError("rank 0 has ended") from error
            return values
        for rank, (connection, _) in enumerate(self._links, 1):
            late = time.monotonic() + START_SECONDS
            while not connection.poll(_TICK_SECONDS):
                if time.monotonic() > late:
                    self.abort(rank, f"it has not responded for {START_SECONDS:g} s")
                self.check()
            try:
                values.append(connection.recv())
            except (EOFError, OSError):
                self.abort(rank, "it has ended")
            if isinstance(values[-1], _Failure):
                self._failures[rank] = values[-1]
                self.abort()
            self.check()
        for rank, (connection, _) in enumerate(self._links, 1):
            with self._broken_link(rank):
                connection.send(values)
        return values

    def shared_memory(self, nbytes: int) -> mmap.mmap:
        """Return memory that all ranks share, zeroed at first. All ranks call it.

        It has no name in any file system, and lives until the last rank releases it.
        """
        if self.rank:
            descriptor = recv_handle(self._links[0].connection)
        else:
            descriptor = os.memfd_create("stepgraph-ranks", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
            for rank, (connection, _) in enumerate(self._links, 1):
                with self._broken_link(rank):
                    send_handle(connection, descriptor, None)
                # The application may have set a default timeout, which `send_handle` applies.
                os.set_blocking(connection.fileno(), True)
        try:
            return mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def serve(self, timeout: float) -> None:
        """Let no rank wait for another one longer than `timeout` seconds from now on."""
        self.timeout, self._serves = timeout, True
        if hasattr(self.collectives, "set_timeout"):
            self.collectives.set_timeout(timeout)

    def send(self, *message: object) -> None:
        """Rank 0: send a message to all other ranks, in order."""
        if self._failed.is_set():
            self.check()
        data = pickle.dumps((self.steps, self.checksum, message))
        data = len(data).to_bytes(4, "little") + data
        for rank, link in enumerate(self._links, 1):
            with self._broken_link(rank):
                rest = memoryview(data)
                while rest:
                    try:
                        rest = rest[os.write(link.pipe, rest) :]
                    except BlockingIOError:  # the pipe is full
                        room = select.poll()
                        room.register(link.pipe, select.POLLOUT)
                        if not room.poll(1e3 * self.timeout):
                            raise

    def receive(self) -> tuple[int, int, tuple[Any, ...]]:
        """Wait for a message; return rank 0's `steps` and `checksum`, and the message."""
        unread, pipe = self._unread, self._links[0].pipe
        while True:
            size = 4 + int.from_bytes(unread[:4], "little")
            if len(unread) >= max(size, 5):
                break
            spin_until = time.perf_counter() + _SPIN_SECONDS
            while not self._arrivals.poll(0) and time.perf_counter() < spin_until:
                pass
            if not (data := os.read(pipe, 1 << 16)):
                raise RankError("rank 0 has ended")
            unread += data
        steps, checksum, message = pickle.loads(bytes(unread[4:size]))
        del unread[:size]
        return steps, checksum, message

    def check_in(self, tokens: bytes) -> None:
        """Add the tokens of a step to the checksum."""
        self.steps += 1
        self.checksum = crc32(tokens, self.checksum)

    def check_messages_taken(self) -> None:
        """Rank 0: raise `RankError` if a rank has not read all messages. End the group then."""
        for rank, link in enumerate(self._links, 1):
            if any(fcntl.ioctl(link.pipe, termios.FIONREAD, bytes(4))):
                self.abort(rank, f"it has not taken a message for {self.timeout:g} s")
        self.check()

    def abort(self, rank: int | None = None, reason: str = "") -> None:
        """Rank 0: end the group, and the operations that wait.

        `reason` says what `rank` did; it counts if no process has ended or sent an error.
        """
        if rank is not None and self._suspect is None:
            self._suspect = rank, reason
        self._failed.set()
        if self.collectives is not None:
            self.collectives.abort()

    def report(self, error: BaseException) -> None:
        """Another rank than 0: send the error that ends it."""
        kind = type(error).__name__
        known = kind in _SAME_ERRORS or isinstance(error, RankError)
        reason = str(error) if known else f"{kind}: {error}"
        failure = getattr(self.collectives, "failure", None)
        with suppress(OSError):
            self._links[0].connection.send(_Failure(kind, reason, failure))

    def end(self, error: BaseException) -> BaseException:
        """Rank 0: end the group because of an error here; return the failure to report.

        That is a `RankError` if the error follows from the failure of another rank.
        """
        follows = self.failed or getattr(self.collectives, "failure", None) is not None
        if not follows:
            self._reason = RankError, f"rank 0: {type(error).__name__}: {error}"
        self.abort()
        if not follows:
            return error
        reason = self._find_reason()
        if str(reason) == str(error):
            return error
        reason.__cause__ = error
        return reason

    def close(self) -> None:
        """End the processes that this one started. Idempotent.

        Messages must have told them to end: those that have not within the timeout are killed.
        """
        if self.rank or self._closed.is_set() or os.getpid() != self._owner:
            return
        self._closed.set()
        if self._watch is not threading.current_thread():
            self._watch.join()
        until = time.monotonic() + (0.0 if self.failed else self.timeout)
        for rank, process in enumerate(self._processes, 1):
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                if not self.failed:
                    logger.warning("rank %d did not end and is killed", rank)
        self._end()
        for link in self._links:
            link.close()

    @contextmanager
    def _broken_link(self, rank: int) -> Iterator[None]:
        """End the group if a rank takes no messages."""
        try:
            yield
        except OSError as error:
            self.abort(rank, f"it takes no message: {error}")
            self.check()

    def _find_reason(self) -> Exception:
        """Return why the group has failed. Looks for the cause for a moment, once.

        A rank that operations waited for may have ended, or may say what failed.
        """
        with self._lock:
            until = time.monotonic() + _EXPLAIN_SECONDS
            while self._reason is None:
                self._reason = self._cause(late=time.monotonic() > until)
                if self._reason is None:
                    time.sleep(_EXPLAIN_SECONDS / 20)
            kind, text = self._reason
            return kind(text)

    def _cause(self, *, late: bool) -> tuple[type[Exception], str] | None:
        """Return the cause, or if it is late the best guess."""
        waited: list[CollectiveFailure | None] = [getattr(self.collectives, "failure", None)]
        guesses: list[tuple[int, str]] = []
        for rank, process in enumerate(self._processes, 1):
            status = process.poll()  # before its last messages
            self._receive_failures(rank)
            failure = self._failures.get(rank)
            if failure is not None:
                if failure.waited is None:
                    kinds = {} if self._serves else _SAME_ERRORS
                    return kinds.get(failure.kind, RankError), f"rank {rank}: {failure.reason}"
                waited.append(failure.waited)
                guesses.append((rank, failure.reason))
            elif status is not None:
                return RankError, f"rank {rank}: process {process.pid} {_how(status)}"
        if not late:
            return None
        first = [(w.rank, w.reason) for w in waited if w is not None and not w.ended_before]
        if self._suspect is not None:
            first.append(self._suspect)
        rank, reason = [*first, *guesses, (0, "gave up waiting for another rank")][0]
        return RankError, f"rank {rank}: {reason}"

    def _receive_failures(self, rank: int) -> None:
        connection = self._links[rank - 1].connection
        with suppress(EOFError, OSError):
            while rank not in self._failures and connection.poll():
                message = connection.recv()
                if isinstance(message, _Failure):
                    self._failures[rank] = message

    def _look(self) -> bool:
        """Look whether all processes run; return whether to look again."""
        if any(process.poll() is not None for process in self._processes):
            self.abort()
        if not self.failed:
            return True
        self._find_reason()
        self._end()
        return False


def _watch(reference: weakref.ref[RankGroup], closed: threading.Event) -> None:
    """Watch a group, without keeping it alive."""
    while not closed.wait(_TICK_SECONDS):
        group = reference()
        if group is None or not group._look():
            return
        del group


def _kill(processes: Sequence[subprocess.Popen[bytes]], owner: int) -> None:
    """Kill the processes that run. Nothing in a forked child of the owner."""
    if os.getpid() == owner:
        for process in processes:
            process.kill()
            process.wait()


def _how(status: int) -> str:
    """Return how a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"
