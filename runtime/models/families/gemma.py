"""The Gemma families: some layers have a window, and from Gemma 3n on embeddings of their own, or
the keys and values of other layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...bounded_repr import bounded_repr
from ...errors import CheckpointError
from ..config_keys import Json, read_count, read_field
from ..layers import ATTENTION_TYPES
from ..layers.experts import ExpertLayout, ExpertTraits, MixtureNorms
from .family import Family, LayerNorms


def _full_every(period: int) -> Callable[[Json, range], list[str]]:
    """Return a function for `Family.layer_types`: the last layer of each period has no window."""
    return lambda config, layers: [ATTENTION_TYPES[(i + 1) % period != 0] for i in layers]


def _with_shared_layers(config: Json, layers: int) -> dict[str, Any]:
    """Return the config with the layers that share keys and values."""
    shared = read_count(config, "num_kv_shared_layers", 0, least=0)
    if shared >= layers:
        raise CheckpointError(
            f"num_kv_shared_layers = {shared} of num_hidden_layers = {layers}: no layer has keys"
            " and values; a drafter that reads another model's is not a model"
        )
    return {**config, "kv_shared_layers": list(range(layers - shared, layers))}


def _with_gemma4_layers(config: Json) -> Json:
    """Gemma 4: heads and widths of layers, and rotations of whole heads."""
    layers = read_field(config, "num_hidden_layers", int)
    found, types = _with_shared_layers(config, layers), []
    if isinstance(listed := config["layer_types"], list) and listed:
        found["layer_types"] = types = [*listed[:-1], "full_attention"]
    own = config.get("per_layer_config")
    if own is None:
        full: dict[str, Any] = {"head_dim": read_count(config, "global_head_dim", 512)}
        kv_heads = config.get("num_global_key_value_heads")
        if kv_heads is not None and read_field(config, "attention_k_eq_v", bool, False):
            full["num_key_value_heads"] = kv_heads
        own = {str(i): full for i, kind in enumerate(types) if kind == "full_attention"}
    if not isinstance(own, Mapping) or not all(isinstance(v, Mapping) for v in own.values()):
        raise CheckpointError(f"per_layer_config must be of objects, not {bounded_repr(own)}")
    of_layers = [{**config, **own.get(str(layer), {})} for layer in range(layers)]
    heads, width = (read_count(config, n) for n in ("num_attention_heads", "intermediate_size"))
    wide = 2 if read_field(config, "use_double_wide_mlp", bool, False) else 1
    shared = found["kv_shared_layers"]
    found |= {
        "layer_heads": [(heads, read_count(c, "num_key_value_heads")) for c in of_layers],
        "layer_head_dims": [read_count(c, "head_dim") for c in of_layers],
        "layer_widths": [width * (wide if layer in shared else 1) for layer in range(layers)],
    }
    if not read_field(config, "enable_moe_block", bool, False):
        found["num_experts"] = None
    ropes = config.get("rope_parameters")
    if ropes is None:
        full_rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        ropes = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": full_rope}
    if isinstance(ropes, Mapping):  # other types of ropes do not read the factor
        ropes = {
            name: {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
            if isinstance(rope, Mapping) and rope.get("rope_type") in (None, "default")
            else rope
            for name, rope in ropes.items()
        }
    return {**found, "rope_parameters": ropes}


def _with_gemma3n_layers(config: Json) -> Json:
    """Gemma 3n: widths and sparsity of layers."""
    layers = read_field(config, "num_hidden_layers", int)
    width, sparsity = config.get("intermediate_size"), config.get("activation_sparsity_pattern")
    widths = width if isinstance(width, list) else [width] * layers
    if not all(type(size) is int for size in widths):
        raise CheckpointError(f"intermediate_size must be of integers, not {bounded_repr(width)}")
    if sparsity is None:
        sparse = 10 if layers > 10 else 0
        sparsity = [0.95] * sparse + [0.0] * (layers - sparse)
    return {
        **_with_shared_layers(config, layers),
        "intermediate_size": max(widths, default=0),
        "layer_widths": widths,
        "activation_sparsity_pattern": sparsity,
    }


_GEMMA: dict[str, Any] = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
}

_GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    defaults={
        **_GEMMA,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    fixed={"sliding_window_pattern": 2},
    lists_layer_types=True,
    keys={"hidden_act": "hidden_activation"},
    offset_norms=True,
    layer_norms=LayerNorms(
        attention_output="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        mlp_output="post_feedforward_layernorm",
    ),
    scaled_embeddings=True,
)

_SHARING: dict[str, Any] = {
    **_GEMMA,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 512,
    "num_kv_shared_layers": 0,
    "kv_shared_layers": [],
    "layer_widths": [],
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}

_GEMMA3N = replace(
    _GEMMA2,
    architecture="Gemma3nForCausalLM",
    defaults={
        **_SHARING,
        "num_key_value_heads": 2,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "activation_sparsity_pattern": [],
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
    },
    fixed={"attention_multiplier": 1.0},
    keys={
        "hidden_act": "hidden_activation",
        "layer_sparsity": "activation_sparsity_pattern",
        "num_streams": "altup_num_inputs",
        "active": "altup_active_idx",
        "scaled": "altup_correct_scale",
    },
    prepare=_with_gemma3n_layers,
    layer_types=_full_every(5),
    offset_norms=False,
    qk_norm="each_head",
    value_norms=True,
)

_GEMMA4 = replace(
    _GEMMA3N,
    architecture="Gemma4ForCausalLM",
    defaults={
        **_SHARING,
        "layer_heads": [],
        "layer_head_dims": [],
        "attention_k_eq_v": False,
        "partial_rotary_factor": 1.0,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    fixed={"attention_multiplier": 1.0, "norm_topk_prob": True},
    keys={
        "hidden_act": "hidden_activation",
        "keys_as_values": "attention_k_eq_v",
        "num_experts_per_tok": "top_k_experts",
    },
    prepare=_with_gemma4_layers,
    layer_types=_full_every(6),
    layer_scalars=True,
    experts=ExpertTraits(
        optional=True,
        layouts=(
            ExpertLayout.stacked("", "router.proj"),
            ExpertLayout.of_tensors("", "router.proj"),
        ),
        parallel_to_mlp=MixtureNorms(),
    ),
)

FAMILIES: dict[str, Family] = {
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        architecture="Gemma3ForCausalLM",
        defaults={
            **_GEMMA,
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        fixed={},
        qk_norm="each_head",
    ),
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        architecture="Gemma4UnifiedForCausalLM",
        defaults={**_GEMMA4.defaults, "hidden_size_per_layer_input": 0, "sliding_window": 1024},
        experts=None,
    ),
}
