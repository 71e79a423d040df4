"""The collectives of ranks of GPUs over a process group: here gloo is NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stepgraph.runtime.distributed.rank_group import Link, RankGroup
from stepgraph.runtime.engine.rank_start import open_nccl
from stepgraph.runtime.errors import KernelSelfTestError

from ..rigs.forked_ranks import ForkedRanks

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
