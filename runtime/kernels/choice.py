"""The selected implementations of a model's operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .cpu.build import KernelLibrary
from .ops.collectives import Collectives
from .ops.convolution import causal_conv
from .ops.recurrence import recurrence
from .result_check import Fallback
from .weights import MODEL, GroupedWeight, StoredRows, WeightStorage
from .weights.grouped import GroupedFormat

SamplerName = Literal["torch", "cpu", "triton"]
Parts = Sequence[Tensor | GroupedWeight | StoredRows]
"""Rows of a weight, one part after the other, each in the model's dtype or as codes."""


def no_parts(parts: Parts, dtype: torch.dtype) -> None:
    """Return None: no kernel takes these parts."""


@dataclass(frozen=True)
class Kernels:
    """The selected implementations, and their properties that the memory plan and steps need."""

    name: str
    attention: Callable[..., Tensor]
    """Signature of `ops.attention.reference_paged_attention`."""
    linear: Callable[[Tensor, Tensor, Tensor | None, int, Tensor | None], Tensor]
    """`linear(x_TK, weight, bias_N or None, out_features, scales or None)`; the weight as
    `pack_parts` packs it, or it and its scales as `WeightStorage.quantise` returns them."""
    experts: Callable[..., Tensor]
    """Signature of `ops.experts.reference_experts`; the weights of each expert as of `linear`,
    concatenated."""
    bounded_by_length: bool
    """Whether the time of attention depends on the rows' lengths and not on the read width, so that
    steps need only one read width."""
    masks: int
    """Attention masks `[tokens, positions]` that exist at the same time, for the memory plan."""
    ungated_experts: Callable[..., Tensor] | None = None
    """As `experts`, for experts without gate, whose weights have the model's dtype."""
    recurrence: Callable[..., Tensor] = recurrence
    """See `ops.recurrence.Recurrence`."""
    delta_rule: Callable[..., Tensor] | None = None
    """All of `ops.delta_rule.DeltaRule` in decode and verify steps; None: plain PyTorch around
    `recurrence`. Takes queries and keys `[T, G, K]` and values `[T, H, V]` of the convolution, a
    `[T, H, X]`, b `[T, H]`, A_log, dt_bias, the scale of beta, a `RaggedBatch` and a `RowPlace`;
    returns `[T, H, V]` in the model's dtype."""
    causal_conv: Callable[..., Tensor] = causal_conv
    """See `ops.convolution.Convolution`."""
    sampler: SamplerName = "torch"
    """Which of `sampling.SAMPLERS`: "torch" is compiled where steps are, the others are kernels."""
    library: KernelLibrary | None = None
    """The C++ library with the operators; None if none is used."""
    make_stack: Callable[..., Any] | None = None
    """Creates a `Stack` from a `BoundModel`: all layers and the final norm as one operation, for
    models with `runs_stack`."""
    stack_obstacle: Callable[[Any], str | None] = lambda plan: None
    """Returns why `make_stack` cannot run the layers of a model, or None."""
    make_decode_step: Callable[..., Any] | None = None
    """Creates a `DecodeStep` from such a stack and a `BoundModel`."""
    weights: WeightStorage = MODEL
    """How the weights of linear layers are stored; 8-bit weights have scales."""
    pack_parts: Callable[[Parts, torch.dtype, Tensor], None] | None = None
    """Packs each weight of a linear layer or of an expert, of a model in this dtype, into uint8
    memory of `parts_bytes`; None: weights are not packed."""
    store_parts: Callable[[Parts, torch.dtype], tuple[Tensor, Tensor]] | None = None
    """Returns a weight of which parts are codes, and its scales, as `linear` takes them; None:
    `pack_parts` takes it, or codes are decoded while they are loaded."""
    parts_bytes: Callable[[Parts, torch.dtype], int | None] = no_parts
    """The bytes that either makes of such parts, on any device; None: no kernel takes them, so they
    are decoded."""
    codes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the parameters, by name, that stay in the codes of their checkpoint."""
    formats: tuple[GroupedFormat, ...] = ()
    """The formats of these codes."""
    fallbacks: tuple[Fallback, ...] = ()
    """Native operations that plain PyTorch replaces, and dependent launch if it was disabled."""
    dependent_launch: bool = True
    """Whether Triton kernels may begin while their predecessors run, if the device supports it."""
    batch_invariant: bool = False
    """Whether plain PyTorch operations run token by token (see `ops/operation.py`)."""
    collectives: Collectives | None = None
    """Of the tensor-parallel group; None: the model is on one device."""

    def runs_stack(self, plan: Any) -> bool:
        """Whether all layers of the model are one operation."""
        if self.make_stack is None or self.stack_obstacle(plan) is not None:
            return False
        # The C++ stack adds over ranks itself, through shared memory only.
        own_sums = self.library is not None and self.collectives is not None
        return not own_sums or bool(self.collectives and self.collectives.communicator)

    def with_state_of(self, other: Kernels) -> Kernels:
        """Return these kernels, with the operations of `other` that read and write state."""
        return replace(
            self,
            attention=other.attention,
            bounded_by_length=other.bounded_by_length,
            masks=other.masks,
            recurrence=other.recurrence,
            delta_rule=other.delta_rule,
            causal_conv=other.causal_conv,
        )

    def unpacked_bytes(self, n: int, k: int) -> int:
        """Temporary bytes of a linear layer that converts its `[n, k]` weight."""
        return n * k * 4 if self.weights.dtype is not None and self.pack_parts is None else 0
