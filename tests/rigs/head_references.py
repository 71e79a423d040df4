"""Layers of drafters in plain PyTorch: whole sequences, float64, no cache and no kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Weights = Mapping[str, Tensor]

LAYER_CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 97,
}
"""Of the layers of a drafter for tiny models."""


def write_head(directory: Path, config: Mapping[str, Any], weights: Weights) -> Path:
    """Write a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), directory / "model.safetensors")
    return directory


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) * 1.5 * columns**-0.5


def random_layer(config: Mapping[str, Any], inputs: int, *, qk_norm: bool = False) -> Weights:
    """Weights of a layer under the names of a checkpoint; `inputs` of queries, keys and values."""
    hidden, inner, size = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights = {
        "self_attn.q_proj.weight": random_matrix(heads * size, inputs),
        "self_attn.k_proj.weight": random_matrix(kv_heads * size, inputs),
        "self_attn.v_proj.weight": random_matrix(kv_heads * size, inputs),
        "self_attn.o_proj.weight": random_matrix(hidden, heads * size),
        "mlp.gate_proj.weight": random_matrix(inner, hidden),
        "mlp.up_proj.weight": random_matrix(inner, hidden),
        "mlp.down_proj.weight": random_matrix(hidden, inner),
        "input_layernorm.weight": random_norm(hidden),
        "post_attention_layernorm.weight": random_norm(hidden),
    }
    if qk_norm:
        weights["self_attn.q_norm.weight"] = random_norm(size)
        weights["self_attn.k_norm.weight"] = random_norm(size)
    return weights


def random_norm(size: int) -> Tensor:
    return 1.0 + 0.2 * torch.randn(size)


class Reference:
    """Functions of a checkpoint's tensors, after they were rounded to a dtype."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, dtype: torch.dtype) -> None:
        self.config = config
        self.weights = {
            name: t.to(dtype).double() if t.is_floating_point() else t
            for name, t in weights.items()
        }

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def heads(self, name: str, kind: str, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys `[T, heads, head_dim]`, normed and rotated."""
        size = self.config["head_dim"]
        y = self.linear(f"{name}.{kind}_proj", x).view(len(x), -1, size)
        if f"{name}.{kind}_norm.weight" in self.weights:
            y = self.norm(f"{name}.{kind}_norm", y)
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        angles = positions[:, None].double() * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = y.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def attend(
        self, name: str, x: Tensor, positions: Tensor, keys_of: Tensor, key_positions: Tensor,
        seen: Tensor,
    ) -> Tensor:  # fmt: skip
        """Attention of `x` to keys and values of other states, where `seen [T, K]`."""
        size = self.config["head_dim"]
        q = self.heads(name, "q", x, positions)
        k = self.heads(name, "k", keys_of, key_positions)
        v = self.linear(f"{name}.v_proj", keys_of).view(len(keys_of), -1, size)
        repeats = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        scores = torch.einsum("thd,khd->htk", q, k) * size**-0.5
        scores = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.linear(f"{name}.o_proj", torch.einsum("htk,khd->thd", scores, v).flatten(1))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(self.linear(f"{name}.gate_proj", x))
        return self.linear(f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", x))


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def best(logits: Tensor) -> tuple[int, float, float]:
    """The most likely token, its probability, and by how much its logit exceeds the second."""
    first, second = logits.topk(2).values.tolist()
    return int(logits.argmax()), float(logits.softmax(-1).max()), first - second
