"""Which models and machines have native kernels, and why others have none."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from .ops.linear import can_pack
from .ops.weight_storage import WeightStorage

__all__ = ["KernelChoice", "have_triton", "native_obstacle"]

KernelChoice = Literal["native", "torch"]
"""`native`: the C++ operators on a CPU, the Triton kernels on CUDA. `torch`: plain PyTorch around
the paged attention operation."""


def have_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def native_obstacle(
    device_type: str, dtype: torch.dtype, weights: WeightStorage, *, latent: bool
) -> str | None:
    """Return why some operations of a model have no native kernel, or None where all have one.

    Args:
        device_type: `cpu` or `cuda`.
        dtype: of weights and activations.
        weights: how weights of linear layers are stored.
        latent: whether the model has latent attention.
    """
    if latent:
        return "latent attention has a native attention kernel, but no native layers"
    if device_type == "cpu" and not can_pack(dtype):
        return f"the C++ operators have no linear layer in {str(dtype).removeprefix('torch.')}"
    if device_type == "cpu" and weights == "fp8":
        return "the C++ operators have no linear layer over fp8 weights (weight_dtype='int8' has)"
    return None
