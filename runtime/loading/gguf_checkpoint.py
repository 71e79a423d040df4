"""Reads GGUF files as checkpoints of transformers: as a `config.json`, and tensors by its names.

Conversion to GGUF renames tensors, stacks experts and changes a few tensors. Here it is undone, so
that families, layouts and shards apply to GGUF files as they are. The package gguf has the names of
tensors in each architecture.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError, ConfigError
from ..kernels.weights.gguf import GGUFType, PlainType
from ..models.config import ModelConfig
from ..models.families import FAMILIES
from ..models.plan import fused_layout
from ..models.rope import Rope, RopeScaling, inverse_frequencies
from .checkpoint import CheckpointReader, TensorHeader
from .gguf_file import GGUFFile
from .gguf_tensors import GGUFStored, GGUFTensors

# Metadata as a `config.json`.

_MODEL_TYPES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma2", "phi3", "granite", "olmo2"), ""),
    **dict.fromkeys(("glm4", "smollm3", "cohere2", "lfm2"), ""),
    **{"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe"},
    **{"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text", "chatglm": "glm"},
    **{"deepseek2": "deepseek_v2", "gpt-oss": "gpt_oss", "llama4": "llama4_text"},
    **{"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"},
    **{"lfm2moe": "lfm2_moe", "granitehybrid": "granitemoehybrid", "falcon-h1": "falcon_h1"},
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "nemotron_h"),
}
"""The `model_type` of each architecture; empty: the same."""
_FIELDS = {
    "block_count": "num_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "shortconv.l_cache": "conv_L_cache",
}
"""Key of the metadata, after the architecture -> field of `ModelConfig` or `ExpertsConfig`, or key
of `config.json`."""
_DELTA_RULE = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
    *("linear_key_head_dim", "linear_conv_kernel_dim"),
)
_MAMBA = ("mamba_n_groups", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv")
_STATE_KEYS = {
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _DELTA_RULE),
    **dict.fromkeys(("granitehybrid", "falcon-h1"), _MAMBA),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        ("n_groups", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel"),
    ),
}
"""Keys of `config.json` for the sizes of recurrent layers: groups, or heads of keys; heads, and
the size of one; the size of a state's keys; and the tokens that a convolution sees."""
_MULTIPLIERS = {
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier"), 1.0),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    **{"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5},
}
"""Of Falcon-H1; conversion multiplies weights by them."""
_END_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"),
    "<\uff5cend▁of▁sentence\uff5c>",
)
"""Control tokens that end an output, whether or not the metadata says so."""
_CONTROL = 3
_SIGMOID = 2
_DEEPSEEK_V3_EXPERTS = 256
"""Older files lack the groups of experts, which of its relatives only DeepSeek V3 has."""
_LLAMA3_CONTEXT = 8192
"""`original_max_position_embeddings` of all published models with a `llama3` rope. Files have only
the factors that follow from it."""


class _Metadata:
    """The metadata of a model without the name of its architecture in keys."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.require("general.architecture", str)
        supported = [name for name, model in _MODEL_TYPES.items() if (model or name) in FAMILIES]
        if self.architecture not in supported:
            raise CheckpointError(
                f"the GGUF architecture {bounded_repr(self.architecture, 60)} is not supported;"
                f" supported: {', '.join(supported)}"
            )

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number; None if there is none, nor a default."""
        return self.file.get(f"{self.architecture}.{key}", (int, float), default)

    @property
    def model_type(self) -> str:
        match self.architecture:
            case "llama" if self.number("expert_count"):
                return "mixtral"
            case "olmo2" if self.number("attention.sliding_window"):
                return "olmo3"
            case "deepseek2" if self.number("expert_gating_func") == _SIGMOID:
                return "deepseek_v3"
        return _MODEL_TYPES[self.architecture] or self.architecture


def gguf_config(file: GGUFFile) -> ModelConfig:
    """Return the config of a GGUF file with the tensors of all its parts.

    Raises:
        CheckpointError: the file is damaged, or its model is not supported.
    """
    try:
        return ModelConfig.from_hf(_config_json(_Metadata(file)))
    except (CheckpointError, ConfigError) as error:
        problem = str(error).removeprefix(f"{file.path}: ")
        raise CheckpointError(f"{file.path}: {problem}") from error


