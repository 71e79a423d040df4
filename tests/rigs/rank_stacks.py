"""The C++ stack of one rank of a tensor-parallel group, compared with the modules of all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from stepgraph.cache.spec import group_layers
from stepgraph.runtime.distributed.shared_memory_collectives import SharedMemoryCollectives
from stepgraph.runtime.kernels import RaggedBatch, select_kernels
from stepgraph.runtime.kernels.ops.layer_plan import ModelPlan
from stepgraph.runtime.kernels.ops.parameter import Parameter
from stepgraph.runtime.models.sharding import shard_plan
from torch import Tensor

from .stack_plans import PlanDecoder, PlanRig
from .stack_rig import CPU


def part_of(parameter: Parameter, whole: Tensor) -> Tensor:
    """The values of a rank's parameter, of those of the whole model."""
    if parameter.sources[0].name is None:
        return torch.zeros_like(whole)
    if parameter.cut is None:
        return whole
    return parameter.cut.part_of(whole.reshape(parameter.cut.whole)).reshape(parameter.shape)


def rank_kv_heads(plan: ModelPlan, rank: int, ranks: int) -> slice:
    """The key/value heads of the whole model that a rank holds."""
    whole = plan.attend.kv_heads
    own = shard_plan(plan, rank, ranks).attend.kv_heads
    first = rank * own if own * ranks == whole else whole * rank // ranks
    return slice(first, first + own)


class RankRig:
    """Steps of a whole model in plain PyTorch, and of a rank's stack over its part of the cache."""

    def __init__(self, whole: PlanRig, group: SharedMemoryCollectives) -> None:
        self.whole, self.dtype, self.storage = whole, whole.dtype, whole.storage
        plan = shard_plan(whole.plan, group.rank, group.ranks)
        self.heads = rank_kv_heads(whole.plan, group.rank, group.ranks)
        kernels = replace(select_kernels(CPU, "compile", self.dtype), collectives=group)
        groups = group_layers(plan.states)
        self.decoder = PlanDecoder(plan, kernels, self.dtype, groups, self.storage)
        own = [p for p in plan.parameters() if p != plan.embedding]
        self.decoder.store((p.name, part_of(p, whole.values[p.name])) for p in own)
        assert self.decoder.stack is not None

    def step(
        self, inputs: RaggedBatch, x_TD: Tensor, *, stacked: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Hidden states, and this rank's part of the arena afterwards."""
        if not stacked:
            out, arena = self.whole.step(inputs, x_TD, stacked=False)
            return out, arena[:, :, :, self.heads]
        arena = self.whole.arena[:, :, :, self.heads].contiguous()
        with torch.no_grad():
            return self.decoder.decode(x_TD, arena, inputs), arena


def bits(x: Tensor) -> Any:
    """What equals that of another tensor exactly where all bits are the same."""
    return bytes(x.contiguous().view(torch.uint8).numpy())
