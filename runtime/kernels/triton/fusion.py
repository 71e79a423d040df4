"""Which kernels a layer of a plan is: neighbouring operations that one kernel computes.

Also the operations and traits that the kernels support. Knows shapes and no tensors; imports no
triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..ops.activation import Activate, GateOutput
from ..ops.causal_conv import CausalConv
from ..ops.delta_rule import DeltaRule
from ..ops.experts import Experts
from ..ops.layer_plan import LayerPlan, ModelPlan
from ..ops.norms import GatedNorm, JoinNorms, QKNorm
from ..ops.operation import Add, Known, Operation
from ..ops.stack import (
    KNOWN_TO_STACK,
    AttentionBlock,
    Block,
    ExpertsBlock,
    GatedBlock,
    blocks_obstacle,
    blocks_of,
)
from ..ops.state_space import StateSpace
from .linear import FEW_ROWS

_OTHERS = (JoinNorms, Add, GateOutput, CausalConv, DeltaRule, StateSpace, GatedNorm)

SUPPORTED: Known = {
    **{
        kind: traits - {"reads", "writes"}
        for kind, traits in KNOWN_TO_STACK.items()
        if kind not in _OTHERS
    },
    QKNorm: frozenset({"offset", "all_heads"}),
}
"""Traits of each kind of operation."""

_WORTH_BYTES = 16 << 20
"""Bytes that an H100 or H200 reads in 4 to 5 µs, about the time of three kernels: assumed."""


class Fused(NamedTuple):
    """A kernel of a layer."""

    name: str
    operations: tuple[Operation | None, ...]
    """Whose weights and state it reads; of `Experts`, "route" reads the router's."""


def fuse(layer: LayerPlan) -> tuple[Fused, ...]:
    """Return the kernels of a layer in order, as decode steps of few rows run them.

    Raises ValueError as `blocks_of`.
    """
    return tuple(kernel for block in blocks_of(layer) for kernel in _kernels(block))


def _kernels(block: Block) -> Iterator[Fused]:
    if isinstance(block, AttentionBlock):
        yield Fused("norm_linear", (block.input_norm, block.qkv))
        yield Fused("decode_attention", (block.qk_norm, block.rotate, block.attend))
        yield Fused("output", (block.output, block.output_norm))
    elif isinstance(block, GatedBlock):
        clamped = is_clamped(block.activate)
        yield Fused("norm_linear" if clamped else "gate_up", (block.norm, block.gate_up))
        if clamped:
            yield Fused("activate", (block.activate,))
        yield Fused("down", (block.down, block.output_norm))
    else:
        assert isinstance(block, ExpertsBlock), "not in `SUPPORTED`"
        if block.norm is not None or block.output_norm is not None:
            yield Fused("norm_rows", (block.norm,))
        yield Fused("route", (block.experts,))
        yield Fused("experts", (block.experts, block.output_norm))


def is_clamped(activate: Activate) -> bool:
    """Return whether an activation is a kernel of its own, after a product."""
    return bool(activate.traits)


def fusion_obstacle(plan: ModelPlan) -> str | None:
    """Return what keeps the layers of a model from the kernels of this package, or None."""
    if (obstacle := blocks_obstacle(plan, SUPPORTED)) is not None:
        return obstacle
    blocks = (block for layer in set(plan.layers) for block in blocks_of(layer))
    scaled = any(b.output_norm is not None and b.residual.scale != 1.0 for b in blocks)
    return "residual with scale after a norm" if scaled else None


def runs_by_pair(experts: Experts, tokens: int, expert_bytes: float) -> bool:
    """Return whether each pair of a token and an expert is computed by itself.

    Tokens of a step that share an expert then read its weights (`expert_bytes`) once each. Blocks
    of pairs read them once, in three kernels more.
    """
    repeated = tokens * experts.per_token - experts.expected_experts(tokens)
    return tokens <= FEW_ROWS and repeated * expert_bytes <= _WORTH_BYTES
