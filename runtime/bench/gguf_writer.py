"""Writes a checkpoint as GGUF, for llama.cpp. Runs in the Python that has llama.cpp installed.

Llama, Qwen3 and Qwen3 mixtures of experts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""llama.cpp's name, by the model type of transformers."""
EXPERTS = ".mlp.experts."
EXPERT_NUMBER = re.compile(r"(?<=\.mlp\.experts\.)(\d+)\.")
SIZES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps",
}
EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Keys of the file -> fields of a config."""


def write_gguf(checkpoint: Path, path: Path, stored_as: str | None = None) -> None:
    """Convert a checkpoint, one tensor at a time.

    The file has no vocabulary: prompts are token ids.

    Args:
        checkpoint: directory in Hugging Face format.
        path: the file.
        stored_as: "q8_0": matrices are quantised, except routers; None: they keep their dtype.

    Raises:
        ValueError: the architecture is not one of `ARCHITECTURES`, or has traits that llama.cpp
            does not read from a file.
    """
    import gguf
    import numpy as np
    from gguf.utility import SafetensorsLocal

    config = json.loads((checkpoint / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    _check(config, rope, checkpoint)
    architecture = ARCHITECTURES[config["model_type"]]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = {key: config[name] for key, name in SIZES.items()}
    values |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), int(head_dim))
    values["rope_freq_base"] = rope["rope_theta"]
    if config["model_type"] == "qwen3_moe":
        config.setdefault("num_experts", config.get("num_local_experts"))
        values |= {key: config[name] for key, name in EXPERT_SIZES.items()}
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    for key, value in values.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("no_vocab")

    kinds = gguf.GGMLQuantizationType
    stored = {"BF16": (np.uint16, kinds.BF16), "F16": (np.float16, kinds.F16)}
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"]
    )
    stacks: dict[str, dict[int, Any]] = {}
    """Tensors by name; the experts of a layer are stacked in the order of their numbers."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in SafetensorsLocal(file).tensors.items():
            found = EXPERT_NUMBER.search(name)
            number = 0 if found is None else int(found[1])
            stacks.setdefault(EXPERT_NUMBER.sub("", name), {})[number] = tensor
    for name, numbered in stacks.items():
        first = numbered[min(numbered)]
        dtype, kind = stored.get(first.dtype, (np.float32, kinds.F32))
        if (EXPERTS not in name and len(first.shape) == 1) or name.endswith("mlp.gate.weight"):
            kind = kinds.F32  # norms and routers
        elif stored_as is not None:
            kind = getattr(kinds, stored_as.upper())
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise ValueError(f"{checkpoint}: llama.cpp has no name for {name}")
        parts = []
        for _, tensor in sorted(numbered.items()):
            data = tensor.mmap_bytes().view(dtype).reshape(tensor.shape)
            if kind in (kinds.F32, kinds.Q8_0):
                bfloat16 = tensor.dtype == "BF16"
                data = (data.astype(np.uint32) << 16).view(np.float32) if bfloat16 else data
                data = data.astype(np.float32)
            parts.append(_neighbours_rotated(name, data, config, int(head_dim)))
        data = np.ascontiguousarray(np.stack(parts) if EXPERTS in name else parts[0])
        if kind == kinds.Q8_0:
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(theirs, data.view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(config: dict[str, Any], rope: dict[str, Any], checkpoint: Path) -> None:
    needed = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "use_sliding_window": False,
    }
    known = config["model_type"] in ARCHITECTURES and rope.get("rope_type", "default") == "default"
    if not known or any(config.get(name, value) != value for name, value in needed.items()):
        raise ValueError(
            f"{checkpoint}: llama.cpp reads {', '.join(ARCHITECTURES)} with default"
            f" rope_parameters, full attention, and experts in every layer with norm_topk_prob"
        )


def _neighbours_rotated(name: str, data: Any, config: dict[str, Any], head_dim: int) -> Any:
    """Return query and key rows in the order of llama.cpp.

    For Llama it rotates neighbours, the checkpoint halves of a head.
    """
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in counts.items():
        if part in name and config["model_type"] == "llama":
            halves = data.reshape(config[key], 2, head_dim // 2, -1)
            return halves.swapaxes(1, 2).reshape(data.shape)
    return data
