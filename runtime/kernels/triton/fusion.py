"""Which kernels a layer of a plan is: neighbouring operations that one kernel computes.

Also the operations and traits that the kernels support. Knows shapes and no tensors; imports no
triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ops.activation import Activate
from ..ops.attention import Attend
from ..ops.experts import Experts
from ..ops.layer_plan import LayerPlan, ModelPlan
from ..ops.linear import Linear
from ..ops.norms import JoinNorms, Norm, QKNorm
from ..ops.operation import Known
from ..ops.rotation import Rotate
from ..ops.stack import (
    KNOWN_TO_STACK,
    AttentionBlock,
    Block,
    GatedBlock,
    blocks_obstacle,
    blocks_of,
)
from .linear import FEW_ROWS

SUPPORTED: Known = {
    **{kind: traits for kind, traits in KNOWN_TO_STACK.items() if kind is not JoinNorms},
    QKNorm: frozenset({"offset", "all_heads"}),
}
"""Traits of each kind of operation."""

_WORTH_BYTES = 16 << 20
"""Bytes that an H100 or H200 reads in 4 to 5 µs, about the time of three kernels: assumed."""


@dataclass(frozen=True)
class NormLinear:
    """A linear layer over the hidden states, which are normed first if the layer has a norm."""

    norm: Norm | None
    linear: Linear
    activate: Activate | None = None
    """A gated activation of the result; None: there is none."""

    @property
    def name(self) -> str:
        """The kernel's, a field of `Operations`."""
        return "norm_linear" if self.activate is None else "gate_up"

    @property
    def features(self) -> int:
        """Features of the result."""
        return self.linear.out_features if self.activate is None else self.activate.features


@dataclass(frozen=True)
class Attention:
    """Norms of queries and keys, rotation, write to the cache and attention."""

    qk_norm: QKNorm | None
    rotate: Rotate
    attend: Attend
    name: str = "decode_attention"


@dataclass(frozen=True)
class ResidualLinear:
    """A linear layer whose result times `scale` is added to the hidden states, normed or not."""

    linear: Linear
    norm: Norm | None
    scale: float = 1.0
    name: str = "down"
    sums: bool = False
    """Ranks add their results first, by a kernel of its own with the residual and the norms."""


@dataclass(frozen=True)
class Activation:
    """A gated activation that is not part of a product."""

    activate: Activate
    name: str = "activate"


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts of the hidden states, added to them, with norms before or after."""

    norm: Norm | None
    experts: Experts
    output_norm: Norm | None
    scale: float = 1.0
    name: str = "experts"
    sums: bool = False
    """See `ResidualLinear`, as for `scale`."""

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of its kernels, fields of `Operations`, in order."""
        norms = self.norm is not None or self.output_norm is not None
        return ("norm_rows", "route", "experts") if norms else ("route", "experts")


Fused = NormLinear | Attention | ResidualLinear | Activation | Mixture


def fuse(layer: LayerPlan) -> tuple[Fused, ...]:
    """Return the kernels of a layer in order, as decode steps of few rows run them.

    The product after attention is called `output`. Raises ValueError as `blocks_of`.
    """
    return tuple(kernel for block in blocks_of(layer) for kernel in _kernels(block))


def _kernels(block: Block) -> Iterator[Fused]:
    ends, sums = (block.output_norm, block.residual.scale), block.sum is not None
    if isinstance(block, AttentionBlock):
        assert not isinstance(block.input_norm, JoinNorms), "not in `SUPPORTED`"
        yield NormLinear(block.input_norm, block.qkv)
        yield Attention(block.qk_norm, block.rotate, block.attend)
        yield ResidualLinear(block.output, *ends, name="output", sums=sums)
    elif isinstance(block, GatedBlock):
        clamped = bool(block.activate.traits)
        yield NormLinear(block.norm, block.gate_up, None if clamped else block.activate)
        if clamped:  # which is a kernel of its own
            yield Activation(block.activate)
        yield ResidualLinear(block.down, *ends, sums=sums)
    else:
        yield Mixture(block.norm, block.experts, *ends, sums=sums)


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
