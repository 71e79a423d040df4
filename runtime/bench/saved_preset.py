"""Saves the random weights of a preset as a checkpoint that other runtimes load."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..loading.loader import random_weights, resolve_source
from ..models.config import ModelConfig
from ..models.plan import fused_layout
from .peers import PeerError

__all__ = ["checkpoint_of", "save_random_weights"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose presets can be saved."""
_SAME_NAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "hidden_act", "head_dim"),
    *("max_position_embeddings", "tie_word_embeddings", "bos_token_id"),
)


@contextmanager
def checkpoint_of(
    model: str, dtype: str, seed: int, device: torch.device | str = "cpu"
) -> Iterator[Path]:
    """Yield the directory of a model; a preset is saved in one that is removed afterwards.

    Raises:
        PeerError: a preset of a family that is not saved.
    """
    source = resolve_source(model)
    if source.directory is not None:
        yield source.directory
        return
    config = source.native
    with tempfile.TemporaryDirectory(prefix="stepgraph-checkpoint-") as scratch:
        stored = getattr(torch, config.torch_dtype if dtype == "auto" else dtype)
        save_random_weights(config, Path(scratch), stored, seed, device=device)
        yield Path(scratch)


def save_random_weights(
    config: ModelConfig,
    directory: Path,
    dtype: torch.dtype,
    seed: int,
    *,
    device: torch.device | str = "cpu",
) -> None:
    """Write a config.json and the weights of `random_weights`.

    Raises:
        PeerError: the family is not one of `FAMILIES`.
    """
    fields = _hf_fields(config) | {"dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(fields))
    layout = fused_layout(config)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in random_weights(config, dtype, seed, device=device):
        for part, values in layout[name].parts(tensor):
            if part.name is None:
                continue  # zeros that checkpoints leave out
            if part.name not in tensors:
                tensors[part.name] = torch.empty(part.shape, dtype=dtype)
            part.write(tensors[part.name], values.cpu())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _hf_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model in the form of transformers."""
    rope = config.rope_scaling
    if config.model_type not in FAMILIES or rope.type not in ("default", "llama3"):
        raise PeerError(
            f"a preset of {config.model_type} cannot be compared with other runtimes: give a"
            f" checkpoint, or a preset of {', '.join(FAMILIES)}"
        )
    fields = {name: getattr(config, name) for name in _SAME_NAME} | {
        "model_type": config.model_type,
        "architectures": [config.family.architecture],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "eos_token_id": list(config.eos_token_ids),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": rope.type, "rope_theta": config.rope_theta},
        "sliding_window": config.sliding_window,
    }
    if rope.type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        for name in (*names, "original_max_position_embeddings"):
            fields["rope_parameters"][name] = getattr(rope, name)
    if config.experts is not None:
        same = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        fields |= {name: getattr(config.experts, name) for name in same}
        fields["mlp_only_layers"] = list(config.experts.dense_layers)
    return fields
