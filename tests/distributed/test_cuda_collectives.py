"""How ranks of GPUs choose their collectives: here gloo is NCCL, and kernels are interpreted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from stepgraph.runtime.distributed.peer_memory import PeerMemoryCollectives, SumChoice
from stepgraph.runtime.distributed.process_group import OwnProcessGroup, ProcessGroupCollectives
from stepgraph.runtime.distributed.rank_group import RankGroup
from stepgraph.runtime.distributed.segment import SharedSegment, shared_memory
from stepgraph.runtime.engine import rank_start
from stepgraph.runtime.engine.collectives_self_test import CollectiveCases
from stepgraph.runtime.engine.rank_start import (
    ChosenCollectives,
    choose_collectives,
    choose_sums,
    failed_candidates,
)
from stepgraph.runtime.errors import KernelSelfTestError
from stepgraph.runtime.kernels import select_kernels
from stepgraph.runtime.kernels.result_check import Fallback
from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.kernels.triton.peer_exchange import ABORT, FAILURE, PeerRegions
from stepgraph.runtime.tools import verify_collectives

from ..rigs.peer_rig import PeerRanks, run_peers
from ..rigs.sharding_rig import tiny_config

CPU = torch.device("cpu")
CASES = CollectiveCases((1, 3), 40, (6, 5), torch.bfloat16, CPU, seed=3)
EVERY_SIZE = float("inf")
ranks_are_processes = pytest.mark.skipif(not INTERPRETED, reason="on a CPU")


def on_ranks(body: Callable[[RankGroup, PeerMemoryCollectives], Any]) -> list[Any]:
    """Return what two ranks return, which have a group and peer memory."""
    memory, _ = shared_memory(SharedSegment.nbytes_for(2))

    def run(regions: PeerRegions) -> Any:
        group = RankGroup(memory, regions.rank, 2)
        peers = PeerMemoryCollectives(regions, [SumChoice(EVERY_SIZE, "one_shot")])
        found = body(group, peers)
        group.exchange(None)
        group.watch.stop()
        return found

    return run_peers(2, run)


class Wrong(PeerMemoryCollectives):
    """One rank adds something else."""

    def all_reduce(self, x_BF: torch.Tensor) -> torch.Tensor:
        out = super().all_reduce(x_BF)
        return out + 1 if self.rank == 1 else out


class Broken(PeerMemoryCollectives):
    """The kernels of one rank do not compile; the other one waits in vain."""

    def all_reduce(self, x_BF: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            raise ValueError("no such instruction")
        self.timeout_seconds = 1e-9
        return super().all_reduce(x_BF)


@ranks_are_processes
def test_every_rank_finds_the_same_errors() -> None:
    def body(group: RankGroup, peers: PeerMemoryCollectives) -> Any:
        sums = peers.sums
        candidates = {
            "one_shot": peers,
            "broken": Broken(peers.regions, sums),
            "two_shot": peers.with_sums([SumChoice(EVERY_SIZE, "two_shot")]),
            "wrong": Wrong(peers.regions, sums),
        }
        peers.timeout_seconds = 60.0
        errors = failed_candidates(
            group, {"one_shot": peers, "broken": candidates["broken"]}, CASES
        )
        peers.timeout_seconds = 60.0
        return errors | failed_candidates(
            group, {n: candidates[n] for n in ("two_shot", "wrong")}, CASES
        )

    errors, same = on_ranks(body)
    assert errors == same
    assert set(errors) == {"broken", "wrong"}
    assert "rank 1: ValueError: no such instruction" in errors["broken"]
    assert "rank 0: rank 1 did not take part" in errors["broken"]
    assert errors["wrong"].startswith("rank 1: all_reduce [1, 40]")


@ranks_are_processes
def test_a_process_group_that_is_not_the_default_one() -> None:
    def body(group: RankGroup, peers: PeerMemoryCollectives) -> Any:
        for _ in range(2):  # two engines, one after the other
            processes = OwnProcessGroup(group, CPU, 60.0)
            collectives = ProcessGroupCollectives(processes.process_group, processes.close)
            errors = failed_candidates(group, {"gloo": collectives}, CASES)
            initialised = dist.is_initialized()
            collectives.close()
            collectives.close()
        return errors, initialised

    assert on_ranks(body) == [({}, False)] * 2


@ranks_are_processes
def test_no_group_without_one_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: RankGroup, peers: PeerMemoryCollectives) -> Any:
        if group.rank == 1:
            monkeypatch.setattr(dist, "ProcessGroupGloo", None)
        with pytest.raises(RuntimeError) as found:
            OwnProcessGroup(group, CPU, 1.0)
        return str(found.value)

    message, same = on_ranks(body)
    assert message == same
    assert "rank 1: TypeError" in message


TIMES = {
    "one_shot": {80: 5.0, 240: 9.0},
    "two_shot": {80: 7.0, 240: 8.0},
    "NCCL": {80: 20.0, 240: 21.0},
}


def chosen(monkeypatch: pytest.MonkeyPatch, times: Any, opens: bool = True) -> list[Any]:
    """What both ranks choose, given the times of the candidates."""

    def body(group: RankGroup, peers: PeerMemoryCollectives) -> Any:
        names: dict[Any, str] = {}

        def algorithms(found: Any, device: torch.device) -> Any:
            made = original(found, device)
            names.update({collectives: name for name, collectives in made.items()})
            return made

        def open_peers(*arguments: Any) -> Any:
            if opens:
                return peers
            arguments[-1]["peer memory"] = "rank 0: device 0 cannot access device 1"
            return None

        original = rank_start._algorithms
        monkeypatch.setattr(rank_start, "_algorithms", algorithms)
        monkeypatch.setattr(rank_start, "_open_peers", open_peers)
        monkeypatch.setattr(
            rank_start, "measured", lambda group, c, cases: times[names.get(c, "NCCL")]
        )
        found = choose_collectives(group, CASES, 4096, 7.0)
        x = torch.full((1, 3), 1.0 + group.rank)
        total = found.collectives.all_reduce(x).tolist()
        sums = getattr(found.collectives, "sums", None)
        timeout = getattr(found.collectives, "timeout_seconds", None)
        return total, sums, timeout, found.report, found.fallback

    one, other = on_ranks(body)
    assert one == other
    assert one[0] == [[3.0] * 3]
    return list(one[1:])


@ranks_are_processes
def test_the_fastest_algorithm_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, timeout, report, fallback = chosen(monkeypatch, TIMES)
    assert sums == tuple(choose_sums({n: TIMES[n] for n in ("one_shot", "two_shot")}))
    assert [(round(c.most_bytes, 1), c.algorithm) for c in sums] == [
        (138.6, "one_shot"),
        (EVERY_SIZE, "two_shot"),
    ]
    assert timeout == 7.0
    assert report["us"] == TIMES
    assert report["used"].startswith("peer memory: one_shot")
    assert fallback is None


@ranks_are_processes
@pytest.mark.parametrize("opens", [True, False])
def test_nccl_replaces_the_kernels(opens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is faster for one row, and where there is no peer memory."""
    times = TIMES | {"NCCL": {80: 4.0, 240: 100.0}}
    sums, _, report, fallback = chosen(monkeypatch, times, opens)
    assert sums is None
    assert report["used"] == "NCCL"
    if opens:
        assert fallback.error == "NCCL is faster: 4 µs and 5 µs for 80 bytes"
    else:
        assert "device 0 cannot access device 1" in fallback.error


