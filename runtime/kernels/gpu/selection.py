"""The kernels of this package as one choice of `select_kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import Kernels, paged_attention, reference_linear
from ..weight_storage import WeightStorage
from .decode_step import GpuDecodeStep
from .launch import INTERPRETED
from .linear import GpuLinear
from .paged_attention import register, triton_paged_attention
from .stack import GpuStack, product

__all__ = ["gpu_kernels"]


def gpu_kernels(weights: WeightStorage) -> Kernels:
    """What runs on a CUDA device with Triton; in Triton's interpreter, on the CPU.

    Latent attention has no stack: its layers are compiled around the attention of this package.
    """
    register()
    return Kernels(
        name="triton",
        # The operator is opaque to torch.compile; the interpreter's tensors are not CUDA's.
        attention=triton_paged_attention if INTERPRETED else paged_attention,
        linear=_linear,
        pack=None,
        bounded_by_length=True,
        masks=0,
        weights=weights,
        make_stack=GpuStack,
        make_decode_step=GpuDecodeStep,
    )


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
    return product(x_TK, GpuLinear(weight_NK, scales_N, bias_N))
