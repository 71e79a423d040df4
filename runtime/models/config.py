"""The configuration of a decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from ..arguments import Allowed, Range, allowed_values, check_fields
from ..bounded_repr import bounded_repr
from ..errors import CheckpointError, ConfigError
from ..kernels.ops.attention import AttentionTemperature
from ..kernels.weights import QUANT_METHODS, checkpoint_formats
from .config_keys import Json, read_field, read_optional
from .families import FAMILIES, family_of
from .families.family import CONFIG_KEYS, Family
from .layers import ATTENTION_TYPES, LAYER_TYPES, MIXERS
from .layers.altup import AltUp
from .layers.dimensions import MOST_SIZE, Dimensions, Mixer, Number, Size
from .layers.experts import ExpertsConfig
from .rope import UNROTATED, UNSCALED, Rope, RopeScaling, RopeType

T = TypeVar("T")

_MOST_LAYERS = 4096


# The dimensions of multi-head latent attention.


@dataclass(frozen=True, kw_only=True)
class LatentConfig(Dimensions):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token is cached as one vector that all heads share: a latent, from which each head's keys and
    values are projected, and a key that carries the position. Raises `ConfigError`.
    """

    q_lora_rank: Size | None = None
    """Elements that the queries are compressed to; None: they are projected at once."""
    kv_lora_rank: Size
    """Elements of the latent."""
    qk_nope_head_dim: Size
    """Elements of a head's queries and keys that are not rotated."""
    qk_rope_head_dim: Size
    """Rotated elements; all heads share the key's."""
    v_head_dim: Size
    """Elements of a head's values."""
    rope_interleave: bool = True
    """Whether the elements of a rotated pair are neighbours."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, reason in (
            ("qk_rope_head_dim", "rotary embeddings turn pairs of elements"),
            ("kv_lora_rank", "the latents of an 8-bit cache are followed by scales of 2 bytes"),
        ):
            if (value := getattr(self, name)) % 2:
                raise ConfigError(f"{name} = {value} must be even: {reason}")

    @property
    def cached_dim(self) -> int:
        """Elements that the cache holds of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head's queries."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class Multipliers(Dimensions):
    """Factors of the results of linear layers (muP, arXiv 2203.03466). Raises `ConfigError`."""

    attention_in_multiplier: Number = 1.0
    """Of queries, keys and values."""
    key_multiplier: Number = 1.0
    attention_out_multiplier: Number = 1.0
    mlp_multipliers: tuple[Number, ...] = (1.0,) * 2
    """Of the gate of an MLP, and of its output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(found := self.mlp_multipliers) != 2:
            raise ConfigError(f"mlp_multipliers = {bounded_repr(found)} must have 2 numbers")


@dataclass(frozen=True, kw_only=True)
class DeepNorm(Dimensions):
    """Residual additions to normed hidden states (DeepNorm, arXiv 2203.00555; MiniMax-01).

    A layer's h becomes alpha * norm(h) + beta * f(norm(h)). Raises `ConfigError`.
    """

    full_attn_alpha_factor: Number = 1.0
    full_attn_beta_factor: Number = 1.0
    linear_attn_alpha_factor: Number = 1.0
    linear_attn_beta_factor: Number = 1.0
    mlp_alpha_factor: Number = 1.0
    mlp_beta_factor: Number = 1.0


_SECTIONS: Mapping[str, type[Dimensions]] = {
    "multipliers": Multipliers,
    "deep_norm": DeepNorm,
    "altup": AltUp,
}
"""Fields of `ModelConfig` with fields of their own, in families that read their keys."""


# Reads the keys of a `config.json` that describe rotary positions.


def _read_ropes(config: Json, family: Family) -> tuple[Rope, Rope | None]:
    """Return the rotation of the layers and, if the family has two, of sliding layers.

    Reads `rope_parameters` (transformers 5) or `rope_scaling` with a separate base (4). Raises
    `CheckpointError` if both are present and contradict each other.
    """
    parameters = _rope_object(config, "rope_parameters")
    scaling = _rope_object(config, "rope_scaling")
    nested = {
        name: _rope_object(parameters, name) for name in ATTENTION_TYPES if name in parameters
    }
    if not family.two_ropes:
        if nested:
            raise CheckpointError(
                "rope_parameters must be the same for all layers of "
                f"{family.architecture}, not by layer type: " + bounded_repr(dict(parameters))
            )
        # transformers: outside the object it has priority over what is said inside.
        first = read_optional(config, _TRAINED_CONTEXT, int)
        return _full_rope(config, family, parameters, scaling, first), None
    if parameters and not nested:
        raise CheckpointError(
            f"rope_parameters of {family.architecture} must be by layer type "
            f"({', '.join(ATTENTION_TYPES)}), not {bounded_repr(dict(parameters))}"
        )
    full, sliding = (nested.get(name, {}) for name in ATTENTION_TYPES)
    return (
        _full_rope(config, family, full, scaling),
        _rope(config, family, sliding, "rope_local_base_freq"),
    )


def _full_rope(
    config: Json, family: Family, parameters: Json, scaling: Json, first: int | None = None
) -> Rope:
    """Read the rotation of full attention, which either object or both may describe."""
    rope = _rope(config, family, parameters or scaling, "rope_theta", first)
    if parameters and scaling:
        # The base may stand in the newer one only.
        with_base = {"rope_theta": rope.theta, **scaling}
        if _rope(config, family, with_base, "rope_theta", first) != rope:
            raise CheckpointError(
                f"rope_parameters = {bounded_repr(dict(parameters))} and rope_scaling = "
                f"{bounded_repr(dict(scaling))} contradict each other: the config must have one of "
                "them, or both alike"
            )
    return rope


def _rope_object(config: Json, name: str) -> Json:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{name} must be an object, not {bounded_repr(value)}")
    return value or {}


def _rope(
    config: Json, family: Family, rope: Json, theta_key: str, first: int | None = None
) -> Rope:
    """Read one rotation; its base may be outside the object, under `theta_key`.

    `first`: positions of the first training, whatever the object says.
    """
    holder = rope if rope.get("partial_rotary_factor") is not None else config
    partial = read_field(holder, "partial_rotary_factor", float, 1.0)
    if partial != 1.0 and not family.reads("partial_rotary_factor"):
        raise CheckpointError(
            f"partial_rotary_factor = {partial} is not supported for {family.architecture}, whose "
            "heads are rotated as a whole"
        )
    theta = read_optional(rope, "rope_theta", float)
    if theta is None:
        theta = read_field(config, theta_key, float, 10000.0)
    return Rope(theta, _rope_scaling(config, rope, first), partial)


def _rope_scaling(config: Json, rope: Json, first: int | None) -> RopeScaling:
    kind = cast(RopeType, rope.get("rope_type") or rope.get("type") or "default")
    if kind not in get_args(RopeType) or kind == "default":
        return RopeScaling(type=kind)
    given = {key: value for key, value in rope.items() if value is not None}
    max_positions = read_field(config, "max_position_embeddings", int)
    if first is None:
        first = read_field(given, _TRAINED_CONTEXT, int, max_positions)
    if kind == "proportional":
        given = {"factor": 1.0, **given}
    elif kind != "linear":
        given[_TRAINED_CONTEXT] = max_positions if kind == "dynamic" else first
    if kind == "longrope":
        # Without a factor: as many times the first training's context as the model has positions.
        given = {"factor": max(1.0, max_positions / max(first, 1)), **given}
    scaling: dict[str, Any] = {}
    for name in ("factor", "mscale_all_dim", *_ROPE_KEYS.get(kind, ())):
        if (value := given.get(name)) is not None:
            scaling[name] = tuple(value) if isinstance(value, list) else value
        elif name not in _OPTIONAL:
            raise CheckpointError(f"the config has no {name}")
    return RopeScaling(type=kind, **scaling)


_TRAINED_CONTEXT = "original_max_position_embeddings"

_ROPE_KEYS: dict[RopeType, tuple[str, ...]] = {
    "dynamic": (_TRAINED_CONTEXT,),
    "llama3": (_TRAINED_CONTEXT, "low_freq_factor", "high_freq_factor"),
    "yarn": (_TRAINED_CONTEXT, "truncate", "beta_fast", "beta_slow", "mscale", "attention_factor"),
    "longrope": (_TRAINED_CONTEXT, "short_factor", "long_factor", "attention_factor"),
}
"""Keys of a rope by its type, besides the keys that all types have."""

_OPTIONAL = ("mscale_all_dim", *_ROPE_KEYS["yarn"], "attention_factor")


# Reads the keys of a `config.json` that describe its layers and their attention.

_OF_ALL = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias"),
    *("bos_token_id", "num_experts_per_tok", "moe_intermediate_size", "head_dim"),
)
"""Fields that are keys of every config; `Family.reads` decides about other fields."""

_NULLABLE = (
    *("rms_norm_eps", "bos_token_id", "q_lora_rank"),
    *("attn_logit_softcapping", "final_logit_softcapping", "attention_value_scale"),
    *("n_shared_experts", "n_group", "topk_group", "moe_latent_size"),
)
"""Fields that have their default where the config has null. Null switches flags off."""


def _read_fields(kind: type, config: Json, family: Family, known: Json) -> dict[str, Any]:
    """Return the fields of a dataclass: `known` ones, and keys of the config that have the types of
    fields."""
    found = dict(known)
    for name, allowed in allowed_values(kind).items():
        key, is_flag = family.key(name), allowed.kind is bool
        if name in known or (name in _NULLABLE and config.get(key) is None):
            continue
        if name not in _OF_ALL and not family.reads(key):
            continue
        if allowed.kind is tuple:
            found[name] = _read_list(config, key, allowed.entry)
        else:
            found[name] = read_field(config, key, allowed.kind, False if is_flag else None)
    return found


def _read_list(config: Json, name: str, entry: Allowed | None) -> tuple[Any, ...]:
    listed = config.get(name)
    if not isinstance(listed, list):
        raise CheckpointError(f"{name} must be a list, not {bounded_repr(listed)}")
    if entry is not None and entry.kind is float:
        return tuple(read_field({name: number}, name, float) for number in listed)
    return tuple(tuple(each) if isinstance(each, list) else each for each in listed)


def _read_attention(config: Json, family: Family) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` that describe the layers and their attention."""
    num_layers = read_field(config, "num_hidden_layers", int)
    heads = read_field(config, "num_attention_heads", int)
    hidden_size = read_field(config, "hidden_size", int)
    rope, sliding_rope = _read_ropes(config, family)
    types, window = _read_layer_types(config, family, num_layers)
    config = {**config, "layer_types": types}
    unrotated = (layer for layer in range(num_layers) if family.is_unrotated(config, layer))
    slides = "sliding_attention" in types
    found: dict[str, Any] = {
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "partial_rotary_factor": rope.partial,
        "sliding_rope": sliding_rope,
        "layer_types": tuple(types) if {*types} != {"full_attention"} else (),
        "sliding_window": window if slides else None,
        "unrotated_layers": tuple(unrotated),
    }
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if (state := read_field(config, key, str, "float32")) not in DTYPES:
            raise CheckpointError(
                f"{key} = {bounded_repr(state)} must be one of {', '.join(DTYPES)}; recurrent state"
                " is kept in float32"
            )
    for name, kind in _SECTIONS.items():
        if any(family.reads(family.key(field.name)) for field in fields(kind)):
            found[name] = kind(**_read_fields(kind, config, family, {}))
    tunes = "attn_temperature_tuning"
    if family.reads(tunes) and read_field(config, tunes, bool):
        found["temperature"] = AttentionTemperature(
            read_field(config, "floor_scale", int), read_field(config, "attn_scale", float)
        )
    found |= _read_heads(config, family, heads, hidden_size)
    for mixer in {mixer for name in types for mixer in LAYER_TYPES[name]} - {"attention"}:
        own = MIXERS[mixer]
        sizes = {**config, "head_dim": found["head_dim"]}
        found["mixer"] = own(**_read_fields(own, sizes, family, family.mixer))
    return found


