"""Attention as operations: grouped-query attention, and multi-head latent attention.

Kernels rotate elements i and i + head_dim / 2 of a head. Where a model rotates neighbours, or a
part of a head, rows of queries and keys are reordered when they are loaded (see `HeadRows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from ..kernels.ops.activation import GateOutput
from ..kernels.ops.attention import Attend, KeysAsValues
from ..kernels.ops.latent import LatentQueries, LatentToValues
from ..kernels.ops.linear import Linear
from ..kernels.ops.norms import HeadNorm, Norm, QKNorm
from ..kernels.ops.operation import Operation
from ..kernels.ops.parameter import HeadRows, Parameter, Slice, Source
from ..kernels.ops.rotation import Rotate
from .config import LatentConfig, ModelConfig
from .layer_kinds import LayerKind
from .layers import ATTENTION_TYPES
from .layers.tensors import Part, linear, vector
from .rope import UNROTATED, Rope


def attention(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """Multi-head latent attention, or grouped-query attention (Ainslie et al. 2023), with norms of
    queries and keys or without."""
    if config.latent is not None:
        yield from latent_attention(config, kind, config.latent)
        return
    factors = config.multipliers
    pairs = config.head_dim // 2 if config.layer_head_dims else 0
    if kind.kv_source is not None:
        yield from _shared_queries(config, kind, pairs)
    else:
        into = factors.attention_in_multiplier
        q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        of_keys = into * factors.key_multiplier
        yield _qkv(config, kind, ((q, into), (k, of_keys), (k, into)))
        if _keys_are_values(config, kind):
            yield KeysAsValues(name="keys_as_values")
        if config.family.value_norms:
            own = Parameter("attention.v_norm.weight", (Source(None, (config.head_dim,)),))
            eps = config.rms_norm_eps
            yield HeadNorm(name="v_norm", weight=own, eps=eps, offset=True, part=2)
        normed = config.family.qk_norm if config.use_qk_norm else "none"
        if normed == "unweighted" and kind.rope == UNROTATED:
            normed = "none"
        if normed != "none":
            yield _qk_norm(config, kind)
        yield Rotate(name="rotate", kind=kind.rope_kind, pairs=pairs)
    scale = config.attention_multiplier
    if scale is None:
        scale = float((config.query_pre_attn_scalar or config.head_dim) ** -0.5)
    attended = attend(config, kind, scale=scale, value_dim=config.head_dim)
    if config.family.gated_attention:
        yield replace(attended, writes="attended")
        yield from _attention_gate(config)
    else:
        yield attended
    output = {config.family.output: config.hidden_size}
    biased = config.attention_bias and config.family.output_bias
    values = config.num_heads * (config.value_dim or config.head_dim)
    scales = ((config.hidden_size, factors.attention_out_multiplier),)
    yield linear("attention.output", output, values, biased, factors=scales)


def attend(
    config: ModelConfig,
    kind: LayerKind,
    *,
    scale: float,
    value_dim: int,
    shared_values: bool = False,
) -> Attend:
    """The operation that writes and reads the cache."""
    sinks = None
    layer_type = ATTENTION_TYPES[kind.window is not None]
    if (stored := config.family.attention_sinks.get(layer_type)) is not None:
        sinks = Parameter("attention.sinks.weight", (Source(stored, (config.num_heads,)),))
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
        sinks=sinks,
        temperature=config.temperature if kind.rope == UNROTATED else None,
        shared_values=shared_values,
        value_padding=0 if config.value_dim is None else value_dim - config.value_dim,
        keys_of=kind.kv_source,
    )


def _attention_gate(config: ModelConfig) -> Iterator[Operation]:
    """The gate of the output of attention: the rows after the queries of each head."""
    name, size, heads = config.family.qkv[0], config.head_dim, config.num_heads
    rows = HeadRows(size, heads, size, 0, stride=2 * size)
    parts = [(name, 2 * heads * size, rows)]
    gate = linear("attention.gate", parts, config.hidden_size, config.attention_bias)
    yield replace(gate, reads=("normed",), writes="gate")
    yield GateOutput(name="gate_output", reads=("attended", "gate"), features=heads * size)


def _keys_are_values(config: ModelConfig, kind: LayerKind) -> bool:
    return config.keys_as_values and kind.window is None


def _shared_queries(config: ModelConfig, kind: LayerKind, pairs: int) -> Iterator[Operation]:
    """The queries of a layer that reads the keys and values of another one."""
    name, *_ = config.family.qkv
    heads, size = config.num_heads, config.head_dim
    queries, biased = {name: heads * size}, config.attention_bias
    hidden = config.hidden_size
    yield linear("attention.queries", queries, hidden, biased, split=(heads,), unit=size)
    weight = vector("attention.q_norm", "self_attn.q_norm", size)
    yield HeadNorm(name="q_norm", weight=weight, eps=config.rms_norm_eps, part=0)
    yield Rotate(name="rotate", kind=kind.rope_kind, pairs=pairs, queries_only=True)


def _qkv(config: ModelConfig, kind: LayerKind, factors: tuple[tuple[int, float], ...]) -> Linear:
    """The projection to queries, keys and values of all heads, with rows ordered for rotation."""
    names, size, order = config.family.qkv, config.head_dim, _rows_of_head(config, kind.rope)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    hidden, biased = config.hidden_size, config.attention_bias
    if _keys_are_values(config, kind):
        keys = {name: n * size for name, n in zip(names[:2], heads, strict=False)}
        return linear("attention.qkv", keys, hidden, biased, split=heads[:2], unit=size)
    selected = [None if order is None else replace(order, heads=n) for n in heads[:2]]
    parts: list[Part]
    if len(names) > 1:
        rows = [n * size for n in heads[:2]]
        if config.family.gated_attention:
            rows[0] *= 2
            own = order or HeadRows(0, 1, size, 0)
            selected[0] = replace(own, heads=heads[0], stride=2 * size)
        values = _value_rows(config, names[2])
        parts = [*zip(names[:2], rows, selected, strict=True), *values]
    elif order is None:
        parts = [(names[0], sum(heads) * size, None)]
    else:
        starts = accumulate((n * size for n in heads[:2]), initial=0)
        as_stored = HeadRows(0, heads[2], size, size)
        parts = [
            (names[0], sum(heads) * size, replace(rows, start=start))
            for rows, start in zip((*filter(None, selected), as_stored), starts, strict=True)
        ]
    return linear("attention.qkv", parts, hidden, biased, split=heads, unit=size, factors=factors)


def _value_rows(config: ModelConfig, name: str) -> Iterator[Part]:
    """The rows of values; those of a head that are shorter than its keys are followed by zeros."""
    heads, size = config.num_kv_heads, config.value_dim or config.head_dim
    if size == config.head_dim:
        yield name, heads * size, None
        return
    for head in range(heads):
        yield name, heads * size, Slice(0, head * size, size)
        yield None, config.head_dim - size, None


def _rows_of_head(config: ModelConfig, rope: Rope) -> HeadRows | None:
    """The order of the rows of one head of queries and keys; None: as they are stored."""
    rotated = rope.rotated_elements(config.head_dim)
    interleaved = config.family.rope_interleaved
    if not rotated or (rotated == config.head_dim and not interleaved):
        return None
    return HeadRows(0, 1, config.head_dim, rotated, interleaved)


def _qk_norm(config: ModelConfig, kind: LayerKind) -> QKNorm:
    """The norm of queries and keys, before the rotation.

    A model with a norm without weight has it after the rotation. A rotation of amplitude a
    multiplies a head by a. Norming it with epsilon e is norming the unrotated head with e / a**2,
    so `ModelConfig.rope` has amplitude 1 in these layers.
    """
    family, eps, order = config.family, config.rms_norm_eps, _rows_of_head(config, kind.rope)
    all_heads, unweighted = family.qk_norm == "all_heads", family.qk_norm == "unweighted"
    if unweighted:
        eps /= config.rope_scaling.amplitude**2

    def weight(name: str, theirs: str, heads: int) -> Parameter:
        own = heads if all_heads else 1
        source = Source(None, (config.head_dim,))
        if not unweighted:
            selection = None if order is None else replace(order, heads=own)
            stored = f"self_attn.{theirs}.weight"
            source = Source(stored, (own * config.head_dim,), selection)
        return Parameter(f"attention.{name}.weight", (source,))

    q_norm, k_norm = family.qk_norm_names
    return QKNorm(
        name="qk_norm",
        q=weight("q_norm", q_norm, config.num_heads),
        k=weight("k_norm", k_norm, config.num_kv_heads),
        eps=eps,
        offset=family.offset_norms or unweighted,
        all_heads=all_heads,
    )


# Multi-head latent attention as operations.

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside latent attention, independent of the config."""


