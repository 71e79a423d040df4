"""The library's product: of prefill, of more than 32 rows, and where it is chosen for fewer.

Shapes: T rows, N output features, K input features.

Weights in the model's dtype go to the library's matrix product. Weights of 8 bits are brought to
the model's dtype on the way to the tensor cores, tile by tile, which is exact; sums are multiplied
by the scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .kernel_weights import kernel_weight
from .linear import SCALE_BLOCK, GpuLinear
from .linear_tiles import as_operand

__all__ = ["library_linear"]

_BLOCK_N = 128
_BLOCK_K = 64
_BAND = 8
"""Blocks of rows whose programs are neighbours: they share what they read of the weight."""


@triton.jit
def matmul(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, T, N, K, SCALE_BLOCKS, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, STAGES: tl.constexpr,
    STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program makes `[BLOCK_N, BLOCK_T]` of the transposed result."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    let_dependents_start(PDL)
    blocks_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (BAND * blocks_n)
    height = tl.minimum(tl.cdiv(T, BLOCK_T) - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * blocks_n)
    t = (band * BAND + place % height) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    # What stands behind the last row or feature is the last one once more, and not stored.
    x_rows = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[None, :] * K
    weight_n = tl.minimum(n, N - 1)
    w_rows = w_ptr + weight_n.to(tl.int64)[:, None] * K
    wait_for_inputs(PDL)
    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(w_rows + k[None, :])
            x = tl.load(x_rows + k[:, None])
        else:
            w = tl.load(w_rows + k[None, :], mask=k[None, :] < K, other=0)
            x = tl.load(x_rows + k[:, None], mask=k[:, None] < K, other=0.0)
        numbers = as_operand(w, STORAGE, NATIVE_FP8, dtype)
        if BLOCKS:
            scales = tl.load(scale_ptr + weight_n * SCALE_BLOCKS + start // 128)
            sums += tl.dot(numbers, x, input_precision="ieee") * scales[:, None]
        else:
            sums = tl.dot(numbers, x, sums, input_precision="ieee")
    if not BLOCKS:
        sums = sums * tl.load(scale_ptr + weight_n)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_n).to(tl.float32)[:, None]
    out_rows = out_ptr + t.to(tl.int64)[None, :] * N
    tl.store(out_rows + n[:, None], sums.to(dtype), mask=(t < T)[None, :] & (n < N)[:, None])


def library_linear(x_TK: Tensor, linear: GpuLinear, out_TN: Tensor) -> None:
    """`out = linear(x)`, any number of rows; all contiguous, activations in the model's dtype.

    `linear.reference_linear` is the reference.
    """
    if linear.scales is None:
        if linear.bias is None:
            torch.mm(x_TK, linear.weight.T, out=out_TN)
        else:
            torch.addmm(linear.bias, x_TK, linear.weight.T, out=out_TN)
        return
    rows, k = x_TK.shape
    n = linear.weight.shape[0]
    weight, storage = kernel_weight(linear)
    # 16 rows at least, of a power of two, so that few kernels are compiled.
    block_t = min(128, max(16, triton.next_power_of_2(rows)))
    call_kernel(
        matmul,
        (-(-rows // block_t) * -(-n // _BLOCK_N),),
        x_TK,
        weight,
        linear.scales,
        linear.bias,
        out_TN,
        rows,
        n,
        k,
        -(-k // SCALE_BLOCK),
        num_warps=8 if block_t == 128 else 4,
        BLOCK_T=block_t,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        BAND=_BAND,
        STAGES=4,
        STORAGE=storage["STORAGE"],
        NATIVE_FP8=storage["NATIVE_FP8"],
        BLOCKS=linear.scales.dim() == 2,
        EVEN=k % _BLOCK_K == 0,
    )
