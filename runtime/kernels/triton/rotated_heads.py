"""Norm and rotation of single heads in kernels, as the plain model has them, and in plain torch.

Shapes: N vectors, E head_dim. Numbers are rounded to the dtype of memory where the model rounds
them (`ops/norms.RMSNorm`, `ops/rotation.rotate`): after the norm, after the rotation, and after
the temperature of queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..ops.attention import AttentionTemperature
from ..ops.attention import tempered as tempered_queries
from ..ops.rotation import rotate
from .linear import GpuNorm, reference_norm
from .linear_tiles import normed

__all__ = [
    "HeadRotation",
    "load_norm",
    "normed_and_turned",
    "reciprocal_of_heads",
    "reference_rotated",
    "tempered",
]

_BLOCK = tl.constexpr(1024)
"""Elements of all heads that are summed up at a time."""


class HeadRotation(NamedTuple):
    """Norm and rotation of a layer's queries and keys."""

    q_norm: Tensor | None
    """Weights `[E]` of the norm of queries; None: there is none, of keys neither. `[H * E]` if all
    heads of a token are normed together, and the weights of keys are `[G * E]`."""
    k_norm: Tensor | None
    eps: float
    """Of these norms."""
    offset_norms: bool
    """They multiply by one plus their weight, see `ops/norms.py`."""
    cos: Tensor
    """float32 `[T, E / 2]`, of the angles of the tokens' positions; a pair is (i, i + E / 2)."""
    sin: Tensor
    temperature: AttentionTemperature | None = None
    """Of queries, after the rotation."""

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        floor, scale = self.temperature or (0, 0.0)
        return {
            "OFFSET_NORMS": self.offset_norms,
            "ALL_HEADS": self.all_heads,
            "FLOOR": floor,
            "TEMPERATURE": scale,
        }

    @property
    def all_heads(self) -> bool:
        """Whether all heads of a token are normed together."""
        return self.q_norm is not None and self.q_norm.shape[0] != 2 * self.cos.shape[1]


@triton.jit
def load_norm(  # type: ignore[no-untyped-def]
    norm_ptr, heads, E: tl.constexpr, BLOCK_E: tl.constexpr, ALL_HEADS: tl.constexpr
):  # fmt: skip
    """Weights of the norm of `heads` [N], and those of the elements opposite, in float32.

    `[1, BLOCK_E]`, or `[N, BLOCK_E]` if all heads are normed together; heads outside of the model
    must be forced into its range.
    """
    i = tl.arange(0, BLOCK_E)
    opposite = tl.where(i < E // 2, i + E // 2, i - E // 2)
    start = heads[:, None] * E if ALL_HEADS else 0
    mask = (i < E)[None, :]
    weights = tl.load(norm_ptr + start + i[None, :], mask=mask, other=0.0).to(tl.float32)
    weights_opposite = tl.load(norm_ptr + start + opposite[None, :], mask=mask, other=0.0)
    return weights, weights_opposite.to(tl.float32)


@triton.jit
def reciprocal_of_heads(x_ptr, start, eps, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the root mean square of the N elements of all heads of a token."""
    i = tl.arange(0, _BLOCK)
    squares = tl.zeros([_BLOCK], tl.float32)
    for first in tl.static_range(0, N, _BLOCK):  # all loads are in flight together
        x = tl.load(x_ptr + start + first + i, mask=first + i < N, other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, axis=0) / N + eps)


@triton.jit
def normed_and_turned(  # type: ignore[no-untyped-def]
    x_ptr, starts, inside, weights, weights_opposite, reciprocal, cos, sin, eps,
    E: tl.constexpr, BLOCK_E: tl.constexpr, OFFSET_NORMS: tl.constexpr,
):  # fmt: skip
    """Vectors `[N, BLOCK_E]` that begin at `starts`, normed if there are weights, and rotated.

    Weights are those of `load_norm`; `reciprocal` is that of all heads, None: of each vector.

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
        if reciprocal is None:
            reciprocal = tl.rsqrt(tl.sum(x * x, axis=1) / E + eps)[:, None]
        x = normed(x, reciprocal, weights, dtype, OFFSET_NORMS)
        y = normed(y, reciprocal, weights_opposite, dtype, OFFSET_NORMS)
    turned = x * cos[None, :] + tl.where((i < E // 2)[None, :], -y, y) * sin[None, :]
    return tl.where(mask, turned, 0.0).to(dtype)


@triton.jit
def tempered(q, position, FLOOR: tl.constexpr, TEMPERATURE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries at a position times their `AttentionTemperature`, rounded; FLOOR 0: as they are."""
    if FLOOR > 0:
        floors = ((position + 1) // FLOOR).to(tl.float32)
        q = (q.to(tl.float32) * (tl.log(floors + 1.0) * TEMPERATURE + 1.0)).to(q.dtype)
    return q


def reference_rotated(
    q_THE: Tensor, k_TGE: Tensor, rotation: HeadRotation, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed where the model norms them, and rotated; queries times their
    temperature."""
    rotated = []
    for x, weight in ((q_THE, rotation.q_norm), (k_TGE, rotation.k_norm)):
        if weight is not None:
            vectors = x.flatten(1) if rotation.all_heads else x
            norm = GpuNorm(weight, rotation.eps, rotation.offset_norms)
            x = reference_norm(vectors, norm).view(x.shape)
        rotated.append(rotate(x, rotation.cos, rotation.sin))
    q_THE, k_TGE = rotated
    if rotation.temperature is not None:
        q_THE = tempered_queries(rotation.temperature, q_THE, positions_T)
    return q_THE, k_TGE
