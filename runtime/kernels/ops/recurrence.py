"""The recurrence of linear attention with decay, which all recurrent layers share.

For each value head, with a state S `[K, V]` (zero before the first token), log decay g, and

    S <- exp(g) * S                       g of the head, or of each of its K channels
    u  = beta * (v - k . S)               delta rule; without beta: u = v
    S <- S + k u^T                        outer product
    o  = q . S

GatedDeltaNet (Yang et al., arXiv 2412.06464) and KDA (Kimi Linear, arXiv 2510.26692) have the delta
rule, with a decay of the head and of each channel. Mamba-2 (Dao and Gu, arXiv 2405.21060) is k = B,
q = C, v = dt * x, g = dt * A; Mamba-1 has one value channel for each head and a decay for each
channel; Lightning attention has a constant decay.

The state after a token of a block is a function of the state S at the start of the block and of k,
u and g of the block's tokens up to it:

    S_p = exp(g_b + ... + g_p) S + sum over i of k_i exp(g_i+1 + ... + g_p) u_i^T

so u and o of a token need no state but the one at the start of the block. That is how every kernel
computes them: a decode step reads the state and writes it only once a block (compare ReplaySSM).

Shapes: T tokens, G key heads, H value heads (G divides H; head h has the keys of head h // (H /
G)), K and V elements of a key and of a value, C tokens of a block. All numbers are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....cache.spec import RowPlace, RowState, StatePart
from .batch import RaggedBatch
from .row_states import StateBatch, Walk, define_state_operator, walk

Recurrence = Callable[
    [Tensor, Tensor, Tensor, Tensor, "Tensor | None", RaggedBatch, RowPlace], Tensor
]
"""Computes `[T, H, V]` from q and k `[T, G, K]`, v `[T, H, V]`, g `[T, H, 1]` or `[T, H, K]`, and
beta `[T, H]` or None (no delta rule), all float32, and updates the state of the batch's rows."""
RECURRENCE_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta"
"""The schema of its tensors."""


def recurrent_state(key_heads: int, heads: int, key: int, value: int, decays: int) -> RowState:
    """Return the state of a recurrence.

    Args:
        key_heads: G.
        heads: H.
        key: K.
        value: V.
        decays: 1 for a decay of each head, K for one of each channel.
    """
    shapes = (key_heads, key), (heads, value), (heads, decays)
    return RowState(
        snapshot=(StatePart((heads, key, value), "float32"),),
        inputs=tuple(StatePart(shape, "float32") for shape in shapes),
    )


def reference_recurrence(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g_THX: Tensor, beta_TH: Tensor | None, *given: Any
) -> Tensor:
    """Compute a recurrence in plain PyTorch, token by token; `given` are those of `StateBatch`.

    Tokens of padding are zero.
    """
    batch = StateBatch(*given)
    heads, groups, size = v_THV.shape[1], k_TGK.shape[1], batch.block_size
    out_THV = torch.zeros_like(v_THV)
    state = v_THV.new_zeros(heads, k_TGK.shape[2], v_THV.shape[2])
    inputs = [v_THV.new_zeros(size, *x.shape[1:]) for x in (k_TGK, v_THV, g_THX)]

    def replay(states: Sequence[Tensor], inputs: Sequence[Tensor], count: int) -> list[Tensor]:
        (state_HKV,), (k_CGK, u_CHV, g_CHX) = states, inputs
        state_HKV = state_HKV.clone()
        for k_GK, u_HV, g_HX in zip(k_CGK[:count], u_CHV[:count], g_CHX[:count], strict=True):
            k_HK = k_GK.repeat_interleave(heads // groups, 0)
            state_HKV = g_HX.exp()[:, :, None] * state_HKV + k_HK[:, :, None] * u_HV[:, None]
        return [state_HKV]

    def token(t: int, offset: int, states: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        k_HK = k_TGK[t].repeat_interleave(heads // groups, 0)
        q_HK = q_TGK[t].repeat_interleave(heads // groups, 0)
        state_HKV = g_THX[t].exp()[:, :, None] * replay(states, inputs, offset)[0]
        u_HV = v_THV[t]
        if beta_TH is not None:
            u_HV = beta_TH[t, :, None] * (u_HV - (k_HK[:, :, None] * state_HKV).sum(1))
        for part, value in zip(inputs, (k_TGK[t], u_HV, g_THX[t]), strict=True):
            part[offset] = value
        state_HKV = state_HKV + k_HK[:, :, None] * u_HV[:, None]
        out_THV[t] = (q_HK[:, :, None] * state_HKV).sum(1)

    walk(batch, Walk([state], inputs, replay, token))
    return out_THV


recurrence: Recurrence = define_state_operator(
    "recurrence", RECURRENCE_ARGUMENTS, reference_recurrence, like=2
)
"""`reference_recurrence` as an operator, which is opaque to torch.compile."""
