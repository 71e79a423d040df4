"""Collectives over shared memory against sums in plain torch, and those of process groups."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stepgraph.runtime.distributed.rank_group import Link, RankGroup
from stepgraph.runtime.distributed.shared_memory_collectives import SharedMemoryCollectives
from stepgraph.runtime.engine.rank_start import open_nccl
from stepgraph.runtime.errors import KernelSelfTestError, RankError
from stepgraph.runtime.kernels.ops.collectives import largest_of_ranks
from torch import Tensor

from ..rigs.forked_ranks import ForkedGroup, ForkedRanks, run_ranks
from ..rigs.sharding_rig import reference_largest, reference_sum

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(nan=7.5), b.nan_to_num(nan=7.5))


def random_operation(
    draw: random.Random, group: SharedMemoryCollectives
) -> tuple[Callable[[], Any], Any]:
    """An operation of this rank, and its expected result; draws the parts of all ranks."""
    generator = torch.Generator().manual_seed(draw.getrandbits(60))
    dtype, kind = draw.choice(DTYPES), draw.choice(("sum", "sum", "gather", "largest"))
    rows = draw.choice((1, 2, 7, 33, 150))
    if kind == "sum":
        shape = (rows, draw.choice((1, 15, 64, 577, 1024)))
        parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(group.ranks)]
        if draw.random() < 0.2:
            parts[draw.randrange(group.ranks)][0, 0] = draw.choice((torch.nan, torch.inf))
        own = parts[group.rank]
        if draw.random() < 0.3:
            own = own.t().contiguous().t()
        return lambda: group.all_reduce(own), reference_sum(parts)
    if kind == "gather":
        sizes = [draw.choice((0, 1, 5, 300, 2001)) for _ in range(group.ranks)]
        parts = [torch.randn(rows, n, generator=generator).to(dtype) for n in sizes]
        return lambda: group.gather(parts[group.rank], sizes), torch.cat(parts, dim=1)
    shape = (group.ranks, rows)
    values = torch.randint(-3, 3, shape, generator=generator).float()
    values[torch.rand(shape, generator=generator) < 0.1] = torch.nan
    ids = torch.randint(0, 1 << 40, shape, generator=generator)
    expected = reference_largest(list(values), list(ids))
    return lambda: largest_of_ranks(group, values[group.rank], ids[group.rank]), expected


def run_random_operations(seed: int, count: int, group: SharedMemoryCollectives) -> list[int]:
    """Check random operations with random delays; return hashes of the bits of their results."""
    draw, delays = random.Random(seed), random.Random(f"{seed} {group.rank}")
    hashes = []
    for index in range(count):
        run, expected = random_operation(draw, group)
        if delays.random() < 0.05:
            time.sleep(delays.choice((0.0001, 0.001, 0.005)))
        result = run()
        got, due = (x if isinstance(x, tuple) else (x,) for x in (result, expected))
        for x, y in zip(got, due, strict=True):
            assert same(x, y), (index, x, y)
            hashes.append(hash(bytes(x.contiguous().view(torch.uint8).numpy())))
    return hashes


@pytest.mark.parametrize(
    ("ranks", "threads", "part_bytes"),
    [(2, 1, 1 << 16), (3, 1, 4096), (4, 1, 1 << 16), (2, 3, 1 << 20)],
)
def test_random_operations_equal_the_reference_on_all_ranks(
    ranks: int, threads: int, part_bytes: int
) -> None:
    results = run_ranks(
        ranks,
        lambda group: run_random_operations(ranks + threads, 150, group),
        part_bytes=part_bytes,
        threads=threads,
    )
    assert all(result == results[0] for result in results)


def attempts(group: SharedMemoryCollectives) -> tuple[str, float, float]:
    """Sum until it fails; return the error, and the seconds of that and of one more attempt."""
    x = torch.ones(4, 64)
    while True:
        began = time.monotonic()
        try:
            group.all_reduce(x)
        except RankError as error:
            failed = time.monotonic()
            with pytest.raises(RankError):
                group.all_reduce(x)
            return str(error), failed - began, time.monotonic() - failed


def test_a_rank_that_stops_ends_the_others_in_time() -> None:
    group = ForkedGroup(3)
    group.start(attempts, timeout=2.0)
    time.sleep(0.3)
    os.kill(group.processes[1].pid, signal.SIGSTOP)
    for number in (0, 2):
        assert group._results[number].poll(30)
    os.kill(group.processes[1].pid, signal.SIGCONT)
    first, stopped, last = group.results()
    for text, seconds, again in (first, last):
        assert "rank 1 did not take part" in text or "aborted the group" in text
        assert seconds < 20.0
        assert again < 1.0, "of the 2 s that a call may wait"
    assert any("rank 1 did not take part" in text for text, *_ in (first, last))
    assert group.abort_word() in (1, 3)
    assert "aborted the group" in stopped[0], "which it finds when it goes on"


@pytest.mark.slow
def test_a_group_that_is_stopped_and_continued_goes_on() -> None:
    """The rank that waits goes on first."""

    def body(group: SharedMemoryCollectives) -> int:
        for index in range(3):
            if index == 1 and group.rank == 0:
                time.sleep(0.5)
            group.all_reduce(torch.ones(4, 64))
        return index

    group = ForkedGroup(2)
    group.start(body, timeout=4.0)
    time.sleep(0.3)
    for process in group.processes:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(5.0)
    for process in reversed(group.processes):
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)
    assert group.results() == [2, 2]


def test_a_rank_with_another_operation_ends_the_group() -> None:
    def body(group: SharedMemoryCollectives) -> str:
        group.all_reduce(torch.ones(5))
        try:
            while True:
                group.all_reduce(torch.ones(8 if group.rank == 2 else 9))
        except RankError as error:
            return str(error)

    errors = run_ranks(3, body)
    assert any("runs another operation" in error for error in errors)


def test_an_abort_from_outside_wakes_a_waiting_rank() -> None:
    group = ForkedGroup(2)
    group.start(lambda own: own.rank == 1 or attempts(own), timeout=60.0)
    time.sleep(0.3)
    began = time.monotonic()
    group.memory[:4] = (2).to_bytes(4, "little")
    (text, *_), _ = group.results()
    assert "rank 1 aborted the group" in text
    assert time.monotonic() - began < 30.0, "of the 60 s that a call may wait"


# Process groups: here gloo is NCCL ----------------------------------------------------------------


CPU = torch.device("cpu")


def on_ranks(body: Callable[[RankGroup], Any]) -> list[Any]:
    """Return what two ranks return."""
    links = Link.pair()

    def run(rank: int) -> Any:
        group = RankGroup(rank, 2, [links[rank]])
        found = body(group)
        group.exchange(None)
        group.close()
        return found

    ranks = ForkedRanks()
    ranks.fork(2, run)
    return ranks.returned()


def test_process_group_is_not_the_default_one() -> None:
    def body(group: RankGroup) -> Any:
        for _ in range(2):  # two engines, one after the other
            collectives = open_nccl(group, CPU, 60.0)
            total = collectives.all_reduce(torch.full((1, 3), 1.0 + group.rank)).tolist()
            initialised = dist.is_initialized()
            collectives.close()
            collectives.close()
        return total, initialised

    assert on_ranks(body) == [([[3.0] * 3], False)] * 2


def test_process_group_needs_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: RankGroup) -> Any:
        if group.rank == 1:
            monkeypatch.setattr(dist, "ProcessGroupGloo", None)
        with pytest.raises(KernelSelfTestError) as found:
            open_nccl(group, CPU, 0.3)
        return str(found.value)

    message, same = on_ranks(body)
    assert message == same
    assert "tensor_parallel=2" in message
    assert "rank 1: TypeError" in message
