"""Builds the plan of a model from its config; the only place that orders a layer's operations.

Parameter names are ours; source names are as in a Hugging Face checkpoint. Matrices with the
same input (q, k, v and gate, up) are stacked into one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from ..kernels import Kernels
from ..kernels.ops.activation import Activate, ActivationName, GateOutput
from ..kernels.ops.altup import (
    AddToOthers,
    CorrectStreams,
    ExpandStreams,
    Laurel,
    MergeStreams,
    PredictStreams,
    SelectStream,
)
from ..kernels.ops.attention import Attend, KeysAsValues
from ..kernels.ops.causal_conv import CausalConv
from ..kernels.ops.delta_rule import DeltaRule
from ..kernels.ops.experts import Experts
from ..kernels.ops.latent import LatentQueries, LatentToValues
from ..kernels.ops.layer_inputs import LayerInput, LayerInputs
from ..kernels.ops.layer_plan import LayerPlan, ModelPlan
from ..kernels.ops.linear import Linear, stored_bytes
from ..kernels.ops.norms import GatedNorm, HeadNorm, Norm, QKNorm
from ..kernels.ops.operation import Add, Multiply, Operation, Replace, Residual
from ..kernels.ops.parameter import (
    ExpertRows,
    HeadRows,
    Parameter,
    Selection,
    Shape,
    Slice,
    Source,
)
from ..kernels.ops.rotation import Rotate
from ..kernels.ops.state_space import LinearAttention, SelectiveInputs, StateSpace
from ..kernels.weights import INT4, MODEL
from .config import AltUpConfig, DecoderConfig, DeltaRuleConfig, LatentConfig, ModelConfig
from .families import DeltaRuleLayout, ExpertLayout, ExpertsConfig, LayerType, Mixer, MixtureNorms
from .rope import UNROTATED, Rope
from .sharding import check_ranks, shard_plan
from .transformers.config import TransformersConfig

# Operations of a layer from the names of their tensors in a checkpoint.
#
# Names of parameters are ours; names of sources are as in a Hugging Face checkpoint, in a layer
# relative to the layer.


def matrix(ours: str, theirs: str, rows: int, columns: int) -> Parameter:
    """The weight `[rows, columns]` of one tensor of the checkpoint."""
    return Parameter(f"{ours}.weight", (Source(f"{theirs}.weight", (rows, columns)),))


def vector(ours: str, theirs: str, size: int) -> Parameter:
    """A vector of the checkpoint."""
    return Parameter(f"{ours}.weight", (Source(f"{theirs}.weight", (size,)),))


def norm(config: ModelConfig, ours: str, theirs: str, *, name: str = "") -> Norm:
    """A norm of hidden states; `name` is its name in profiles (default: `ours`)."""
    weight = vector(ours, theirs, config.hidden_size)
    offset = config.family.offset_norms
    centred = config.family.centred_norms
    own = name or ours
    return Norm(name=own, weight=weight, eps=config.rms_norm_eps, offset=offset, centred=centred)


Part: TypeAlias = tuple[str | None, int, Selection | None]
"""A linear layer of the checkpoint (None: zeros), its rows, and which of them; None: all."""


def linear(
    ours: str,
    parts: dict[str, int] | Sequence[Part],
    columns: int,
    biased: Container[str] = (),
    *,
    split: tuple[int, ...] = (),
    unit: int = 1,
    part: int | None = None,
) -> Linear:
    """A linear layer of `parts` (source -> rows, or `Part`s), of which those in `biased` have a
    bias."""
    if isinstance(parts, dict):
        parts = [(source, rows, None) for source, rows in parts.items()]
    weight = tuple(
        Source(None if source is None else f"{source}.weight", (n, columns), rows)
        for source, n, rows in parts
    )
    bias = None
    if any(source in biased for source, _, _ in parts):
        sources = tuple(
            Source(f"{source}.bias" if source in biased else None, (n,), rows)
            for source, n, rows in parts
        )
        bias = Parameter(f"{ours}.bias", sources)
    return Linear(
        name=f"{ours.rpartition('.')[2]}_linear",
        weight=Parameter(f"{ours}.weight", weight),
        bias=bias,
        split=split,
        unit=unit,
        part=part,
    )


# Grouped-query attention as operations, from the layout of a checkpoint.
#
# Kernels rotate elements i and i + head_dim / 2 of a head. Where a model rotates neighbours, or a
# part of a head, rows of queries and keys are reordered when they are loaded (see `HeadRows`).


class LayerKind(NamedTuple):
    """What the layers of a model can differ in."""

    window: int | None
    """Tokens that a token attends to; None: all previous tokens."""
    rope: Rope
    rope_kind: int
    """Index into the model's rotations."""
    mixers: tuple[Mixer, ...]
    feed_forward: Literal["mlp", "experts"] | None
    """What it has after its mixers; None: nothing."""
    heads: tuple[int, int] | None = None
    """Its query and key/value heads; None: the model's."""
    head_dim: int | None = None
    """Elements of its heads; None: the model's."""
    width: int | None = None
    """Width of its MLP; None: the model's."""
    sparsity: float = 0.0
    """`Activate.sparsity` of its MLP."""
    slope: float = 0.0
    """`LinearAttention.slope` of its lightning attention."""
    kv_source: int | None = None
    """The layer whose keys and values it reads; None: its own."""


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
        yield scaled(_qkv(config, kind), (q, into), (k, into * factors.key_multiplier), (k, into))
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
    biased = tuple(output) if config.attention_bias and config.family.output_bias else ()
    values = config.value_dim or config.head_dim
    product = linear("attention.output", output, config.num_heads * values, biased)
    yield scaled(product, (config.hidden_size, factors.attention_out_multiplier))


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
    layer_type: LayerType = "full_attention" if kind.window is None else "sliding_attention"
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
    gate = linear(
        "attention.gate", parts, config.hidden_size, (name,) if config.attention_bias else ()
    )
    yield replace(gate, reads=("normed",), writes="gate")
    yield GateOutput(name="gate_output", reads=("attended", "gate"), features=heads * size)


