"""Tiny checkpoints with a module for multi-token prediction, and the module in plain PyTorch.

The last layer of a model with one layer more becomes the module. transformers has no class for
MiMo, whose layers are those of Qwen2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    layers: tuple[str, ...]
    """What the names of each layer of the module begin with."""
    embedding_norm: str
    hidden_norm: str
    fuse: str
    norm: str
    normed: bool
    """Hidden states are taken after the last norm, of the model and of the module."""
    hidden_first: bool = False
    """The order in the input of `fuse`."""
    copies: tuple[str, ...] = ()
    """Tensors that repeat the embedding."""
    renamed: tuple[str, str] = ("-", "-")
    """Part of a name in a layer of the model, and in the layer of the module."""
    window: int | None = None
    """Of the layer of the module."""
    offset: float = 0.0
    """Added to the weights of norms."""
    stored: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `config.json` that transformers does not write."""


def after_last(settings: Mapping[str, Any], norm: str, **copies: tuple[str, ...]) -> Kind:
    """The module is one more layer of the model."""
    layer = f"model.layers.{LAYERS}."
    names = [layer + name for name in ("enorm", "hnorm", "eh_proj", norm)]
    own = tuple(layer + name for name in copies.get("copies", ()))
    return Kind(settings, (layer,), *names, normed=True, copies=own)


DEEPSEEK: dict[str, Any] = {
    "norm": "shared_head.norm",
    "copies": ("shared_head.head.weight", "embed_tokens.weight"),
}
LINEAR_AND_FULL = ["linear_attention", "full_attention", "linear_attention"]
KINDS = {
    "deepseek_v3": after_last(VARIANTS["deepseek_v3_moe"], **DEEPSEEK),
    "glm4_moe": after_last(VARIANTS["glm4_moe"], **DEEPSEEK),
    "glm4_moe_lite": after_last(VARIANTS["glm4_moe_lite"] | {"mlp_layer_types": None}, **DEEPSEEK),
    "hy_v3": after_last(VARIANTS["hy_v3"], "final_layernorm", copies=("shared_head.weight",)),
    "ernie4_5_moe": Kind(
        VARIANTS["ernie4_5_moe"]
        | {"moe_layer_end_index": LAYERS - 1, "moe_layer_interval": 1}
        | {"tie_word_embeddings": False},
        layers=("model.mtp_block.0.",),
        embedding_norm="model.mtp_emb_norm.0",
        hidden_norm="model.mtp_hidden_norm.0",
        fuse="model.mtp_linear_proj.0",
        norm="model.norm",
        normed=False,
    ),
    "mimo_v2_flash": Kind(
        VARIANTS["mimo_v2_flash"]
        | {"layer_types": ["full_attention", *["sliding_attention"] * LAYERS]}
        | {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1), "dense"]},
        layers=("model.mtp.layers.0.",),
        embedding_norm="model.mtp.layers.0.enorm",
        hidden_norm="model.mtp.layers.0.hnorm",
        fuse="model.mtp.layers.0.eh_proj",
        norm="model.mtp.layers.0.final_layernorm",
        normed=True,
        renamed=("post_attention_layernorm", "pre_mlp_layernorm"),
        window=VARIANTS["mimo_v2_flash"]["sliding_window"],
    ),
    "qwen3_next": Kind(
        VARIANTS["qwen3_next"] | {"layer_types": [*LINEAR_AND_FULL, "full_attention"]},
        layers=("mtp.layers.0.",),
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        fuse="mtp.fc",
        norm="mtp.norm",
        normed=True,
        offset=1.0,
        stored={"layer_types": LINEAR_AND_FULL},
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
        layers=("model.mtp_layers.0.",),
        embedding_norm="model.mtp_layers.0.token_layernorm",
        hidden_norm="model.mtp_layers.0.hidden_layernorm",
        fuse="model.mtp_layers.0.input_proj",
        norm="model.mtp_layers.0.final_layernorm",
        hidden_first=True,
        normed=False,
    ),
}
IN_PYTORCH = ("deepseek_v3", "glm4_moe_lite", "mimo_v2_flash")
"""Kinds without layers in C++."""
OF_HYBRIDS = {
    "qwen3": Kind(
        VARIANTS["qwen3"] | {"use_sliding_window": False},
        layers=("mtp.layers.0.",),
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        fuse="mtp.fc",
        norm="mtp.norm",
        normed=True,
    ),
    "mixtral": Kind(
        VARIANTS["mixtral"],
        layers=("mtp.layers.0.", "mtp.layers.1."),
        embedding_norm="mtp.layers.0.enorm",
        hidden_norm="mtp.layers.0.hnorm",
        fuse="mtp.layers.0.eh_proj",
        norm="mtp.layers.1.final_layernorm",
        normed=True,
    ),
}
"""Layouts of Qwen3-Next and of Nemotron 3, with layers of other families."""


