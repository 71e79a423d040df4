"""Steps of tensor-parallel ranks on the kernels for GPUs, interpreted in a process each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from stepgraph.runtime.distributed.process_group import ProcessGroupCollectives
from stepgraph.runtime.kernels.ops.operation import AllReduce
from stepgraph.runtime.kernels.triton.backend import gpu_kernels
from stepgraph.runtime.kernels.triton.decode_attention import triton_paged_attention
from stepgraph.runtime.kernels.triton.fusion import fuse, fusion_obstacle
from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.kernels.weights import MODEL
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.sharding import shard_plan

from ..rigs.forked_ranks import ForkedRanks
from ..rigs.sharding_rig import rank_steps, tiny_config, whole_run, write_checkpoint


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
        assert sum(isinstance(op, AllReduce) for op in of_rank.operations) == 2
        assert [f.name for f in fuse(of_rank)] == [f.name for f in fuse(layer)]


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU")
@pytest.mark.parametrize(
    "variant",
    [
        "micro",
        *(
            pytest.param(v, marks=pytest.mark.slow)
            for v in ("base", "gemma2", "granite", "mixtral")
        ),
    ],
)
def test_steps_of_ranks(variant: str, tmp_path: Path) -> None:
    """Prefill and decode steps: tokens and logits of the whole model. Gloo is NCCL."""
    config = tiny_config(variant, 2)
    write_checkpoint(config, tmp_path)
    store = tmp_path / "store"

    def body(rank: int) -> Any:
        dist.init_process_group("gloo", f"file://{store}", world_size=2, rank=rank)
        collectives = ProcessGroupCollectives(dist.group.WORLD)
        kernels = dataclasses.replace(gpu_kernels(MODEL), attention=triton_paged_attention)
        steps = rank_steps(config, tmp_path, collectives, kernels)
        assert steps.decoder.stack is not None
        with torch.no_grad():
            run = steps.run(steps=1)
        collectives.close()
        return [logits.tolist() for logits in run.logits], run.tokens.tolist()

    ranks = ForkedRanks()
    ranks.fork(2, body)
    results = ranks.returned()
    expected = whole_run(config, tmp_path)
    for logits, found in results:
        assert torch.equal(torch.tensor(found), expected.tokens[:2])
        torch.testing.assert_close(torch.tensor(logits[0]), expected.logits[0], rtol=0, atol=2e-4)
    assert results[0][0] == results[1][0], "the same bits"
