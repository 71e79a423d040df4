"""Why a group of ranks has ended, as rank 0 finds out; the other ranks are imitated."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from stepgraph.runtime.distributed import rank_group
from stepgraph.runtime.distributed.command_ring import RingReader
from stepgraph.runtime.distributed.rank_group import RankGroup
from stepgraph.runtime.distributed.segment import SharedSegment, shared_memory
from stepgraph.runtime.engine import startup
from stepgraph.runtime.errors import CheckpointError, RankError
from stepgraph.runtime.kernels.ops.collectives import CollectiveFailure

from ..rigs.parallel_rig import wait_for

LATE = "did not take part in an operation of the group within 3 s"
KILLED = "process 7 was ended by SIGKILL"


class Child:
    """A process of another rank, which ends when the test says so."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.status: str | None = None
        self.ends_at = 0.0
        self.ended_by_itself = False

    def failure(self) -> str | None:
        return self.status if time.monotonic() >= self.ends_at else None

    def wait(self, seconds: float) -> bool:
        return True

    def end(self) -> None:
        self.status = self.status or "process 9 was ended by SIGKILL"


MakeGroup = Callable[..., tuple[RankGroup, list[Child]]]


@pytest.fixture
def make_group() -> Iterator[MakeGroup]:
    """Return rank 0 of a group, and the others."""
    groups: list[RankGroup] = []

    def make(ranks: int = 3) -> tuple[RankGroup, list[Child]]:
        memory, descriptor = shared_memory(SharedSegment.nbytes_for(ranks))
        os.close(descriptor)
        children: Any = [Child(rank) for rank in range(1, ranks)]
        groups.append(RankGroup(memory, 0, ranks, children))
        return groups[-1], children

    yield make
    for group in groups:
        group.close()


def assert_ended(group: RankGroup, reason: str, kind: type[Exception] = RankError) -> None:
    with pytest.raises(kind) as found:
        group.check()
    assert str(found.value).startswith(reason)


ENDED_BEFORE = CollectiveFailure(1, "aborted the group", ended_before=True)
OF_OPERATORS: list[tuple[int | None, CollectiveFailure, list[tuple[int, str, float]], str]] = [
    # Who set the abort word, why operators of rank 0 failed, ends of processes, the reason.
    (0, CollectiveFailure(2, LATE), [(2, KILLED, 0.0)], f"rank 2: {KILLED}"),
    (0, CollectiveFailure(2, LATE), [(2, KILLED, 0.1)], f"rank 2: {KILLED}"),
    (0, CollectiveFailure(2, LATE), [], f"rank 2: {LATE}"),
    (None, CollectiveFailure(2, LATE), [], f"rank 2: {LATE}"),  # kernels do not see the word
    (1, ENDED_BEFORE, [(1, "status 1", 0.0), (2, KILLED, 0.1)], f"rank 2: {KILLED}"),
    (1, ENDED_BEFORE, [(1, "status 1", 0.0)], f"rank 2: {LATE}"),
]


@pytest.mark.parametrize(("aborted_by", "failure", "ends", "reason"), OF_OPERATORS)
def test_operators_give_up_before_the_watch_sees_why(
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
    aborted_by: int | None,
    failure: CollectiveFailure,
    ends: list[tuple[int, str, float]],
    reason: str,
) -> None:
    monkeypatch.setattr(rank_group, "_TICK_SECONDS", 600.0)
    monkeypatch.setattr(rank_group, "_EXPLAIN_SECONDS", 0.3)
    group, children = make_group()
    group.watch.collectives = SimpleNamespace(failure=failure)
    if aborted_by is not None:
        group.segment.abort_word.cast("I")[0] = aborted_by + 1
    if failure.ended_before:
        group.segment.abort(1, {"rank": 2, "reason": LATE, "waited": True})
    for rank, status, delay in ends:
        child = children[rank - 1]
        child.ended_by_itself = status == "status 1"
        child.status, child.ends_at = status, time.monotonic() + delay
    operator = RuntimeError(str(failure))
    for _ in range(2):  # all methods that raise say the same
        ended = group.end(operator)
        assert isinstance(ended, RankError)
        assert (str(ended), ended.__cause__) == (reason, operator)
        assert_ended(group, reason)
        group.fail(operator)


def test_watch_finds_the_reason_before_it_ends_processes(make_group: MakeGroup) -> None:
    group, children = make_group()
    group.watch.collectives = SimpleNamespace(failure=CollectiveFailure(1, LATE))
    group.segment.abort_word.cast("I")[0] = 1
    wait_for(lambda: children[1].status)
    assert_ended(group, f"rank 1: {LATE}")


def test_patience_begins_with_a_heartbeat(make_group: MakeGroup) -> None:
    """A rank may have stood still before; only the next gap counts."""
    group, _ = make_group(2)
    group.segment.of_rank[1].process = os.getpid()  # as this process
    group.serve(0.2)
    time.sleep(0.4)
    group.check()
    group.segment.of_rank[1].heartbeat += 1
    wait_for(lambda: group.segment.aborted)
    assert_ended(group, f"rank 1: process {os.getpid()} has not responded for 0.2 s")


@pytest.mark.parametrize("steps", [1, 0])
def test_ranks_must_agree_on_tokens_in_time(make_group: MakeGroup, steps: int) -> None:
    group, _ = make_group(2)
    group.serve(0.5)
    group.segment.of_rank[1].progress = steps << 32 | 5 * steps
    group.check_in(b"tokens")

    def aborted() -> bool:
        group.segment.of_rank[1].heartbeat += 1
        return group.segment.aborted

    wait_for(aborted)
    late = "it has not ended step 1 within 0.5 s after rank 0"
    assert_ended(group, f"rank 1: {'its tokens differ from rank 0' if steps else late}")


@pytest.mark.parametrize(("serves", "kind"), [(False, CheckpointError), (True, RankError)])
def test_errors_of_a_rank_keep_their_type_only_while_it_starts(
    make_group: MakeGroup, serves: bool, kind: type[Exception]
) -> None:
    group, _ = make_group()
    if serves:
        group.serve(5.0)
    group.segment.abort(1, {"rank": 1, "reason": "no such directory", "kind": "CheckpointError"})
    assert_ended(group, "rank 1: no such directory", kind)


def test_rank_that_takes_no_commands_ends_the_group(make_group: MakeGroup) -> None:
    group, _ = make_group()
    group.writer.send(1)
    for rank in (1, 2):
        reader = RingReader(group.segment, rank, group.check)
        assert reader.receive() == (1, b"")
    group.check_commands_taken()
    group.writer.send(2)
    assert reader.receive() == (2, b"")
    with pytest.raises(RankError) as found:
        group.check_commands_taken()
    assert str(found.value).startswith("rank 1: ")


def test_error_of_the_watch_ends_the_group(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _ = make_group()
    monkeypatch.setattr(group.segment, "of_rank", [])
    wait_for(lambda: group.segment.aborted)
    assert_ended(group, "rank 0: its watch failed: IndexError")


def test_rank_ends_even_if_its_output_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def flush() -> None:
        raise BrokenPipeError

    ended: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", SimpleNamespace(flush=flush))
        patch.setattr(os, "_exit", ended.append)
        startup._exit(7)
    assert ended == [7]
