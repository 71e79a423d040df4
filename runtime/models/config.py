"""The configuration of a decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError, ConfigError
from .attention_fields import read_ropes, read_windows, refuse_experts
from .families import FAMILIES, Family, LayerType, family_of, read_field, read_optional
from .latent_config import LatentConfig
from .limits import check_theta, require_layers, require_numbers, require_sizes
from .rope import UNSCALED, Rope, RopeScaling, RopeType

__all__ = [
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
    sliding_rope: Rope | None = None
    """The rotation of sliding layers; None: the same as the other layers."""
    max_position_embeddings: int
    """Tokens of context the model was trained for."""
    tie_word_embeddings: bool
    """Whether the output projection is the embedding."""
    attention_bias: bool = False
    """Whether the q, k, v and output projections have biases."""
    mlp_bias: bool = False
    """Whether the gate, up and down projections have biases."""
    hidden_act: str = "silu"
    layer_types: tuple[LayerType, ...] = ()
    """Type of each layer; empty: all have full attention."""
    sliding_window: int | None = None
    """Tokens that a token of a sliding layer attends to, itself included."""
    query_pre_attn_scalar: float | None = None
    """Scores are multiplied by this to the power of -1/2; None: by that of `head_dim`."""
    attn_logit_softcapping: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    swiglu_limit: float | None = None
    """What gate and up of the MLP are clamped to, in families with such an activation."""
    final_logit_softcapping: float | None = None
    """Logits x become cap * tanh(x / cap)."""
    latent: LatentConfig | None = None
    """The dimensions of multi-head latent attention."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Each of these ends an output."""
    torch_dtype: str = "float32"
    """The dtype of the checkpoint's weights, as torch names it."""

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
                "final_logit_softcapping",
            ),
        )
        for rope in (Rope(self.rope_theta, self.rope_scaling), self.sliding_rope):
            if rope is not None:
                check_theta(rope)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads = {self.num_heads} must be a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim = {self.head_dim} must be even: rotary embeddings turn pairs of elements"
            )
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
        if self.sliding_rope is not None and self._slides(layer):
            return self.sliding_rope
        return Rope(self.rope_theta, self.rope_scaling)

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
        mixtures of experts, quantized weights) and for missing, mistyped or contradictory fields.
        """
        model_type, family = family_of(config)
        if config.get("quantization_config") is not None:
            raise CheckpointError(
                "the checkpoint is quantized (quantization_config is set); only checkpoints in "
                + ", ".join(_DTYPES)
                + " can be loaded"
            )
        if read_optional(config, "use_bidirectional_attention", bool):
            raise CheckpointError("use_bidirectional_attention is set; only causal models decode")
        names = {**_CONFIG_JSON_NAMES, "hidden_act": family.activation_key}
        config = {**family.defaults, **config}
        eos = _token_ids(config) + _token_ids(generation_config or {})
        try:
            return ModelConfig(
                model_type=model_type,
                vocab_size=read_field(config, "vocab_size", int),
                intermediate_size=read_field(config, "intermediate_size", int),
                rms_norm_eps=read_field(config, "rms_norm_eps", float, 1e-6),
                tie_word_embeddings=read_field(config, "tie_word_embeddings", bool, False),
                mlp_bias=family.mlp_bias and read_field(config, "mlp_bias", bool, False),
                hidden_act=read_field(config, family.activation_key, str, family.activation),
                final_logit_softcapping=read_optional(config, "final_logit_softcapping", float)
                if family.logits_softcap
                else None,
                swiglu_limit=read_optional(config, "swiglu_limit", float)
                if family.clamped_activation
                else None,
                bos_token_id=read_optional(config, "bos_token_id", int),
                eos_token_ids=tuple(dict.fromkeys(eos)),
                torch_dtype=_dtype_name(config),
                **_attention_fields(config, family),
            )
        except ConfigError as error:
            message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
            raise CheckpointError(message) from error


def _attention_fields(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` that describe the layers and their attention."""
    num_layers = read_field(config, "num_hidden_layers", int)
    require_layers(num_layers)  # before types are listed for so many
    heads = read_field(config, "num_attention_heads", int)
    hidden_size = read_field(config, "hidden_size", int)
    max_positions = read_field(config, "max_position_embeddings", int)
    rope, sliding_rope = read_ropes(config, family, max_positions)
    layer_types, window = read_windows(config, family, num_layers)
    fields: dict[str, Any] = {
        "num_layers": num_layers,
        "num_heads": heads,
        "hidden_size": hidden_size,
        "max_position_embeddings": max_positions,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "sliding_rope": sliding_rope,
        "layer_types": layer_types,
        "sliding_window": window,
        "attention_bias": family.attention_bias
        and read_field(config, "attention_bias", bool, False),
    }
    if family.query_scalar:
        fields["query_pre_attn_scalar"] = read_field(config, "query_pre_attn_scalar", float)
    if family.score_softcap:
        fields["attn_logit_softcapping"] = read_optional(config, "attn_logit_softcapping", float)
    if family.latent:
        return fields | _latent_fields(config, family, num_layers, heads)
    if config.get("head_dim") is None and heads > 0 and hidden_size % heads:
        raise CheckpointError(
            f"hidden_size = {hidden_size} must be a multiple of num_attention_heads = {heads} "
            "where the config has no head_dim"
        )
    fields["num_kv_heads"] = read_field(config, "num_key_value_heads", int, heads)
    fields["head_dim"] = read_field(config, "head_dim", int, hidden_size // max(heads, 1))
    return fields


def _latent_fields(
    config: Mapping[str, Any], family: Family, num_layers: int, heads: int
) -> dict[str, Any]:
    refuse_experts(config, num_layers)
    kv_heads = read_field(config, "num_key_value_heads", int, heads)
    if kv_heads != heads:
        raise CheckpointError(
            f"num_key_value_heads = {kv_heads} must be num_attention_heads = {heads}: latent "
            "attention shares its cache among all heads"
        )
    interleave = family.rope_interleaved
    if interleave is None:
        interleave = read_field(config, "rope_interleave", bool)
    latent = LatentConfig(
        q_lora_rank=read_optional(config, "q_lora_rank", int),
        kv_lora_rank=read_field(config, "kv_lora_rank", int),
        qk_nope_head_dim=read_field(config, "qk_nope_head_dim", int),
        qk_rope_head_dim=read_field(config, "qk_rope_head_dim", int),
        v_head_dim=read_field(config, "v_head_dim", int),
        rope_interleave=interleave,
    )
    return {"latent": latent, "num_kv_heads": 1, "head_dim": latent.cached_dim}


def _require_supported(field: str, value: str, supported: Iterable[str]) -> None:
    if value not in supported:
        names = ", ".join(map(repr, supported))
        raise ConfigError(f"{field} = {bounded_repr(value)} is not supported; supported: {names}")


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
