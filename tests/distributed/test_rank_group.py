"""Why a group of ranks has failed, as rank 0 finds out; the other ranks are imitated."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from stepgraph.runtime.distributed import rank_group
from stepgraph.runtime.distributed.rank_group import Link, RankGroup
from stepgraph.runtime.engine import startup
from stepgraph.runtime.errors import CheckpointError, RankError
from stepgraph.runtime.kernels.ops.collectives import CollectiveFailure

from ..rigs.service_rig import wait_until

LATE = "did not take part in an operation of the group within 3 s"
KILLED = "process 7 was ended by SIGKILL"


class FakeProcess:
    """A process of another rank, which ends when the test says so."""

    pid = 7

    def __init__(self) -> None:
        self.status: int | None = None
        self.ends_at = 0.0

    def poll(self) -> int | None:
        return self.status if time.monotonic() >= self.ends_at else None

    def wait(self, seconds: float | None = None) -> None:
        """It has ended."""

    def kill(self) -> None:
        self.status = -9 if self.status is None else self.status


class FakeCollectives:
    def __init__(self, failure: CollectiveFailure | None) -> None:
        self.failure = failure

    def abort(self) -> None:
        """Nothing waits."""


class Rig:
    """Rank 0 of a group, and the other ranks."""

    def __init__(self, ranks: int) -> None:
        ends = [Link.pair() for _ in range(ranks - 1)]
        self.processes = [FakeProcess() for _ in ends]
        links = [ours for ours, _ in ends]
        self.group = RankGroup(0, ranks, links, self.processes)  # type: ignore[arg-type]
        self.others = [RankGroup(n, ranks, [end]) for n, (_, end) in enumerate(ends, 1)]

    def fail(self, rank: int, error: Exception, failure: CollectiveFailure | None = None) -> None:
        """Let a rank end because of an error, or because its operations gave up."""
        other = self.others[rank - 1]
        other.collectives = FakeCollectives(failure)
        other.report(error)
        self.processes[rank - 1].status = 1

    def assert_ended(self, reason: str, kind: type[Exception] = RankError) -> None:
        wait_until(lambda: self.group.failed)
        with pytest.raises(kind) as found:
            self.group.check()
        assert str(found.value).startswith(reason)


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(ranks: int = 3) -> Rig:
        rigs.append(Rig(ranks))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.group.timeout = 0.0
        rig.group.close()


MakeRig = Callable[..., Rig]
ENDED_BEFORE = CollectiveFailure(1, "aborted the group", ended_before=True)
LATE_2 = CollectiveFailure(2, LATE)
OF_OPERATIONS: list[tuple[CollectiveFailure, bool, float | None, str]] = [
    # Why operations of rank 0 failed, whether rank 1 has waited, when rank 2 ended, the reason.
    (LATE_2, False, 0.0, f"rank 2: {KILLED}"),
    (LATE_2, False, 0.1, f"rank 2: {KILLED}"),
    (LATE_2, False, None, f"rank 2: {LATE}"),
    (ENDED_BEFORE, True, 0.1, f"rank 2: {KILLED}"),
    (ENDED_BEFORE, True, None, f"rank 2: {LATE}"),
]


@pytest.mark.parametrize(("failure", "waited", "ends", "reason"), OF_OPERATIONS)
def test_operations_give_up_before_the_watch_sees_why(
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    failure: CollectiveFailure,
    waited: bool,
    ends: float | None,
    reason: str,
) -> None:
    monkeypatch.setattr(rank_group, "_TICK_SECONDS", 600.0)
    monkeypatch.setattr(rank_group, "_EXPLAIN_SECONDS", 0.3)
    rig = make_rig()
    monkeypatch.setattr(rank_group, "_TICK_SECONDS", 0.1)
    rig.group.collectives = FakeCollectives(failure)
    if waited:
        rig.fail(1, RankError(str(LATE_2)), LATE_2)
    if ends is not None:
        rig.processes[1].status, rig.processes[1].ends_at = -9, time.monotonic() + ends
    operator = RuntimeError(str(failure))
    for _ in range(2):  # all methods that raise say the same
        ended = rig.group.end(operator)
        assert isinstance(ended, RankError)
        assert (str(ended), ended.__cause__) == (reason, operator)
        rig.assert_ended(reason)


def test_error_of_rank_0_ends_the_processes(make_rig: MakeRig) -> None:
    rig = make_rig()
    error = KeyError("step")
    assert rig.group.end(error) is error
    rig.assert_ended("rank 0: KeyError: 'step'")
    wait_until(lambda: all(process.status == -9 for process in rig.processes))


@pytest.mark.parametrize(("serves", "kind"), [(False, CheckpointError), (True, RankError)])
def test_errors_of_a_rank_keep_their_type_only_while_it_starts(
    make_rig: MakeRig, serves: bool, kind: type[Exception]
) -> None:
    rig = make_rig()
    if serves:
        rig.group.serve(5.0)
    rig.fail(1, CheckpointError("no such directory"))
    rig.assert_ended("rank 1: no such directory", kind)


def test_exchange_raises_what_a_rank_raised(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.fail(1, CheckpointError("no such directory"))
    with pytest.raises(CheckpointError):
        rig.group.exchange("a")


def test_messages_arrive_in_order_with_the_checksum(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.group.check_in(b"tokens")
    large = os.urandom(3_000_000)

    def send() -> None:
        rig.group.send("run", large)
        rig.group.send("close")

    thread = threading.Thread(target=send)
    thread.start()
    for other in rig.others:
        other.check_in(b"tokens")
        assert other.receive() == (1, other.checksum, ("run", large))
    thread.join()
    for other in rig.others:
        assert other.receive() == (1, other.checksum, ("close",))


def test_rank_that_takes_no_messages_ends_the_group(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.group.serve(0.2)
    rig.group.send(1)
    for other in rig.others:
        other.receive()
    rig.group.check_messages_taken()
    rig.group.send(2)
    rig.others[1].receive()
    with pytest.raises(RankError) as found:
        rig.group.check_messages_taken()
    assert str(found.value).startswith("rank 1: ")


@pytest.mark.parametrize("least", [0, 1100], ids=["few files", "many files"])
def test_send_to_a_rank_that_takes_no_messages_ends(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    make_pipe = os.pipe

    def pipe() -> tuple[int, int]:
        """Return a pipe like that of a process with `least` open files."""
        read, write = make_pipe()
        high = fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, least)
        os.close(write)
        return read, high

    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", pipe)
        rig = make_rig(2)
    rig.group.serve(0.2)
    with pytest.raises(RankError):
        rig.group.send(bytes(1 << 24))
    rig.assert_ended("rank 1: it takes no message")


def test_memory_is_shared(make_rig: MakeRig) -> None:
    rig = make_rig()
    memory = rig.group.shared_memory(1 << 16)
    memory[5:8] = b"abc"
    for other in rig.others:
        assert other.shared_memory(1 << 16)[5:8] == b"abc"


def test_rank_without_rank_0_is_an_error() -> None:
    ours, theirs = Link.pair()
    group = RankGroup(1, 2, [theirs])
    ours.close()
    with pytest.raises(RankError):
        group.receive()
    with pytest.raises(RankError):
        group.exchange("a")


def test_rank_ends_even_if_its_output_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def flush(self) -> None:
            raise BrokenPipeError

    ended: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Closed())
        patch.setattr(os, "_exit", ended.append)
        startup._exit(7)
    assert ended == [7]
