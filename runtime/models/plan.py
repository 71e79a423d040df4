"""Builds the plan of a model from its config; the only module that lists a layer's operations.

Parameter names are ours; source names are those of a Hugging Face checkpoint. Matrices with the
same input (q, k, v and gate, up) are stacked into one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..kernels.ops.layer_operations import (
    Activate,
    ActivationName,
    Attend,
    LatentKeys,
    LatentRotate,
    LatentToValues,
    Linear,
    Norm,
    Operation,
    Parameter,
    QKNorm,
    QueriesToLatent,
    Residual,
    Rotate,
)
from ..kernels.ops.layer_plan import LayerPlan, ModelPlan
from .config import LatentConfig, ModelConfig, Rope

__all__ = ["model_plan", "rope_kinds"]

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside latent attention, independent of the config."""
_ACTIVATIONS: dict[str, ActivationName] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_CLAMPED_ALPHA = 1.702
"""Factor in the sigmoid of a clamped activation: gate * sigmoid(1.702 * gate) (gpt-oss)."""

LayerKind = tuple[int | None, int]
"""Window and kind of rotation, in which the layers of a model can differ."""


def model_plan(config: ModelConfig) -> ModelPlan:
    """Return the plan of a model; layers of one kind share a plan."""
    ropes = rope_kinds(config)
    kinds = [
        (config.window(layer), ropes.index(config.rope(layer)))
        for layer in range(config.num_layers)
    ]
    layers = {kind: LayerPlan(tuple(_layer(config, kind))) for kind in dict.fromkeys(kinds)}
    embedding = _matrix("embed_tokens", "model.embed_tokens", config.vocab_size, config.hidden_size)
    head = embedding
    if not config.tie_word_embeddings:
        head = _matrix("lm_head", "lm_head", config.vocab_size, config.hidden_size)
    return ModelPlan(
        embedding=embedding,
        embedding_scale=config.hidden_size**0.5 if config.family.scaled_embeddings else 1.0,
        layers=tuple(layers[kind] for kind in kinds),
        norm=_norm(config, "norm", "model.norm", name="final_norm"),
        head=Linear(name="head", weight=head),
        logit_softcap=config.final_logit_softcapping or 0.0,
        rope_kinds=len(ropes),
    )


def rope_kinds(config: ModelConfig) -> list[Rope]:
    """Return the distinct rotations of the layers, indexed by `Rotate.kind`."""
    return list(dict.fromkeys(config.rope(layer) for layer in range(config.num_layers)))


