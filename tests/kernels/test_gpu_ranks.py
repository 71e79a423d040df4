"""Steps of tensor-parallel ranks on the kernels for GPUs, interpreted in a process each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from stepgraph.runtime.distributed.peer_memory import PeerMemoryCollectives, SumChoice
from stepgraph.runtime.kernels.ops.layer_operations import AllReduce
from stepgraph.runtime.kernels.triton.backend import gpu_kernels
from stepgraph.runtime.kernels.triton.fusion import (
    Mixture,
    ResidualLinear,
    fuse,
    fusion_obstacle,
)
from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.kernels.triton.paged_attention import triton_paged_attention
from stepgraph.runtime.kernels.triton.peer_exchange import FAILURE, PeerRegions, slot_bytes_for
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.sharding import shard_plan

from ..rigs.peer_rig import run_peers
from ..rigs.sharding_rig import tiny_config, write_checkpoint
from ..rigs.sharding_steps import rank_steps, whole_run

ranks_are_processes = pytest.mark.skipif(not INTERPRETED, reason="on a CPU")
EVERY_SIZE = float("inf")


@pytest.mark.parametrize("variant", ["base", "gemma2", "mixtral", "olmo3", "granite"])
def test_sums_belong_to_the_products_before_them(variant: str) -> None:
    """Each layer of a rank is the same kernels as that of one device, two of which are summed."""
    whole = model_plan(tiny_config(variant, 2))
    if fusion_obstacle(whole) is not None:
        pytest.skip("no kernels for its layers")
    plan = shard_plan(whole, 1, 2)
    if (obstacle := fusion_obstacle(plan)) is not None:
        assert "ranks" in obstacle
        return
    for layer, of_rank in zip(whole.layers, plan.layers, strict=True):
        fused = fuse(of_rank)
        summed = [f for f in fused if isinstance(f, ResidualLinear | Mixture) and f.sums]
        assert len(summed) == sum(isinstance(op, AllReduce) for op in of_rank.operations) == 2
        assert [type(f) for f in fused] == [type(f) for f in fuse(layer)]
        assert [f.name for f in fused] == [f.name for f in fuse(layer)]


def rank_results(variant: str, directory: Path, *, algorithm: Any) -> list[Any]:
    """What two ranks compute, and the fused collectives that they called."""
    config = tiny_config(variant, 2)
    write_checkpoint(config, directory)
    dtype = torch.float32
    sizes = (2, 32, config.hidden_size, config.vocab_size, dtype)

    def body(regions: PeerRegions) -> Any:
        peers = PeerMemoryCollectives(regions, [SumChoice(EVERY_SIZE, algorithm)])
        fused: list[str] = []
        for name in ("sum_rows", "pick_greedy"):
            kept = getattr(peers, name)

            def counted(*given: Any, kept: Any = kept, name: str = name, **more: Any) -> Any:
                fused.append(name)
                return kept(*given, **more)

            setattr(peers, name, counted)
        kernels = dataclasses.replace(gpu_kernels("model"), attention=triton_paged_attention)
        steps = rank_steps(config, directory, peers, kernels)
        assert steps.decoder.stack is not None
        with torch.no_grad():
            run = steps.run(steps=1)
        assert regions.control[FAILURE] == 0
        logits = [logits.tolist() for logits in run.logits]
        return logits, run.tokens.tolist(), fused

    return run_peers(2, body, slot_bytes=slot_bytes_for(*sizes))


SLOW = pytest.mark.slow


@ranks_are_processes
@pytest.mark.parametrize(
    ("variant", "algorithm"),
    [
        ("wide", "one_shot"),  # of one layer
        pytest.param("base", "one_shot", marks=SLOW),
        pytest.param("base", "two_shot", marks=SLOW),
        pytest.param("gemma2", "one_shot", marks=SLOW),
        pytest.param("gemma2", "two_shot", marks=SLOW),
        pytest.param("granite", "two_shot", marks=SLOW),
        pytest.param("mixtral", "one_shot", marks=SLOW),
        pytest.param("granite", "one_shot", marks=SLOW),
    ],
)
def test_steps_of_ranks(variant: str, algorithm: str, tmp_path: Path) -> None:
    """Prefill and decode steps: tokens and logits of the whole model."""
    results = rank_results(variant, tmp_path, algorithm=algorithm)
    config = tiny_config(variant, 2)
    expected = whole_run(config, tmp_path)
    tokens = expected.tokens[:2]
    for logits, found, fused in results:
        assert torch.equal(torch.tensor(found), tokens)
        torch.testing.assert_close(torch.tensor(logits[0]), expected.logits[0], rtol=0, atol=2e-4)
        assert fused.count("pick_greedy") == 1
        sums = 2 * config.num_layers * 2 if algorithm == "one_shot" else 0
        assert fused.count("sum_rows") == sums
    assert results[0][0] == results[1][0], "the same bits"