def latent_attention(
    config: ModelConfig, kind: LayerKind, latent: LatentConfig
) -> Iterator[Operation]:
    """Multi-head latent attention (DeepSeek-V2), with the projections of keys and values absorbed.

    The cache has one vector per token, the normed latent and the rotated key. It is the key of all
    heads, and its first elements are the value. Instead of projecting each latent to a key, the
    query is projected to the latent space (q . (W c) = (W^T q) . c). Attention then returns a
    weighted sum of latents, which is projected to values.
    """
    heads, rank, hidden = config.num_heads, latent.kv_lora_rank, config.hidden_size
    queries = heads * latent.qk_head_dim
    # A direct query projection (without q_lora_rank) never has a bias.
    q_part = "self_attn.q_proj" if latent.q_lora_rank is None else "self_attn.q_a_proj"
    parts = {
        q_part: latent.q_lora_rank or queries,
        "self_attn.kv_a_proj_with_mqa": latent.cached_dim,
    }
    yield linear(
        "attention.q_kv",
        parts,
        hidden,
        tuple(parts.keys() - {"self_attn.q_proj"}) if config.attention_bias else (),
        split=(latent.q_lora_rank or queries, rank, latent.qk_rope_head_dim),
    )
    if latent.q_lora_rank is not None:
        q_norm = vector("attention.q_norm", "self_attn.q_a_layernorm", latent.q_lora_rank)
        yield Norm(name="q_norm", weight=q_norm, eps=_LATENT_NORM_EPS, part=0)
        up = {"self_attn.q_b_proj": queries}
        yield linear("attention.q_up", up, latent.q_lora_rank, part=0)
    per_head = latent.qk_nope_head_dim + latent.v_head_dim
    kv_up = Parameter(
        "attention.kv_up.weight",
        (Source("self_attn.kv_b_proj.weight", (heads * per_head, rank)),),
        (heads, per_head, rank),
    )
    keys = latent.qk_nope_head_dim
    yield LatentQueries(
        name="latent_queries",
        kv_up=kv_up,
        keys=keys,
        norm=vector("attention.latent_norm", "self_attn.kv_a_layernorm", rank),
        eps=_LATENT_NORM_EPS,
        rope=latent.qk_rope_head_dim,
        interleaved=latent.rope_interleave,
        kind=kind.rope_kind,
    )
    scale = float(latent.qk_head_dim**-0.5) * config.rope_scaling.latent_score_scale
    yield attend(config, kind, scale=scale, value_dim=rank, shared_values=True)
    yield LatentToValues(name="latent_to_values", kv_up=kv_up, keys=keys)
    output = {"self_attn.o_proj": hidden}
    yield linear("attention.output", output, heads * latent.v_head_dim, config.attention_bias)