def _layer(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    output_norms = config.family.output_norms
    hidden, inner = config.hidden_size, config.intermediate_size
    yield _norm(config, "input_norm", "input_layernorm")
    if config.latent is None:
        yield from _attention(config, kind)
    else:
        yield from _latent_attention(config, kind, config.latent)
    # With output norms, transformers' post_attention_layernorm norms the output of attention;
    # otherwise it norms the input of the MLP.
    if output_norms:
        yield _norm(config, "attention_output_norm", "post_attention_layernorm")
    yield Residual(name="residual")
    before_mlp = "pre_feedforward_layernorm" if output_norms else "post_attention_layernorm"
    yield _norm(config, "mlp_norm", before_mlp)
    biased = _all if config.mlp_bias else _none
    gate_up, down = {"mlp.gate_proj": inner, "mlp.up_proj": inner}, {"mlp.down_proj": hidden}
    yield _linear("gate_up", gate_up, hidden, biased, split=(inner, inner))
    yield _activate(config)
    yield _linear("down", down, inner, biased)
    if output_norms:
        yield _norm(config, "mlp_output_norm", "post_feedforward_layernorm")
    yield Residual(name="residual")


def _attention(config: ModelConfig, kind: LayerKind) -> Iterator[Operation]:
    """Grouped-query attention (Ainslie et al. 2023), with norms of queries and keys or without."""
    family = config.family
    biased = _all if config.attention_bias else _none
    parts = {
        "self_attn.q_proj": config.query_size,
        "self_attn.k_proj": config.kv_size,
        "self_attn.v_proj": config.kv_size,
    }
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    yield _linear(
        "attention.qkv", parts, config.hidden_size, biased, split=heads, unit=config.head_dim
    )
    if family.qk_norm:
        yield QKNorm(
            name="qk_norm",
            q=_vector("attention.q_norm", "self_attn.q_norm", config.head_dim),
            k=_vector("attention.k_norm", "self_attn.k_norm", config.head_dim),
            eps=config.rms_norm_eps,
            offset=family.offset_norms,
        )
    yield Rotate(name="rotate", kind=kind[1])
    scale = float((config.query_pre_attn_scalar or config.head_dim) ** -0.5)
    yield _attend(config, kind, scale=scale, value_dim=config.head_dim)
    output = {"self_attn.o_proj": config.hidden_size}
    yield _linear("attention.output", output, config.query_size, biased)


def _latent_attention(
    config: ModelConfig, kind: LayerKind, latent: LatentConfig
) -> Iterator[Operation]:
    """Multi-head latent attention (DeepSeek-V2), with the projections of keys and values absorbed.

    The cache has one vector per token, the normed latent and the rotated key. It is the key of all
    heads, and its first elements are the value. Instead of projecting each latent to a key, the
    query is projected to the latent space (q . (W c) = (W^T q) . c). Attention then returns a
    weighted sum of latents, which is projected to values.
    """
    biased = _all if config.attention_bias else _none
    heads, rank, hidden = config.num_heads, latent.kv_lora_rank, config.hidden_size
    queries = heads * latent.qk_head_dim
    # A direct query projection (without q_lora_rank) never has a bias.
    q_part = "self_attn.q_proj" if latent.q_lora_rank is None else "self_attn.q_a_proj"
    parts = {
        q_part: latent.q_lora_rank or queries,
        "self_attn.kv_a_proj_with_mqa": latent.cached_dim,
    }
    yield _linear(
        "attention.q_kv",
        parts,
        hidden,
        lambda part: biased(part) and part != "self_attn.q_proj",
        split=(latent.q_lora_rank or queries, rank, latent.qk_rope_head_dim),
    )
    if latent.q_lora_rank is not None:
        q_norm = _vector("attention.q_norm", "self_attn.q_a_layernorm", latent.q_lora_rank)
        yield Norm(name="q_norm", weight=q_norm, eps=_LATENT_NORM_EPS, part=0)
        up = {"self_attn.q_b_proj": queries}
        yield _linear("attention.q_up", up, latent.q_lora_rank, _none, part=0)
    yield LatentRotate(
        name="rotate",
        heads=heads,
        nope=latent.qk_nope_head_dim,
        rope=latent.qk_rope_head_dim,
        interleaved=latent.rope_interleave,
        kind=kind[1],
    )
    per_head = latent.qk_nope_head_dim + latent.v_head_dim
    kv_up = Parameter(
        "attention.kv_up.weight",
        ("self_attn.kv_b_proj.weight",),
        ((heads * per_head, rank),),
        (heads, per_head, rank),
    )
    keys = latent.qk_nope_head_dim
    yield QueriesToLatent(name="queries_to_latent", kv_up=kv_up, keys=keys)
    latent_norm = _vector("attention.latent_norm", "self_attn.kv_a_layernorm", rank)
    yield LatentKeys(name="latent_norm", weight=latent_norm, eps=_LATENT_NORM_EPS)
    scale = float(latent.qk_head_dim**-0.5) * config.rope_scaling.latent_score_scale
    yield _attend(config, kind, scale=scale, value_dim=rank, shared_values=True)
    yield LatentToValues(name="latent_to_values", kv_up=kv_up, keys=keys)
    output = {"self_attn.o_proj": hidden}
    yield _linear("attention.output", output, heads * latent.v_head_dim, biased)


def _attend(
    config: ModelConfig,
    kind: LayerKind,
    *,
    scale: float,
    value_dim: int,
    shared_values: bool = False,
) -> Attend:
    sinks = Parameter("attention.sinks.weight", ("self_attn.sinks",), ((config.num_heads,),))
    return Attend(
        name="attention",
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        value_dim=value_dim,
        scale=scale,
        window=kind[0] or 0,
        softcap=config.attn_logit_softcapping or 0.0,
        sinks=sinks if config.family.attention_sinks else None,
        shared_values=shared_values,
    )


def _activate(config: ModelConfig) -> Activate:
    function, features = _ACTIVATIONS[config.hidden_act], config.intermediate_size
    if not config.swiglu_limit:
        return Activate(name="activate", function=function, features=features)
    return Activate(
        name="activate",
        function=function,
        features=features,
        limit=config.swiglu_limit,
        alpha=_CLAMPED_ALPHA,
        up_offset=1.0,
    )


def _all(part: str) -> bool:
    return True


def _none(part: str) -> bool:
    return False


def _matrix(ours: str, theirs: str, rows: int, columns: int) -> Parameter:
    return Parameter(f"{ours}.weight", (f"{theirs}.weight",), ((rows, columns),))


def _vector(ours: str, theirs: str, size: int) -> Parameter:
    return Parameter(f"{ours}.weight", (f"{theirs}.weight",), ((size,),))


def _norm(config: ModelConfig, ours: str, theirs: str, *, name: str = "") -> Norm:
    """A norm of hidden states; `name` is its name in profiles (default: `ours`)."""
    weight = _vector(ours, theirs, config.hidden_size)
    offset = config.family.offset_norms
    return Norm(name=name or ours, weight=weight, eps=config.rms_norm_eps, offset=offset)


def _linear(
    ours: str,
    parts: dict[str, int],
    columns: int,
    biased: Callable[[str], bool],
    *,
    split: tuple[int, ...] = (),
    unit: int = 1,
    part: int | None = None,
) -> Linear:
    """A linear layer of `parts` (source -> rows); `biased` selects the parts with a bias."""
    rows = tuple(parts.values())
    weight = Parameter(
        f"{ours}.weight",
        tuple(f"{source}.weight" for source in parts),
        tuple((n, columns) for n in rows),
    )
    bias = None
    if any(map(biased, parts)):
        sources = tuple(f"{source}.bias" if biased(source) else None for source in parts)
        bias = Parameter(f"{ours}.bias", sources, tuple((n,) for n in rows))
    name = f"{ours.rpartition('.')[2]}_linear"
    return Linear(name=name, weight=weight, bias=bias, split=split, unit=unit, part=part)
