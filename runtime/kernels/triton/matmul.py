"""Products of any number of rows: the library's, and a kernel of this package.

Shapes: T rows, N output features, K input features.

Weights in the model's dtype go to the library's matrix product. Weights of 8 bits are brought to
the model's dtype on the way to the tensor cores, tile by tile, which is exact; sums are multiplied
by the scales. The same kernel computes the logits of a router, and all products of a
batch-invariant engine.

A row of the result is one chain of tensor-core products over blocks of input features in ascending
order. Input features are not split (split-K): partial sums would need memory for T rows each.
In a batch-invariant engine sizes follow from the shape of the weight, so the same machine
code multiplies a row in any step: the rows of a step only choose how many programs there are.

The rows are the left operand, 64 of them, as many as a warp group of Hopper multiplies. With few
rows most of the operand is zeros that are not loaded, and the time is still the time of reading the
weight; so blocks of the weight are small where large ones would leave processors idle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_calls import call_kernel, let_dependents_start, num_multiprocessors, wait_for_inputs
from .linear import GpuLinear
from .linear_tiles import as_operand
from .quantised import kernel_weight

__all__ = ["RowSizes", "library_linear", "linear_of_any_rows", "tiled_product"]

_SHARE = 0.7
"""Programs for each multiprocessor that are enough to choose larger blocks."""


class RowSizes(NamedTuple):
    """Of the tiles of a product: rows, output features, input features and stages."""

    block_t: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int = 4


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
    rows, n = out_TN.shape
    multiprocessors = num_multiprocessors(x_TK.device)
    sizes = _sizes(n, x_TK.dtype, multiprocessors)
    many = rows > 64 and x_TK.dtype != torch.float32
    if many and -(-rows // 128) * -(-n // 128) >= _SHARE * multiprocessors:
        sizes = RowSizes(128, 128, 64, 4, num_warps=8)
    tiled_product(x_TK, linear, out_TN, sizes)


def linear_of_any_rows(x_TK: Tensor, linear: GpuLinear, out_TN: Tensor) -> None:
    """As `library_linear`; the bits of a row do not depend on T, nor on the other rows."""
    sizes = _sizes(out_TN.shape[1], x_TK.dtype, num_multiprocessors(x_TK.device))
    tiled_product(x_TK, linear, out_TN, sizes)


def tiled_product(x_TK: Tensor, linear: GpuLinear, out_TN: Tensor, sizes: RowSizes) -> None:
    """`out = linear(x)` in tiles of these sizes; of weights that are not
    quantised, `out` may have another dtype than `x`."""
    rows, n = out_TN.shape
    weight, storage = kernel_weight(linear)
    call_kernel(
        product_of_any_rows,
        (triton.cdiv(rows, sizes.block_t), triton.cdiv(n, sizes.block_n)),
        x_TK,
        weight,
        linear.scales,
        linear.bias,
        out_TN,
        rows,
        n,
        num_warps=sizes.num_warps,
        K=x_TK.shape[1],
        BLOCK_T=sizes.block_t,
        BLOCK_N=sizes.block_n,
        BLOCK_K=sizes.block_k,
        STAGES=sizes.stages,
        **storage,
    )


def _sizes(n: int, dtype: torch.dtype, multiprocessors: int) -> RowSizes:
    """Return the sizes for a weight of N rows; none of them spills registers."""
    if dtype == torch.float32:  # multiplied by the ordinary units, from registers
        return RowSizes(16, 32, 32, 2)
    for block_n in (128, 64):
        if n >= _SHARE * multiprocessors * block_n:
            return RowSizes(64, block_n, 64, 4)
    return RowSizes(64, 32, 128, 4)


@triton.jit(do_not_specialize=["T"])
def product_of_any_rows(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, T, N,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, STORAGE: tl.constexpr, NATIVE_FP8: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j): `BLOCK_T` rows times `BLOCK_N` rows of the weight.

    Programs of the same rows of the weight are neighbours, so that memory is read once.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = K % BLOCK_K == 0
    let_dependents_start(PDL)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_n = tl.minimum(n, N - 1)  # past the last feature it is read again, and not stored
    there = (t < T)[:, None]
    x_rows = x_ptr + t.to(tl.int64)[:, None] * K
    w_rows = w_ptr + weight_n.to(tl.int64)[None, :] * K
    wait_for_inputs(PDL)
    sums = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            x = tl.load(x_rows + k[None, :], mask=there, other=0.0)
            w = tl.load(w_rows + k[:, None])
        else:
            inside = k < K
            x = tl.load(x_rows + k[None, :], mask=there & inside[None, :], other=0.0)
            w = tl.load(w_rows + k[:, None], mask=inside[:, None], other=0)
        w = as_operand(w, STORAGE, NATIVE_FP8, dtype)
        if SCALE_BLOCKS:
            scales = tl.load(scale_ptr + weight_n * SCALE_BLOCKS + start // 128)
            sums += tl.dot(x, w, input_precision="ieee") * scales[None, :]
        else:
            sums = tl.dot(x, w, sums, input_precision="ieee")
    if scale_ptr is not None and not SCALE_BLOCKS:
        sums *= tl.load(scale_ptr + weight_n)[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_n).to(tl.float32)[None, :]
    out_rows = out_ptr + t.to(tl.int64)[:, None] * N
    tl.store(out_rows + n[None, :], sums.to(dtype), mask=there & (n < N)[None, :])
