"""The kernels of this package as one choice of `select_kernels`.

Triton is imported when a model is made, not before: a plan of memory needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import paged_attention
from ..choice import Kernels
from ..linear import reference_linear
from ..stack import DecodeEnds, DecodeStep, Stack, StackLayer, StackShape
from ..weight_storage import WeightStorage

__all__ = ["gpu_kernels"]


def gpu_kernels(weights: WeightStorage) -> Kernels:
    """What runs on a CUDA device with Triton.

    Latent attention has no stack: its layers are compiled around the attention of this package.
    """
    if torch.cuda.is_available():
        from .paged_attention import register

        register()
    return Kernels(
        name="triton",
        attention=paged_attention,
        linear=_linear,
        pack=None,
        bounded_by_length=True,
        masks=0,
        weights=weights,
        sampler="triton",
        make_stack=_make_stack,
        make_decode_step=_make_decode_step,
    )


def _make_stack(shape: StackShape, layers: Sequence[StackLayer], norm: Tensor) -> Stack:
    from .stack import GpuStack

    return GpuStack(shape, layers, norm)


def _make_decode_step(stack: Stack, ends: DecodeEnds) -> DecodeStep:
    from .decode_step import GpuDecodeStep

    return GpuDecodeStep(stack, ends)


def _linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_features: int,
    scales_N: Tensor | None = None,
) -> Tensor:
    """As `reference_linear`, by the kernels of this package where torch does not compile it."""
    if torch.compiler.is_compiling():
        return reference_linear(x_TK, weight_NK, bias_N, out_features, scales_N)
    from .linear import GpuLinear
    from .stack import product

    return product(x_TK, GpuLinear(weight_NK, scales_N, bias_N))
