"""What one rank of a tensor-parallel group holds, as text."""

from __future__ import annotations

import torch

from ...cache.memory.memory_plan import format_bytes
from ..kernels import Kernels
from ..kernels.ops.layer_plan import ModelPlan
from ..models.layout import parameter_bytes

__all__ = ["describe_shard"]


def describe_shard(
    whole: ModelPlan, plan: ModelPlan, kernels: Kernels, dtype: torch.dtype
) -> list[str]:
    """Return lines about a rank's plan: what it holds of the model, and what all ranks hold."""
    if plan.shard is None:
        return []
    total = sum(parameter_bytes(p, kernels, dtype) for p in whole.parameters())
    sizes = [(p.cut is None, parameter_bytes(p, kernels, dtype)) for p in plan.parameters()]
    own, replicated = (sum(n for copied, n in sizes if copied is kind) for kind in (False, True))
    attend, all_heads = plan.layers[0].attend, whole.layers[0].attend
    holders = plan.shard.ranks * attend.kv_heads // all_heads.kv_heads
    cache = "a latent of all heads" if attend.shared_values else "key/value heads"
    held = f"{attend.kv_heads} of {all_heads.kv_heads} {cache}"
    return [
        f"rank {plan.shard.rank} of {plan.shard.ranks}: {attend.heads} of {all_heads.heads} query"
        f" heads, {len(plan.shard.vocab):,} of {plan.vocab_size:,} tokens of the vocabulary",
        f"weights: {format_bytes(own)} of its own, {format_bytes(replicated)} replicated on every"
        f" rank, of {format_bytes(total)} of the model",
        f"cache: {held}" + (f", replicated on {holders} ranks" if holders > 1 else ""),
    ]
