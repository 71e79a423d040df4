"""GGUF files of random bits, and of the tiny models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from stepgraph.runtime.kernels.weights.gguf import GGUFType
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .tiny_models import TinyModel

_HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (), "NVFP4": ()},
}
"""Where in a block of a type float16 numbers begin; others have one at byte 0."""

Array = np.ndarray[Any, Any]


def random_blocks(
    stored_as: GGUFType, rows: tuple[int, ...], blocks: int, seed: int = 0, scale: float = 1.0
) -> Array:
    """Random blocks uint8 `[*rows, blocks, B]`, whose float16 numbers are about `scale`."""
    rng = np.random.default_rng(seed)
    shape = (*rows, blocks)
    raw = rng.integers(0, 256, (*shape, stored_as.nbytes), dtype=np.uint8)
    for start in _HALVES.get(stored_as.name, (0,)):
        halves = (rng.uniform(0.5, 1.0, shape) * scale).astype(np.float16)
        raw[..., start : start + 2] = halves[..., None].view(np.uint8)
    if stored_as.name == "MXFP4":
        raw[..., 0] = 127 + np.log2(scale) - rng.integers(0, 3, shape)
    if stored_as.name == "NVFP4":
        raw[..., :4] &= 63  # without sign, and below 2
    return raw


ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), "llama"),
    **{"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "glm": "chatglm", "olmo3": "olmo2"},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "deepseek2"),
    **{"gpt_oss": "gpt-oss", "llama4_text": "llama4"},
}
"""Of each model type, where the name is another one."""
_LENGTHS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "conv_L_cache": "shortconv.l_cache",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "expert_count"),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), "attention.sliding_window"),
}
_NUMBERS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "routed_scaling_factor": "expert_weights_scale",
}
Encode = Callable[[str, Array], tuple[Array, GGMLQuantizationType]]
"""Returns a matrix as a file stores it: rows of bytes, or numbers, and the type."""


def plain(name: str, weight: Array) -> tuple[Array, GGMLQuantizationType]:
    """Every matrix in float32."""
    return weight, GGMLQuantizationType.F32


def write_gguf(
    model: TinyModel,
    path: Path,
    encode: Encode = plain,
    extra: Mapping[str, Array] = MappingProxyType({}),
    architecture: str = "",
    **changes: Any,
) -> None:
    """Write a tiny model as llama.cpp converts it.

    Args:
        model: in float32.
        path: of the file.
        encode: of its matrices.
        extra: more tensors.
        architecture: empty: of the model's type.
        **changes: metadata, with `.` as `__`, after the architecture; None: left out.
    """
    config = model.reference.config
    architecture = architecture or ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(model, architecture) | changes).items():
        if value is not None:
            _add(writer, f"{architecture}.{key.replace('__', '.')}", value)
    _add(writer, "tokenizer.ggml.eos_token_id", 1)
    names = gguf.get_tensor_name_map(
        next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config.num_hidden_layers,
    )
    for name, tensor in _converted(model, architecture):
        found = names.get_name(name, (".weight", ".bias")) or name
        found += "" if found.endswith((".weight", ".bias")) else ".weight"
        data, kind = (tensor, None) if tensor.ndim == 1 else encode(name, tensor)
        writer.add_tensor(found, np.ascontiguousarray(data), raw_dtype=kind)
    for name, data in extra.items():
        writer.add_tensor(name, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    {**add, str: writer.add_string, list: writer.add_array}[type(value)](key, value)


def _metadata(model: TinyModel, architecture: str) -> dict[str, Any]:
    """The metadata of a model, after the name of the architecture."""
    config = model.reference.config
    fields = config.to_dict()
    found: dict[str, Any] = {"block_count": config.num_hidden_layers}
    for names, kind in ((_LENGTHS, int), (_NUMBERS, float)):
        for name, key in names.items():
            if fields.get(name) is not None:
                found[key] = kind(fields[name])
    mlp = fields.get("intermediate_size_mlp") or fields["intermediate_size"]
    if architecture == "lfm2":  # rounds it
        mlp = int(model.reference.model.layers[0].feed_forward.w1.out_features)
    found["feed_forward_length"] = mlp
    if "expert_count" in found:
        width = fields.get("moe_intermediate_size") or fields["intermediate_size"]
        found["expert_feed_forward_length"] = width
    if architecture == "deepseek2":
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        found |= {
            "attention.head_count_kv": 1,
            "attention.key_length": config.kv_lora_rank + rope,
            "attention.key_length_mla": nope + rope,
            "attention.value_length_mla": config.v_head_dim,
        }
        if config.model_type == "deepseek_v3":
            found |= {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
    kinds = fields.get("layer_types") or []
    if architecture == "lfm2":
        heads = found["attention.head_count_kv"]
        found["attention.head_count_kv"] = [heads * (kind != "conv") for kind in kinds]
    elif "sliding_attention" in kinds and architecture not in ("gemma2", "gemma3", "gpt-oss"):
        slides = [kind == "sliding_attention" for kind in kinds]
        found["attention.sliding_window_pattern"] = slides
    ropes = fields["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    found["rope.freq_base"] = float(rope["rope_theta"])
    if "sliding_attention" in ropes:
        found["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if (partial := rope.get("partial_rotary_factor")) is not None:
        head_dim = fields.get("head_dim") or config.hidden_size // config.num_attention_heads
        found["rope.dimension_count"] = int(head_dim * partial)
    if rope["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = float(rope["factor"])
        if (first := rope.get("original_max_position_embeddings")) is not None:
            found["rope.scaling.original_context_length"] = first
        if (weight := rope.get("mscale_all_dim")) is not None:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * weight
    if rope["rope_type"] == "longrope":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _permuted(rows: Array, heads: int) -> Array:
    """Rows of queries or keys, with the halves of each head alternating."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _converted(model: TinyModel, architecture: str) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a model as its file has them, by names close to transformers'."""
    config = model.reference.config
    tensors: dict[str, Array] = {}
    for path in model.directory.glob("*.safetensors"):
        tensors |= {name: tensor.float().numpy() for name, tensor in load_file(path).items()}
    stacks: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if (match := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)) is not None:
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        elif "experts.gate_up_proj" in name:
            suffix = ".bias" if name.endswith("_bias") else ".weight"
            base = name.partition(".gate_up_proj")[0]
            if suffix == ".weight" and config.model_type in ("gpt_oss", "llama4_text"):
                tensor = tensor.swapaxes(1, 2)
            half = tensor.shape[1] // 2
            parts = (tensor[:, :half], tensor[:, half:])
            if config.model_type == "gpt_oss":
                parts = (tensor[:, ::2], tensor[:, 1::2])
            yield from zip((f"{base}.{n}_proj{suffix}" for n in ("gate", "up")), parts, strict=True)
        elif name.endswith("experts.down_proj_bias"):
            yield name.replace("_bias", ".bias"), tensor
        elif name.endswith("experts.down_proj"):
            swapped = config.model_type in ("gpt_oss", "llama4_text")
            yield f"{name}.weight", tensor.swapaxes(1, 2) if swapped else tensor
        elif name.endswith("kv_b_proj.weight"):
            nope, heads = config.qk_nope_head_dim, config.num_attention_heads
            by_head = tensor.reshape(heads, -1, tensor.shape[-1])
            yield name.replace("kv_b", "k_b"), by_head[:, :nope].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), by_head[:, nope:]
        elif name.endswith("correction_bias"):
            yield name.replace("_bias", ".bias"), tensor
        elif name.endswith("conv.conv.weight"):
            yield name, tensor[:, 0]
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            yield name, tensor + 1
        elif architecture in ("llama", "granite", "smollm3") and re.search("[qk]_proj", name):
            keys = "k_proj" in name
            heads = config.num_key_value_heads if keys else config.num_attention_heads
            yield name, _permuted(tensor, heads)
        else:
            yield name, tensor
    for name, stack in stacks.items():
        yield name, np.stack([stack[i] for i in range(len(stack))])
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    for name in ("short", "long") if rope["rope_type"] == "longrope" else ():
        yield f"rope_factors_{name}", np.array(rope[f"{name}_factor"], np.float32)
    if rope["rope_type"] == "llama3":
        yield "rope_freqs", _llama3_factors(config, rope)


def _llama3_factors(config: Any, rope: dict[str, Any]) -> Array:
    """The divisors of frequencies that transformers computes."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    exponents = np.arange(0, 2 * len(scaled), 2, dtype=np.float32) / (2 * len(scaled))
    return (rope["rope_theta"] ** -exponents / scaled.numpy()).astype(np.float32)