def _keys_are_values(config: ModelConfig, kind: LayerKind) -> bool:
    return config.keys_as_values and kind.window is None


def _shared_queries(config: ModelConfig, kind: LayerKind, pairs: int) -> Iterator[Operation]:
    """The queries of a layer that reads the keys and values of another one."""
    name, *_ = config.family.qkv
    heads, size = config.num_heads, config.head_dim
    yield linear(
        "attention.queries",
        [(name, heads * size, None)],
        config.hidden_size,
        (name,) if config.attention_bias else (),
        split=(heads,),
        unit=size,
    )
    weight = vector("attention.q_norm", "self_attn.q_norm", size)
    yield HeadNorm(name="q_norm", weight=weight, eps=config.rms_norm_eps, part=0)
    yield Rotate(name="rotate", kind=kind.rope_kind, pairs=pairs, queries_only=True)


def _qkv(config: ModelConfig, kind: LayerKind) -> Linear:
    """The projection to queries, keys and values of all heads, with rows ordered for rotation."""
    names, size, order = config.family.qkv, config.head_dim, _rows_of_head(config, kind.rope)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    biased = names if config.attention_bias else ()
    if _keys_are_values(config, kind):
        keys = {name: n * size for name, n in zip(names[:2], heads, strict=False)}
        split = heads[:2]
        return linear("attention.qkv", keys, config.hidden_size, biased, split=split, unit=size)
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
    return linear("attention.qkv", parts, config.hidden_size, biased, split=heads, unit=size)


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


