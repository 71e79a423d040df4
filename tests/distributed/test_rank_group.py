"""Why a group of ranks has ended, as rank 0 finds out; the other ranks are imitated."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from stepgraph.runtime.distributed import rank_group
from stepgraph.runtime.distributed.command_ring import RingReader
from stepgraph.runtime.distributed.rank_group import RankGroup
from stepgraph.runtime.distributed.segment import SharedSegment, shared_memory
from stepgraph.runtime.errors import CheckpointError, RankError
from stepgraph.runtime.kernels.ops.collectives import CollectiveFailure

LATE = "did not take part in an operation of the group within 3 s"


class Child:
    """A process of another rank, which ends when the test says so."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.status: str | None = None
        self.ends_at = 0.0
        self.ended_by_itself = False

    def failure(self) -> str | None:
        return self.status if time.monotonic() >= self.ends_at else None

    def end_with(self, status: str, *, by_itself: bool = False, delay: float = 0.0) -> None:
        self.status, self.ended_by_itself = status, by_itself
        self.ends_at = time.monotonic() + delay

    def drain(self) -> None:
        pass

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


@pytest.fixture
def late_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches does not run in time."""
    monkeypatch.setattr(rank_group, "_TICK_SECONDS", 600.0)


def give_up(group: RankGroup, rank: int, failure: CollectiveFailure) -> None:
    """Let operators of a rank end the group, and those of this one fail."""
    group.watch.collectives = SimpleNamespace(failure=failure)
    group.segment.abort_word.cast("I")[0] = rank + 1


def reason(group: RankGroup) -> str:
    """What all methods that raise say."""
    operator = RuntimeError(str(group.watch.collectives.failure))
    ended = group.end(operator)
    assert isinstance(ended, RankError)
    assert ended.__cause__ is operator
    for _ in range(2):
        with pytest.raises(RankError) as found:
            group.check()
        assert str(found.value) == str(ended)
    group.fail(operator)
    assert str(group.end(operator)) == str(ended)
    return str(ended)


def assert_ended(group: RankGroup, reason: str, kind: type[Exception] = RankError) -> None:
    """The reason is a pattern."""
    with pytest.raises(kind, match=reason):
        group.check()


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_operators_give_up_before_the_watch_sees_that_a_rank_died(
    make_group: MakeGroup, late_watch: None, delay: float
) -> None:
    group, (_, two) = make_group()
    give_up(group, 0, CollectiveFailure(2, LATE))
    two.end_with("process 7 was ended by SIGKILL", delay=delay)
    assert reason(group) == "rank 2: process 7 was ended by SIGKILL"


def test_operators_give_up_waiting_for_a_rank_that_runs(
    make_group: MakeGroup, late_watch: None
) -> None:
    group, _ = make_group()
    give_up(group, 0, CollectiveFailure(2, LATE))
    assert reason(group) == f"rank 2: {LATE}"


def test_another_rank_gives_up_waiting_for_one_that_died(
    make_group: MakeGroup, late_watch: None
) -> None:
    group, (one, two) = make_group()
    give_up(group, 1, CollectiveFailure(1, "aborted the group", ended_before=True))
    group.segment.abort(1, {"rank": 2, "reason": LATE}, decided=False)
    one.end_with("process 8 ended with status 1", by_itself=True)
    two.end_with("process 7 was ended by SIGKILL", delay=0.1)
    assert reason(group) == "rank 2: process 7 was ended by SIGKILL"


def test_the_watch_finds_the_reason_before_it_ends_processes(make_group: MakeGroup) -> None:
    group, _ = make_group()
    give_up(group, 0, CollectiveFailure(1, LATE))
    wait_for(lambda: group.segment.abort_record(decided=True) is not None)
    assert reason(group) == f"rank 1: {LATE}"


def test_patience_begins_with_a_heartbeat(make_group: MakeGroup) -> None:
    """A rank may have stood still before; only the next gap counts."""
    group, _ = make_group(2)
    group.segment.join(1)  # as this process
    group.serve(0.2)
    time.sleep(0.6)
    group.check()
    group.segment.beat(1)
    wait_for(lambda: group.segment.aborted)
    assert_ended(group, r"rank 1: process .* has not responded for 0.2 s")


def test_other_tokens_while_idle(make_group: MakeGroup) -> None:
    group, _ = make_group(2)
    group.segment.set_progress(1, 1 << 32 | 5)
    group.check_in(b"tokens")
    wait_for(lambda: group.segment.aborted)
    assert_ended(group, "rank 1: its tokens differ from rank 0's at step 1")


def test_a_step_that_does_not_end(make_group: MakeGroup) -> None:
    group, _ = make_group(2)
    group.serve(2.0)
    group.check_in(b"tokens")

    def aborted() -> bool:
        group.segment.beat(1)
        return group.segment.aborted

    wait_for(aborted)
    assert_ended(group, "rank 1: it has not ended step 1 within 2 s after rank 0")


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_rank_is_blamed_for_what_kernels_waited_for(
    make_group: MakeGroup, late_watch: None
) -> None:
    """Kernels do not set the abort word: the error of the call ends the group."""
    group, _ = make_group()
    group.watch.collectives = SimpleNamespace(failure=CollectiveFailure(2, LATE))
    assert isinstance(group.end(RankError(f"rank 2 {LATE}")), RankError)
    assert_ended(group, f"rank 2: {LATE}")


def test_errors_of_a_rank_keep_their_type_only_while_it_starts(make_group: MakeGroup) -> None:
    for serves, kind in ((False, CheckpointError), (True, RankError)):
        group, _ = make_group()
        if serves:
            group.serve(5.0)
        group.segment.abort(
            1, {"rank": 1, "reason": "no such directory", "kind": "CheckpointError"}
        )
        assert_ended(group, "rank 1: no such directory", kind)


def test_a_rank_that_takes_no_commands_ends_the_group(make_group: MakeGroup) -> None:
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


def test_an_error_of_the_watch_ends_the_group(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _ = make_group()
    monkeypatch.setattr(group.watch, "_compare", lambda now: [][1])
    wait_for(lambda: group.segment.aborted)
    assert_ended(group, "rank 0: its watch failed: IndexError")


def test_a_rank_ends_even_if_nobody_reads_its_output() -> None:
    program = (
        "import sys, stepgraph.runtime.engine.startup as worker\n"
        "sys.stdin.readline(); print('buffered'); worker._exit(7)"
    )
    command = [sys.executable, "-c", program]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.write(b"go\n")
        process.stdin.close()
        assert process.wait(120) == 7