def _read_heads(config: Json, family: Family, heads: int, hidden_size: int) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` that describe the heads of attention."""
    if family.latent:
        return _latent_fields(config, family, heads)
    if config.get("head_dim") is None and heads > 0 and hidden_size % heads:
        raise CheckpointError(
            f"hidden_size = {hidden_size} must be a multiple of num_attention_heads = {heads} "
            "where the config has no head_dim"
        )
    return {
        "num_kv_heads": read_field(config, "num_key_value_heads", int, heads),
        "head_dim": read_field(config, "head_dim", int, hidden_size // max(heads, 1)),
    }


_OF_EACH_LAYER = ("layer_heads", "layer_head_dims", "layer_widths", "layer_sparsity")


def _latent_fields(config: Json, family: Family, heads: int) -> dict[str, Any]:
    kv_heads = read_field(config, "num_key_value_heads", int, heads)
    if kv_heads != heads:
        raise CheckpointError(
            f"num_key_value_heads = {kv_heads} must be num_attention_heads = {heads}: latent "
            "attention shares its cache among all heads"
        )
    latent = LatentConfig(**_read_fields(LatentConfig, config, family, {}))
    return {"latent": latent, "num_kv_heads": 1, "head_dim": latent.cached_dim}


def _read_layer_types(
    config: Json, family: Family, num_layers: int
) -> tuple[list[str], int | None]:
    """Return the type of each layer and the window of layers that slide."""
    window = read_optional(config, family.key("sliding_window"), int)
    if family.reads("use_sliding_window") and not read_field(config, "use_sliding_window", bool):
        window = None
    listed, kinds = config.get("layer_types"), family.layer_kinds
    implied: Sequence[str] = []
    if listed is None or not family.lists_layer_types:
        implied = family.implied_types(config, range(num_layers))
    if listed is None:
        listed = implied
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise CheckpointError(
            f"layer_types must be a list of {num_layers} layers (num_hidden_layers), not "
            + bounded_repr(listed)
        )
    for layer, name in enumerate(listed):
        if not isinstance(name, str) or name not in kinds:
            raise CheckpointError(
                f"layer_types has {bounded_repr(name)} for layer {layer}; supported for "
                f"{family.architecture}: {', '.join(map(repr, kinds))}"
            )
    if listed != implied and not family.lists_layer_types:
        raise CheckpointError(
            f"layer_types = {bounded_repr(listed)} contradicts {family.architecture}, whose "
            f"layers are {bounded_repr(implied)}"
        )
    return [kinds[name] for name in listed], window


# Reads the keys of a `config.json` that describe mixtures of experts.

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys that transformers treats as one. transformers 5.23 ignores `norm_topk_prob` for DeepSeek-V2,
`topk_method` and `scoring_func` for DeepSeek-V3."""


def _read_experts(config: Json, family: Family) -> ExpertsConfig | None:
    """Return the mixtures of a config; None if no layer has one.

    Raises `CheckpointError` if a key is missing, of another type, or describes an unsupported
    variant; `ConfigError` if the numbers contradict each other.
    """
    traits = family.experts
    if traits is None:
        return None
    layers = read_field(config, "num_hidden_layers", int)
    dense = traits.dense_layers(config, layers)
    counts = {
        key: count
        for key in dict.fromkeys((family.key("num_experts"), *_COUNTS))
        if (count := read_optional(config, key, int)) is not None
    }
    if len(set(counts.values())) > 1:
        raise CheckpointError(f"the config has different numbers of experts: {counts}")
    count = next(iter(counts.values()), None)
    if len(dense) == layers or (traits.optional and not count):
        return None
    if count is None:
        raise CheckpointError(f"the config has no {family.key('num_experts')}")
    if family.reads("topk_method"):  # of which only one has groups
        method = read_field(config, "topk_method", str)
        if method not in ("greedy", "group_limited_greedy"):
            raise CheckpointError(
                f"topk_method = {bounded_repr(method)} is not supported; supported: 'greedy', "
                "'group_limited_greedy'"
            )
        if method == "greedy":
            config = {**config, "n_group": None, "topk_group": None}
    known = {
        "num_experts": count,
        "scores": traits.scores,
        "group_score": traits.group_score,
        "dense_layers": dense,
    }
    return ExpertsConfig(**_read_fields(ExpertsConfig, config, family, known))


Dtype = Literal["float32", "bfloat16", "float16"]

DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def config_json_name(field: str) -> str:
    """Return the name in `config.json` of a field of `ModelConfig`."""
    return CONFIG_KEYS.get(field, field)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The configuration of a decoder: `ModelConfig` or `TransformersConfig`."""

    model_type: str
    vocab_size: Size
    """Logits of a token."""
    hidden_size: Size
    num_layers: Annotated[int, Range(1, _MOST_LAYERS)]
    max_position_embeddings: Size
    """Tokens of context the model was trained for."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding."""
    bos_token_id: int | None = None
    """Begins a text."""
    eos_token_ids: tuple[int, ...] = ()
    """Each of these ends an output."""
    torch_dtype: Dtype = "float32"
    """The dtype of the checkpoint's weights, as torch names it."""

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence."""
        return self.max_position_embeddings


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """A decoder-only transformer. Raises `ConfigError` if contradictory."""

    model_type: str = "llama"
    """Name of the `Family`, which has the traits of all models of this type."""
    intermediate_size: Size
    """Width of the gated MLP."""
    num_heads: Size
    """Query heads."""
    num_kv_heads: Size
    """Key/value heads; each serves `num_heads // num_kv_heads` query heads. 1 if `latent`."""
    head_dim: Size
    """Elements of one head; `num_heads * head_dim` need not be `hidden_size`. If `latent`, those of
    the cached vector and of the projected queries."""
    value_dim: Size | None = None
    """Elements of a head's values; None: `head_dim`. Of latent attention `LatentConfig` says it."""
    attention_value_scale: Number = 1.0
    """Factor of the values."""
    rms_norm_eps: Number = 1e-6
    rope_theta: float
    rope_scaling: RopeScaling = UNSCALED
    partial_rotary_factor: float = 1.0
    """Share of the elements of a head, from the first on, that is rotated."""
    sliding_rope: Rope | None = None
    """The rotation of sliding layers; None: the same as the other layers."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers whose queries and keys are not rotated."""
    attention_bias: bool = False
    """Whether the q, k and v projections have biases; in most families the output projection too.
    """
    mlp_bias: bool = False
    """Whether the gate, up and down projections have biases."""
    hidden_act: Literal["silu", "gelu_pytorch_tanh", "relu2"] = "silu"
    layer_types: tuple[str, ...] = ()
    """Type of each layer, which says what mixes its tokens; empty: all have full attention."""
    sliding_window: Size | None = None
    """Tokens that a token of a sliding layer attends to, itself included."""
    use_qk_norm: bool = True
    """Whether queries and keys are normed, in families that norm them."""
    temperature: AttentionTemperature | None = None
    """Of the queries of layers without rotation."""
    query_pre_attn_scalar: Number | None = None
    """Scores are multiplied by this to the power of -1/2; None: `head_dim`."""
    attention_multiplier: Number | None = None
    """Factor of the scores; None: as `query_pre_attn_scalar` says."""
    embedding_multiplier: Number = 1.0
    """Factor of the embeddings."""
    residual_multiplier: Number = 1.0
    """Factor of the outputs of attention and MLP."""
    logits_scaling: Number = 1.0
    """Divisor of the logits."""
    attn_logit_softcapping: Number | None = None
    """Scores s become cap * tanh(s / cap)."""
    swiglu_limit: Number | None = None
    """What gate and up of the MLP are clamped to, in families with such an activation."""
    swiglu_alpha: Number = 1.702
    """Factor of the gate in the sigmoid, in families with such an activation."""
    final_logit_softcapping: Number | None = None
    """Logits x become cap * tanh(x / cap)."""
    latent: LatentConfig | None = None
    """The dimensions of multi-head latent attention."""
    experts: ExpertsConfig | None = None
    """The mixtures of experts; None: every layer has an MLP."""
    layer_heads: tuple[tuple[Size, Size], ...] = ()
    """Query and key/value heads of each layer; empty: as `num_heads` and `num_kv_heads`."""
    mixer: Mixer | None = None
    """What mixes tokens in its layers without attention, or beside it."""
    multipliers: Multipliers = Multipliers()
    """Factors of the results of its linear layers."""
    layer_head_dims: tuple[Size, ...] = ()
    """Elements of a head of each layer; empty: `head_dim`."""
    layer_widths: tuple[Size, ...] = ()
    """Width of the MLP of each layer; empty: `intermediate_size`."""
    layer_sparsity: tuple[Annotated[float, Range(0.0, 0.9999)], ...] = ()
    """`Activate.sparsity` of each layer; empty: 0."""
    kv_shared_layers: tuple[int, ...] = ()
    """Layers without keys and values of their own: they read the last layer before them that has
    some and the same type."""
    keys_as_values: bool = False
    """Whether layers with full attention project to keys and values at once."""
    hidden_size_per_layer_input: Annotated[int, Range(0, MOST_SIZE)] = 0
    """Elements of each layer's input that depends on the token (see `LayerInputs`); 0: none."""
    vocab_size_per_layer_input: Size = 1
    """Tokens that have such inputs of their own."""
    altup: AltUp | None = None
    """Several streams of hidden states; None: one."""
    deep_norm: DeepNorm | None = None
    """Factors of additions to normed hidden states; None: layers add to the hidden states."""
    shard: tuple[int, int] | None = None
    """Rank and number of ranks: the plan of the model is for one rank of a tensor-parallel
    group. All other fields describe the whole model. None: the plan is for the whole model."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        for name in _OF_EACH_LAYER:
            if (listed := getattr(self, name)) and len(listed) != self.num_layers:
                raise ConfigError(
                    f"{name} lists {len(listed)} layers, num_layers = {self.num_layers}"
                )
        for heads, kv_heads in ((self.num_heads, self.num_kv_heads), *self.layer_heads):
            if heads % kv_heads:
                raise ConfigError(
                    f"num_heads = {heads} must be a multiple of num_kv_heads = {kv_heads}"
                )
        for size in (self.head_dim, *self.layer_head_dims):
            if size % 2:
                raise ConfigError(
                    f"head_dim = {size} must be even: rotary embeddings turn pairs of elements"
                )
        if self.value_dim is not None and self.value_dim > self.head_dim:
            raise ConfigError(
                f"value_dim = {self.value_dim} must be at most head_dim = {self.head_dim}: values"
                " are stored in as many elements as keys"
            )
        rotated = self.head_dim if self.latent is None else self.latent.qk_rope_head_dim
        for rope in (self._full_rope, self.sliding_rope):
            if rope is not None:
                rope.check(rotated)
        self._check_layers()
        self._check_token_ids()

    def _check_layers(self) -> None:
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ConfigError(
                "layer_types has 'sliding_attention', but sliding_window is not in use: it must be"
                " at least 1"
            )
        for layer in self.kv_shared_layers:
            if self.kv_source(layer) is None:
                raise ConfigError(
                    f"num_kv_shared_layers: layer {layer} has no keys and values of its own, and"
                    " no layer of its type before it has"
                )
        if unknown := {*self.layer_types} - LAYER_TYPES.keys():
            raise ConfigError(
                f"layer_types has {', '.join(sorted(map(repr, unknown)))}; it may have"
                f" {', '.join(map(repr, LAYER_TYPES))}"
            )
        used = {mixer for layer in range(self.num_layers) for mixer in self.mixers(layer)}
        if "attention" not in used:
            raise ConfigError(
                f"layer_types has no layer with attention, only {', '.join(sorted(used)) or 'MLPs'}"
                "; at least one is needed"
            )
        for name in used - {"attention"}:
            if not isinstance(self.mixer, kind := MIXERS[name]):
                raise ConfigError(
                    f"layer_types has {name!r}, but mixer is {bounded_repr(self.mixer)}; it must be"
                    f" a {kind.__name__}"
                )
        if self.experts is not None and self.mlp_bias:
            raise ConfigError("mlp_bias is set, which models with experts cannot have here")
        if (temperature := self.temperature) is not None and temperature.floor < 1:
            raise ConfigError(f"floor_scale = {temperature.floor} must be at least 1")

    def _check_token_ids(self) -> None:
        token_ids = self.eos_token_ids
        if self.bos_token_id is not None:
            token_ids = (self.bos_token_id, *token_ids)
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(
                    f"bos_token_id = {bounded_repr(self.bos_token_id)}, eos_token_ids = "
                    f"{bounded_repr(self.eos_token_ids)}: {bounded_repr(token_id)} is not below "
                    f"vocab_size = {self.vocab_size}, or negative"
                )

    @property
    def family(self) -> Family:
        """The traits of all models of this type."""
        return FAMILIES[self.model_type]

    def window(self, layer: int) -> int | None:
        """Tokens that a token of the layer attends to, itself included; None: all before it."""
        return self.sliding_window if self._slides(layer) else None

    def rope(self, layer: int) -> Rope:
        """The rotation of the layer."""
        if layer in self.unrotated_layers:
            return UNROTATED
        rope = self._full_rope
        if self.sliding_rope is not None and self._slides(layer):
            rope = self.sliding_rope
        if self.layer_head_dims:
            rope = rope._replace(head_dim=self.layer_head_dims[layer])
        # A norm without weight after the rotation cancels its amplitude.
        normed = self.family.qk_norm == "unweighted" and self.use_qk_norm
        if normed and rope.scaling.amplitude != 1.0:
            rope = rope._replace(scaling=replace(rope.scaling, attention_factor=1.0))
        return rope

    def kv_source(self, layer: int) -> int | None:
        """The layer whose keys and values a layer reads; None: its own, or there is none."""
        if layer not in self.kv_shared_layers:
            return None
        earlier = (i for i in range(layer) if i not in self.kv_shared_layers)
        return max((i for i in earlier if self._slides(i) == self._slides(layer)), default=None)

    def mixers(self, layer: int) -> tuple[str, ...]:
        """The mixers of the layer."""
        return LAYER_TYPES[self.layer_types[layer]] if self.layer_types else ("attention",)

    def feed_forward(self, layer: int) -> Literal["mlp", "experts"] | None:
        """What the layer has after its mixers; None: nothing."""
        if self.family.separate_layers and self.mixers(layer):
            return None
        dense = self.experts is None or layer in self.experts.dense_layers
        return "mlp" if dense else "experts"

    @property
    def _full_rope(self) -> Rope:
        return Rope(self.rope_theta, self.rope_scaling, self.partial_rotary_factor)

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence: `max_position_embeddings`, times the factor of a `dynamic`
        rope."""
        scalings = (self.rope(layer).scaling for layer in range(self.num_layers))
        factor = max((s.factor for s in scalings if s.type == "dynamic"), default=1.0)
        return min(int(self.max_position_embeddings * factor), MOST_SIZE)

    def with_layers(self, layers: Sequence[int]) -> ModelConfig:
        """Return the config of a model that has only these layers, in this order."""

        def chosen(of: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(index for index, layer in enumerate(layers) if layer in of)

        by_layer: dict[str, Any] = {
            name: tuple(values[layer] for layer in layers)
            for name in ("layer_types", *_OF_EACH_LAYER)
            if (values := getattr(self, name))
        }
        experts = self.experts
        if experts is not None:
            experts = replace(experts, dense_layers=chosen(experts.dense_layers))
        return replace(
            self,
            num_layers=len(layers),
            unrotated_layers=chosen(self.unrotated_layers),
            kv_shared_layers=chosen(self.kv_shared_layers),
            experts=experts,
            mixer=None if self.mixer is None else self.mixer.of_layers(layers),
            **by_layer,
        )

    @property
    def whole(self) -> ModelConfig:
        """The config of the whole model."""
        return self if self.shard is None else replace(self, shard=None)

    def _slides(self, layer: int) -> bool:
        return bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"

    @staticmethod
    def from_hf(
        config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read the fields of a `config.json`, in the layout of transformers 4 or 5.

        Keys that are left out have the values that transformers assumes for the family.
        End-of-text tokens come from `config`, then from `generation_config`. Raises
        `CheckpointError` for unsupported models (unknown architecture, activation, rope type,
        quantized weights) and for missing, mistyped or contradictory fields.
        """
        model_type, family = family_of(config)
        check_quantisation(config)
        both_ways = config.get("use_bidirectional_attention")
        if both_ways not in (None, False, "vision"):  # of images only: a text is causal
            found = bounded_repr(both_ways)
            raise CheckpointError(
                f"use_bidirectional_attention = {found} is set; only causal models decode"
            )
        try:
            return ModelConfig(**_read(config, generation_config or {}, model_type, family))
        except ConfigError as error:
            message = re.sub(r"\w+", lambda word: family.key(word[0]), str(error))
            raise CheckpointError(message) from error


def _read(config: Json, generation: Json, model_type: str, family: Family) -> dict[str, Any]:
    """Return the fields of a `ModelConfig`."""
    if (listed := family.num_layers(config)) is not None:
        config = {**config, "num_hidden_layers": listed}
    layers = read_field(config, "num_hidden_layers", int)
    if not 1 <= layers <= _MOST_LAYERS:  # before anything is listed for each layer
        raise CheckpointError(f"num_hidden_layers = {layers} must be from 1 to {_MOST_LAYERS}")
    config = {**family.defaults, **config, **family.fixed}
    for key, value in family.only.items():
        found = config.get(key)
        if found is not None and (type(found), found) != (type(value), value):
            raise CheckpointError(
                f"{key} = {bounded_repr(found)} is not supported for {family.architecture}, only"
                f" {json.dumps(value)} is"
            )
    if family.lists_layer_types and config.get("layer_types") is None:
        config["layer_types"] = family.implied_types(config, range(layers))
    config = family.prepare(config)
    config = _in_vocabulary(config, config, family)
    eos = token_ids(config) + token_ids(_in_vocabulary(generation, config, family))
    dtype = read_field(config, "torch_dtype" if config.get("dtype") is None else "dtype", str, "")
    activation = family.key("hidden_act")
    known = {
        "model_type": model_type,
        "hidden_act": read_field(config, activation, str, family.defaults.get(activation, "silu")),
        "experts": _read_experts(config, family),
        "eos_token_ids": tuple(dict.fromkeys(eos)),
        "torch_dtype": dtype.removeprefix("torch.") or "float32",
        **_read_attention(config, family),
    }
    return _read_fields(ModelConfig, config, family, known)


def _in_vocabulary(tokens: Json, config: Json, family: Family) -> Json:
    """Return `tokens` without the default tokens of a family that the vocabulary does not have.

    transformers writes its defaults to the files of a model with a smaller vocabulary.
    """
    size = read_field(config, "vocab_size", int)
    found = dict(tokens)
    for name in ("bos_token_id", "eos_token_id"):
        default = family.defaults.get(name)
        if default is not None and tokens.get(name) == default:
            known = [i for i in (default if isinstance(default, list) else [default]) if i < size]
            found[name] = known if name == "eos_token_id" else next(iter(known), None)
    return found


def check_quantisation(config: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for weights that are quantised in a way that is not read."""
    settings = config.get("quantization_config")
    if settings is None:
        return
    try:
        checkpoint_formats(settings if isinstance(settings, Mapping) else {})
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint is quantized (quantization_config has {error}); the methods"
            f" {', '.join(QUANT_METHODS)} are read. Use the original checkpoint, or save a"
            " dequantized one with transformers; EngineConfig(weight_dtype='int8') quantizes it"
            " while it is loaded",
            code="quantized",
        ) from error


def token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end-of-text tokens of a `config.json`. Raises `CheckpointError`."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in values):
        raise CheckpointError(
            f"eos_token_id must be an integer or a list of them, not {bounded_repr(value)}"
        )
    return tuple(values)
