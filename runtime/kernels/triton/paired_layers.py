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
from torch import Tensor

from ....profiling.attribution import operation
from ..ops.stack import StackLayer, StackShape
from .fused_pair import PairShape, default_pair_config, new_barrier
from .linear import FEW_ROWS, GpuLinear, LinearConfig, Norm
from .operations import Operations
from .step_attention import DecodeAttention
from .tuning import lookup, tuning_key

__all__ = ["LayerPairs", "PairedLayers", "every_pair"]

Layers = Sequence[tuple[StackLayer, tuple[GpuLinear, GpuLinear, GpuLinear, GpuLinear]]]
"""Of each layer q/k/v, output, gate/up and down as well."""


class LayerPairs(NamedTuple):
    """Configurations of the pairs of a step; None: two kernels."""

    output_gate_up: LinearConfig | None
    down_qkv: LinearConfig | None


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


class PairedLayers:
    """The layers of a stack, for decode steps with pairs."""

    def __init__(
        self,
        operations: Operations,
        shape: StackShape,
        layers: Layers,
        device: torch.device,
    ) -> None:
        """Keep the layers, and a barrier on the device."""
        self._operations, self._shape, self._layers = operations, shape, layers
        # With norms of outputs the residual addition is left to the next kernel that norms.
        self._supported = operations.pairs and not any(
            norm is not None
            for layer, _ in layers
            for norm in (layer.attention_output_norm, layer.mlp_output_norm)
        )
        # Kept, as graphs are replayed with its address.
        self._barrier = new_barrier(device)

    def tuned(self, rows: int, dtype: torch.dtype) -> LayerPairs | None:
        """Return the pairs of a step that were tuned to be faster than two kernels, or None.

        None for more than four rows, where a layer norms what attention or the MLP return, and
        where `fused_pair` is plain torch.
        """
        if rows > FEW_ROWS or not self._supported or not self._layers:
            return None
        _, (qkv, output, gate_up, down) = self._layers[0]
        pairs = LayerPairs(
            _tuned(PairShape.of(rows, output, gate_up, gated=True), dtype, output.weight),
            _tuned(PairShape.of(rows, down, qkv, gated=False), dtype, down.weight),
        )
        return None if pairs == LayerPairs(None, None) else pairs

    def run(self, x_TD: Tensor, step: DecodeAttention, pairs: LayerPairs) -> Tensor:
        """Return the hidden states after the last layer, `[T, D]`, not normed.

        Args:
            x_TD: hidden states before the first layer.
            step: attention of the layers.
            pairs: as `tuned` returns them.
        """
        operations, gelu, tokens = self._operations, self._shape.gelu, x_TD.shape[0]
        qkv_TN: Tensor | None = None
        for index, (layer, (qkv, output, gate_up, down)) in enumerate(self._layers):
            with operation("layer", index):
                if qkv_TN is None:
                    qkv_TN = x_TD.new_empty(tokens, qkv.weight.shape[0])
                    with operation("norm_linear"):
                        operations.norm_linear(x_TD, self._norm(layer.input_norm), qkv, qkv_TN)
                attended_TK = step.attended(layer, qkv_TN, output.weight)

                out_TD, norm = torch.empty_like(x_TD), self._norm(layer.mlp_norm)
                inner_TF = x_TD.new_empty(tokens, self._shape.intermediate_size)
                if pairs.output_gate_up is not None:
                    with operation("output_gate_up"):
                        operations.fused_pair(
                            attended_TK,
                            output,
                            x_TD,
                            out_TD,
                            norm,
                            gate_up,
                            inner_TF,
                            self._barrier,
                            pairs.output_gate_up,
                            gated=True,
                            gelu=gelu,
                        )
                else:
                    with operation("combine_output"):
                        operations.residual_linear(attended_TK, output, x_TD, out_TD)
                    with operation("gate_up"):
                        operations.gate_up(out_TD, norm, gate_up, inner_TF, gelu=gelu)

                x_TD, out_TD, qkv_TN = out_TD, torch.empty_like(x_TD), None
                following = self._layers[index + 1 : index + 2]
                if pairs.down_qkv is not None and following:
                    ((next_layer, (next_qkv, *_)),) = following
                    qkv_TN = x_TD.new_empty(tokens, next_qkv.weight.shape[0])
                    with operation("down_qkv"):
                        operations.fused_pair(
                            inner_TF,
                            down,
                            x_TD,
                            out_TD,
                            self._norm(next_layer.input_norm),
                            next_qkv,
                            qkv_TN,
                            self._barrier,
                            pairs.down_qkv,
                            gated=False,
                        )
                else:
                    with operation("down"):
                        operations.residual_linear(inner_TF, down, x_TD, out_TD)
                x_TD = out_TD
        return x_TD

    def _norm(self, weight: Tensor) -> Norm:
        return Norm(weight.detach(), self._shape.eps, self._shape.offset_norms)


def _tuned(shape: PairShape, dtype: torch.dtype, weight: Tensor) -> LinearConfig | None:
    """The sizes of a pair that was tuned to be faster than two kernels."""
    if _every.get():
        return default_pair_config(shape)
    sizes = (shape.name, shape.rows, shape.n, shape.k, dtype, weight.dtype, weight.device)
    config = lookup(tuning_key(*sizes, hidden=shape.hidden))
    return config if config is not None and config.kind == "pair" else None