def _config_json(metadata: _Metadata) -> dict[str, Any]:
    """Return what the `config.json` of the model says."""
    file, family = metadata.file, FAMILIES[metadata.model_type]
    config: dict[str, Any] = {"model_type": metadata.model_type, "rope_theta": 10000.0}
    for key, field in _FIELDS.items():
        value = file.plain(f"{metadata.architecture}.{key}")
        if value is not None:
            config[family.key(field)] = value
    layers = metadata.number("block_count", 0) - metadata.number("nextn_predict_layers", 0)
    held = {layer[1] for layer in map(_LAYER.fullmatch, file.tensors) if layer is not None}
    if layers > len(held):  # before anything is made for each layer
        raise CheckpointError(
            f"block_count = {layers}, but there are tensors of {len(held)} layers"
        )
    config["num_hidden_layers"] = layers
    embedding = file.tensors.get("token_embd.weight")
    config["vocab_size"] = 0 if embedding is None else embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = any(
        f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "qkv", "q_a", "kv_a_mqa")
    )
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    config["torch_dtype"] = _dtype(file)
    config["bos_token_id"] = file.get("tokenizer.ggml.bos_token_id", int)
    config["eos_token_id"] = _end_tokens(file)
    heads = max(1, metadata.number("attention.head_count", 1))
    width = metadata.number("embedding_length", 0) // heads
    head_dim = metadata.number("attention.key_length", width)
    if family.reads("partial_rotary_factor") and head_dim:
        rotated = metadata.number("rope.dimension_count", head_dim)
        config["partial_rotary_factor"] = rotated / head_dim
    if not config.get("sliding_window"):
        config["sliding_window"] = None
    pattern = file.plain(f"{metadata.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[bool(slides)] for slides in pattern]
    config["rope_scaling"] = _rope(metadata)
    _add_of_architecture(config, metadata)
    return config


def _add_of_architecture(config: dict[str, Any], metadata: _Metadata) -> None:
    """Add what metadata leaves to the code of llama.cpp, or has under other keys."""
    number, rope = metadata.number, config["rope_scaling"]
    if (keys := _STATE_KEYS.get(metadata.architecture)) is not None:
        heads = max(1, number("ssm.time_step_rank", 1))
        sizes = ("ssm.group_count", "ssm.time_step_rank", "ssm.inner_size")
        values = map(number, (*sizes, "ssm.state_size", "ssm.conv_kernel"))
        config |= dict(zip(keys, values, strict=True))
        config[keys[2]] = number("ssm.inner_size", 0) // heads
    match metadata.architecture:
        case "qwen35" | "qwen35moe" | "qwen3next":
            interval = number("full_attention_interval", 4)
            recurrent = metadata.file.plain(f"{metadata.architecture}.attention.recurrent_layers")
            layers = range(1, config["num_hidden_layers"] + 1)
            recurrent = recurrent or [layer % max(1, interval) != 0 for layer in layers]
            kinds = ("full_attention", "linear_attention")
            config |= {
                "layer_types": [kinds[bool(r)] for r in recurrent[: config["num_hidden_layers"]]],
                "shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
                "norm_topk_prob": True,
            }
        case "qwen3moe" | "qwen3vlmoe":
            config["norm_topk_prob"] = True
        case "cohere2":
            config["logit_scale"] = config.get("logits_scaling")
        case "gemma2" | "gemma3" as name:
            # The largest models scale scores by the width of a head without `head_dim`.
            scalar = config.get("head_dim")
            if config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[name]:
                scalar = number("embedding_length", 0) / max(1, number("attention.head_count", 1))
            config["query_pre_attn_scalar"] = scalar
        case "deepseek2":
            # Newer files have the head sizes of multi-head attention under keys of their own.
            rotated = number("rope.dimension_count", 0)
            key, value = (
                number(f"attention.{part}_length_mla", number(f"attention.{part}_length", 0))
                for part in ("key", "value")
            )
            if rope is not None and (scale := number("rope.scaling.yarn_log_multiplier")):
                rope |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * scale, 6))
            grouped = number("expert_group_count", 1) > 1
            if "n_group" not in config and number("expert_count") != _DEEPSEEK_V3_EXPERTS:
                config |= {"n_group": 1, "topk_group": 1}  # Kimi K2
            config |= {
                "num_key_value_heads": config.get("num_attention_heads"),
                "qk_rope_head_dim": rotated,
                "qk_nope_head_dim": key - rotated,
                "v_head_dim": value,
                "q_lora_rank": config.get("q_lora_rank"),
                "topk_method": "group_limited_greedy" if grouped else "greedy",
                "norm_topk_prob": config.get("norm_topk_prob", False),
                "routed_scaling_factor": config.get("routed_scaling_factor", 1.0),
            }
        case "lfm2" | "lfm2moe":
            attending = _attending(config, metadata)
            tensors = metadata.file.tensors
            config |= {
                "layer_types": ["full_attention" if attends else "conv" for attends in attending],
                "conv_bias": "blk.0.shortconv.conv.bias" in tensors,
                "block_auto_adjust_ff_dim": False,
                "num_dense_layers": number("leading_dense_block_count"),
                "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in tensors),
                "norm_topk_prob": True,
            }
        case "granitehybrid":
            attending = _attending(config, metadata)
            rotates = metadata.file.get("granitehybrid.rope.scaling.finetuned", bool, True)
            width = number("feed_forward_length")
            config |= {
                "layer_types": ["attention" if attends else "mamba" for attends in attending],
                "num_local_experts": number("expert_count", 0),
                "intermediate_size": width,
                "shared_intermediate_size": number("expert_shared_feed_forward_length", width),
                "position_embedding_type": "rope" if rotates else None,
            }
        case "nemotron_h" | "nemotron_h_moe":
            widths = config.get("intermediate_size")
            attending = _attending(config, metadata)
            if not isinstance(widths, list) or len(widths) != len(attending):
                raise CheckpointError(
                    f"{metadata.architecture}.feed_forward_length must have a number for each"
                    f" layer, not {bounded_repr(widths, 80)}"
                )
            mlp = "E" if number("expert_count") else "-"
            config |= {
                "hybrid_override_pattern": "".join(
                    "*" if attends else mlp if width else "M"
                    for attends, width in zip(attending, widths, strict=True)
                ),
                "intermediate_size": max(widths),
                "moe_shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
            }
        case "falcon-h1":
            config |= _MULTIPLIERS | {
                "mamba_d_ssm": number("ssm.inner_size"),
                "mamba_rms_norm": "blk.0.ssm_norm.weight" in metadata.file.tensors,
                "mamba_norm_before_gate": False,
            }
        case "gpt-oss":
            # Without scaling, transformers would scale as in the published models.
            rope = rope or {"rope_type": "default"}
            config |= {"rope_parameters": rope | {"truncate": False}, "rope_scaling": None}
        case "llama4":
            # Of the published models, Maverick has 128 experts and no norms of queries and keys.
            config["use_qk_norm"] = number("expert_count") != 128
        case "olmo2" if metadata.model_type == "olmo3":
            # Frequencies of sliding layers are not scaled.
            full = {"rope_type": "default", "rope_theta": config["rope_theta"]}
            sliding = full | {"rope_theta": config.get("rope_local_base_freq", full["rope_theta"])}
            ropes = {"full_attention": full | (rope or {}), "sliding_attention": sliding}
            config |= {"rope_parameters": ropes, "rope_scaling": None}
        case "phi3" if (first := number("rope.scaling.original_context_length")) is not None:
            config["original_max_position_embeddings"] = first


