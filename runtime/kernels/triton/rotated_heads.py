"""Norm and rotation of single heads in kernels, as the plain model has them, and in plain torch.

Shapes: N vectors, E head_dim. Numbers are rounded to the dtype of memory where the model rounds
them (`models/modules.RMSNorm`, `models/rope.rotate`): after the norm and after the rotation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear import GpuNorm, reference_norm
from .linear_tiles import normed

__all__ = ["HeadRotation", "normed_and_turned", "reference_rotated", "reference_turned"]


class HeadRotation(NamedTuple):
    """Norm and rotation of a layer's queries and keys."""

    q_norm: Tensor | None
    """Weights `[E]` of the norm of queries; None: there is none, of keys neither."""
    k_norm: Tensor | None
    eps: float
    """Of these norms."""
    offset_norms: bool
    """They multiply by one plus their weight, see `models/modules.py`."""
    cos: Tensor
    """float32 `[T, E / 2]`, of the angles of the tokens' positions; a pair is (i, i + E / 2)."""
    sin: Tensor


@triton.jit
def normed_and_turned(  # type: ignore[no-untyped-def]
    x_ptr, starts, inside, weights, weights_opposite, cos, sin, eps,
    E: tl.constexpr, BLOCK_E: tl.constexpr, OFFSET_NORMS: tl.constexpr,
):  # fmt: skip
    """Vectors `[N, BLOCK_E]` that begin at `starts`, normed if there are weights, and rotated.

    The pair of element i is i +- E / 2: it is loaded a second time, in the order in which it is
    needed. In the dtype of memory, zeros in the padding.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK_E)
    opposite = tl.where(i < E // 2, i + E // 2, i - E // 2)
    mask = inside[:, None] & (i < E)[None, :]
    x = tl.load(x_ptr + starts[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + starts[:, None] + opposite[None, :], mask=mask, other=0.0).to(tl.float32)
    if weights is not None:
        reciprocal = tl.rsqrt(tl.sum(x * x, axis=1) / E + eps)[:, None]
        x = normed(x, reciprocal, weights[None, :], dtype, OFFSET_NORMS)
        y = normed(y, reciprocal, weights_opposite[None, :], dtype, OFFSET_NORMS)
    turned = x * cos[None, :] + tl.where((i < E // 2)[None, :], -y, y) * sin[None, :]
    return tl.where(mask, turned, 0.0).to(dtype)


def reference_turned(x_TNE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """`models.rope.rotate`; cosines and sines are float32 `[T, E / 2]`."""
    first, second = x_TNE.float().chunk(2, dim=-1)
    cos, sin = cos_TE[:, None], sin_TE[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_TNE.dtype)


def reference_rotated(
    q_THE: Tensor, k_TGE: Tensor, rotation: HeadRotation
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed where the model norms them, and rotated."""
    weights = rotation.q_norm, rotation.k_norm
    rotated = []
    for x, weight in zip((q_THE, k_TGE), weights, strict=True):
        if weight is not None:
            x = reference_norm(x, GpuNorm(weight, rotation.eps, rotation.offset_norms))
        rotated.append(reference_turned(x, rotation.cos, rotation.sin))
    return rotated[0], rotated[1]
