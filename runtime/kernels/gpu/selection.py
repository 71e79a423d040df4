"""The kernels of this package as one choice of `select_kernels`."""

from __future__ import annotations

from .. import Kernels, paged_attention
from ..weight_storage import WeightStorage
from .decode_step import GpuDecodeStep
from .launch import INTERPRETED
from .library_linear import library_linear_of
from .paged_attention import register, triton_paged_attention
from .stack import GpuStack

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
        linear=library_linear_of,
        pack=None,
        bounded_by_length=True,
        masks=0,
        weights=weights,
        make_stack=GpuStack,
        make_decode_step=GpuDecodeStep,
    )