@ranks_are_processes
def test_no_collectives_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: RankGroup, peers: PeerMemoryCollectives) -> Any:
        monkeypatch.setattr(dist, "ProcessGroupGloo", None)  # on both
        with pytest.raises(KernelSelfTestError, match="no collective operations work") as found:
            choose_collectives(group, CASES, 4096, 7.0)
        return str(found.value)

    messages = on_ranks(body)
    assert messages[0] == messages[1]
    assert "tensor_parallel=2" in messages[0]


def test_what_the_host_and_the_kernels_tell_each_other() -> None:
    regions = PeerRanks(3).of_rank(1, 2.5)
    peers = PeerMemoryCollectives(regions, [SumChoice(EVERY_SIZE, "one_shot")])
    assert peers.timeout_seconds == 2.5
    assert peers.failure is None
    regions.control[FAILURE] = 3
    late = "rank 2 did not take part in a collective operation within 2.5 s"
    assert str(peers.failure) == late
    assert peers.failure is not None
    assert (peers.failure.rank, peers.failure.ended_before) == (2, False)
    regions.control[FAILURE] = -1
    assert peers.failure.ended_before
    peers.abort()
    assert regions.control[ABORT] == 1


@ranks_are_processes
@pytest.mark.slow
def test_operators_in_compiled_code() -> None:
    """They are called where the code calls them, also where a result is unused or the same."""

    def body(group: RankGroup, peers: PeerMemoryCollectives) -> Any:
        calls: list[str] = []
        for name in ("all_reduce", "gather", "largest"):
            kept = getattr(peers, name)

            def counted(*given: Any, kept: Any = kept, name: str = name) -> Any:
                if not torch.compiler.is_compiling():
                    calls.append(name)
                return kept(*given)

            setattr(peers, name, counted)

        def step(x: torch.Tensor) -> torch.Tensor:
            peers.all_reduce(x)
            ids = torch.arange(len(x))
            best, _ = peers.largest(x.float().amax(1), ids)
            return peers.all_reduce(x) + peers.gather(x, [4, 4])[:, :4] + best[:, None]

        x = torch.full((2, 4), 1.0 + group.rank)
        return torch.compile(step)(x).tolist(), calls

    for out, calls in on_ranks(body):
        assert out == [[3.0 + 1.0 + 2.0] * 4] * 2
        assert calls == ["all_reduce", "largest", "all_reduce", "gather"]


