"""The collectives of ranks of GPUs over a process group: here gloo is NCCL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stepgraph.runtime.distributed.process_group import OwnProcessGroup, ProcessGroupCollectives
from stepgraph.runtime.distributed.rank_group import RankGroup
from stepgraph.runtime.distributed.segment import SharedSegment, shared_memory
from stepgraph.runtime.engine import rank_start
from stepgraph.runtime.engine.collectives_self_test import CollectiveCases
from stepgraph.runtime.engine.rank_start import failed_check, open_nccl
from stepgraph.runtime.errors import KernelSelfTestError
from stepgraph.runtime.kernels import select_kernels

from ..rigs.forked_ranks import ForkedRanks
from ..rigs.sharding_rig import tiny_config

CPU = torch.device("cpu")
CASES = CollectiveCases((1, 3), 40, (6, 5), torch.bfloat16, CPU, seed=3)


def on_ranks(body: Callable[[RankGroup], Any]) -> list[Any]:
    """Return what two ranks return."""
    memory, _ = shared_memory(SharedSegment.nbytes_for(2))

    def run(rank: int) -> Any:
        group = RankGroup(memory, rank, 2)
        found = body(group)
        group.exchange(None)
        group.watch.stop()
        return found

    ranks = ForkedRanks()
    ranks.fork(2, run)
    return ranks.returned()


class Wrong(ProcessGroupCollectives):
    """One rank adds something else."""

    def all_reduce(self, x_BF: torch.Tensor) -> torch.Tensor:
        out = super().all_reduce(x_BF)
        return out + 1 if self.rank == 1 else out


class Differing(ProcessGroupCollectives):
    """Within the tolerance."""

    def all_reduce(self, x_BF: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x_BF) * (1 + 2**-7 * self.rank)


def test_wrong_collectives_are_found_on_all_ranks() -> None:
    def body(group: RankGroup) -> Any:
        processes = OwnProcessGroup(group, CPU, 60.0)
        wrong, differing = (
            failed_check(group, kind(processes.process_group, lambda: None), CASES)
            for kind in (Wrong, Differing)
        )
        processes.close()
        return wrong, differing

    found, same = on_ranks(body)
    assert found == same
    wrong, differing = found
    assert wrong.startswith("rank 1: all_reduce [1, 40]")
    assert differing == "results differ between ranks"


def test_process_group_is_not_the_default_one() -> None:
    def body(group: RankGroup) -> Any:
        for _ in range(2):  # two engines, one after the other
            collectives = open_nccl(group, CASES, 60.0)
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
            open_nccl(group, CASES, 1.0)
        return str(found.value)

    message, same = on_ranks(body)
    assert message == same
    assert "tensor_parallel=2" in message
    assert "rank 1: TypeError" in message


def test_kernels_on_cuda_have_tested_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested are the sizes of the model."""
    given: list[Any] = []
    opened: Any = SimpleNamespace(abort=lambda: None)

    def open_tested(group: Any, *arguments: Any) -> Any:
        given.extend(arguments)
        return opened

    monkeypatch.setattr(rank_start, "open_nccl", open_tested)
    monkeypatch.setattr(rank_start, "on_device", lambda device: nullcontext())
    model = dataclasses.replace(tiny_config("base", 2), shard=(1, 2))
    group: Any = SimpleNamespace(
        ranks=2,
        rank=1,
        exchange=lambda value: [value, value],
        watch=SimpleNamespace(on_abort=None),
    )
    config: Any = SimpleNamespace(
        device=torch.device("cuda", 1), dtype=torch.bfloat16, prefill_chunk=100
    )
    plain = select_kernels(CPU, "eager", torch.float32)
    assert rank_start.with_collectives(plain, group, model, config).collectives is opened
    assert group.watch.on_abort == opened.abort
    cases, _ = given
    assert cases.tokens == (1, 8, 32, 100)
    assert cases.hidden_size == model.hidden_size
    assert sum(cases.vocab_sizes) == model.vocab_size
    assert cases.device == config.device
