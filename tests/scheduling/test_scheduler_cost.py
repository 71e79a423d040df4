"""What planning costs does not grow: not with the queue, not with the cache, not with time."""

from __future__ import annotations

import gc
import sys
from collections import deque
from types import FrameType

import pytest
from stepgraph.runtime.scheduling.plan import StepPlan

from ..rigs.scheduler_rig import Rig


def costs_of(rig: Rig, steps: int) -> list[int]:
    """Calls that the plans of the next steps make, of Python and of C, which do not depend on the
    machine. Without the garbage collector: its callbacks and the finalizers of what other tests
    left would be counted too."""
    costs: list[int] = []
    plan = rig.scheduler.plan

    def profile(frame: FrameType, event: str, arg: object) -> None:
        costs[-1] += event in ("call", "c_call")

    def counted() -> StepPlan:
        costs.append(0)
        before = sys.getprofile()
        gc.disable()
        sys.setprofile(profile)
        try:
            return plan()
        finally:
            sys.setprofile(before)
            gc.enable()

    rig.scheduler.plan = counted  # type: ignore[method-assign]
    for _ in range(steps):
        rig.loop.step()
    del rig.scheduler.plan
    return costs


def crowded(queued: int, host_blocks: int) -> list[int]:
    """Admission, forks, decoding, blocks run out, preemption, admission again."""
    rig = Rig(
        windows=(None, 5),
        max_num_seqs=4,
        usable_blocks=24,
        host_blocks=host_blocks,
        block_size=2,
        prefix=True,
    )
    for _ in range(queued):
        rig.loop.requests.add(rig.group(3, max_tokens=30, n=2))
    costs = costs_of(rig, 20)
    assert rig.loop.counts["preemptions"] > 0
    return costs


@pytest.mark.parametrize("host_blocks", [0, 20])
def test_planning_costs_the_same_however_many_wait(host_blocks: int) -> None:
    assert sum(crowded(5_000, host_blocks)) <= 1.05 * sum(crowded(10, host_blocks))


def test_planning_costs_the_same_however_many_are_paused() -> None:
    def costs(num_paused: int) -> list[int]:
        rig = Rig(max_num_seqs=4, block_size=16, prefix=True)
        paused = [rig.group(3) for _ in range(num_paused)]
        for group in paused:
            rig.loop.requests.add(group)
            rig.loop.requests.set_paused(group, True)
        rig.add(2), rig.add(2)
        return costs_of(rig, 12)

    assert costs(1) == costs(1_000)


def test_a_decode_step_costs_the_same_however_long_the_sequences_are() -> None:
    """Where no block is taken or given back: all else would be paid for by every token."""
    rig = Rig(windows=(None, 7), max_num_seqs=2, block_size=16, prefix=True)
    rig.add(2), rig.add(2)
    rig.step(2)  # who joins those that decode is looked at once
    costs = costs_of(rig, 12)
    assert len(set(costs)) == 1
    rig.step(4)
    assert costs_of(rig, 3) == costs[:3]


def sizes_of(rig: Rig) -> dict[str, int]:
    """Elements of every container of the scheduler, the loop and the cache."""
    owners = {
        "scheduler": rig.scheduler,
        "running": rig.scheduler._running,
        "publishing": rig.scheduler.publisher,
        "loop": rig.loop,
        "requests": rig.loop.requests,
        "cache": rig.cache,
        "pool": rig.cache.pool,
        "host": rig.cache.host,
    }
    return {
        f"{owner}.{name}": len(value)
        for owner, holder in owners.items()
        for name, value in vars(holder).items()
        if isinstance(value, list | dict | set | tuple | deque)
    }


@pytest.mark.parametrize("host_blocks", [0, 16])
def test_nothing_grows_with_time(host_blocks: int) -> None:
    rig = Rig(
        windows=(None, 3),
        usable_blocks=20,
        host_blocks=host_blocks,
        block_size=2,
        prefix=True,
    )
    sizes = []
    for _ in range(6):
        for index in range(12):
            rig.add_group(3 + index % 5, max_tokens=9, n=1 + index % 2, shared=index % 4)
        rig.drain()
        sizes.append(sizes_of(rig))
    assert sizes[0] == sizes[-1]
    assert rig.loop.counts["preemptions"] > 10
    assert sum(map(len, rig.cache.pool._block_of)) <= rig.cache.usable_blocks
