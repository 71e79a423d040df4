"""The root-mean-square norm as a kernel of its own, before products that do not norm.

Shapes: T rows, D features.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import GpuNorm, Pending, reference_norm
from .linear_tiles import input_tile, row_statistics

__all__ = ["norm_rows", "reference_norm_rows"]

_BLOCK = 4096
"""Features that a program has at a time."""


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, sum_ptr, norm_ptr, out_ptr, eps, post_eps, K: tl.constexpr,
    BLOCK: tl.constexpr, OFFSET: tl.constexpr, POST_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program norms one row."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    NORM: tl.constexpr = norm_ptr is not None
    EVEN: tl.constexpr = K % BLOCK == 0
    let_dependents_start(PDL)
    weight = 0.0
    if NORM:
        k = tl.arange(0, BLOCK)[None, :]
        weight = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    reciprocal, post_reciprocal = row_statistics(
        x_ptr, delta_ptr, post_ptr, sum_ptr, row, row >= 0, True, eps, post_eps, K, BLOCK, NORM,
        POST_OFFSET, dtype,
    )  # fmt: skip
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        if NORM and K > BLOCK:
            weight = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        x = input_tile(
            x_ptr, delta_ptr, post_ptr, row[:, None], k, k < K, reciprocal[:, None],
            post_reciprocal[:, None], weight, K, EVEN, NORM, OFFSET, POST_OFFSET, dtype,
        )  # fmt: skip
        tl.store(out_ptr + row[:, None] * K + k, x.to(dtype), mask=k < K)


def norm_rows(
    x_TD: Tensor, norm: GpuNorm | None, out_TD: Tensor, pending: Pending | None = None
) -> None:
    """`out = norm(x)`, or of `x + pending.norm(pending.delta)`, which goes into `pending.out`.

    All contiguous; `out_TD` is a tensor of its own. Without `norm` the rows are not normed.
    """
    rows, k = x_TD.shape
    post = None if pending is None else pending.norm
    call_kernel(
        norm_kernel,
        (rows,),
        x_TD,
        None if pending is None else pending.delta,
        None if post is None else post.weight,
        None if pending is None else pending.out,
        None if norm is None else norm.weight,
        out_TD,
        0.0 if norm is None else norm.eps,
        0.0 if post is None else post.eps,
        K=k,
        BLOCK=min(_BLOCK, triton.next_power_of_2(k)),
        OFFSET=norm is not None and norm.offset,
        POST_OFFSET=post is not None and post.offset,
    )


def reference_norm_rows(
    x_TD: Tensor, norm: GpuNorm | None, pending: Pending | None = None
) -> Tensor:
    """What `norm_rows` does, in plain torch."""
    if pending is not None:
        x_TD = x_TD + reference_norm(pending.delta, pending.norm)
        pending.out.copy_(x_TD)
    return reference_norm(x_TD, norm)
