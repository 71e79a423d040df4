"""The operations of a `LayerPlan` in plain PyTorch, one function per kind, bound to their weights.

torch.compile traces these functions, and they run when a backend has no faster implementation.
Constants of an operation are bound once, before the first step.

Shape suffixes: T tokens of a step, H query heads, G key/value heads, E head_dim, R kv_lora_rank, C
what latent attention caches of a token, F features, K kinds of rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import AttentionForm, Experts, ExpertTensors, Kernels, LayerPlace, RaggedBatch
from ..kernels.ops.activation import gated_activation
from ..kernels.ops.collectives import Collectives
from ..kernels.ops.layer_operations import (
    Activate,
    AllReduce,
    Attend,
    AttentionTemperature,
    JoinNorms,
    LatentKeys,
    LatentRotate,
    LatentToValues,
    Linear,
    Norm,
    Operation,
    QKNorm,
    QueriesToLatent,
    Rotate,
)
from ..kernels.ops.parameter import Parameter
from .modules import HeadProjection, Projection, RMSNorm, Vector, mean_square, per_token
from .rope import rotate

__all__ = ["Binding", "LayerStep", "Run", "bind", "collectives_of"]


class LayerStep(NamedTuple):
    """Inputs that all layers of one step share."""

    cos: Tensor
    """float32 `[K, T, E / 2]`."""
    sin: Tensor
    arena: Tensor
    batch: RaggedBatch
    embeddings: Tensor | None = None
    """`[T, D]`: the embeddings that `JoinNorms` reads."""


Run = Callable[[Any, LayerStep], Any]
"""A bound operation: the value, a tensor or a tuple of parts, to the next one."""
Module = Callable[[Parameter, Callable[[], nn.Module]], Any]
"""Returns the module that holds a parameter, made by the second argument if there is none yet."""


class Binding(NamedTuple):
    """What operations of a layer are bound to."""

    module: Module
    """Returns the modules that hold the parameters."""
    kernels: Kernels
    """Of linear layers and attention."""
    place: LayerPlace
    """Of the layer in the cache."""
    storage: str
    """How the cache stores vectors."""


@singledispatch
def bind(op: Operation, to: Binding) -> Run:
    """Return an operation, but no `Residual`, as a function of its value and the step."""
    raise TypeError(f"no plain version of {op}")


@bind.register
def _norm(op: Norm, to: Binding) -> Run:
    norm = to.module(op.weight, lambda: RMSNorm(op.eps, offset=op.offset))
    return _on_part(per_token(to.kernels, norm), op.part)


@bind.register
def _join_norms(op: JoinNorms, to: Binding) -> Run:
    def norm(weight: Parameter) -> Callable[[Tensor], Tensor]:
        return per_token(to.kernels, to.module(weight, lambda: RMSNorm(op.eps, offset=op.offset)))

    of_embeddings = norm(op.embeddings)
    of_hidden = None if op.hidden is None else norm(op.hidden)

    def run(x_TD: Tensor, step: LayerStep) -> Tensor:
        assert step.embeddings is not None
        normed_TD = x_TD if of_hidden is None else of_hidden(x_TD)
        return torch.cat((of_embeddings(step.embeddings), normed_TD), dim=-1)

    return run


@bind.register
def _linear(op: Linear, to: Binding) -> Run:
    linear = to.module(op.weight, lambda: Projection(to.kernels, op.out_features, op.in_features))
    if not op.split:
        return _on_part(linear, op.part)
    sizes, unit = op.split, op.unit
    if unit == 1:
        return lambda x_TF, step: linear(x_TF).split(sizes, dim=-1)
    return lambda x_TF, step: linear(x_TF).unflatten(1, (-1, unit)).split(sizes, dim=1)


def _on_part(function: Callable[[Tensor], Tensor], part: int | None) -> Run:
    if part is None:
        return lambda x, step: function(x)
    return lambda parts, step: (*parts[:part], function(parts[part]), *parts[part + 1 :])


@bind.register
def _qk_norm(op: QKNorm, to: Binding) -> Run:
    q_norm = to.module(op.q, lambda: RMSNorm(op.eps, offset=op.offset))
    k_norm = to.module(op.k, lambda: RMSNorm(op.eps, offset=op.offset))
    if op.ranks > 1 and op.all_heads:
        return _qk_norm_of_ranks(op, q_norm, k_norm, to.kernels)
    q_norm, k_norm = per_token(to.kernels, q_norm), per_token(to.kernels, k_norm)
    if not op.all_heads:
        return lambda qkv, step: (q_norm(qkv[0]), k_norm(qkv[1]), qkv[2])

    def run(qkv: tuple[Tensor, Tensor, Tensor], step: LayerStep) -> tuple[Tensor, Tensor, Tensor]:
        q_THE, k_TGE, v_TGE = qkv
        q_THE = q_norm(q_THE.flatten(1)).view(q_THE.shape)
        return q_THE, k_norm(k_TGE.flatten(1)).view(k_TGE.shape), v_TGE

    return run


def _qk_norm_of_ranks(op: QKNorm, q_norm: RMSNorm, k_norm: RMSNorm, kernels: Kernels) -> Run:
    """The norm over the heads of all ranks, from the sum of their means of squares."""
    collectives, mean = collectives_of(kernels), per_token(kernels, mean_square)

    def run(qkv: tuple[Tensor, Tensor, Tensor], step: LayerStep) -> tuple[Tensor, Tensor, Tensor]:
        q_THE, k_TGE, v_TGE = qkv
        q_TF, k_TF = q_THE.flatten(1), k_TGE.flatten(1)
        squares_T2 = torch.stack((mean(q_TF), mean(k_TF)), dim=-1)
        q_T1, k_T1 = (collectives.all_reduce(squares_T2) / op.ranks).split(1, dim=-1)
        q_TF, k_TF = q_norm(q_TF, q_T1), k_norm(k_TF, k_T1)
        return q_TF.view(q_THE.shape), k_TF.view(k_TGE.shape), v_TGE

    return run


def collectives_of(kernels: Kernels) -> Collectives:
    """Return the collectives of the group that a shard of a model belongs to."""
    assert kernels.collectives is not None, "the kernels of a rank have its collectives"
    return kernels.collectives


@bind.register
def _all_reduce(op: AllReduce, to: Binding) -> Run:
    collectives = collectives_of(to.kernels)
    return lambda x_TF, step: collectives.all_reduce(x_TF)


@bind.register
def _rotate(op: Rotate, to: Binding) -> Run:
    kind = op.kind

    def run(qkv: tuple[Tensor, Tensor, Tensor], step: LayerStep) -> tuple[Tensor, Tensor, Tensor]:
        q_THE, k_TGE, v_TGE = qkv
        cos_TE, sin_TE = step.cos[kind], step.sin[kind]
        return rotate(q_THE, cos_TE, sin_TE), rotate(k_TGE, cos_TE, sin_TE), v_TGE.contiguous()

    return run


@bind.register
def _attend(op: Attend, to: Binding) -> Run:
    sinks = None if op.sinks is None else to.module(op.sinks, Vector)
    # `run` must not hold `to`, which holds the layer: memory in a cycle is freed late.
    attention, place, features = to.kernels.attention, to.place, op.features
    temper = None
    if op.temperature is not None:
        temper = per_token(to.kernels, partial(_tempered, op.temperature))
    constants = (op.scale, op.window, op.softcap, to.storage, op.value_dim, op.chunk)

    def run(value: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        q_THE, k_TGE, *values = value
        if temper is not None:
            q_THE = temper(q_THE, step.batch.positions)
        form = AttentionForm(*constants, None if sinks is None else sinks.weight)
        v_TGE = values[0] if values else None
        attended_THE = attention(q_THE, k_TGE, v_TGE, step.arena, place, step.batch, form)
        return attended_THE.reshape(q_THE.shape[0], features)

    return run


def _tempered(temperature: AttentionTemperature, q_THE: Tensor, positions_T: Tensor) -> Tensor:
    """Multiply queries by the temperature of their positions, in float32."""
    floors_T = torch.floor((positions_T.float() + 1.0) / temperature.floor)
    factors_T = torch.log1p(floors_T) * temperature.scale + 1.0
    return (q_THE * factors_T[:, None, None]).to(q_THE.dtype)


@bind.register
def _activate(op: Activate, to: Binding) -> Run:
    gated = per_token(to.kernels, gated_activation(op))
    return lambda gate_up, step: gated(*gate_up)


@bind.register
def _experts(op: Experts, to: Binding) -> Run:
    router = to.module(op.router, Vector)
    correction = None
    if op.correction is not None:
        dtype = op.correction.dtype
        correction = to.module(op.correction, lambda: Vector(dtype))

    def projection(weight: Parameter) -> Any:
        rows, columns = weight.shape
        return to.module(weight, lambda: Projection(to.kernels, rows, columns, weight.matrices))

    gate_up, down = projection(op.gate_up), projection(op.down)
    run_experts = to.kernels.experts

    def run(x_TD: Tensor, step: LayerStep) -> Tensor:
        tensors = ExpertTensors(
            router.weight,
            router.bias,
            None if correction is None else correction.weight,
            *(gate_up.weight, gate_up.scales, gate_up.bias),
            *(down.weight, down.scales, down.bias),
        )
        return run_experts(op, x_TD, tensors, step.batch.live_tokens)

    return run


@bind.register
def _latent_rotate(op: LatentRotate, to: Binding) -> Run:
    heads, sizes, interleaved, kind = op.heads, (op.nope, op.rope), op.interleaved, op.kind

    def run(value: tuple[Tensor, Tensor, Tensor], step: LayerStep) -> tuple[Tensor, ...]:
        q_TF, latent_TR, key_TE = value
        cos_TE, sin_TE = step.cos[kind], step.sin[kind]
        q_THE = q_TF.unflatten(1, (heads, -1))
        plain_THE, turned_THE = q_THE.split(sizes, dim=-1)
        turned_THE = rotate(turned_THE, cos_TE, sin_TE, interleaved=interleaved)
        key_T1E = rotate(key_TE[:, None], cos_TE, sin_TE, interleaved=interleaved)
        return plain_THE, turned_THE, latent_TR, key_T1E

    return run


@bind.register
def _queries_to_latent(op: QueriesToLatent, to: Binding) -> Run:
    kv_up = to.module(op.kv_up, lambda: HeadProjection(op.keys))
    project = per_token(to.kernels, kv_up.queries_to_latent)

    def run(value: tuple[Tensor, Tensor, Tensor, Tensor], step: LayerStep) -> tuple[Tensor, ...]:
        plain_THE, turned_THE, latent_TR, key_T1E = value
        q_THC = torch.cat((project(plain_THE), turned_THE), dim=-1)
        return q_THC, latent_TR, key_T1E

    return run


@bind.register
def _latent_keys(op: LatentKeys, to: Binding) -> Run:
    norm = per_token(to.kernels, to.module(op.weight, lambda: RMSNorm(op.eps)))

    def run(value: tuple[Tensor, Tensor, Tensor], step: LayerStep) -> tuple[Tensor, Tensor]:
        q_THC, latent_TR, key_T1E = value
        return q_THC, torch.cat((norm(latent_TR)[:, None], key_T1E), dim=-1)

    return run


@bind.register
def _latent_to_values(op: LatentToValues, to: Binding) -> Run:
    kv_up = to.module(op.kv_up, lambda: HeadProjection(op.keys))
    project = per_token(to.kernels, kv_up.latent_to_values)
    heads = op.kv_up.shape[0]

    def run(attended_TF: Tensor, step: LayerStep) -> Tensor:
        return project(attended_TF.unflatten(1, (heads, -1))).flatten(1)

    return run
