"""Norms and activations as kernels of their own, around products that do not apply them.

Shapes: T rows, D features, F features of gate and of up.

"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..ops.activation import Activate, gated_activation
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import GpuNorm, Pending, reference_norm
from .linear_tiles import activate, input_tile, row_statistics

__all__ = [
    "activate_rows",
    "activation_constants",
    "norm_rows",
    "reference_activate_rows",
    "reference_norm_rows",
]

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


_BLOCK_F = 1024


def activation_constants(activate: Activate | None) -> dict[str, Any]:
    """Return a gated activation as kernels take it."""
    if activate is None:
        return {"GELU": False, "LIMIT": 0.0, "ALPHA": 1.0, "UP_OFFSET": 0.0}
    return {
        "GELU": activate.function == "gelu_tanh",
        "LIMIT": activate.limit,
        "ALPHA": activate.alpha,
        "UP_OFFSET": activate.up_offset,
    }


@triton.jit
def activation_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, F, BLOCK: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, UP_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program makes `BLOCK` features of one row."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    let_dependents_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    gate = tl.load(x_ptr + row * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    out = activate(gate, up, GELU, dtype, LIMIT, ALPHA, UP_OFFSET)
    tl.store(out_ptr + row * F + f, out.to(dtype), mask=f < F)


def activate_rows(gate_up_TF: Tensor, out_TF: Tensor, activate: Activate) -> None:
    """`out = act(gate) * up` of rows `[T, 2F]`, gate first.

    Both contiguous; each result is rounded to their dtype, as `ops/activation.py` does.
    """
    rows, features = out_TF.shape
    grid, constants = (rows, -(-features // _BLOCK_F)), activation_constants(activate)
    call_kernel(activation_kernel, grid, gate_up_TF, out_TF, features, BLOCK=_BLOCK_F, **constants)


def reference_activate_rows(gate_up_TF: Tensor, activate: Activate) -> Tensor:
    """What `activate_rows` does, in plain torch."""
    return gated_activation(activate)(*gate_up_TF.chunk(2, dim=-1))
