"""Decoder layers of three kernels: pairs of products run as one kernel where that is faster.

    1 decode_attention   norms of queries and keys, rotation, write to the cache, attention
    2 output_gate_up     output projection, residual, norm, gate and up, activation
    3 down_qkv           down projection, residual, norm of the next layer and its q, k and v

The tuner decides for each pair; either can be two kernels instead. The first layer's q, k and v and
the last layer's down projection have no partner. For up to four rows, and models that do not norm
the outputs of attention and the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from .fused_pair import PairShape, default_pair_config
from .fusion import Fused, GateUp, NormLinear, ResidualLinear, product_pairs
from .kernel_calls import num_multiprocessors
from .linear import FEW_ROWS, GpuLinear, LinearConfig
from .tuning import lookup, tuning_key

__all__ = ["LayerPairs", "every_pair", "tuned_pairs"]


class LayerPairs(NamedTuple):
    """Configurations of the pairs of a step; None: two kernels."""

    output_gate_up: LinearConfig | None
    down_qkv: LinearConfig | None

    def of(self, first: Fused, second: Fused) -> LinearConfig | None:
        """Return the configuration of two neighbours that are one kernel, or None."""
        if not isinstance(first, ResidualLinear) or first.norm is not None:
            return None
        if isinstance(second, GateUp):
            return self.output_gate_up
        return self.down_qkv if isinstance(second, NormLinear) else None


_every: ContextVar[bool] = ContextVar("whether untuned pairs are one kernel", default=False)


@contextmanager
def every_pair() -> Iterator[None]:
    """Run every supported pair as one kernel with default sizes, in this block.

    For compiling kernels that engines run only where tuning selected them.
    """
    token = _every.set(True)
    try:
        yield
    finally:
        _every.reset(token)


def tuned_pairs(
    layer: Sequence[tuple[Fused, GpuLinear | None]], rows: int, dtype: torch.dtype
) -> LayerPairs | None:
    """Return the pairs of a step that were tuned to be faster than two kernels, or None.

    None for more than four rows, and where a layer norms what attention or the MLP return.

    Args:
        layer: the kernels of a layer with their products; those of all layers have these shapes.
        rows: of the step.
        dtype: of activations.
    """
    if rows > FEW_ROWS:
        return None
    products, fused = dict(layer), [fused for fused, _ in layer]
    chosen: dict[str, LinearConfig | None] = {"output_gate_up": None, "down_qkv": None}
    for first, second in product_pairs([fused, fused]):
        one, other = products[first], products[second]
        assert one is not None
        assert other is not None
        shape = PairShape.of(rows, one, other, gated=isinstance(second, GateUp))
        chosen[shape.name] = _tuned(shape, dtype, one.weight)
    pairs = LayerPairs(**chosen)
    return None if pairs == LayerPairs(None, None) else pairs


def _tuned(shape: PairShape, dtype: torch.dtype, weight: torch.Tensor) -> LinearConfig | None:
    """The sizes of a pair that was tuned to be faster than two kernels."""
    if _every.get():
        return default_pair_config(shape, num_multiprocessors(weight.device))
    sizes = (shape.name, shape.rows, shape.n, shape.k, dtype, weight.dtype, weight.device)
    config = lookup(tuning_key(*sizes, hidden=shape.hidden))
    return config if config is not None and config.kind == "pair" else None
