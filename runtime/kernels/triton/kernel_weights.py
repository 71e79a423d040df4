"""Weights of linear layers as kernels take them: views, constants, prefetches, ends of sums.

Shapes: N output features, K input features, R rows of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear import SCALE_BLOCK, STORAGES, GpuLinear
from .quantised_cache import fp8_is_native

__all__ = [
    "kernel_weight",
    "load_channels",
    "may_prefetch",
    "operation_name",
    "prefetch_segments",
]


def operation_name(specialization: Any) -> str:
    """Of a compiled kernel, as profilers show it: that of the operation."""
    name: str = specialization.constants["NAME"]
    return name


def kernel_weight(linear: GpuLinear) -> tuple[Tensor, dict[str, Any]]:
    """A weight as kernels take it (fp8 as its bits), and the constants that describe it."""
    weight = linear.weight
    storage = STORAGES[weight.dtype]
    blocks = 0
    if linear.scales is not None and linear.scales.dim() == 2:
        blocks = -(-weight.shape[1] // SCALE_BLOCK)
    constants = {
        "STORAGE": storage,
        "NATIVE_FP8": fp8_is_native(weight.device),
        "SCALE_BLOCKS": blocks,
    }
    return (weight.view(torch.uint8) if storage == "fp8" else weight), constants


def may_prefetch(tensor: Tensor) -> bool:
    """Whether all rows begin and end at multiples of 16 bytes, as a prefetch takes them."""
    on_meta = tensor.device.type == "meta"  # which has no addresses
    aligned = on_meta or tensor.data_ptr() % 16 == 0
    return aligned and tensor.shape[-1] * tensor.element_size() % 16 == 0


@triton.jit
def prefetch_segments(  # type: ignore[no-untyped-def]
    w_ptr, rows, begin, end, K: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Request elements `begin` ... `end` - 1 of each of `rows` into the L2 cache.

    As `prefetch_rows`, of rows [R] that do not follow each other: a request of a thread for each,
    of whole 16 bytes.
    """
    if PDL:
        size: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        bytes_each = tl.maximum(end - begin, 0) * size + tl.zeros(rows.shape, tl.int32)
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.gt.s32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [(w_ptr.to(tl.int64) + (rows.to(tl.int64) * K + begin) * size), bytes_each],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_channels(scale_ptr, bias_ptr, weight_n, SCALE_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What sums of features are multiplied by, and what is added."""
    scales = 1.0
    if scale_ptr is not None and not SCALE_BLOCKS:
        scales = tl.load(scale_ptr + weight_n)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_n).to(tl.float32)
    return scales, bias
