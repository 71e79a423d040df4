"""The families of decoders that can be served, and how their `config.json`s are read.

What tells one family from another is data: the traits of its layers, and what transformers assumes
where a `config.json` leaves a key out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from ..errors import CheckpointError
from .rope import Rope, RopeScaling, RopeType

__all__ = [
    "FAMILIES",
    "Family",
    "LayerType",
    "family_of",
    "read_field",
    "read_optional",
    "read_ropes",
    "read_windows",
    "refuse_experts",
]

LayerType = Literal["full_attention", "sliding_attention"]
_LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")

Json = Mapping[str, Any]
T = TypeVar("T")


def _full(config: Json, layer: int) -> bool:
    return False


def _sliding_if_windowed(config: Json, layer: int) -> bool:
    return config.get("sliding_window") is not None


def _sliding_from_a_layer_on(config: Json, layer: int) -> bool:
    windowed = config["use_sliding_window"] and config["sliding_window"] is not None
    return windowed and layer >= read_field(config, "max_window_layers", int)


def _every_second_full(config: Json, layer: int) -> bool:
    return layer % 2 == 0


def _last_of_each_pattern_full(config: Json, layer: int) -> bool:
    pattern = read_field(config, "sliding_window_pattern", int)
    if pattern < 1:
        raise CheckpointError(f"sliding_window_pattern = {pattern} must be at least 1")
    return (layer + 1) % pattern != 0


@dataclass(frozen=True, kw_only=True)
class Family:
    """What all models of one `model_type` have in common."""

    architecture: str
    """The class name that checkpoints give."""
    defaults: Json = field(default_factory=dict)
    """Keys of `config.json` that may be left out, with what transformers then assumes."""
    is_sliding: Callable[[Json, int], bool] = _full
    """Whether a layer slides, where the config does not list `layer_types`."""
    window_switch: bool = False
    """Whether `use_sliding_window` of the config says if there is a window."""
    lists_layer_types: bool = False
    """Whether `layer_types` of the config decides."""
    attention_bias: bool = True
    """Whether the config can give biases to the projections of attention."""
    mlp_bias: bool = False
    """Whether the config can give biases to the MLP."""
    activation_key: str = "hidden_act"
    """What `config.json` calls the activation of the MLP."""
    activation: str = "silu"
    """The activation where the config names none."""
    qk_norm: bool = False
    """Each head of the queries and keys is normed before it is rotated."""
    offset_norms: bool = False
    """Norms multiply by one plus their weight, in float32, and round afterwards."""
    output_norms: bool = False
    """What attention and MLP return is normed too, before it is added to the residual stream."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    query_scalar: bool = False
    """`query_pre_attn_scalar` takes the place of the head size in the scale of the scores."""
    score_softcap: bool = False
    """`attn_logit_softcapping` is in force."""
    logits_softcap: bool = False
    """`final_logit_softcapping` is in force."""
    two_ropes: bool = False
    """Sliding layers have a rotation of their own."""
    latent: bool = False
    """Multi-head latent attention."""
    rope_interleaved: bool | None = False
    """Whether rotated pairs are neighbours; None: `rope_interleave` of the config says it."""


_GEMMA: dict[str, Any] = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={"bos_token_id": 1, "eos_token_id": 2},
        mlp_bias=True,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        is_sliding=_sliding_if_windowed,
        attention_bias=False,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        is_sliding=_sliding_from_a_layer_on,
        window_switch=True,
        lists_layer_types=True,
        qk_norm=True,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        defaults=_GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        is_sliding=_every_second_full,
        lists_layer_types=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        offset_norms=True,
        output_norms=True,
        scaled_embeddings=True,
        query_scalar=True,
        score_softcap=True,
        logits_softcap=True,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA
        | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        is_sliding=_last_of_each_pattern_full,
        lists_layer_types=True,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        qk_norm=True,
        offset_norms=True,
        output_norms=True,
        scaled_embeddings=True,
        query_scalar=True,
        logits_softcap=True,
        two_ropes=True,
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        defaults=_DEEPSEEK
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
        },
        mlp_bias=True,
        latent=True,
        rope_interleaved=True,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        defaults=_DEEPSEEK
        | {
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "rope_interleave": True,
        },
        latent=True,
        rope_interleaved=None,
    ),
}
"""By `model_type`. transformers takes no notice of `attn_logit_softcapping` in Gemma 3, has no
biases in the attention of Mistral, and caps the logits of the Gemmas only, whatever the config
says."""


def family_of(config: Json) -> tuple[str, Family]:
    """Return the model type of a `config.json` and its family. Raises `CheckpointError`."""
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    supported = None if family is None else family.architecture
    architectures = config.get("architectures")
    # Checkpoints name the class they were saved from; a bare config has only the model type.
    named = architectures if isinstance(architectures, list) and architectures else [supported]
    if family is None or supported not in named:
        found = ", ".join(str(name) for name in named if name) or "(unnamed)"
        raise CheckpointError(
            f"architecture {found} (model_type {model_type!r}) is not supported; supported: "
            + ", ".join(family.architecture for family in FAMILIES.values())
        )
    return model_type, family


def read_optional(config: Json, name: str, kind: type[T]) -> T | None:
    """Return a field checked for its type, None if it is absent or null."""
    value = config.get(name)
    if value is None:
        return None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:  # not isinstance: to Python, true is an int
        raise CheckpointError(f"{name} must be of type {kind.__name__}, not {value!r}")
    return value


def read_field(config: Json, name: str, kind: type[T], default: T | None = None) -> T:
    """Return a field checked for its type; absent and null mean the default, if there is one."""
    value = read_optional(config, name, kind)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no {name}")
    return value


