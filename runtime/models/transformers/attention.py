"""The attention of a transformers model over the paged cache.

transformers passes the calling module to its attention function. So all modules of a model hold its
`CurrentStep`, which `TransformersDecoder.decode` sets for the time of a forward pass.

Shapes: T tokens, H query heads, G key/value heads, E head_dim of the cache. transformers' tensors
are `[1, heads, T, dim]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import AttentionForm, LayerPlace, RaggedBatch
from ...operation_scopes import operation
from .experts import register_experts
from .library import import_transformers
from .masks import probe_mask

__all__ = [
    "IMPLEMENTATION",
    "PROBED_IMPLEMENTATION",
    "AttentionStep",
    "CurrentStep",
    "PagedLayer",
    "PagedStep",
    "register",
]

IMPLEMENTATION = "stepgraph"
"""Name of our attention function in transformers; without masks."""
PROBED_IMPLEMENTATION = "stepgraph_probe"
"""The same function, with the mask function of a probe."""
_CURRENT_STEP = "stepgraph_current_step"
"""Attribute of the modules of a model."""


class AttentionStep(Protocol):
    """The attention of a forward pass."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> Tensor:
        """Return `[1, T, H, value_dim]`."""


class CurrentStep:
    """The step of the forward pass that a model runs; None between its forward passes."""

    def __init__(self, model: nn.Module) -> None:
        """Make all modules of a model refer to this object."""
        self.step: AttentionStep | None = None
        for module in model.modules():
            setattr(module, _CURRENT_STEP, self)

    @contextmanager
    def running(self, step: AttentionStep) -> Iterator[None]:
        """Run forward passes with a step."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


class PagedLayer(NamedTuple):
    """An attention call of a forward pass: its place in the cache and its constants."""

    place: LayerPlace
    form: AttentionForm
    kv_heads: int
    """Of the cache; a layer with fewer repeats each."""
    head_dim: int
    """Of the cache: the larger one of a key's and a value's elements."""


@dataclass(slots=True)
class PagedStep:
    """Attends call by call of one forward pass: the n-th call is layer n."""

    attention: Callable[..., Tensor]
    arena: Tensor
    batch: RaggedBatch
    layers: tuple[PagedLayer, ...]
    calls: int = 0

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        keywords: dict[str, Any],
    ) -> Tensor:
        """Write the keys and values of all tokens, then attend: `[1, T, H, value_dim]`."""
        layer = self.layers[self.calls]
        self.calls += 1
        form = layer.form
        if keywords.get("s_aux") is not None:
            form = form._replace(sinks=keywords["s_aux"])
        size, dim = layer.head_dim, value.shape[-1]
        with operation("attention"):
            out_THE = self.attention(
                _tokens_first(query, size),
                _tokens_first(_repeated(key, layer.kv_heads), size),
                _tokens_first(_repeated(value, layer.kv_heads), size),
                self.arena,
                layer.place,
                self.batch,
                form,
            )
        out = out_THE if dim == size else out_THE[..., :dim]
        return out[None]


def _repeated(x_1GTE: Tensor, heads: int) -> Tensor:
    """Return `heads` heads, of which each group of neighbours is one of the given."""
    count = heads // x_1GTE.shape[1]
    return x_1GTE if count == 1 else x_1GTE.repeat_interleave(count, dim=1)


def _tokens_first(x_1HTE: Tensor, size: int) -> Tensor:
    """Return `[T, heads, size]`, contiguous, padded with zeros."""
    x_THE = x_1HTE[0].transpose(0, 1)
    if x_THE.shape[-1] != size:
        return F.pad(x_THE, (0, size - x_THE.shape[-1]))
    return x_THE.contiguous()


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers."""
    current: CurrentStep = getattr(module, _CURRENT_STEP)
    assert current.step is not None, "a forward pass needs a step"
    return current.step.attend(module, query, key, value, attention_mask, keywords), None


def register() -> None:
    """Register our attention and experts with transformers, under names of our own. Idempotent."""
    transformers = import_transformers()
    transformers.AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
    transformers.AttentionInterface.register(PROBED_IMPLEMENTATION, paged_attention_forward)
    transformers.AttentionMaskInterface.register(PROBED_IMPLEMENTATION, probe_mask)
    register_experts()
