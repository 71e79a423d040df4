"""Which kernels a layer of a plan is: neighbouring operations that one kernel computes.

Also the operations and traits that the kernels support. Knows shapes and no tensors; imports no
triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..ops.activation import Activate
from ..ops.attention import Attend
from ..ops.experts import Experts
from ..ops.layer_plan import LayerPlan, ModelPlan
from ..ops.linear import Linear
from ..ops.norms import Norm, QKNorm
from ..ops.operation import AllReduce, Known, Operation, Residual, unsupported
from ..ops.rotation import Rotate
from .linear import FEW_ROWS

_EXPERTS = {"router_bias", "correction", "gate_up_bias", "down_bias", "shared", "scaled_inputs"}
SUPPORTED: Known = {
    Norm: frozenset({"offset"}),
    Linear: frozenset({"bias", "split", "unit"}),
    QKNorm: frozenset({"offset", "all_heads"}),
    Rotate: frozenset(),
    Attend: frozenset({"window", "chunk", "softcap", "sinks", "temperature"}),
    Activate: frozenset({"limit", "alpha", "up_offset"}),
    AllReduce: frozenset(),
    Residual: frozenset({"scale"}),
    Experts: frozenset(_EXPERTS),
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

_PATTERNS: list[tuple[tuple[type[Operation], ...], Callable[..., Fused]]] = [
    ((QKNorm, Rotate, Attend), Attention),
    ((Rotate, Attend), partial(Attention, None)),
    ((Linear, Norm, Residual), lambda linear, norm, residual: ResidualLinear(linear, norm)),
    ((Linear, Residual), lambda linear, residual: ResidualLinear(linear, None, residual.scale)),
    ((Activate,), Activation),
    ((Norm, Linear, Activate), NormLinear),
    ((Norm, Linear), NormLinear),
    ((Norm, Experts, Residual), lambda norm, op, residual: Mixture(norm, op, None, residual.scale)),
    ((Norm, Experts, Norm, Residual), lambda *operations: Mixture(*operations[:3])),
]
"""The first that fits the next operations of a layer is one kernel. Where the value is the hidden
states, the norm that it begins with may be missing: some layers norm only outputs."""


def _taken(kinds: tuple[type[Operation], ...], operations: Sequence[Operation]) -> list[Operation]:
    """Return the next operations if they are of these kinds and one kernel computes them, or [].

    Ranks may sum a product before it is added. A clamped activation is a kernel of its own.
    """
    taken: list[Operation] = []
    left = list(kinds)
    for op in operations:
        if isinstance(op, AllReduce):
            product = bool(taken) and isinstance(taken[-1], Linear | Experts)
            if not product or kinds[-1] is not Residual:
                return []
        elif not isinstance(op, left.pop(0)):
            return []
        clamped = isinstance(op, Activate) and bool(op.traits) and len(kinds) > 1
        if clamped or unsupported(op, SUPPORTED) is not None:
            return []
        taken.append(op)
        if not left:
            return taken
    return []


def fuse(layer: LayerPlan) -> tuple[Fused, ...]:
    """Return the kernels of a layer in order, as decode steps of few rows run them.

    The product after attention is called `output`.

    Raises:
        ValueError: an operation has no kernel where it stands; the message is its title.
    """
    left, found = list(layer.operations), list[Fused]()
    while left:
        of_hidden = not found or isinstance(found[-1], ResidualLinear | Mixture)
        for kinds, make in _PATTERNS:
            taken, missing = _taken(kinds, left), []
            if not taken and of_hidden and kinds[0] is Norm:
                taken, missing = _taken(kinds[1:], left), [None]
            if taken:
                parts = [op for op in taken if not isinstance(op, AllReduce)]
                if kinds[-2:] == (Norm, Residual) and "scale" in parts[-1].traits:
                    raise ValueError("residual with scale after a norm")
                fused = make(*missing, *parts)
                if isinstance(fused, ResidualLinear | Mixture):
                    fused = replace(fused, sums=len(parts) < len(taken))
                break
        else:
            kinds_first = sorted(left, key=lambda op: type(op) in SUPPORTED)
            reasons = (unsupported(op, SUPPORTED) for op in kinds_first)
            raise ValueError(next(filter(None, reasons), left[0].title))
        if isinstance(fused, ResidualLinear) and found and isinstance(found[-1], Attention):
            fused = replace(fused, name="output")
        found.append(fused)
        del left[: len(taken)]
    return tuple(found)


def fusion_obstacle(plan: ModelPlan) -> str | None:
    """Return what keeps the layers of a model from the kernels of this package, or None."""
    try:
        for layer in dict.fromkeys(plan.layers):
            fuse(layer)
    except ValueError as error:
        return str(error)
    heads = {
        (op.heads, op.kv_heads, op.head_dim, op.value_dim)
        for op in plan.operations
        if isinstance(op, Attend)
    }
    return "layers with different heads" if len(heads) > 1 else None


def runs_by_pair(experts: Experts, tokens: int, expert_bytes: float) -> bool:
    """Return whether each pair of a token and an expert is computed by itself.

    Tokens of a step that share an expert then read its weights (`expert_bytes`) once each. Blocks
    of pairs read them once, in three kernels more.
    """
    repeated = tokens * experts.per_token - experts.expected_experts(tokens)
    return tokens <= FEW_ROWS and repeated * expert_bytes <= _WORTH_BYTES
