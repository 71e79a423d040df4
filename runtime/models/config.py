"""The configuration of a decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError, ConfigError
from ..kernels.ops.layer_operations import AttentionTemperature
from .attention_fields import MULTIPLIERS, read_attention
from .experts_config import ExpertsConfig
from .experts_fields import read_experts
from .families import FAMILIES, family_of
from .family import Family, Json, LayerType, read_field, read_optional
from .latent_config import LatentConfig
from .limits import MOST_SIZE, check_rope, require_layers, require_numbers, require_sizes
from .rope import UNROTATED, UNSCALED, Rope, RopeScaling, RopeType

__all__ = [
    "AttentionTemperature",
    "ExpertsConfig",
    "LatentConfig",
    "LayerType",
    "ModelConfig",
    "Rope",
    "RopeScaling",
    "RopeType",
    "config_json_name",
]

_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_DTYPES = ("float32", "bfloat16", "float16")

_CONFIG_JSON_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}
"""Field -> its name in `config.json`, where they differ."""


def config_json_name(field: str) -> str:
    """Return the name in `config.json` of a field of `ModelConfig`."""
    return _CONFIG_JSON_NAMES.get(field, field)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Raises `ConfigError` if contradictory."""

    model_type: str = "llama"
    """Name of the `Family`, which has the traits of all models of this type."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the gated MLP."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads; each serves `num_heads // num_kv_heads` query heads. 1 if `latent`."""
    head_dim: int
    """Elements of one head; `num_heads * head_dim` need not be `hidden_size`. If `latent`, those of
    the cached vector and of the projected queries."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = UNSCALED
    partial_rotary_factor: float = 1.0
    """Share of the elements of a head, from the first on, that is rotated."""
    sliding_rope: Rope | None = None
    """The rotation of sliding layers; None: the same as the other layers."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers whose queries and keys are not rotated."""
    max_position_embeddings: int
    """Tokens of context the model was trained for."""
    tie_word_embeddings: bool
    """Whether the output projection is the embedding."""
    attention_bias: bool = False
    """Whether the q, k and v projections have biases; in most families the output projection too.
    """
    mlp_bias: bool = False
    """Whether the gate, up and down projections have biases."""
    hidden_act: str = "silu"
    layer_types: tuple[LayerType, ...] = ()
    """Type of each layer; empty: all have full attention."""
    sliding_window: int | None = None
    """Tokens that a token of a sliding layer attends to, itself included."""
    use_qk_norm: bool = True
    """Whether queries and keys are normed, in families that norm them without weight."""
    temperature: AttentionTemperature | None = None
    """Of the queries of layers without rotation."""
    query_pre_attn_scalar: float | None = None
    """Scores are multiplied by this to the power of -1/2; None: by that of `head_dim`."""
    attention_multiplier: float | None = None
    """Factor of the scores; None: as `query_pre_attn_scalar` says."""
    embedding_multiplier: float = 1.0
    """Factor of the embeddings."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP."""
    logits_scaling: float = 1.0
    """Divisor of the logits."""
    attn_logit_softcapping: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    swiglu_limit: float | None = None
    """What gate and up of the MLP are clamped to, in families with such an activation."""
    swiglu_alpha: float = 1.702
    """Factor of the gate in the sigmoid, in families with such an activation."""
    final_logit_softcapping: float | None = None
    """Logits x become cap * tanh(x / cap)."""
    latent: LatentConfig | None = None
    """The dimensions of multi-head latent attention."""
    experts: ExpertsConfig | None = None
    """The mixtures of experts; None: every layer has an MLP."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Each of these ends an output."""
    torch_dtype: str = "float32"
    """The dtype of the checkpoint's weights, as torch names it."""
    shard: tuple[int, int] | None = None
    """Rank and number of ranks: the plan of the model is that of one rank of a tensor-parallel
    group. All other fields describe the whole model. None: the plan is that of the whole model."""

    def __post_init__(self) -> None:
        _require_supported("model_type", self.model_type, FAMILIES)
        _require_supported("hidden_act", self.hidden_act, _ACTIVATIONS)
        _require_supported("torch_dtype", self.torch_dtype, _DTYPES)
        require_layers(self.num_layers)
        require_sizes(
            self,
            (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "max_position_embeddings",
            ),
        )
        require_numbers(
            self,
            (
                "rms_norm_eps",
                "query_pre_attn_scalar",
                "attn_logit_softcapping",
                "swiglu_limit",
                "swiglu_alpha",
                "final_logit_softcapping",
                *MULTIPLIERS,
            ),
        )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads = {self.num_heads} must be a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim = {self.head_dim} must be even: rotary embeddings turn pairs of elements"
            )
        for rope in (self._full_rope, self.sliding_rope):
            if rope is not None:
                check_rope(rope, self.rotated_head_dim)
        self._check_layers()
        self._check_token_ids()

    def _check_layers(self) -> None:
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"layer_types lists {len(self.layer_types)} layers, num_layers = {self.num_layers}"
            )
        if "sliding_attention" in self.layer_types:
            if self.sliding_window is None:
                raise ConfigError(
                    "layer_types has 'sliding_attention', but sliding_window is not in use: "
                    "it must be at least 1"
                )
            require_sizes(self, ("sliding_window",))
        if (self.latent is not None) != self.family.latent:
            raise ConfigError(f"latent = {self.latent} contradicts model_type {self.model_type!r}")
        if self.experts is not None and self.family.experts is None:
            raise ConfigError(f"experts contradict model_type {self.model_type!r}")
        if (temperature := self.temperature) is not None and temperature.floor < 1:
            raise ConfigError(f"floor_scale = {temperature.floor} must be at least 1")
        if self.latent is not None:
            if self.layer_types:
                raise ConfigError("layer_types must be empty with latent attention")
            if (self.num_kv_heads, self.head_dim) != (1, self.latent.cached_dim):
                raise ConfigError(
                    f"num_kv_heads = {self.num_kv_heads} and head_dim = {self.head_dim} must be 1 "
                    f"and {self.latent.cached_dim}, those of the cached vector"
                )

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

    @property
    def query_size(self) -> int:
        """Elements of the queries of one token, as attention takes them."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of the keys of one token in one layer (as many as of the values)."""
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """Tokens that a token of the layer attends to, itself included; None: all before it."""
        return self.sliding_window if self._slides(layer) else None

    def rope(self, layer: int) -> Rope:
        """The rotation of the layer."""
        if layer in self.unrotated_layers:
            return UNROTATED
        if self.sliding_rope is not None and self._slides(layer):
            return self.sliding_rope
        rope = self._full_rope
        if self.norms_rotated and rope.scaling.amplitude != 1.0:
            rope = rope._replace(scaling=replace(rope.scaling, attention_factor=1.0))
        return rope

    @property
    def norms_rotated(self) -> bool:
        """Whether queries and keys are normed without weight after they are rotated, which cancels
        the amplitude of the rotation."""
        return self.family.qk_norm == "unweighted" and self.use_qk_norm

    def is_mixture(self, layer: int) -> bool:
        """Whether the layer has experts instead of an MLP."""
        return self.experts is not None and self.experts.is_mixture(layer)

    @property
    def rotated_head_dim(self) -> int:
        """Elements of a head of which `partial_rotary_factor` is a share."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

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

        experts = self.experts
        if experts is not None:
            experts = replace(experts, dense_layers=chosen(experts.dense_layers))
        return replace(
            self,
            num_layers=len(layers),
            layer_types=tuple(self.layer_types[layer] for layer in layers if self.layer_types),
            unrotated_layers=chosen(self.unrotated_layers),
            experts=experts,
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
        End-of-text tokens are those of `config` followed by those of `generation_config`. Raises
        `CheckpointError` for unsupported models (unknown architecture, activation, rope type,
        quantized weights) and for missing, mistyped or contradictory fields.
        """
        model_type, family = family_of(config)
        _refuse_quantised(config, family)
        if read_optional(config, "use_bidirectional_attention", bool):
            raise CheckpointError("use_bidirectional_attention is set; only causal models decode")
        names = {
            **_CONFIG_JSON_NAMES,
            "hidden_act": family.activation_key,
            "intermediate_size": family.inner_size_key,
            **(family.experts.keys if family.experts is not None else {}),
        }
        try:
            # Before anything is listed for each layer.
            require_layers(read_field(config, "num_hidden_layers", int))
            config = family.prepare({**family.defaults, **config, **family.fixed})
            config = _in_vocabulary(config, config, family)
            eos = _token_ids(config) + _token_ids(
                _in_vocabulary(generation_config or {}, config, family)
            )
            return ModelConfig(
                model_type=model_type,
                vocab_size=read_field(config, "vocab_size", int),
                intermediate_size=read_field(config, family.inner_size_key, int),
                rms_norm_eps=read_field(config, "rms_norm_eps", float, 1e-6),
                tie_word_embeddings=read_field(config, "tie_word_embeddings", bool, False),
                mlp_bias=family.mlp_bias and read_field(config, "mlp_bias", bool, False),
                hidden_act=read_field(config, family.activation_key, str, family.activation),
                final_logit_softcapping=read_optional(config, "final_logit_softcapping", float)
                if family.logits_softcap
                else None,
                experts=None if family.experts is None else read_experts(config, family.experts),
                bos_token_id=read_optional(config, "bos_token_id", int),
                eos_token_ids=tuple(dict.fromkeys(eos)),
                torch_dtype=_dtype_name(config),
                **read_attention(config, family),
            )
        except ConfigError as error:
            message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
            raise CheckpointError(message) from error


def _require_supported(field: str, value: str, supported: Iterable[str]) -> None:
    if value not in supported:
        names = ", ".join(map(repr, supported))
        raise ConfigError(f"{field} = {bounded_repr(value)} is not supported; supported: {names}")


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


def _refuse_quantised(config: Mapping[str, Any], family: Family) -> None:
    """Raise `CheckpointError` for weights that are stored in a format that is not read."""
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    if method == "mxfp4" and family.experts is not None and family.experts.mxfp4:
        return
    raise CheckpointError(
        f"the checkpoint is quantized (quantization_config has quant_method = "
        f"{bounded_repr(method, 60)}); only checkpoints in {', '.join(_DTYPES)}, and experts of "
        "gpt_oss in mxfp4, can be loaded. Use the original checkpoint, or save a dequantized one "
        "with transformers; EngineConfig(weight_dtype='int8') quantizes it while it is loaded",
        code="quantized",
    )


def _token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in values):
        raise CheckpointError(
            f"eos_token_id must be an integer or a list of them, not {bounded_repr(value)}"
        )
    return tuple(values)


def _dtype_name(config: Mapping[str, Any]) -> str:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    return read_field(config, key, str, "float32").removeprefix("torch.")