@ranks_are_processes
def test_what_is_verified_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of `verify_collectives` after the choice, without graphs."""

    def body(group: RankGroup, peers: PeerMemoryCollectives) -> Any:
        def once(group: RankGroup, run: Any, written: Any) -> Any:
            result = run()
            return result, 0, sum(int(t.view(torch.uint8).sum()) for t in written)

        monkeypatch.setattr(verify_collectives, "_replayed", once)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
        cases = dataclasses.replace(CASES, hidden_size=4096)
        found = [verify_collectives._fused(group, peers, cases, 2)]
        found.append(verify_collectives._absent_rank(group, peers, cases))
        return found

    found, same = on_ranks(body)
    assert found == same
    assert [entry["error"] for entry in found] == [None, None]


@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_kernels_on_cuda_have_the_chosen_collectives(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tested are the sizes of the model; `native` does not take NCCL."""
    given: list[Any] = []
    chosen = ChosenCollectives(Nothing(), {"used": "NCCL"}, Fallback("collectives", "2", "why"))

    def choose(group: Any, *arguments: Any) -> ChosenCollectives:
        given.extend(arguments)
        return chosen

    monkeypatch.setattr(rank_start, "choose_collectives", choose)
    monkeypatch.setattr(rank_start, "on_device", lambda device: nullcontext())
    model = dataclasses.replace(tiny_config("base", 2), shard=(1, 2))
    group: Any = SimpleNamespace(
        ranks=2,
        rank=1,
        exchange=lambda value: [value, value],
        watch=SimpleNamespace(on_abort=None),
    )
    config: Any = SimpleNamespace(
        device=torch.device("cuda", 1),
        dtype=torch.bfloat16,
        prefill_chunk=100,
        user=SimpleNamespace(kernels=kernels),
    )
    plain = select_kernels(CPU, "eager", torch.float32)
    if kernels == "native":
        with pytest.raises(KernelSelfTestError, match="kernels='native', and NCCL would replace"):
            rank_start.with_collectives(plain, group, model, config)
        return
    found, fallback = rank_start.with_collectives(plain, group, model, config)
    assert found.collectives is chosen.collectives
    assert found.collectives_report == chosen.report
    assert fallback == chosen.fallback
    assert group.watch.on_abort == chosen.collectives.abort
    cases, slot_bytes, _ = given
    assert cases.tokens == (1, 8, 32, 100)
    assert cases.hidden_size == model.hidden_size
    assert sum(cases.vocab_sizes) == model.vocab_size
    assert cases.device == config.device
    assert slot_bytes % 8192 == 0


class Nothing:
    """Collectives whose operations are never called."""

    rank, ranks = 1, 2

    def abort(self) -> None:
        pass

    all_reduce = gather = largest = close = None
