"""Drafters in plain PyTorch, and checkpoints of them: whole sequences, float64, no kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .drafter_rig import Reference as DraftsOf
from .tiny_models import TinyModel

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


DRAFT_VOCAB = 61
EAGLE3: dict[str, Any] = {
    **LAYER_CONFIG,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


def write_eagle3(
    directory: Path, *, speculators: bool = False, hidden: int = 48, mapped: bool = True,
    without: tuple[str, ...] = (), seed: int = 7, **changes: Any,
) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """Write a head with random weights: directory, config of its layer and tensors as published."""
    torch.manual_seed(seed)
    config = {**EAGLE3, "hidden_size": hidden, **changes}
    vocab = config["vocab_size"]
    if not mapped:
        config["draft_vocab_size"] = vocab
    draft_vocab = config["draft_vocab_size"]
    prefix = "layers.0." if speculators else "midlayer."
    layer = random_layer(config, 2 * hidden, qk_norm=config["model_type"] == "qwen3")
    weights = {
        **{prefix + name: tensor for name, tensor in layer.items()},
        f"{prefix}hidden_norm.weight": random_norm(hidden),
        "fc.weight": random_matrix(hidden, 3 * 48),
        "norm.weight": 3 * random_norm(hidden),
        "lm_head.weight": random_matrix(draft_vocab, hidden),
        "embed_tokens.weight": torch.randn(vocab, hidden),
    }
    if mapped:
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        weights["d2t"] = chosen - torch.arange(len(chosen))
        weights["t2d"] = torch.isin(torch.arange(vocab), chosen)
    weights = {name: tensor for name, tensor in weights.items() if name not in without}
    stored = config
    if speculators:
        stored = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "draft_vocab_size": config.pop("draft_vocab_size"),
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "norm_before_residual": config.pop("norm_before_residual", True),
            "transformer_layer_config": config,
        }
        config["norm_before_residual"] = stored["norm_before_residual"]
    return write_head(directory, stored, weights), config, weights


def eagle3(
    config: dict[str, Any], weights: dict[str, Tensor], target: TinyModel, dtype: torch.dtype
) -> DraftsOf:
    """Drafts of a head: the published computation over whole sequences."""
    layer = "layers.0" if "layers.0.hidden_norm.weight" in weights else "midlayer"
    model = target.reference
    shared = {
        "embed_tokens.weight": model.get_input_embeddings().weight.detach(),
        "lm_head.weight": model.get_output_embeddings().weight.detach(),
    }
    ref = Reference(config, {**shared, **weights}, dtype)

    def drafts(known: list[int], features: Tensor, count: int) -> list[tuple[int, float, float]]:
        hidden = ref.linear("fc", features.double())
        tokens, found = list(known[1:]), []
        for _ in range(count):
            embedded = ref.weights["embed_tokens.weight"][torch.tensor(tokens)]
            normed = ref.norm(f"{layer}.hidden_norm", hidden)
            residual = normed if config.get("norm_before_residual") else hidden
            x = torch.cat((ref.norm(f"{layer}.input_layernorm", embedded), normed), dim=-1)
            at = torch.arange(len(tokens))
            x = residual + ref.attend(f"{layer}.self_attn", x, at, x, at, causal(len(tokens)))
            x = x + ref.mlp(f"{layer}.mlp", ref.norm(f"{layer}.post_attention_layernorm", x))
            logits = ref.linear("lm_head", ref.norm("norm", x[-1:]))[0]
            token, *rest = best(logits)
            token += int(weights["d2t"][token]) if "d2t" in weights else 0
            found.append((token, *rest))
            tokens.append(token)
            hidden = torch.cat((hidden, x[-1:]))
        return found

    return drafts


LAYERS, MASK, BLOCK = 2, 96, 6
DFLASH: dict[str, Any] = {
    **LAYER_CONFIG,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": LAYERS,
    "block_size": BLOCK,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
}


def write_dflash(
    directory: Path, *, without: str = "none", more: dict[str, Tensor] | None = None, **changes: Any
) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Write a drafter with random weights."""
    torch.manual_seed(5)
    config = {**DFLASH, **changes}
    hidden = config["hidden_size"]
    layers = [random_layer(config, hidden, qk_norm=True) for _ in range(LAYERS)]
    weights = {
        **{f"layers.{i}.{name}": t for i, layer in enumerate(layers) for name, t in layer.items()},
        "fc.weight": random_matrix(hidden, 2 * hidden),
        "hidden_norm.weight": random_norm(hidden),
        "norm.weight": 4 * random_norm(hidden),
        **(more or {}),
    }
    weights = {name: tensor for name, tensor in weights.items() if without not in name}
    return write_head(directory, config, weights), config, weights


def dflash(
    config: dict[str, Any], weights: dict[str, Tensor], target: TinyModel, dtype: torch.dtype
) -> DraftsOf:
    """Drafts of a model: the published computation over the whole context."""
    model = target.reference
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    ref = Reference(config, {**weights, "embedding": embedding, "head.weight": head}, dtype)
    window = config.get("sliding_window") or 1000

    def drafts(known: list[int], features: Tensor, count: int) -> list[tuple[int, float, float]]:
        context = ref.norm("hidden_norm", ref.linear("fc", features.double()))
        block = torch.tensor([known[-1], *[MASK] * count])
        x = ref.weights["embedding"][block]
        at = torch.arange(len(context) + len(block))
        own = at[len(context) :]
        seen = torch.ones(len(block), len(at), dtype=torch.bool)
        if config.get("is_causal") or window < 1000:
            seen = (at <= own[:, None]) & (at > own[:, None] - window)
        for i in range(LAYERS):
            normed = ref.norm(f"layers.{i}.input_layernorm", x)
            states = torch.cat((context, normed))
            x = x + ref.attend(f"layers.{i}.self_attn", normed, own, states, at, seen)
            x = x + ref.mlp(f"layers.{i}.mlp", ref.norm(f"layers.{i}.post_attention_layernorm", x))
        logits = ref.linear("head", ref.norm("norm", x[1:]))
        return [best(row) for row in logits]

    return drafts
