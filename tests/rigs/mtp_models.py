"""Tiny checkpoints with a module for multi-token prediction, and the module in plain PyTorch.

transformers has no such modules, and no class for MiMo, whose layers are those of Qwen2. The last
layer of a model with one layer more becomes the module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from . import drafter_rig
from .head_references import best, random_matrix, random_norm
from .tiny_models import BASE, VARIANTS, random_model

LAYERS = BASE["num_hidden_layers"]


@dataclass(frozen=True)
class Kind:
    """The published layout of a family, and a tiny model of it."""

    settings: Mapping[str, Any]
    stored: Mapping[str, Any]
    """Fields of `config.json` that transformers does not write."""
    module: str
    """Where the tensors of the module are."""
    embedding_norm: str
    hidden_norm: str
    fuse: str
    norm: str
    hidden_first: bool
    """The order in the input of `fuse`."""
    normed: bool
    """Hidden states are taken after the last norm, of the model and of the module."""


KINDS = {
    "deepseek_v3": Kind(
        settings=VARIANTS["deepseek_v3_moe"],
        stored={},
        module=f"model.layers.{LAYERS}.",
        embedding_norm="enorm",
        hidden_norm="hnorm",
        fuse="eh_proj",
        norm="shared_head.norm",
        hidden_first=False,
        normed=True,
    ),
    "mimo": Kind(
        settings={
            "model_type": "qwen2",
            "head_dim": 10,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": LAYERS - 1,
        },
        stored={
            "model_type": "mimo",
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
            "use_mrope": False,
        },
        module="model.mtp_layers.0.",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        fuse="input_proj",
        norm="final_layernorm",
        hidden_first=True,
        normed=False,
    ),
}


def write(directory: Path, kind: str, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint with random weights.

    Returns:
        The model with the layer of the module as its last one.
    """
    layout = KINDS[kind]
    settings = BASE | dict(layout.settings) | {"num_hidden_layers": LAYERS + 1} | changes
    model = random_model(settings)
    model.save_pretrained(directory)
    stored = json.loads((directory / "config.json").read_text())
    stored |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1, **layout.stored}
    stored.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(stored))
    last = f"model.layers.{LAYERS}."
    tensors = {
        layout.module + name.removeprefix(last) if name.startswith(last) else name: tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    hidden, embedding = model.config.hidden_size, tensors["model.embed_tokens.weight"]
    tensors |= {
        f"{layout.module}{layout.embedding_norm}.weight": random_norm(hidden),
        f"{layout.module}{layout.hidden_norm}.weight": random_norm(hidden),
        f"{layout.module}{layout.fuse}.weight": random_matrix(hidden, 2 * hidden),
        f"{layout.module}{layout.norm}.weight": 2 * random_norm(hidden),
    }
    if kind == "deepseek_v3":
        for name in ("shared_head.head.weight", "embed_tokens.weight"):
            tensors[layout.module + name] = embedding.clone()
    save(directory, tensors)
    return model


def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})


def module(directory: Path, kind: str, model: PreTrainedModel) -> drafter_rig.Reference:
    """The module of a checkpoint, over whole sequences."""
    layout, tensors = KINDS[kind], load_file(directory / "model.safetensors")
    fuse = tensors[f"{layout.module}{layout.fuse}.weight"]
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    layer = model.model.layers[LAYERS]

    def norm(name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return x * scale * tensors[f"{layout.module}{name}.weight"]

    @torch.no_grad()
    def drafts(known: list[int], features: Tensor, count: int) -> list[tuple[int, float, float]]:
        hidden, tokens, found = features.float(), list(known[1:]), []
        for _ in range(count):
            pair = [
                norm(layout.embedding_norm, embedding[torch.tensor(tokens)]),
                norm(layout.hidden_norm, hidden),
            ]
            x = (torch.cat(pair[::-1] if layout.hidden_first else pair, dim=-1) @ fuse.T)[None]
            n = len(tokens)
            mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
            at = torch.arange(n)[None]
            turned = model.model.rotary_emb(x, at)
            out = layer(x, attention_mask=mask, position_ids=at, position_embeddings=turned)
            out = (out[0] if isinstance(out, tuple) else out).view(n, -1)[-1:]
            normed = norm(layout.norm, out)
            token, *rest = best((normed @ head.T)[0].double())
            found.append((token, *rest))
            tokens.append(token)
            hidden = torch.cat((hidden, normed if layout.normed else out))
        return found

    return drafts


def write_predictable(directory: Path, kind: str, reads: str, layers: float = 0.0) -> None:
    """Write a model whose next token is a function of the newest one, which its module knows.

    Embeddings are orthogonal and norms have gains of both signs, so that a module that is given
    another hidden state than the one it was made for drafts other tokens.

    Args:
        directory: the checkpoint.
        kind: of `KINDS`.
        reads: which input of its module decides: `embedding` or `hidden`, the hidden state.
        layers: what the layers of the model add, as a share of what random ones do; 0: nothing.
    """
    vocab, layout = 40, KINDS[kind]
    write(directory, kind, vocab_size=vocab, tie_word_embeddings=False)
    tensors = load_file(directory / "model.safetensors")
    torch.manual_seed(1)
    hidden = tensors["model.norm.weight"].numel()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.0 if name.startswith(layout.module) else layers)
    of = torch.linalg.qr(torch.randn(hidden, vocab)).Q.T * hidden**0.5
    after = (torch.arange(vocab) * 7 + 3) % vocab
    gain = random_norm(hidden) * torch.randn(hidden).sign()
    tensors["model.embed_tokens.weight"] = of
    tensors["model.norm.weight"] = gain
    tensors[f"{layout.module}{layout.norm}.weight"] = gain.clone()
    head = torch.empty(vocab, hidden)
    head[after] = 8.0 * of / gain / hidden
    tensors["lm_head.weight"] = head
    hidden_gain = gain if layout.normed else torch.ones(hidden)
    fuse = {
        "embedding": torch.diag(1.0 / tensors[f"{layout.module}{layout.embedding_norm}.weight"]),
        "hidden": (of[after].T @ of / hidden)
        / (hidden_gain * tensors[f"{layout.module}{layout.hidden_norm}.weight"]),
    }
    fuse = {name: part if name == reads else torch.zeros_like(part) for name, part in fuse.items()}
    order = ("hidden", "embedding") if layout.hidden_first else ("embedding", "hidden")
    tensors[f"{layout.module}{layout.fuse}.weight"] = torch.cat([fuse[n] for n in order], dim=1)
    save(directory, tensors)
