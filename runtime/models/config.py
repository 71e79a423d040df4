"""What a decoder of the Llama family is made of, read from a Hugging Face `config.json`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from ..errors import CheckpointError, ConfigError

__all__ = ["ModelConfig", "RopeScaling", "RopeType", "rope_inverse_frequencies"]

RopeType = Literal["default", "linear", "llama3"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
"""The model types that can be served, and the class name that checkpoints give each."""
_ACTIVATIONS = ("silu",)
_DTYPES = ("float32", "bfloat16", "float16")

_CONFIG_JSON_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}
"""Fields that `config.json` calls otherwise."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was first trained on.

    `linear` divides every frequency by `factor`; `llama3` divides the low ones, keeps the high
    ones and blends those between (see `rope_inverse_frequencies`). Raises `ConfigError`.
    """

    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above `original_max_position_embeddings` / this are stretched."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below `original_max_position_embeddings` / this are kept."""
    original_max_position_embeddings: int = 8192
    """`llama3`: positions of the first training."""

    def __post_init__(self) -> None:
        if self.type not in get_args(RopeType):
            raise ConfigError(
                f"rope type {self.type!r} is not supported; supported are "
                + ", ".join(map(repr, get_args(RopeType)))
            )
        if not 1 <= self.factor < math.inf:
            raise ConfigError(f"rope factor = {self.factor} must be a number of at least 1")
        if self.type == "llama3":
            if not 0 < self.low_freq_factor < self.high_freq_factor:
                raise ConfigError(
                    f"rope low_freq_factor = {self.low_freq_factor} must be above 0 and below "
                    f"high_freq_factor = {self.high_freq_factor}"
                )
            if self.original_max_position_embeddings < 1:
                raise ConfigError(
                    "rope original_max_position_embeddings = "
                    f"{self.original_max_position_embeddings} must be at least 1"
                )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Raises `ConfigError` if contradictory."""

    model_type: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the gated MLP."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads; each serves `num_heads // num_kv_heads` query heads."""
    head_dim: int
    """Elements of one head; `num_heads * head_dim` need not be `hidden_size`."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int
    """Tokens of context the model was trained for."""
    tie_word_embeddings: bool
    """Whether the output projection is the embedding."""
    attention_bias: bool = False
    """Whether the q, k, v and output projections have biases."""
    mlp_bias: bool = False
    """Whether the gate, up and down projections have biases."""
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Each of these ends an output."""
    torch_dtype: str = "float32"
    """The dtype of the checkpoint's weights, as torch names it."""

    def __post_init__(self) -> None:
        _require_supported("model_type", self.model_type, _ARCHITECTURES)
        _require_supported("hidden_act", self.hidden_act, _ACTIVATIONS)
        _require_supported("torch_dtype", self.torch_dtype, _DTYPES)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} = {value} must be a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads = {self.num_heads} must be a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim = {self.head_dim} must be even: rotary embeddings turn pairs of elements"
            )
        token_ids = self.eos_token_ids
        if self.bos_token_id is not None:
            token_ids = (self.bos_token_id, *token_ids)
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(
                    f"bos_token_id = {self.bos_token_id}, eos_token_ids = {self.eos_token_ids}: "
                    f"{token_id} is not below vocab_size = {self.vocab_size}, or negative"
                )

    @property
    def query_size(self) -> int:
        """Elements of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of the keys of one token in one layer (as many as of the values)."""
        return self.num_kv_heads * self.head_dim

    @staticmethod
    def from_hf(
        config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read the fields of a `config.json`, in the layout of transformers 4 or 5.

        End-of-text tokens are those of `config` followed by those of `generation_config`.
        Raises `CheckpointError` for what cannot be served (unknown architecture, activation,
        rope type, quantized weights) and for missing, mistyped or contradictory fields.
        """
        model_type = _supported_model_type(config)
        if config.get("quantization_config") is not None:
            raise CheckpointError(
                "the checkpoint is quantized (quantization_config is set); only checkpoints in "
                + ", ".join(_DTYPES)
                + " can be loaded"
            )
        heads = _field(config, "num_attention_heads", int)
        hidden_size = _field(config, "hidden_size", int)
        max_positions = _field(config, "max_position_embeddings", int)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"rope_parameters must be an object, not {rope!r}")
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise CheckpointError(
                f"partial_rotary_factor = {partial} is not supported; every element of a head must "
                "be rotated"
            )
        if config.get("head_dim") is None and heads > 0 and hidden_size % heads:
            raise CheckpointError(
                f"hidden_size = {hidden_size} must be a multiple of num_attention_heads = {heads} "
                "where the config has no head_dim"
            )
        bos = config.get("bos_token_id")
        eos = _token_ids(config) + _token_ids(generation_config or {})
        try:
            return ModelConfig(
                model_type=model_type,
                vocab_size=_field(config, "vocab_size", int),
                hidden_size=hidden_size,
                intermediate_size=_field(config, "intermediate_size", int),
                num_layers=_field(config, "num_hidden_layers", int),
                num_heads=heads,
                num_kv_heads=_field(config, "num_key_value_heads", int, heads),
                head_dim=_field(config, "head_dim", int, hidden_size // max(heads, 1)),
                rms_norm_eps=_field(config, "rms_norm_eps", float, 1e-6),
                rope_theta=_field({**config, **rope}, "rope_theta", float, 10000.0),
                rope_scaling=_rope_scaling(rope, max_positions),
                max_position_embeddings=max_positions,
                tie_word_embeddings=_field(config, "tie_word_embeddings", bool, False),
                attention_bias=_field(config, "attention_bias", bool, False),
                mlp_bias=_field(config, "mlp_bias", bool, False),
                hidden_act=_field(config, "hidden_act", str, "silu"),
                bos_token_id=None if bos is None else _field(config, "bos_token_id", int),
                eos_token_ids=tuple(dict.fromkeys(eos)),
                torch_dtype=_dtype_name(config),
            )
        except ConfigError as error:
            message = re.sub(
                r"\w+", lambda word: _CONFIG_JSON_NAMES.get(word[0], word[0]), str(error)
            )
            raise CheckpointError(message) from error


def rope_inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the angle by which each pair of elements turns per position: float32 `[head_dim / 2]`.

    Pair i turns by `rope_theta ** (-2i / head_dim)` radians (Su et al. 2021, "RoFormer").
    `linear` scaling divides all of them by the factor (Chen et al. 2023). `llama3` scaling
    weighs by how often a pair turned within the first training's context, n = L / wavelength:
    below `low_freq_factor` turns it is divided by the factor, above `high_freq_factor` it is
    kept, in between the two blend linearly in n (Llama 3.1).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies: torch.Tensor = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling.type == "default":
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.type == "linear":
        return stretched
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1.0 - kept) * stretched + kept * frequencies


def _require_supported(field: str, value: str, supported: Iterable[str]) -> None:
    if value not in supported:
        names = ", ".join(map(repr, supported))
        raise ConfigError(f"{field} = {value!r} is not supported; supported: {names}")


def _supported_model_type(config: Mapping[str, Any]) -> str:
    model_type = str(config.get("model_type"))
    architectures = config.get("architectures")
    supported = _ARCHITECTURES.get(model_type)
    # Checkpoints name the class they were saved from; a bare config has only the model type.
    named = architectures if isinstance(architectures, list) and architectures else [supported]
    if supported is None or supported not in named:
        found = ", ".join(str(name) for name in named if name) or "(unnamed)"
        raise CheckpointError(
            f"architecture {found} (model_type {model_type!r}) is not supported; supported: "
            + ", ".join(_ARCHITECTURES.values())
        )
    return model_type


def _field(config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Return a field checked for its type; absent and null mean the default, if there is one."""
    value = config.get(name)
    if value is None:
        if default is None:
            raise CheckpointError(f"the config has no {name}")
        return default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:  # not isinstance: to Python, true is an int
        raise CheckpointError(f"{name} must be of type {kind.__name__}, not {value!r}")
    return value


def _token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in values):
        raise CheckpointError(f"eos_token_id must be an integer or a list of them, not {value!r}")
    return tuple(values)


def _rope_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` (4), which may say just `type`."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        return RopeScaling(type="linear", factor=_field(rope, "factor", float))
    if kind == "llama3":
        return RopeScaling(
            type="llama3",
            factor=_field(rope, "factor", float),
            low_freq_factor=_field(rope, "low_freq_factor", float),
            high_freq_factor=_field(rope, "high_freq_factor", float),
            original_max_position_embeddings=_field(
                rope, "original_max_position_embeddings", int, max_positions
            ),
        )
    return RopeScaling(type=cast(RopeType, kind))


def _dtype_name(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")
