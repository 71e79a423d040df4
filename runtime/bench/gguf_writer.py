"""Writes a checkpoint as GGUF, for llama.cpp. Runs in the Python that has llama.cpp installed.

Metadata and tensors are as llama.cpp's own converter writes them (`convert_hf_to_gguf.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    **{"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next"},
    **{"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"},
    **{"lfm2": "lfm2", "lfm2_moe": "lfm2moe", "falcon_h1": "falcon-h1"},
    **{"granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h"},
}
"""llama.cpp's name, by the model type of transformers."""
EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)(\d+)\.")
FIELDS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
    "leading_dense_block_count": ("num_dense_layers",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        *("shared_expert_intermediate_size", "shared_intermediate_size"),
        "moe_shared_expert_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
}
"""Key of the file, after the architecture -> its names in a `config.json`."""
RENAMED = {
    r"\.dt_bias$": ".dt_proj.bias",
    r"\.expert_bias$": ".expert_bias.bias",
    r"correction_bias$": "correction.bias",
    r"^model\.(.*feed_forward\.experts)": r"\1",
    r"^backbone\.(.*)mixer\.experts": r"model.\1mlp.experts",
}
"""Names of tensors that the package gguf knows under another name."""
STATE_HEAD_DIM = ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim")
MAMBA = ("granitemoehybrid", "nemotron_h", "falcon_h1")
HYBRID = set(ARCHITECTURES) - {"llama", "qwen3", "qwen3_moe", "falcon_h1"}
"""Model types with layers of several kinds."""
MROPE_SECTIONS = (11, 11, 10)
"""Rotated pairs by the position in time, height and width, which are equal in a text."""
SIGMOID = 2
DEFAULTS = {
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    **{"use_sliding_window": False, "attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0},
    **{"attention_out_multiplier": 1.0, "ssm_out_multiplier": 1.0, "key_multiplier": 1.0},
    **{"lm_head_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5},
    **{"moe_latent_size": None, "attention_bias": False, "conv_bias": False},
}
"""Values of keys that files have no metadata for."""


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Convert a checkpoint, one tensor at a time; matrices keep their dtype.

    The file has no vocabulary: prompts are token ids.

    Args:
        checkpoint: directory in Hugging Face format.
        path: the file.

    Raises:
        ValueError: the architecture is not one of `ARCHITECTURES`, or has traits that llama.cpp
            does not read from a file.
    """
    import gguf
    import numpy as np
    from gguf.utility import SafetensorsLocal

    config = json.loads((checkpoint / "config.json").read_text())
    _check(config, checkpoint)
    stacks: dict[str, dict[int, Any]] = {}
    """Tensors by name; the experts of a layer are stacked in the order of their numbers."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in SafetensorsLocal(file).tensors.items():
            found = EXPERT_NUMBER.search(name)
            number = 0 if found is None else int(found[1])
            stacks.setdefault(EXPERT_NUMBER.sub("", name), {})[number] = tensor
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    shapes = {name: stack[min(stack)].shape for name, stack in stacks.items()}
    values = metadata(config, shapes)
    for key, value in values.items():
        add_value(writer, f"{architecture}.{key}", value)
    writer.add_tokenizer_model("no_vocab")

    kinds = gguf.GGMLQuantizationType
    stored = {"BF16": (np.uint16, kinds.BF16), "F16": (np.float16, kinds.F16)}
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], values["block_count"])
    for name, numbered in stacks.items():
        parts = []
        for _, tensor in sorted(numbered.items()):
            dtype, kind = stored.get(tensor.dtype, (np.float32, kinds.F32))
            data = tensor.mmap_bytes().view(dtype).reshape(tensor.shape)
            if kept_in_float32(name, tensor.shape) and kind != kinds.F32:
                if kind == kinds.BF16:
                    data = (data.astype(np.uint32) << 16).view(np.float32)
                data, kind = data.astype(np.float32), kinds.F32
            parts.append(dict(converted(name, data, config)))
        for ours in parts[0]:
            theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
            if theirs is None:
                raise ValueError(f"{checkpoint}: llama.cpp has no name for {name}")
            tensors = [part[ours] for part in parts]
            data = np.ascontiguousarray(np.stack(tensors) if len(tensors) > 1 else tensors[0])
            writer.add_tensor(theirs, data.view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(config: dict[str, Any], checkpoint: Path) -> None:
    """Raise `ValueError` for a model that a file cannot describe."""
    rope = config.get("rope_parameters") or config
    known = config["model_type"] in ARCHITECTURES and rope.get("rope_type", "default") == "default"
    unknown = [name for name, value in DEFAULTS.items() if config.get(name, value) != value]
    if config["model_type"] in HYBRID and not layer_types(config):
        unknown.append("layer_types")
    if config.get("mamba_rms_norm") and config["mamba_norm_before_gate"]:
        unknown.append("mamba_norm_before_gate")
    if not known or unknown:
        raise ValueError(
            f"{checkpoint}: llama.cpp reads {', '.join(ARCHITECTURES)} with default"
            f" rope_parameters, full attention, and experts in every layer with norm_topk_prob;"
            f" keys with values that it does not read: {', '.join(unknown) or 'none'}"
        )


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers that a config lists."""
    return config.get("layer_types") or config.get("layers_block_type") or []


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether layers of a model are mixtures of experts."""
    if config["model_type"] == "nemotron_h":
        return "moe" in layer_types(config)
    return any(config.get(name) for name in FIELDS["expert_count"])


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a model in `ARCHITECTURES`."""
    name = ARCHITECTURES[config["model_type"]]
    return f"{name}_moe" if name == "nemotron_h" and has_experts(config) else name


def add_value(writer: Any, key: str, value: Any) -> None:
    """Add a value of the metadata with the type of the file that it has in Python."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    {**add, str: writer.add_string, list: writer.add_array}[type(value)](key, value)


def metadata(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the metadata of a model, by keys after the architecture.

    Args:
        config: its `config.json`.
        shapes: of the tensors of the checkpoint.
    """

    def field(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    values = {key: field(*names) for key, names in FIELDS.items()}
    layers = layer_types(config)
    values["block_count"] = config.get("num_hidden_layers") or len(layers)
    values["vocab_size"] = config["vocab_size"]
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    values |= dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim)
    rope = config.get("rope_parameters") or config
    values["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    values["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    kind = config["model_type"]
    if (state := values["ssm.time_step_rank"]) is not None:
        values["ssm.inner_size"] = state * field(*STATE_HEAD_DIM)
    attending = [layer in ("attention", "full_attention") for layer in layers]
    if kind in HYBRID and not kind.startswith("qwen3"):
        heads = values["attention.head_count_kv"]
        values["attention.head_count_kv"] = [heads * attends for attends in attending]
    elif kind in HYBRID:
        values["full_attention_interval"] = attending.index(True) + 1
        values["rope.dimension_sections"] = [*rope.get("mrope_section", MROPE_SECTIONS), 0]
    if kind == "lfm2":  # its config has the width before it is rounded
        values["feed_forward_length"] = shapes["model.layers.0.feed_forward.w1.weight"][0]
    elif kind == "lfm2_moe":
        values["expert_gating_func"] = SIGMOID
    elif kind == "nemotron_h":
        widths = {"moe": config["moe_intermediate_size"], "mlp": config["intermediate_size"]}
        values["feed_forward_length"] = [widths.get(layer, 0) for layer in layers]
    elif kind == "granitemoehybrid":
        values["rope.scaling.finetuned"] = config.get("position_embedding_type") == "rope"
    if not has_experts(config):  # some configs have the other numbers all the same
        values = {key: value for key, value in values.items() if not key.startswith("expert")}
    return {key: value for key, value in values.items() if value is not None}


def kept_in_float32(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp needs a tensor in float32: vectors, kernels of convolutions, routers."""
    convolution = len(shape) == 3 and shape[1] == 1
    router = name.endswith((".gate.weight", "router.layer.weight", "shared_expert_gate.weight"))
    return len(shape) == 1 or convolution or router


def converted(name: str, data: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays that llama.cpp has for a tensor, by names that the package gguf knows.

    Args:
        name: in the checkpoint, of experts without their number.
        data: the tensor; in float32 where `kept_in_float32`, else of any dtype.
        config: the model's `config.json`.
    """
    import numpy as np

    kind = config["model_type"]
    if "linear_attn." in name and kind.startswith("qwen3_5"):
        data = _tiled_values(name, data, config)
    if name.endswith(("q_proj.weight", "k_proj.weight")) and kind in ("llama", "granitemoehybrid"):
        # It rotates neighbours, the checkpoint halves of a head.
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = data.reshape(heads, 2, data.shape[0] // heads // 2, -1)
        data = halves.swapaxes(1, 2).reshape(data.shape)
    if name.endswith("A_log"):
        data = -np.exp(data)
    elif name.endswith(("conv1d.weight", "conv.conv.weight")):
        data = data[:, 0]
    elif name.endswith("norm.weight") and kind.startswith(("qwen3_5", "qwen3_next")):
        data = data if "linear_attn" in name else data + 1  # norms that add one to their weight
    if kind in MAMBA:
        if name.endswith(("A_log", "mixer.D", "mamba.D")):
            data = data[:, None]
        elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            data = data.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
    shared = "mlp.shared_expert" if has_experts(config) else "mlp"
    name = name.replace("shared_mlp.output_linear", f"{shared}.down_proj")  # Granite
    if name.endswith("in_proj_qkvz.weight"):
        # Of each head of keys: its query, key, values and their gates.
        keys, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        by_head = data.reshape(keys, -1, data.shape[-1])
        gates = (by_head.shape[1] + 2 * dim) // 2
        parts = np.split(by_head, (dim, 2 * dim, gates), axis=1)
        *qkv, gate = (part.reshape(-1, data.shape[-1]) for part in parts)
        yield name.replace("qkvz", "qkv"), np.concatenate(qkv)
        yield name.replace("qkvz", "z"), gate
    elif name.endswith("input_linear.weight"):  # gate and up
        mlp = "mlp.experts" if "block_sparse_moe" in name else shared
        base = ".".join(name.split(".")[:3])
        for half, part in zip(("gate", "up"), np.split(data, 2, axis=-2), strict=True):
            yield f"{base}.{mlp}.{half}_proj.weight", part
    else:
        for ours, theirs in RENAMED.items():
            name = re.sub(ours, theirs, name)
        yield name, data


def _tiled_values(name: str, data: Any, config: Mapping[str, Any]) -> Any:
    """Return a tensor with heads of values in llama.cpp's order.

    It has the first head of values of each head of keys, then the second of each, and so on;
    the checkpoint all of the first head of keys, then all of the second.
    """
    if name.endswith("norm.weight"):  # shared by all heads
        return data
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    before = 2 * keys * config["linear_key_head_dim"]  # queries and keys
    data = data.T if "out_proj" in name else data  # has values as inputs
    data = data.copy()
    rows = data[before:] if "qkv" in name or "conv1d" in name else data
    rows[:] = rows.reshape(keys, values // keys, -1).swapaxes(0, 1).reshape(rows.shape)
    return data.T if "out_proj" in name else data