def _attending(config: dict[str, Any], metadata: _Metadata) -> list[bool]:
    """Return whether each layer is attention: others have no heads of keys. The config gets the
    number that these have."""
    heads = config.get("num_key_value_heads")
    if not isinstance(heads, list) or not heads:
        raise CheckpointError(
            f"{metadata.architecture}.attention.head_count_kv must be a list, not"
            f" {bounded_repr(heads, 80)}"
        )
    config["num_key_value_heads"] = max(heads)
    return [bool(count) for count in heads]


def _dtype(file: GGUFFile) -> str:
    """Return the dtype of the model: of its matrices, or bfloat16 if they are quantised."""
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    stored = types.pop() if len(types) == 1 else None
    return str(stored.dtype if isinstance(stored, PlainType) else torch.bfloat16)


def _end_tokens(file: GGUFFile) -> list[int]:
    """Return the tokens that end an output: of the metadata, and control tokens of known names."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ends = [token for key in keys if (token := file.get(key, int)) is not None]
    kinds = file.get("tokenizer.ggml.token_type", np.ndarray)
    if kinds is not None:
        tokens = file.require("tokenizer.ggml.tokens", list)
        control = {tokens[i]: int(i) for i in np.flatnonzero(kinds[: len(tokens)] == _CONTROL)}
        named = [name for name in _END_OF_TURN if name in control]
        if "<|return|>" in named:  # gpt-oss: <|end|> ends a message, of which an output has several
            named = [name for name in named if name != "<|end|>"]
        ends += [control[name] for name in named]
    return list(dict.fromkeys(ends))


def _rope(metadata: _Metadata) -> dict[str, Any] | None:
    """Return the scaling of frequencies."""
    tensors = metadata.file.tensors
    lists = {
        name: tensors[tensor].data.flatten().tolist()
        for name, tensor in (
            ("short_factor", "rope_factors_short.weight"),
            ("long_factor", "rope_factors_long.weight"),
            ("factor", "rope_freqs.weight"),
        )
        if tensor in tensors and tensors[tensor].data.dtype == torch.float32
    }
    if "long_factor" in lists:
        return {"rope_type": "longrope", **lists}
    if factors := lists.get("factor"):
        return _llama3(factors, metadata.number("rope.freq_base", 10000.0))
    kind = metadata.file.get(f"{metadata.architecture}.rope.scaling.type", str, "none")
    if kind not in ("linear", "yarn"):
        return None
    keys = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    }
    found = {ours: metadata.number(f"rope.scaling.{theirs}") for ours, theirs in keys.items()}
    return {"rope_type": kind, **{key: value for key, value in found.items() if value is not None}}


def _llama3(factors: list[float], theta: float) -> dict[str, Any]:
    """Return the scaling with these divisors of frequencies.

    A `llama3` rope is recognised. Other divisors become a `longrope`, whose frequencies kernels
    look up for each sequence.
    """
    factor, dim = round(max(factors), 4), 2 * len(factors)  # computed in float32
    scaling = RopeScaling(
        type="llama3", factor=factor, original_max_position_embeddings=_LLAMA3_CONTEXT
    )
    expected = inverse_frequencies(Rope(theta), dim) / torch.tensor(factors)
    if torch.allclose(inverse_frequencies(Rope(theta, scaling), dim), expected, 1e-4, 0.0):
        return {
            "rope_type": "llama3",
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
            "factor": factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    lists = dict.fromkeys(("short_factor", "long_factor"), factors)
    return {"rope_type": "longrope", "attention_factor": 1.0, **lists}


# Tensors by the names of transformers.

_LAYER = re.compile(r"blk\.(\d{1,9})\.(.*)")
_READ_AS_CONFIG = frozenset(
    {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
)


class GGUFReader(CheckpointReader):
    """The tensors of a GGUF file, by the names that they have in transformers.

    Raises `CheckpointError`, which names the file, for a damaged one.
    """

    reads_rows = True
    described_by = "metadata"

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        """Read a file with the tensors of all its parts, of a model with this config."""
        self.directory = file.path
        self._config = config.whole
        find = GGUFTensors(file, config.num_layers).find
        self._stored: dict[str, GGUFStored] = {}
        for parameter in fused_layout(self._config).values():
            layouts = (parameter.sources, *parameter.alternatives)
            names = dict.fromkeys(source.name for sources in layouts for source in sources)
            found = {n: stored for n in names if n is not None and (stored := find(n))}
            shapes = {name: stored.shape for name, stored in found.items()}
            chosen = parameter.stored_in(shapes).source_names
            self._stored |= {name: found[name] for name in chosen if name in found}
        self._headers = {
            name: TensorHeader(stored.type.name, stored.shape, stored.tensors[0].file)
            for name, stored in self._stored.items()
        }
        quantised = {n: s for n, s in self._stored.items() if isinstance(s.type, GGUFType)}
        self._formats = Counter(stored.type.name for stored in quantised.values())
        self._quantised = {n: s.codes for n, s in quantised.items() if s.compute is None}
        used = {tensor.name for stored in self._stored.values() for tensor in stored.tensors}
        for name in file.tensors.keys() - used - _READ_AS_CONFIG:  # there are no parameters for it
            tensor, layer = file.tensors[name], _LAYER.fullmatch(name)
            if layer is not None:
                if int(layer[1]) >= config.num_layers:
                    continue  # layers after the model's predict further tokens
                name = f"model.layers.{layer[1]}.{layer[2]}"
            self._headers[name] = TensorHeader(tensor.type.name, tensor.shape, tensor.file)

    def close(self) -> None:
        """Unmap the files. May be called again."""
        self._stored, self._quantised = {}, {}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; it may share the mapped file's memory, so copy it to keep it."""
        return self._stored[name].numbers()
