"""State-space layers and linear attention: what the gated inputs of a `recurrence` are.

Shapes: T tokens, H heads, P elements of a head, G groups of heads with the same B and C, N elements
of the state for each element of a head, I = H * P.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....cache.spec import RowState
from .linear import projection
from .norms import RMSNorm
from .operation import Binding, LayerStep, Operation, Run, Vector, per_token
from .parameter import Parameter
from .recurrence import recurrent_state

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class StateSpace(Operation):
    """The selective state space of Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060).

    With dt = clamp(softplus(dt + time_bias)) and A = -exp(decay), in float32:

        S <- exp(dt * A) * S + dt * B x^T
        y  = C . S + skip * x

    The value is x, B and C side by side `[T, I + 2GN]`, a gate `[T, I]` and dt `[T, H]`; or x, the
    gate, dt, B and C. It returns y and the gate, `[T, I]` each. Mamba-1 has heads of one element,
    each with a decay for each element of its state.
    """

    decay: Parameter
    """float32 `[H]` or `[H, N]`: the logarithm of -A."""
    time_bias: Parameter
    """float32 `[H]`."""
    skip: Parameter
    """float32 `[H]`."""
    head_dim: int
    """P."""
    groups: int
    """G; it divides H."""
    state_size: int
    """N."""
    time_limits: tuple[float, float] = (0.0, math.inf)
    """Least and largest dt."""
    gated: bool = False
    """Whether it returns y * silu(gate), for layers without a norm of y."""

    @property
    def heads(self) -> int:
        """H."""
        return self.skip.shape[0]

    @property
    def title(self) -> str:
        return "state spaces"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.decay, self.time_bias, self.skip)

    @property
    def row_state(self) -> RowState:
        decays = self.decay.elements // self.heads
        return recurrent_state(self.groups, self.heads, self.state_size, self.head_dim, decays)

    def bind(self, to: Binding) -> Run:
        place, recurrence = to.row_place, to.kernels.recurrence
        assert place is not None, "the engine has memory for recurrent state"
        decay, time_bias, skip = (
            to.module(own, lambda: Vector(torch.float32)) for own in self.parameters
        )
        heads, groups = self.heads, self.groups
        sizes = (heads * self.head_dim, *(groups * self.state_size,) * 2)
        least, largest = self.time_limits

        def time_step(dt_TH: Tensor) -> Tensor:
            return F.softplus(dt_TH.float() + time_bias.weight).clamp(least, largest)

        time_step_of, silu = per_token(to.kernels, time_step), per_token(to.kernels, F.silu)
        gated = self.gated

        def run(value: tuple[Tensor, ...], step: LayerStep) -> Any:
            x_TI, gate_TI, dt_TH, *bc = value
            if not bc:
                x_TI, *bc = x_TI.split(sizes, dim=-1)
            b_TGN, c_TGN = (part.float().unflatten(1, (groups, -1)) for part in bc)
            x_THP = x_TI.float().unflatten(1, (heads, -1))
            dt_TH1 = time_step_of(dt_TH)[..., None]
            g_THX = dt_TH1 * -decay.weight.exp().view(heads, -1)
            y_THP = recurrence(c_TGN, b_TGN, dt_TH1 * x_THP, g_THX, None, step.batch, place)
            y_TI = (y_THP + skip.weight[:, None] * x_THP).flatten(1)
            if gated:
                return (y_TI * silu(gate_TI.float())).to(x_TI.dtype)
            return y_TI.to(x_TI.dtype), gate_TI

        return run

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if ranks > 1:
            yield "its state spaces are not split"

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        inner, shared = self.heads * self.head_dim, 2 * self.groups * self.state_size
        # In float32 x, dt * x and y, then B and C, and the decays.
        wide = (4 if eager else 3) * inner + shared + 2 * self.decay.elements
        return itemsize * (hidden + 3 * inner + shared) + _FLOAT32 * wide


@dataclass(frozen=True, kw_only=True)
class SelectiveInputs(Operation):
    """The time steps, B and C of Mamba-1, projected from x and normed (Jamba, arXiv 2403.19887).

    The value is x and the gate, `[T, I]` each. It returns x, the gate, dt `[T, I]`, and B and C,
    `[T, N]` each. The projection to dt has rank R.
    """

    projection: Parameter
    """`[R + 2N, I]`: to what dt is projected from, B and C."""
    time_projection: Parameter
    """`[I, R]`."""
    time_norm: Parameter
    """`[R]`."""
    b_norm: Parameter
    """`[N]`."""
    c_norm: Parameter
    """`[N]`."""
    eps: float

    @property
    def title(self) -> str:
        return "selective inputs of state spaces"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.projection, self.time_projection, *self._norms)

    @property
    def _norms(self) -> tuple[Parameter, ...]:
        return (self.time_norm, self.b_norm, self.c_norm)

    def bind(self, to: Binding) -> Run:
        project, time_step = projection(to, self.projection), projection(to, self.time_projection)
        sizes = tuple(norm.shape[0] for norm in self._norms)
        norm_dt, norm_b, norm_c = (
            per_token(to.kernels, to.module(norm, lambda: RMSNorm(self.eps)))
            for norm in self._norms
        )

        def run(value: tuple[Tensor, Tensor], step: LayerStep) -> tuple[Tensor, ...]:
            x_TI, gate_TI = value
            dt_TR, b_TN, c_TN = project(x_TI).split(sizes, dim=-1)
            return x_TI, gate_TI, time_step(norm_dt(dt_TR)), norm_b(b_TN), norm_c(c_TN)

        return run

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        inner, rank = self.time_projection.shape
        projected = self.projection.shape[0]
        norms = 3 * _FLOAT32 * rank if eager else 0
        return itemsize * (hidden + 3 * inner + 3 * projected) + norms


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Operation):
    """Lightning attention (MiniMax-01, arXiv 2501.08313): no softmax, and a constant decay.

    The value is a gate `[T, I]` and the queries, keys and values of each head side by side, to
    which silu is applied, `[T, 3I]`. It returns the result and the gate, `[T, I]` each. Head h of H
    decays by exp(-slope * 2 ** (-8 (h + 1) / H)) with each token.
    """

    heads: int
    """H."""
    head_dim: int
    """P."""
    slope: float

    @property
    def title(self) -> str:
        return "linear attention"

    @property
    def row_state(self) -> RowState:
        return recurrent_state(self.heads, self.heads, self.head_dim, self.head_dim, 1)

    def bind(self, to: Binding) -> Run:
        place, recurrence = to.row_place, to.kernels.recurrence
        assert place is not None, "the engine has memory for recurrent state"
        heads, head_dim, slope = self.heads, self.head_dim, self.slope
        silu = per_token(to.kernels, F.silu)

        def run(value: tuple[Tensor, Tensor], step: LayerStep) -> tuple[Tensor, Tensor]:
            gate_TI, qkv_TF = value
            qkv_TH3P = silu(qkv_TF).float().view(-1, heads, 3, head_dim)
            q_THP, k_THP, v_THP = qkv_TH3P.unbind(2)
            head_H = torch.arange(1, heads + 1, device=qkv_TF.device)
            g_H1 = (-slope * (2.0 ** (-8 / heads)) ** head_H)[:, None]
            g_TH1 = g_H1.expand(len(qkv_TF), heads, 1)
            y_THP = recurrence(q_THP, k_THP, v_THP, g_TH1, None, step.batch, place)
            return y_THP.flatten(1).to(qkv_TF.dtype), gate_TI

        return run

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if ranks > 1:
            yield "its linear attention is not split"

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        inner = self.heads * self.head_dim
        return itemsize * (hidden + 8 * inner) + _FLOAT32 * 4 * inner