def short_convolution(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """A gated short convolution (LFM2)."""
    hidden, conv = config.hidden_size, config.conv
    assert conv is not None, "a layer with a convolution"
    inputs, output = {"conv.in_proj": 3 * hidden}, {"conv.out_proj": hidden}
    biased = ("conv.in_proj", "conv.out_proj") if conv.conv_bias else ()
    yield linear("conv.inputs", inputs, hidden, biased, split=(hidden,) * 3)
    shape = (hidden, 1, conv.conv_taps)
    bias = Parameter("conv.kernel.bias", (Source("conv.conv.bias", (hidden,)),))
    yield CausalConv(
        name="convolution",
        weight=Parameter("conv.kernel.weight", (Source("conv.conv.weight", shape),)),
        bias=bias if conv.conv_bias else None,
        gated=True,
    )
    yield linear("conv.output", output, hidden, biased)


def delta_rule(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """Gated DeltaNet, or Kimi Delta Attention."""
    delta, layout, hidden = config.delta_rule, config.family.delta_rule, config.hidden_size
    assert delta is not None, "a layer with the delta rule"
    assert layout is not None, "a layer with the delta rule"
    at, heads, key_heads = layout.module, delta.linear_num_value_heads, delta.linear_num_key_heads
    key, value = delta.linear_key_head_dim, delta.linear_value_head_dim
    keys, values = key_heads * key, heads * value
    qkv = (keys, keys, values)
    by_channel = len(layout.decay) > 1
    decays = heads * key if by_channel else heads
    split = (
        sum(qkv),
        value if len(layout.gate) > 1 else values,
        key if by_channel else heads,
        heads,
    )
    yield linear("delta.inputs", _delta_inputs(delta, layout, split), hidden, split=split)
    for part, (own, names, size) in enumerate(
        (("gate", layout.gate, values), ("decay", layout.decay, decays)), start=1
    ):
        if len(names) > 1:
            yield linear(f"delta.{own}", {f"{at}.{names[1]}": size}, split[part], part=part)

    def conv(names: Sequence[str], sizes: Sequence[int]) -> tuple[Source, ...]:
        taps = delta.linear_conv_kernel_dim
        return tuple(
            Source(f"{at}.{name}.weight", (size, 1, taps))
            for name, size in zip(names, sizes, strict=True)
        )

    names, third = ("q_conv1d", "k_conv1d", "v_conv1d"), -(-sum(qkv) // 3)
    # transformers 5.24 saves them as three equal parts, whatever their sizes are.
    equal = (third, third, sum(qkv) - 2 * third)
    yield CausalConv(
        name="convolution",
        weight=Parameter(
            "delta.conv.weight",
            conv(("conv1d",), (sum(qkv),)),
            alternatives=(conv(names, qkv), conv(names, equal)),
        ),
        silu=True,
        blocks=qkv,
    )

    def number(name: str, shape: Shape) -> Parameter:
        source = Source(f"{at}.{name}", shape)
        return Parameter(
            f"delta.{name}.weight", (source,), (math.prod(shape),), dtype=torch.float32
        )

    yield DeltaRule(
        name="delta_rule",
        a_log=number("A_log", (1, 1, heads, 1) if by_channel else (heads,)),
        dt_bias=number("dt_bias", (decays,)),
        key_heads=key_heads,
        key_dim=key,
        value_dim=value,
        beta_scale=2.0 if delta.linear_allow_neg_eigval else 1.0,
    )
    yield GatedNorm(
        name="gated_norm",
        weight=vector("delta.norm", f"{at}.{layout.norm}", value),
        eps=layout.norm_eps or config.rms_norm_eps,
        features=values,
        group=value,
        gate=layout.gate_activation,
        in_float32=layout.norm_in_float32,
    )
    yield linear("delta.output", {f"{at}.{layout.output}": hidden}, values)


def _delta_inputs(
    delta: DeltaRuleConfig, layout: DeltaRuleLayout, split: Sequence[int]
) -> Sequence[tuple[str, int, Selection | None]]:
    """The tensors of queries, keys and values, the gate, decays and beta, in this order, with their
    rows and which of them."""
    at, heads = layout.module, delta.linear_num_key_heads
    key, value = delta.linear_key_head_dim, delta.linear_value_head_dim
    each = delta.linear_num_value_heads // heads
    if not layout.by_key_head:
        qkv = (heads * key, heads * key, each * heads * value)
        sizes = qkv if len(layout.qkv) > 1 else (sum(qkv),)
        names = (*layout.qkv, layout.gate[0], layout.decay[0], layout.beta)
        rows = (*sizes, *split[1:])
        return [(f"{at}.{name}", n, None) for name, n in zip(names, rows, strict=True)]

    def parts(name: str, sizes: Sequence[int]) -> list[tuple[str, int, Selection | None]]:
        stride, starts = sum(sizes), accumulate(sizes, initial=0)
        return [
            (f"{at}.{name}", heads * stride, HeadRows(start, heads, size, 0, stride=stride))
            for start, size in zip(starts, sizes, strict=False)
        ]

    beta, decay = parts(layout.beta, (each, each))
    return [*parts(layout.qkv[0], (key, key, each * value, each * value)), decay, beta]


def mamba1(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """A Mamba layer (Gu and Dao, arXiv 2312.00752) with norms of time steps, B and C (Jamba)."""
    mamba, at, hidden = config.mamba1, config.family.mamba, config.hidden_size
    assert mamba is not None, "a Mamba layer"
    inner, size, rank = mamba.mamba_expand * hidden, mamba.mamba_d_state, mamba.mamba_dt_rank
    inputs, output = {f"{at}.in_proj": 2 * inner}, {f"{at}.out_proj": hidden}
    biased = (*inputs, *output) if mamba.mamba_proj_bias else ()
    yield linear("mamba.inputs", inputs, hidden, biased, split=(inner, inner))
    bias = Parameter("mamba.conv.bias", (Source(f"{at}.conv1d.bias", (inner,)),))
    source = Source(f"{at}.conv1d.weight", (inner, 1, mamba.mamba_d_conv))
    yield CausalConv(
        name="convolution",
        weight=Parameter("mamba.conv.weight", (source,)),
        bias=bias if mamba.mamba_conv_bias else None,
        silu=True,
    )
    yield SelectiveInputs(
        name="selective_inputs",
        projection=matrix("mamba.selection", f"{at}.x_proj", rank + 2 * size, inner),
        time_projection=matrix("mamba.time", f"{at}.dt_proj", inner, rank),
        time_norm=vector("mamba.time_norm", f"{at}.dt_layernorm", rank),
        b_norm=vector("mamba.b_norm", f"{at}.b_layernorm", size),
        c_norm=vector("mamba.c_norm", f"{at}.c_layernorm", size),
        eps=config.rms_norm_eps,
    )

    def number(ours: str, theirs: str, *shape: int) -> Parameter:
        source = Source(f"{at}.{theirs}", shape)
        exact = len(shape) > 1
        return Parameter(f"mamba.{ours}.weight", (source,), dtype=torch.float32, exact=exact)

    yield StateSpace(
        name="state_space",
        decay=number("decay", "A_log", inner, size),
        time_bias=number("time_bias", "dt_proj.bias", inner),
        skip=number("skip", "D", inner),
        head_dim=1,
        groups=1,
        state_size=size,
        gated=True,
    )
    yield linear("mamba.output", output, inner, biased)


def mamba2(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """A Mamba-2 layer (Dao and Gu, arXiv 2405.21060)."""
    mamba, at, hidden = config.mamba2, config.family.mamba, config.hidden_size
    assert mamba is not None, "a Mamba-2 layer"
    heads, groups, size = mamba.mamba_n_heads, mamba.mamba_n_groups, mamba.mamba_d_state
    inner, shared = heads * mamba.mamba_d_head, groups * size
    convolved = inner + 2 * shared
    # Stored are the gate, x, B and C, and the time steps.
    stored, rows = f"{at}.in_proj", inner + convolved + heads
    parts = [(inner, convolved), (0, inner), (inner + convolved, heads)]
    inputs = linear(
        "mamba.inputs",
        [(stored, rows, Slice(0, *part)) for part in parts],
        hidden,
        (stored,) if mamba.mamba_proj_bias else (),
        split=(convolved, inner, heads),
    )
    factors = config.multipliers
    z, *xbc_dt = (by * factors.ssm_in_multiplier for by in factors.ssm_multipliers)
    x, b, c, dt = xbc_dt
    yield scaled(inputs, (inner, x), (shared, b), (shared, c), (inner, z), (heads, dt))
    shape = (convolved, 1, mamba.mamba_d_conv)
    bias = Parameter("mamba.conv.bias", (Source(f"{at}.conv1d.bias", (convolved,)),))
    yield CausalConv(
        name="convolution",
        weight=Parameter("mamba.conv.weight", (Source(f"{at}.conv1d.weight", shape),)),
        bias=bias if mamba.mamba_conv_bias else None,
        silu=True,
    )

    def number(ours: str, theirs: str) -> Parameter:
        source = Source(f"{at}.{theirs}", (heads,))
        return Parameter(f"mamba.{ours}.weight", (source,), dtype=torch.float32)

    yield StateSpace(
        name="state_space",
        decay=number("decay", "A_log"),
        time_bias=number("time_bias", "dt_bias"),
        skip=number("skip", "D"),
        head_dim=mamba.mamba_d_head,
        groups=groups,
        state_size=size,
        time_limits=(mamba.least_time_step, mamba.largest_time_step),
        gated=not mamba.mamba_rms_norm,
    )
    if mamba.mamba_rms_norm:
        yield GatedNorm(
            name="gated_norm",
            weight=vector("mamba.norm", f"{at}.norm", inner),
            eps=config.rms_norm_eps,
            features=inner,
            group=inner // groups,
            gate_first=not mamba.mamba_norm_before_gate,
        )
    output = {f"{at}.out_proj": hidden}
    biased = tuple(output) if mamba.mamba_output_bias else ()
    product = linear("mamba.output", output, inner, biased)
    yield scaled(product, (hidden, factors.ssm_out_multiplier))


_LIGHTNING_NORM_EPS = 1e-6
"""Epsilon of the norm inside lightning attention, independent of the config."""


def lightning(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """Lightning attention (MiniMax-01, arXiv 2501.08313)."""
    at, hidden = "self_attn", config.hidden_size
    inner = config.num_heads * config.head_dim
    parts = {f"{at}.output_gate": inner, f"{at}.qkv_proj": 3 * inner}
    yield linear("lightning.inputs", parts, hidden, split=(inner, 3 * inner))
    yield LinearAttention(
        name="linear_attention", heads=config.num_heads, head_dim=config.head_dim, slope=kind.slope
    )
    yield GatedNorm(
        name="gated_norm",
        weight=vector("lightning.norm", f"{at}.norm", inner),
        eps=_LIGHTNING_NORM_EPS,
        features=inner,
        group=inner,
        gate="sigmoid",
    )
    yield linear("lightning.output", {f"{at}.out_proj": hidden}, inner)


# The MLP of a decoder layer as operations.

_ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def mlp(config: ModelConfig, sparsity: float = 0.0) -> Iterator[Operation]:
    """The MLP of a layer."""
    family = config.family
    names = (*family.gate_up, family.down)
    biased = names if config.mlp_bias else ()
    return _mlp(config, "", names, config.intermediate_size, biased, sparsity)


def _mlp(
    config: ModelConfig,
    ours: str,
    names: Sequence[str],
    inner: int,
    biased: Container[str] = (),
    sparsity: float = 0.0,
) -> Iterator[Operation]:
    """A gated MLP (Shazeer 2020, "GLU Variants Improve Transformer"), or one without gate."""
    hidden, (*up, down) = config.hidden_size, names
    of_gate, of_output = config.multipliers.mlp_multipliers
    function = replace(activate(config, inner), sparsity=sparsity)
    gate_up = dict.fromkeys(up, function.parts * inner // len(up))
    split = (inner, inner) if function.gated else ()
    inputs = linear(f"{ours}gate_up", gate_up, hidden, biased, split=split)
    yield scaled(inputs, (inner, of_gate), (inner, 1.0)) if function.gated else inputs
    yield function
    yield scaled(linear(f"{ours}down", {down: hidden}, inner, biased), (hidden, of_output))


def scaled(product: Linear, *factors: tuple[int, float]) -> Linear:
    """A linear layer with `Linear.factors`, none if all are 1."""
    return replace(product, factors=factors) if any(by != 1.0 for _, by in factors) else product


def shared_expert(config: ModelConfig, inner: int) -> Iterator[Operation]:
    """An MLP that all tokens use beside the experts, perhaps times a gate of the token
    (Qwen2-MoE)."""
    traits, hidden = config.family.experts, config.hidden_size
    assert traits is not None, "only families with experts have an `ExpertsConfig`"
    names = [f"{traits.shared}.{name}" for name in traits.shared_names]
    up, *rest, down = _mlp(config, "shared.", names, inner)
    yield from (replace(up, reads=("mlp_normed",)), *rest, replace(down, writes="shared"))
    if not traits.shared_gate:
        yield Add(name="add_shared", reads=("routed", "shared"))
        return
    gate = linear("shared.gate", {traits.shared_gate: 1}, hidden)
    yield replace(gate, reads=("mlp_normed",), writes="shared_gate")
    reads = ("shared", "shared_gate")
    gated = GateOutput(name="gate_shared", reads=reads, features=hidden, per_feature=False)
    yield replace(gated, writes="gated_shared")
    yield Add(name="add_shared", reads=("routed", "gated_shared"))


def activate(config: ModelConfig, features: int) -> Activate:
    """The activation of an MLP, or of an expert, with this number of features."""
    function = _ACTIVATIONS[config.hidden_act]
    if not config.swiglu_limit:
        gated = function != "relu2"
        return Activate(name="activate", function=function, features=features, gated=gated)
    return Activate(
        name="activate",
        function=function,
        features=features,
        limit=config.swiglu_limit,
        alpha=config.swiglu_alpha,
        up_offset=1.0,
    )


# A mixture of experts as an operation, from the layouts of checkpoints.
#
# Shapes: R routed experts, S shared ones, D hidden_size, F width of an expert.


def experts(config: ModelConfig, moe: ExpertsConfig) -> Experts:
    """The operation of a layer with experts; its value is the sum of theirs.

    Its weights are `[(R + S) * 2F, D]`, or F of them without gate, and `[(R + S) * D, F]`: of the
    routed experts, then of the shared ones, which are slices of one MLP in a checkpoint.
    """
    traits = config.family.experts
    assert traits is not None, "only families with experts have an `ExpertsConfig`"
    hidden = moe.moe_latent_size or config.hidden_size
    width, routed = moe.moe_intermediate_size, moe.num_experts
    always, first = moe.n_shared_experts, traits.layouts[0]
    parts = activate(config, width).parts
    slices = [(expert * width, width) for expert in range(always)]

    def of_shared(name: str, axis: int, part: tuple[int, int]) -> Source:
        stored = (hidden, always * width) if axis else (always * width, hidden)
        return Source(f"{traits.shared}.{name}.weight", stored, Slice(axis, *part))

    def parameter(
        name: str, shape: Shape, sources: Callable[[ExpertLayout], Iterable[Source]], **more: Any
    ) -> Parameter:
        """A parameter with alternative layouts."""
        own, *others = dict.fromkeys(tuple(sources(layout)) for layout in traits.layouts)
        return Parameter(f"experts.{name}", own, shape, alternatives=tuple(others), **more)

    def gate_up(layout: ExpertLayout) -> Iterator[Source]:
        shape = (parts * width, hidden)
        yield from _of_experts(layout, layout.gate_up, routed, shape, layout.interleaved)
        for part in slices:
            yield from (of_shared(name, 0, part) for name in ("gate_proj", "up_proj"))

    def down(layout: ExpertLayout) -> Iterator[Source]:
        yield from _of_experts(layout, (layout.down,), routed, (hidden, width))
        yield from (of_shared("down_proj", 1, part) for part in slices)

    def bias(name: str, weight: str, size: int, interleaved: bool = False) -> Parameter | None:
        if not traits.biases:
            return None
        stored = weight.removesuffix("_blocks") + "_bias"
        rows = _expert_rows(routed, size, interleaved)
        sources = tuple(Source(stored, (routed, size), part) for part in rows)
        return Parameter(f"experts.{name}.bias", sources, (routed * size,))

    def storage(each: int) -> dict[str, Any]:
        return {"exact": True} if traits.exact else {"matrices": each * total}

    def router(leaf: str, shape: Shape, **more: Any) -> Parameter:
        def sources(layout: ExpertLayout) -> list[Source]:
            return [Source(f"{layout.router}.{leaf}", shape)]

        return parameter(f"router.{leaf}", shape, sources, **more)

    correction = None
    if traits.correction and moe.use_expert_bias:
        stored = (1, routed) if traits.correction_rows else (routed,)
        source = Source(traits.correction, stored)
        correction = Parameter(
            "experts.correction.weight", (source,), (routed,), dtype=torch.float32
        )
    scales = None
    if traits.parallel_to_mlp is not None:
        source = Source(traits.parallel_to_mlp.expert_scales, (routed,))
        scales = Parameter("experts.scales.weight", (source,), dtype=torch.float32)
    total = routed + always
    return Experts(
        name="experts",
        router=router("weight", (routed, config.hidden_size), exact=True),
        gate_up=parameter(
            "gate_up.weight", (total * parts * width, hidden), gate_up, **storage(parts)
        ),
        down=parameter("down.weight", (total * hidden, width), down, **storage(1)),
        routing=moe.routing,
        activate=activate(config, width),
        router_bias=router("bias", (routed,)) if traits.router_bias else None,
        correction=correction,
        gate_up_bias=bias("gate_up", first.gate_up[0], 2 * width, first.interleaved),
        down_bias=bias("down", first.down, hidden),
        shared=always,
        scaled_inputs=traits.scaled_inputs,
        expert_scales=scales,
        router_input=traits.parallel_to_mlp is not None or moe.moe_latent_size is not None,
    )


def _of_experts(
    layout: ExpertLayout,
    names: tuple[str, ...],
    routed: int,
    shape: tuple[int, int],
    interleaved: bool = False,
) -> Iterator[Source]:
    """Yield the tensors of the routed experts; `shape` is of all `names` of one expert."""
    rows, columns = shape
    if layout.is_stacked:
        stored = (columns, rows) if layout.transposed else shape
        for part in _expert_rows(routed, rows, interleaved, layout.transposed):
            yield Source(names[0], (routed, *stored), part)
        return
    for expert in range(routed):
        for name in names:
            yield Source(name.format(expert), (rows // len(names), columns))


def _expert_rows(
    routed: int, rows: int, interleaved: bool, transposed: bool = False
) -> Iterator[ExpertRows]:
    """Yield the rows of each expert in a stacked tensor, or its bias; of gate and up one by one if
    they alternate."""
    step = 2 if interleaved else 1
    for expert in range(routed):
        for start in range(step):
            yield ExpertRows(expert, start, rows // step, step, transposed)


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
    biased = tuple(output) if config.attention_bias else ()
    yield linear("attention.output", output, heads * latent.v_head_dim, biased)


@lru_cache(maxsize=8)  # thousands of experts have hundreds of thousands of tensors
def model_plan(config: ModelConfig) -> ModelPlan:
    """Return the plan of a model, or of its shard; layers of one kind share a plan.

    Raises:
        ConfigError: the model cannot be split over this number of ranks.
    """
    if config.shard is not None:
        return shard_plan(model_plan(config.whole), *config.shard)
    ropes = rope_kinds(config)
    kinds = [_layer_kind(config, layer, ropes) for layer in range(config.num_layers)]
    layers = {kind: LayerPlan(tuple(_layer(config, kind))) for kind in dict.fromkeys(kinds)}
    embedding = matrix("embed_tokens", "model.embed_tokens", config.vocab_size, config.hidden_size)
    head = embedding
    if not config.tie_word_embeddings:
        head = matrix("lm_head", "lm_head", config.vocab_size, config.hidden_size)
    scale, altup = config.embedding_multiplier, config.altup
    if config.family.scaled_embeddings:
        scale = config.hidden_size**0.5
    return ModelPlan(
        embedding=embedding,
        embedding_scale=scale,
        layers=tuple(layers[kind] for kind in kinds),
        norm=norm(config, "norm", config.family.final_norm, name="final_norm"),
        head=Linear(name="head", weight=head),
        logit_softcap=config.final_logit_softcapping or 0.0,
        logit_scale=1.0 / config.logits_scaling,
        rope_kinds=len(ropes),
        rope_by_length=any(rope.scaling.by_length for rope in ropes),
        layer_inputs=_layer_inputs(config),
        before=None if altup is None else _before(config, altup),
        after=None if altup is None else _after(config, altup),
    )


def mtp_layers(config: ModelConfig) -> Iterator[tuple[str, LayerPlan]]:
    """Yield what the names of each layer of the first module for multi-token prediction begin with,
    and its plan; the family has such modules."""
    layout, plan, ropes = config.family.mtp, model_plan(config), rope_kinds(config)
    assert layout is not None, "only families with modules have drafters for them"
    for prefix, like in layout.layers.items():
        if isinstance(like, int):
            layer = range(config.num_layers)[like]
        else:
            found = [any(isinstance(op, like) for op in each.operations) for each in plan.layers]
            layer = max(index for index, has in enumerate(found) if has)
        kind = _layer_kind(config, layer, ropes)
        if layout.dense and kind.feed_forward == "experts":
            kind = kind._replace(feed_forward="mlp")
        yield layout.first(prefix, config.num_layers), LayerPlan(tuple(_layer(config, kind)))


def plan_of(config: DecoderConfig) -> ModelPlan:
    """Return the plan of a model of a native family, or of transformers."""
    if isinstance(config, ModelConfig):
        return model_plan(config)
    assert isinstance(config, TransformersConfig)
    return config.plan


def shard_config(config: DecoderConfig, rank: int, ranks: int) -> DecoderConfig:
    """Return the config that one rank's plan is made from; `config` for a single rank.

    Raises:
        ConfigError: as `check_ranks`.
    """
    check_ranks(plan_of(config), ranks)
    if ranks == 1:
        return config
    assert isinstance(config, ModelConfig), "others were refused"
    return replace(config, shard=(rank, ranks))


def rope_kinds(config: ModelConfig) -> list[Rope]:
    """Return the distinct rotations of the layers, indexed by `Rotate.kind`."""
    return list(dict.fromkeys(config.rope(layer) for layer in range(config.num_layers)))


def _layer_kind(config: ModelConfig, layer: int, ropes: list[Rope]) -> LayerKind:
    rope = config.rope(layer)
    return LayerKind(
        *(config.window(layer), rope, ropes.index(rope)),
        *(config.mixers(layer), config.feed_forward(layer)),
        config.layer_heads[layer] if config.layer_heads else None,
        config.layer_head_dims[layer] if config.layer_head_dims else None,
        config.layer_widths[layer] if config.layer_widths else None,
        config.layer_sparsity[layer] if config.layer_sparsity else 0.0,
        config.layer_slopes[layer] if "lightning" in config.mixers(layer) else 0.0,
        config.kv_source(layer),
    )


def _layer(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    config = _of_kind(config, kind)
    family, altup = config.family, config.altup
    own = (family.norms_of[mixer] for mixer in kind.mixers if mixer in family.norms_of)
    norms, scale = next(own, family.layer_norms), config.residual_multiplier
    feed_forward, mixers = list(_feed_forward(config, kind)), list(_mixers(config, kind))
    mixed_by = fed_by = scale
    if (deep := config.deep_norm) is not None:
        alpha, mixed_by = deep.linear_attn_alpha_factor, deep.linear_attn_beta_factor
        if "attention" in kind.mixers:
            alpha, mixed_by = deep.full_attn_alpha_factor, deep.full_attn_beta_factor
        mixers = list(_on_normed("normed", alpha, mixers))
        fed_by = deep.mlp_beta_factor
        feed_forward = list(_on_normed("mlp_normed", deep.mlp_alpha_factor, feed_forward))
    if altup is not None:
        yield from _predicted_stream(config, altup)
    if mixers:
        if norms.input is not None:
            always = family.parallel_residual or altup is not None
            own_norm = norm(config, "input_norm", norms.input)
            yield _named(own_norm, "normed", mixers, always=always)
        yield from mixers
        if norms.attention_output is not None:
            yield norm(config, "attention_output_norm", norms.attention_output)
        added = Residual(name="residual", scale=mixed_by * config.attention_value_scale)
        yield _named(added, "attended", feed_forward, always=altup is not None)
    if altup is not None:
        yield from _laurel(config, altup)
    if kind.feed_forward is None:
        return
    if norms.mlp is not None:
        yield _named(norm(config, "mlp_norm", norms.mlp), "mlp_normed", feed_forward)
    yield from feed_forward
    if norms.mlp_output is not None:
        yield norm(config, "mlp_output_norm", norms.mlp_output)
    yield Residual(name="residual", scale=fed_by, writes="" if altup is None else "updated")
    if altup is not None:
        yield from _corrected_streams(config, altup)
    elif config.layer_input_size:
        yield from _layer_input(config)
        yield Residual(name="residual")
    if config.family.layer_scalars:
        scalar = Parameter("scalar.weight", (Source("layer_scalar", (1,)),))
        yield Multiply(name="layer_scalar", weight=scalar)
        yield Replace(name="output")


def _on_normed(name: str, alpha: float, operations: Sequence[Operation]) -> Iterator[Operation]:
    """Operations on the normed hidden states `name`; these, times alpha, are the hidden states that
    their result is added to (DeepNorm)."""
    if alpha != 1.0:
        yield Multiply(name="residual_scale", factor=alpha)
    yield Replace(name="normed")
    first, *others = operations
    yield from (replace(first, reads=(name,)), *others)


def _of_kind(config: ModelConfig, kind: LayerKind) -> ModelConfig:
    """The config of a model that has only layers of this kind."""
    if kind.heads is not None:
        heads, kv_heads = kind.heads
        config = replace(config, num_heads=heads, num_kv_heads=kv_heads, layer_heads=())
    if kind.head_dim is not None:
        config = replace(config, head_dim=kind.head_dim)
    return config if kind.width is None else replace(config, intermediate_size=kind.width)


# Gemma 4's mixtures of experts, whose output is added to an MLP's.


def _parallel_mixture(
    config: ModelConfig, moe: ExpertsConfig, names: MixtureNorms
) -> Iterator[Operation]:
    """The mixture of a layer after its MLP; both read the hidden states after attention."""
    yield replace(norm(config, "dense_norm", names.mlp_output), writes="dense")
    scale = Parameter("router_norm.weight", (Source(names.router, (config.hidden_size,)),))
    of_router = Norm(name="router_norm", weight=scale, eps=config.rms_norm_eps)
    yield replace(of_router, reads=("attended",))
    factor = config.hidden_size**-0.5
    yield Multiply(name="router_scale", factor=factor, writes="router_input")
    inputs = norm(config, "experts_norm", names.input)
    yield replace(inputs, reads=("attended",), writes="experts_input")
    yield replace(experts(config, moe), reads=("experts_input", "router_input"))
    yield replace(norm(config, "experts_output_norm", names.output), writes="mixture")
    yield Add(name="sum", reads=("dense", "mixture"))


# Per-layer embeddings, and the streams of Gemma 3n.


def _layer_inputs(config: ModelConfig) -> LayerPlan | None:
    """The inputs of all layers that depend on the token; None: they have none."""
    hidden, size = config.hidden_size, config.layer_input_size
    if not size:
        return None
    features = config.num_layers * size
    inputs = LayerInputs(
        name="layer_inputs",
        table=matrix("table", "embed_tokens_per_layer", config.layer_input_vocab, features),
        projection=matrix("projection", "per_layer_model_projection", features, hidden),
        norm=vector("norm", "per_layer_projection_norm", size),
        eps=config.rms_norm_eps,
        vocab_size=config.vocab_size,
        writes="layer_inputs",
    )
    return LayerPlan((inputs, Replace(name="output")))


def _before(config: ModelConfig, altup: AltUpConfig) -> LayerPlan:
    """Embeddings become streams."""
    expand = ExpandStreams(name="expand", projections=_projections(config, altup, ""))
    return LayerPlan((expand, Replace(name="streams")))


def _after(config: ModelConfig, altup: AltUpConfig) -> LayerPlan:
    """Streams become the hidden states of a token."""
    merge = MergeStreams(name="merge", projections=_projections(config, altup, "unembed_"))
    return LayerPlan((merge, Replace(name="output")))


def _projections(config: ModelConfig, altup: AltUpConfig, kind: str) -> tuple[Parameter, ...]:
    """The matrices of all streams but the first."""
    size, name = config.hidden_size, f"altup_{kind}projections"
    return tuple(
        matrix(f"streams.{stream}", f"{name}.{stream}", size, size)
        for stream in range(altup.num_streams - 1)
    )


def _layer_input(config: ModelConfig) -> Iterator[Operation]:
    """The layer's input of the token, gated by hidden states and projected to them."""
    hidden, size = config.hidden_size, config.layer_input_size
    yield LayerInput(
        name="layer_input",
        gate=matrix("layer_input.gate", "per_layer_input_gate", size, hidden),
        projection=matrix("layer_input.projection", "per_layer_projection", hidden, size),
        activate=activate(config, size),
    )
    yield norm(config, "layer_input_norm", "post_per_layer_input_norm")


def _routed_streams(
    config: ModelConfig, altup: AltUpConfig, name: str, rows: int
) -> dict[str, Any]:
    """The fields of a `RoutedStreams` with this number of coefficients."""
    streams, hidden = altup.num_streams, config.hidden_size
    router = matrix("altup.router", "altup.modality_router", streams, hidden)
    return {
        "norm": vector("altup.router_norm", "altup.router_norm", hidden),
        "router": router._replace(exact=True),
        "coefs": matrix(f"altup.{name}", f"altup.{name}", rows, streams)._replace(exact=True),
        "eps": config.rms_norm_eps,
        "active": altup.active,
    }


def _predicted_stream(config: ModelConfig, altup: AltUpConfig) -> Iterator[Operation]:
    """Predict the streams; the active one becomes the hidden states of the layer."""
    fields = _routed_streams(config, altup, "prediction_coefs", altup.num_streams**2)
    yield PredictStreams(name="predict", writes="predictions", **fields)
    yield SelectStream(name="active", index=altup.active)
    yield Replace(name="active")


def _laurel(config: ModelConfig, altup: AltUpConfig) -> Iterator[Operation]:
    """The mean of attention and of a residual of low rank, times the root of 2."""
    hidden, rank = config.hidden_size, altup.laurel_rank
    yield Laurel(
        name="laurel",
        left=matrix("laurel.left", "laurel.linear_left", rank, hidden),
        right=matrix("laurel.right", "laurel.linear_right", hidden, rank),
        norm=vector("laurel.norm", "laurel.post_laurel_norm", hidden),
        eps=config.rms_norm_eps,
        reads=("normed",),
        writes="laurel",
    )
    yield Add(name="sum", reads=("attended", "laurel"), factor=2**-0.5)
    yield Replace(name="sum")


def _corrected_streams(config: ModelConfig, altup: AltUpConfig) -> Iterator[Operation]:
    """Correct the streams, and add the layer's input of the token to all but the first."""
    fields = _routed_streams(config, altup, "correction_coefs", altup.num_streams)
    reads = ("predictions", "updated")
    yield CorrectStreams(name="correct", reads=reads, writes="corrected", **fields)
    if config.layer_input_size:
        yield SelectStream(name="active", index=altup.active)
        if altup.scaled:
            source = Source("altup.correct_output_scale", (config.hidden_size,))
            yield Multiply(name="scale", weight=Parameter("altup.scale.weight", (source,)))
        first, last = _layer_input(config)
        yield from (first, replace(last, writes="token_input"))
        yield AddToOthers(name="add", reads=("corrected", "token_input"))
    yield Replace(name="streams")


def _named(
    op: Operation, name: str, later: Iterable[Operation], *, always: bool = False
) -> Operation:
    """Name the value of an operation if a later one reads it by name."""
    return replace(op, writes=name) if always or any(name in o.reads for o in later) else op


def _feed_forward(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """The operations of the MLP or the experts of a layer."""
    if kind.feed_forward is None:
        return
    if kind.feed_forward == "mlp":
        up, *rest = mlp(config, kind.sparsity)
        yield replace(up, reads=("normed",)) if config.family.parallel_residual else up
        yield from rest
        return
    moe, traits = config.experts, config.family.experts
    assert moe is not None, "a layer with experts"
    assert traits is not None
    if traits.parallel_to_mlp is not None:
        yield from mlp(config, kind.sparsity)
        yield from _parallel_mixture(config, moe, traits.parallel_to_mlp)
        return
    routed: Operation = experts(config, moe)
    if (size := moe.moe_latent_size) is not None:
        hidden, (into, out) = config.hidden_size, traits.latent
        latent = linear("experts.latent", {into: size}, hidden)
        yield replace(latent, reads=("mlp_normed",), writes="latent")
        yield replace(routed, reads=("latent", "mlp_normed"))
        routed = linear("experts.output", {out: hidden}, size)
    if not moe.shared_expert_intermediate_size:
        yield routed
        return
    yield replace(routed, writes="routed")
    yield from shared_expert(config, moe.shared_expert_intermediate_size)


_MIXERS: Mapping[Mixer, Callable[[ModelConfig, LayerKind], Iterator[Operation]]] = {
    "attention": attention,
    "conv": short_convolution,
    "delta_rule": delta_rule,
    "mamba1": mamba1,
    "mamba2": mamba2,
    "lightning": lightning,
}
"""The operations of each mixer, from the norm of a layer's input to what is added to it."""


def _mixers(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """The operations of the mixers of a layer."""
    if not kind.mixers:
        return
    if len(kind.mixers) == 1:
        yield from _MIXERS[kind.mixers[0]](config, kind)
        return
    for mixer in kind.mixers:
        first, *inner, last = _MIXERS[mixer](config, kind)
        yield from (replace(first, reads=("normed",)), *inner, replace(last, writes=mixer))
    yield Add(name="add_mixers", reads=kind.mixers)


# Maps the parameters of a model to the tensors of a Hugging Face checkpoint.


def fused_layout(config: ModelConfig) -> dict[str, Parameter]:
    """Return the parameters of the model by our name, in the order a forward pass needs them.

    Each says which tensors of a Hugging Face checkpoint make it, in which order, and their shapes.
    Models with tied embeddings have no `lm_head.weight`.
    """
    return {parameter.name: parameter for parameter in model_plan(config).parameters()}


_NEVER_INT4 = ("embed_tokens.weight", "layer_inputs.table.weight", "lm_head.weight")


def parameter_bytes(parameter: Parameter, kernels: Kernels, dtype: torch.dtype) -> int:
    """Return the bytes of a parameter as the kernels store it."""
    if not parameter.is_matrix:
        return parameter.elements * (parameter.dtype or dtype).itemsize
    if parameter.name in kernels.codes:
        return kernels.codes[parameter.name]
    if kernels.weights == INT4 and (kernels.codes or parameter.name in _NEVER_INT4):
        kernels = replace(kernels, weights=MODEL)
    rows, columns = parameter.shape
    return stored_bytes(kernels, rows, columns, dtype, parameter.matrices)
