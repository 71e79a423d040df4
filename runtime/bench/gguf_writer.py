"""Writes a checkpoint as GGUF, for llama.cpp. Runs in the Python that has llama.cpp installed.

Llama, Qwen3 and Qwen3 mixtures of experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""llama.cpp's name, by the model type of transformers."""
EXPERTS = ".mlp.experts."
EXPERT_NUMBER = re.compile(r"(?<=\.mlp\.experts\.)(\d+)\.")


class Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: Any
    """A `GGMLQuantizationType`."""
    read: Callable[[], Any]
    """Returns an array of the shape, float32 or in the bits of `kind`."""


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

    config = json.loads((checkpoint / "config.json").read_text())
    _check(config, checkpoint)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    _add_sizes(writer, config)
    writer.add_tokenizer_model("no_vocab")
    entries = [*_entries(checkpoint, config, stored_as)]
    for entry in entries:
        shape = gguf.quants.quant_shape_to_byte_shape(entry.shape, entry.kind)
        writer.add_tensor_info(entry.name, shape, np.uint8, int(np.prod(shape)), entry.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        data = np.ascontiguousarray(entry.read())
        if entry.kind == gguf.GGMLQuantizationType.Q8_0:
            data = gguf.quants.quantize(data, entry.kind)
        writer.write_tensor_data(data.view(np.uint8))
    writer.close()


def _check(config: dict[str, Any], checkpoint: Path) -> None:
    rope = config.get("rope_parameters") or config
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


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    head_dim = _head_dim(config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _entries(checkpoint: Path, config: dict[str, Any], stored_as: str | None) -> Iterator[Entry]:
    """Yield the tensors of the file; the experts of a layer are stacked."""
    import gguf
    import numpy as np
    from gguf.utility import SafetensorsLocal

    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[config["model_type"]].upper())
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    kinds = gguf.GGMLQuantizationType
    stored = {"BF16": (np.uint16, kinds.BF16), "F16": (np.float16, kinds.F16)}
    stacks: dict[str, list[Any]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in SafetensorsLocal(file).tensors.items():
            found = EXPERT_NUMBER.search(name)
            number = 0 if found is None else int(found[1])
            stacks.setdefault(EXPERT_NUMBER.sub("", name), []).append((number, tensor))

    def reader(name: str, tensors: list[Any], wide: bool) -> Callable[[], Any]:
        def read() -> Any:
            parts = []
            for tensor in tensors:
                dtype, _ = stored.get(tensor.dtype, (np.float32, kinds.F32))
                data = tensor.mmap_bytes().view(dtype).reshape(tensor.shape)
                if wide and tensor.dtype == "BF16":
                    data = (data.astype(np.uint32) << 16).view(np.float32)
                elif wide:
                    data = data.astype(np.float32)
                parts.append(_neighbours_rotated(name, data, config))
            return np.stack(parts) if EXPERTS in name else parts[0]

        return read

    for name, numbered in stacks.items():
        tensors = [tensor for _, tensor in sorted(numbered, key=lambda pair: pair[0])]
        shape = tuple(tensors[0].shape)
        shape = (len(tensors), *shape) if EXPERTS in name else shape
        _, kind = stored.get(tensors[0].dtype, (np.float32, kinds.F32))
        if len(shape) == 1 or name.endswith("mlp.gate.weight"):  # norms and routers
            kind = kinds.F32
        elif stored_as is not None:
            kind = getattr(kinds, stored_as.upper())
        wide = kind in (kinds.F32, kinds.Q8_0)
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if theirs is None:
            raise ValueError(f"{checkpoint}: llama.cpp has no name for {name}")
        yield Entry(theirs, shape, kind, reader(name, tensors, wide))


def _neighbours_rotated(name: str, data: Any, config: dict[str, Any]) -> Any:
    """Return query and key rows in the order of llama.cpp.

    For Llama it rotates neighbours, the checkpoint halves of a head.
    """
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in counts.items():
        if part in name and config["model_type"] == "llama":
            halves = data.reshape(config[key], 2, _head_dim(config) // 2, -1)
            return halves.swapaxes(1, 2).reshape(data.shape)
    return data


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
