"""Norms and activations: device functions of products, and kernels around products without them.

Shapes: T rows, D or K features, F features of gate and of up. An `EVEN` tile has no feature outside
of K, so it needs no masks.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..ops.activation import Activate, gated_activation
from .kernel_calls import call_kernel, let_dependents_start, wait_for_inputs
from .linear import GpuNorm, Pending, reference_norm

_BLOCK = 4096
"""Features that a program has at a time."""


@triton.jit
def load_tile(pointers, mask, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """What stands there; 0 where masked, whatever the memory holds."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=mask, other=0)


@triton.jit
def normed(x, reciprocal, weight, dtype: tl.constexpr, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """`ops.norms.RMSNorm` of float32 `x`, rounded to `dtype`, in float32."""
    x = x * reciprocal
    out = x * (1.0 + weight) if OFFSET else x.to(dtype).to(tl.float32) * weight
    return out.to(dtype).to(tl.float32)


@triton.jit
def pending_tile(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, rows, k, mask, post_reciprocal,
    K: tl.constexpr, EVEN: tl.constexpr, POST_OFFSET: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Input features `k` of `rows` in float32, what was pending added."""
    x = load_tile(x_ptr + rows * K + k, mask, EVEN).to(tl.float32)
    if delta_ptr is not None:
        delta = load_tile(delta_ptr + rows * K + k, mask, EVEN).to(tl.float32)
        weight = load_tile(post_ptr + k, k < K, EVEN).to(tl.float32)
        delta = normed(delta, post_reciprocal, weight, dtype, POST_OFFSET)
        x = (x + delta).to(dtype).to(tl.float32)
    return x


@triton.jit
def input_tile(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, rows, k, mask, reciprocal, post_reciprocal, weight,
    K: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    POST_OFFSET: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What the weights are multiplied by: `pending_tile`, normed where there is a norm."""
    x = pending_tile(
        x_ptr, delta_ptr, post_ptr, rows, k, mask, post_reciprocal, K, EVEN, POST_OFFSET, dtype
    )  # fmt: skip
    if NORM:
        x = normed(x, reciprocal, weight.to(tl.float32), dtype, OFFSET)
    return x


@triton.jit
def row_statistics(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, sum_ptr, rows, valid, writes, eps, post_eps,
    K: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, POST_OFFSET: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Reciprocals of the root mean squares of `rows` [R] and of what is pending for them.

    A program that `writes` stores the sums of both in `sum_ptr` where rows are `valid`. Rows that
    are not are rows of the input too, so that they need no mask.
    """
    EVEN: tl.constexpr = K % BLOCK == 0
    reciprocal = tl.zeros(rows.shape, tl.float32)
    post_reciprocal = tl.zeros(rows.shape, tl.float32)
    if delta_ptr is not None:
        squares = tl.zeros(rows.shape, tl.float32)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)[None, :]
            delta = load_tile(delta_ptr + rows[:, None] * K + k, k < K, EVEN).to(tl.float32)
            squares += tl.sum(delta * delta, axis=1)
        post_reciprocal = tl.rsqrt(squares / K + post_eps)
    if NORM or delta_ptr is not None:
        squares = tl.zeros(rows.shape, tl.float32)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)[None, :]
            x = pending_tile(
                x_ptr, delta_ptr, post_ptr, rows[:, None], k, k < K, post_reciprocal[:, None],
                K, EVEN, POST_OFFSET, dtype,
            )  # fmt: skip
            squares += tl.sum(x * x, axis=1)
            if delta_ptr is not None:
                mask = (k < K) & valid[:, None] & writes
                tl.store(sum_ptr + rows[:, None] * K + k, x.to(dtype), mask=mask)
        reciprocal = tl.rsqrt(squares / K + eps)
    return reciprocal, post_reciprocal


class Gating(NamedTuple):
    """A gated activation, with the traits of `Activate`: a constant of kernels."""

    gelu: bool
    limit: float
    alpha: float
    up_offset: float

    @classmethod
    def of(cls, act: Activate | None) -> Gating | None:
        """Return an activation as kernels take it."""
        if act is None:
            return None
        return cls(act.function == "gelu_tanh", act.limit, act.alpha, act.up_offset)


@triton.jit
def activate(  # type: ignore[no-untyped-def]
    gate, up, GATING: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """`act(gate) * up` of float32 numbers, each result rounded to `dtype`, in float32."""
    LIMIT: tl.constexpr = GATING.limit
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if LIMIT > 0.0:  # NaN stays NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate).to(dtype).to(tl.float32)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        up = up.to(dtype).to(tl.float32)
    if GATING.up_offset != 0.0:
        up = (up + GATING.up_offset).to(dtype).to(tl.float32)
    if GATING.alpha != 1.0 and not GATING.gelu:
        logit = (gate * GATING.alpha).to(dtype).to(tl.float32)
        active = gate * (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
    else:
        # (1 + tanh(u)) / 2 is the logistic function of 2 u, u = sqrt(2 / pi) (x + 0.044715 x^3).
        logit = gate
        if GATING.gelu:
            logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-logit))
    return active.to(dtype).to(tl.float32) * up


@triton.jit
def scaled(x, SCALE: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """`SCALE` times float32 `x`, both rounded to `dtype`, in float32; 1: x as it is."""
    if SCALE != 1.0:
        x = (x.to(dtype).to(tl.float32) * SCALE).to(dtype).to(tl.float32)
    return x


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, post_ptr, sum_ptr, norm_ptr, out_ptr, eps, post_eps, K: tl.constexpr,
    BLOCK: tl.constexpr, OFFSET: tl.constexpr, POST_OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): the norm of one row."""
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


def norm_arguments(
    norm: GpuNorm | None, pending: Pending | None
) -> tuple[tuple[Tensor | None, ...], tuple[float, float], dict[str, bool]]:
    """Return what is added and normed as kernels take it: tensors, epsilons and constants."""
    weight, eps, offset = (None, 0.0, False) if norm is None else norm
    if pending is None:
        return (None, None, None, weight), (eps, 0.0), {"OFFSET": offset, "POST_OFFSET": False}
    post, constants = pending.norm, {"OFFSET": offset, "POST_OFFSET": pending.norm.offset}
    return (pending.delta, post.weight, pending.out, weight), (eps, post.eps), constants


def norm_rows(
    x_TD: Tensor, norm: GpuNorm | None, out_TD: Tensor, pending: Pending | None = None
) -> None:
    """`out = norm(x)`, or of `x + pending.norm(pending.delta)`, which goes into `pending.out`.

    All contiguous; `out_TD` is a tensor of its own. Without `norm` the rows are not normed.
    """
    rows, k = x_TD.shape
    tensors, epsilons, constants = norm_arguments(norm, pending)
    call_kernel(
        norm_kernel, (rows,), x_TD, *tensors, out_TD, *epsilons,
        K=k, BLOCK=min(_BLOCK, triton.next_power_of_2(k)), **constants,
    )  # fmt: skip


def reference_norm_rows(
    x_TD: Tensor, norm: GpuNorm | None, pending: Pending | None = None
) -> Tensor:
    """What `norm_rows` does, in plain torch."""
    if pending is not None:
        x_TD = x_TD + reference_norm(pending.delta, pending.norm)
        pending.out.copy_(x_TD)
    return reference_norm(x_TD, norm)


_BLOCK_F = 1024


@triton.jit
def activation_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, F, BLOCK: tl.constexpr, GATING: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program makes `BLOCK` features of one row."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    let_dependents_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    gate = tl.load(x_ptr + row * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    out = activate(gate, up, GATING, dtype)
    tl.store(out_ptr + row * F + f, out.to(dtype), mask=f < F)


def activate_rows(gate_up_TF: Tensor, out_TF: Tensor, activate: Activate) -> None:
    """`out = act(gate) * up` of rows `[T, 2F]`, gate first.

    Both contiguous; each result is rounded to their dtype, as `ops/activation.py` does.
    """
    rows, features = out_TF.shape
    call_kernel(
        activation_kernel, (rows, -(-features // _BLOCK_F)), gate_up_TF, out_TF, features,
        BLOCK=_BLOCK_F, GATING=Gating.of(activate),
    )  # fmt: skip


def reference_activate_rows(gate_up_TF: Tensor, activate: Activate) -> Tensor:
    """What `activate_rows` does, in plain torch."""
    return gated_activation(activate)(*gate_up_TF.chunk(2, dim=-1))