def read_windows(
    config: Json, family: Family, num_layers: int
) -> tuple[tuple[LayerType, ...], int | None]:
    """Return the type of each layer and the window of those that slide.

    Without types, all layers attend to everything before them.
    """
    window = read_optional(config, "sliding_window", int)
    if family.window_switch and not read_field(config, "use_sliding_window", bool):
        window = None
    implied = tuple(_LAYER_TYPES[family.is_sliding(config, i)] for i in range(num_layers))
    listed = config.get("layer_types")
    if listed is None:
        types = implied
    elif not isinstance(listed, list) or not all(name in _LAYER_TYPES for name in listed):
        known = ", ".join(map(repr, _LAYER_TYPES))
        raise CheckpointError(f"layer_types must be a list of {known}, not {listed!r}")
    elif len(listed) != num_layers:
        raise CheckpointError(
            f"layer_types lists {len(listed)} layers, num_hidden_layers = {num_layers}"
        )
    else:
        types = tuple(listed)
        if types != implied and not family.lists_layer_types:
            raise CheckpointError(
                f"layer_types = {listed} contradicts {family.architecture}, whose layers are "
                f"{list(implied)}"
            )
    return (types, window) if "sliding_attention" in types else ((), None)


def read_ropes(config: Json, family: Family, max_positions: int) -> tuple[Rope, Rope | None]:
    """Return the rotation of the layers and, where a family has two, that of sliding layers.

    Reads `rope_parameters` (transformers 5) or `rope_scaling` with the base beside it (4). Raises
    `CheckpointError` if both are there and say different things.
    """
    parameters = _rope_object(config, "rope_parameters")
    scaling = _rope_object(config, "rope_scaling")
    nested = {name: _rope_object(parameters, name) for name in _LAYER_TYPES if name in parameters}
    if not family.two_ropes:
        if nested:
            raise CheckpointError(
                "rope_parameters must be the same for all layers of "
                f"{family.architecture}, not by layer type: {dict(parameters)}"
            )
        # transformers: outside the object it has priority over what is said inside.
        first = read_optional(config, "original_max_position_embeddings", int)
        return _full_rope(config, parameters, scaling, max_positions, first), None
    if parameters and not nested:
        raise CheckpointError(
            f"rope_parameters of {family.architecture} must be by layer type "
            f"({', '.join(_LAYER_TYPES)}), not {dict(parameters)}"
        )
    full, sliding = (nested.get(name, {}) for name in _LAYER_TYPES)
    return (
        _full_rope(config, full, scaling, max_positions),
        _rope(config, sliding, "rope_local_base_freq", max_positions),
    )


def _full_rope(
    config: Json, parameters: Json, scaling: Json, max_positions: int, first: int | None = None
) -> Rope:
    """Read the rotation of full attention from the one object that is there, or from both."""
    rope = _rope(config, parameters or scaling, "rope_theta", max_positions, first)
    if parameters and scaling:
        # The base may stand in the newer one only.
        with_base = {"rope_theta": rope.theta, **scaling}
        if _rope(config, with_base, "rope_theta", max_positions, first) != rope:
            raise CheckpointError(
                f"rope_parameters = {dict(parameters)} and rope_scaling = {dict(scaling)} "
                "contradict each other: the config must have one of them, or both alike"
            )
    return rope


def _rope_object(config: Json, name: str) -> Json:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{name} must be an object, not {value!r}")
    return value or {}


def _rope(
    config: Json, rope: Json, theta_key: str, max_positions: int, first: int | None = None
) -> Rope:
    """Read one rotation; its base may stand beside the object, under `theta_key`.

    `first`: positions of the first training, whatever the object says.
    """
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise CheckpointError(
            f"partial_rotary_factor = {partial} is not supported; every element of a head must "
            "be rotated"
        )
    theta = read_optional(rope, "rope_theta", float)
    if theta is None:
        theta = read_field(config, theta_key, float, 10000.0)
    return Rope(theta, _rope_scaling(rope, max_positions, first))


def _rope_scaling(rope: Json, max_positions: int, first: int | None) -> RopeScaling:
    kind = cast(RopeType, rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ("linear", "llama3", "yarn"):
        return RopeScaling(type=kind)
    scaling: dict[str, Any] = {
        "factor": read_field(rope, "factor", float),
        "mscale_all_dim": read_optional(rope, "mscale_all_dim", float),
    }
    if kind != "linear":
        if first is None:
            first = read_field(rope, "original_max_position_embeddings", int, max_positions)
        scaling["original_max_position_embeddings"] = first
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            scaling[name] = read_field(rope, name, float)
    if kind == "yarn":
        scaling |= {
            "beta_fast": read_field(rope, "beta_fast", float, 32.0),
            "beta_slow": read_field(rope, "beta_slow", float, 1.0),
            "truncate": read_field(rope, "truncate", bool, True),
            "attention_factor": read_optional(rope, "attention_factor", float),
            "mscale": read_optional(rope, "mscale", float),
        }
    return RopeScaling(type=kind, **scaling)


def refuse_experts(config: Json, num_layers: int) -> None:
    """Raise `CheckpointError` if a layer of a DeepSeek config is a mixture of experts."""
    experts = config.get("n_routed_experts")
    dense = read_field(config, "first_k_dense_replace", int, 0)
    if experts and dense < num_layers:
        raise CheckpointError(
            f"n_routed_experts = {experts} with first_k_dense_replace = {dense} makes layers "
            f"{dense} to {num_layers - 1} mixtures of experts, which are not supported; only "
            f"dense layers are (first_k_dense_replace of at least {num_layers})"
        )
