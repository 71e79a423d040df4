"""Grouped-query attention as operations, from the layout of a checkpoint.

Kernels rotate elements i and i + head_dim / 2 of a head. Where a model rotates neighbours, or a
part of a head, rows of queries and keys are reordered when they are loaded (see `HeadRows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ..kernels.ops.layer_operations import Attend, Linear, Operation, QKNorm, Rotate
from ..kernels.ops.parameter import HeadRows, Parameter, Source
from .config import ModelConfig, Rope
from .plan_operations import linear
from .rope import UNROTATED

__all__ = ["LayerKind", "attend", "attention"]


class LayerKind(NamedTuple):
    """What the layers of a model can differ in."""

    window: int | None
    """Tokens that a token attends to; None: all previous tokens."""
    rope: Rope
    rope_kind: int
    """Index of the rotation among those of the model."""
    mixture: bool = False
    """Whether it has experts instead of an MLP."""


def attention(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """Grouped-query attention (Ainslie et al. 2023), with norms of queries and keys or without."""
    yield _qkv(config, kind)
    qk_norm = config.family.qk_norm
    if qk_norm == "unweighted":
        if config.norms_rotated and kind.rope != UNROTATED:
            yield _unweighted_qk_norm(config)
    elif qk_norm != "none":
        yield _qk_norm(config, kind)
    yield Rotate(name="rotate", kind=kind.rope_kind)
    scale = config.attention_multiplier
    if scale is None:
        scale = float((config.query_pre_attn_scalar or config.head_dim) ** -0.5)
    yield attend(config, kind, scale=scale, value_dim=config.head_dim)
    biased = config.attention_bias and config.family.output_bias
    output = {"self_attn.o_proj": config.hidden_size}
    yield linear("attention.output", output, config.query_size, lambda part: biased)


def attend(
    config: ModelConfig,
    kind: LayerKind,
    *,
    scale: float,
    value_dim: int,
    shared_values: bool = False,
) -> Attend:
    """The operation that writes and reads the cache."""
    sinks = Parameter("attention.sinks.weight", (Source("self_attn.sinks", (config.num_heads,)),))
    return Attend(
        name="attention",
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        value_dim=value_dim,
        scale=scale,
        window=0 if config.family.chunked else kind.window or 0,
        chunk=kind.window or 0 if config.family.chunked else 0,
        softcap=config.attn_logit_softcapping or 0.0,
        sinks=sinks if config.family.attention_sinks else None,
        temperature=config.temperature if kind.rope == UNROTATED else None,
        shared_values=shared_values,
    )


def _qkv(config: ModelConfig, kind: LayerKind) -> Linear:
    """The projection to queries, keys and values of all heads."""
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    weight = Parameter(
        "attention.qkv.weight", _qkv_sources(config, kind, "weight", (config.hidden_size,))
    )
    bias = None
    if config.attention_bias:
        bias = Parameter("attention.qkv.bias", _qkv_sources(config, kind, "bias", ()))
    return Linear(name="qkv_linear", weight=weight, bias=bias, split=heads, unit=config.head_dim)


def _qkv_sources(
    config: ModelConfig, kind: LayerKind, leaf: str, columns: tuple[int, ...]
) -> tuple[Source, ...]:
    """The tensors of the projection, or of its bias, with rows ordered for rotation."""
    names = config.family.qkv
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    rows = [n * config.head_dim for n in heads]
    reordered = _rows_of_head(config, kind.rope)
    if len(names) == 1:
        shape = (sum(rows), *columns)
        if reordered is None:
            return (Source(f"{names[0]}.{leaf}", shape),)
        as_stored = HeadRows(0, 1, config.head_dim, config.head_dim)
        order = (reordered, reordered, as_stored)
        starts = (0, rows[0], rows[0] + rows[1])
        return tuple(
            Source(f"{names[0]}.{leaf}", shape, replace(part, start=start, heads=n))
            for part, start, n in zip(order, starts, heads, strict=True)
        )
    return tuple(
        Source(
            f"{name}.{leaf}",
            (n * config.head_dim, *columns),
            None if reordered is None or part == 2 else replace(reordered, heads=n),
        )
        for part, (name, n) in enumerate(zip(names, heads, strict=True))
    )


def _rows_of_head(config: ModelConfig, rope: Rope) -> HeadRows | None:
    """The order of the rows of one head of queries and keys; None: as they are stored."""
    rotated = rope.rotated_elements(config.head_dim)
    interleaved = config.family.rope_interleaved is True
    if not rotated or (rotated == config.head_dim and not interleaved):
        return None
    return HeadRows(0, 1, config.head_dim, rotated, interleaved)


def _qk_norm(config: ModelConfig, kind: LayerKind) -> QKNorm:
    all_heads = config.family.qk_norm == "all_heads"
    order = _rows_of_head(config, kind.rope)

    def weight(name: str, heads: int) -> Parameter:
        own = heads if all_heads else 1
        selection = None if order is None else replace(order, heads=own)
        source = Source(f"self_attn.{name}.weight", (own * config.head_dim,), selection)
        return Parameter(f"attention.{name}.weight", (source,))

    return QKNorm(
        name="qk_norm",
        q=weight("q_norm", config.num_heads),
        k=weight("k_norm", config.num_kv_heads),
        eps=config.rms_norm_eps,
        offset=config.family.offset_norms,
        all_heads=all_heads,
    )


def _unweighted_qk_norm(config: ModelConfig) -> QKNorm:
    """A norm without weight, which the model has after the rotation.

    A rotation of amplitude a multiplies a head by a. Its norm with epsilon e is then that of the
    unrotated head with e / a**2, so `ModelConfig.rope` has amplitude 1 in these layers.
    """

    def weight(name: str) -> Parameter:
        return Parameter(f"attention.{name}.weight", (Source(None, (config.head_dim,)),))

    return QKNorm(
        name="qk_norm",
        q=weight("q_norm"),
        k=weight("k_norm"),
        eps=config.rms_norm_eps / config.rope_scaling.amplitude**2,
        offset=True,
    )