def write(directory: Path, kind: str, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint with random weights.

    Returns:
        The model with the layers of the module as its last ones.
    """
    layout = (KINDS | OF_HYBRIDS)[kind]
    both = {"num_hidden_layers": LAYERS + len(layout.layers)}
    settings = BASE | dict(layout.settings) | both | changes
    model = random_model(settings)
    model.save_pretrained(directory)
    stored = json.loads((directory / "config.json").read_text())
    for of_each_layer in ("layer_types", "mlp_layer_types"):
        stored.pop(of_each_layer, None)
    stored |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1, **layout.stored}
    (directory / "config.json").write_text(json.dumps(stored))
    tensors = load_file(directory / "model.safetensors")
    for index, prefix in enumerate(layout.layers, LAYERS):
        last = f"model.layers.{index}."
        for name in [name for name in tensors if name.startswith(last)]:
            own = name.removeprefix(last).replace(*layout.renamed)
            tensors[prefix + own] = tensors.pop(name)
    hidden, embedding = model.config.hidden_size, tensors["model.embed_tokens.weight"]
    tensors |= {
        f"{layout.embedding_norm}.weight": random_norm(hidden),
        f"{layout.hidden_norm}.weight": random_norm(hidden),
        f"{layout.fuse}.weight": random_matrix(hidden, 2 * hidden),
        f"{layout.norm}.weight": 2 * random_norm(hidden),
        **{name: embedding.clone() for name in layout.copies},
    }
    save(directory, tensors)
    return model


def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})


def module(directory: Path, kind: str, model: PreTrainedModel) -> drafter_rig.Reference:
    """The module of a checkpoint, over whole sequences."""
    layout, tensors = (KINDS | OF_HYBRIDS)[kind], load_file(directory / "model.safetensors")
    fuse = tensors[f"{layout.fuse}.weight"]
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)

    def norm(name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return x * scale * (layout.offset + tensors[f"{name}.weight"])

    @torch.no_grad()
    def drafts(known: list[int], features: Tensor, count: int) -> list[tuple[int, float, float]]:
        hidden, tokens, found = features.float(), list(known[1:]), []
        for _ in range(count):
            pair = [
                norm(layout.embedding_norm, embedding[torch.tensor(tokens)]),
                norm(layout.hidden_norm, hidden),
            ]
            out = (torch.cat(pair[::-1] if layout.hidden_first else pair, dim=-1) @ fuse.T)[None]
            n = len(tokens)
            seen = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - (layout.window or n))
            mask = torch.zeros(n, n).masked_fill(~seen, -torch.inf)[None, None]
            at = torch.arange(n)[None]
            kinds = ["sliding_attention"] if layout.window else []
            turned = model.model.rotary_emb(out, at, *kinds)
            for layer in model.model.layers[LAYERS:]:
                out = layer(out, attention_mask=mask, position_ids=at, position_embeddings=turned)
                out = out[0] if isinstance(out, tuple) else out
            out = out.view(n, -1)[-1:]
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
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.mul_(0.0 if name.startswith(layout.layers) else layers)
    of = torch.linalg.qr(torch.randn(hidden, vocab)).Q.T * hidden**0.5
    after = (torch.arange(vocab) * 7 + 3) % vocab
    gain = random_norm(hidden) * torch.randn(hidden).sign()
    tensors["model.embed_tokens.weight"] = of
    tensors["model.norm.weight"] = gain - layout.offset
    tensors[f"{layout.norm}.weight"] = gain - layout.offset
    head = torch.empty(vocab, hidden)
    head[after] = 8.0 * of / gain / hidden
    tensors["lm_head.weight"] = head
    hidden_gain = gain if layout.normed else torch.ones(hidden)
    of_embedding, of_hidden = (
        layout.offset + tensors[f"{name}.weight"]
        for name in (layout.embedding_norm, layout.hidden_norm)
    )
    fuse = {
        "embedding": torch.diag(1.0 / of_embedding),
        "hidden": (of[after].T @ of / hidden) / (hidden_gain * of_hidden),
    }
    fuse = {name: part if name == reads else torch.zeros_like(part) for name, part in fuse.items()}
    order = ("hidden", "embedding") if layout.hidden_first else ("embedding", "hidden")
    tensors[f"{layout.fuse}.weight"] = torch.cat([fuse[n] for n in order], dim=1)
    save(directory, tensors)
