"""Linear attention with the delta rule: Gated DeltaNet and Kimi Delta Attention.

Shapes: T tokens, G key heads, H value heads (G divides H), K and V elements of a key and a value,
F = 2GK + HV features of queries, keys and values, X decays of a head: 1, or K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ....cache.spec import RowState
from .operation import Binding, LayerStep, Operation, Run, ShardedLayer, Vector, per_token
from .parameter import Parameter, cut
from .recurrence import recurrent_state

_LEAST_SQUARES = 1e-6
"""Added to the sum of squares that a query or key is divided by the root of."""


@dataclass(frozen=True, kw_only=True)
class DeltaRule(Operation):
    """Of (queries, keys and values `[T, F]`, gate, a `[T, H * X]`, b `[T, H]`), the output of the
    recurrence `[T, H, V]`, and the gate.

    Queries and keys are scaled to length 1, queries also by K ** -0.5. The log decay is
    -exp(A_log) * softplus(a + dt_bias), of each head in Gated DeltaNet (Yang et al., arXiv
    2412.06464) and of each of its key channels in Kimi Delta Attention (arXiv 2510.26692). Beta is
    sigmoid(b), in the model's dtype; all else is float32, and the output is rounded once.
    """

    a_log: Parameter
    """float32 `[H]`."""
    dt_bias: Parameter
    """float32 `[H * X]`."""
    key_heads: int
    key_dim: int
    value_dim: int
    beta_scale: float = 1.0
    """Factor of beta; 2 allows negative eigenvalues of the state's transition."""

    @property
    def heads(self) -> int:
        """H."""
        return self.a_log.shape[0]

    @property
    def decays(self) -> int:
        """X."""
        return self.dt_bias.shape[0] // self.heads

    @property
    def title(self) -> str:
        return "delta rule"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.a_log, self.dt_bias

    @property
    def row_state(self) -> RowState:
        return recurrent_state(
            self.key_heads, self.heads, self.key_dim, self.value_dim, self.decays
        )

    def bind(self, to: Binding) -> Run:
        a_log, dt_bias = (
            to.module(parameter, lambda: Vector(torch.float32)) for parameter in self.parameters
        )
        place, recurrence = to.row_place, to.kernels.recurrence
        assert place is not None, "the engine has memory for recurrent state"
        key_heads, keys, heads = self.key_heads, self.key_heads * self.key_dim, self.heads
        sizes, scale = (keys, keys, heads * self.value_dim), self.key_dim**-0.5
        beta_scale, fused = self.beta_scale, to.kernels.delta_rule

        def log_decay_of(a_TX: Tensor) -> Tensor:
            dt_THX = F.softplus(a_TX.float() + dt_bias.weight).unflatten(1, (heads, -1))
            log_THX: Tensor = -a_log.weight.exp()[:, None] * dt_THX
            return log_THX

        unit = per_token(to.kernels, _unit)
        log_decay, sigmoid = (
            per_token(to.kernels, log_decay_of),
            per_token(to.kernels, torch.sigmoid),
        )

        def run(
            value: tuple[Tensor, Tensor, Tensor, Tensor], step: LayerStep
        ) -> tuple[Tensor, Tensor]:
            x_TF, gate_TF, a_TX, b_TH = value
            q_TF, k_TF, v_TF = x_TF.split(sizes, dim=-1)
            if fused is not None and step.batch.tokens_per_row is not None:
                parts = (q_TF, key_heads), (k_TF, key_heads), (v_TF, heads), (a_TX, heads)
                split = [part.unflatten(1, (count, -1)) for part, count in parts]
                weights = a_log.weight, dt_bias.weight
                return fused(*split, b_TH, *weights, beta_scale, step.batch, place), gate_TF
            q_TGK = unit(q_TF.unflatten(1, (key_heads, -1))) * scale
            k_TGK = unit(k_TF.unflatten(1, (key_heads, -1)))
            v_THV = v_TF.float().contiguous().unflatten(1, (heads, -1))
            beta_TH = (sigmoid(b_TH) * beta_scale).float()
            out_THV = recurrence(q_TGK, k_TGK, v_THV, log_decay(a_TX), beta_TH, step.batch, place)
            return out_THV.to(x_TF.dtype), gate_TF

        return run

    def rank_obstacle(self, ranks: int) -> Iterator[str]:
        if self.key_heads % ranks:
            yield f"{ranks} does not divide {self.key_heads} key heads of the delta rule"
        elif ranks > 1 and self.decays > 1:
            yield "its decays of channels are not split"

    def shard(self, layer: ShardedLayer, following: Operation | None) -> Iterator[Operation]:
        yield replace(
            self,
            a_log=cut(self.a_log, [layer.rank.part(self.heads)]),
            dt_bias=cut(self.dt_bias, [layer.rank.part(self.heads * self.decays)]),
            key_heads=len(layer.rank.part(self.key_heads)),
        )

    def live_bytes(self, hidden: int, itemsize: int, *, eager: bool) -> int:
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        held = itemsize * (hidden + 2 * keys + 3 * values + self.heads * (self.decays + 1))
        return held + 4 * ((4 if eager else 2) * keys + 2 * values + self.heads * (self.decays + 1))


def _unit(x_TGK: Tensor) -> Tensor:
    """Return vectors of length 1, float32."""
    x_TGK = x_TGK.float()
    return x_TGK * torch.rsqrt(x_TGK.pow(2).sum(-1, keepdim=True) + _LEAST_SQUARES)
