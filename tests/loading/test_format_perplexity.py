"""Perplexity of each weight format in bfloat16, against the dequantised model in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph.runtime import SamplingParams
from stepgraph.runtime.kernels.cpu.features import cpu_features
from stepgraph.runtime.kernels.weights.gguf import GGUF_TYPES
from stepgraph.runtime.loading.gguf_checkpoint import GGUFReader, gguf_config
from stepgraph.runtime.loading.gguf_file import GGUFFile, open_gguf
from stepgraph.runtime.loading.gguf_tokenizer import gguf_tokenizer
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..rigs.engine_rig import opened
from ..rigs.gguf_files import write_gguf
from .test_gguf import WIDE, Encoded, saved
from .test_gguf_models import FILES, dequantised
from .test_weight_formats import LAYOUTS, save_as

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = ("guarantees.md", "serving.md", "cache.md")
SETTINGS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "activation_dtype": "int8"},
}
"""By what activations are rounded to."""

pytestmark = pytest.mark.slow


def check_perplexity(
    path: Path, texts: list[list[int]], reference: PreTrainedModel, **within: float
) -> None:
    """Compare engines on the stored codes with the model of their numbers in float32."""
    with torch.no_grad():
        losses = [
            cross_entropy(reference(ids[None]).logits[0, :-1], ids[1:])
            for ids in map(torch.tensor, texts)
        ]
    expected = math.exp(torch.stack(losses).double().mean())
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for name, most in within.items():
        with opened(path, **SETTINGS[name], kernels="native") as engine:
            outputs = engine.generate(texts, scored)
        entries = [entry for output in outputs for entry in output.prompt_logprobs or () if entry]
        found = math.exp(-sum(entry.logprob for entry in entries) / len(entries))
        change = found / expected - 1
        print(f"{path.name}: {expected:.4f}, {name} {found:.4f}, {change:+.4%}")
        assert abs(change) < most


@torch.no_grad()
def calm(reference: PreTrainedModel, token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Scale the norms of a model with random codes as training does; return their weights.

    Each block adds a quarter of the residual, and logits have a standard deviation of 1.5.
    """
    model, ids = reference.model, torch.tensor([token_ids])
    sizes: dict[torch.nn.Module, float] = {}

    def keep(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        sizes[module] = float((inputs[0] if module in norms else output).square().mean().sqrt())

    blocks = [
        pair
        for layer in model.layers
        for pair in (
            (layer.input_layernorm, layer.self_attn.o_proj),
            (layer.post_attention_layernorm, layer.mlp.down_proj),
        )
    ]
    norms = {norm for norm, _ in blocks}
    hooks = [module.register_forward_hook(keep) for pair in blocks for module in pair]
    for _ in range(8):
        logits = reference(ids).logits
        for norm, block in blocks:
            norm.weight *= (0.25 * sizes[norm] / sizes[block]) ** 0.5
        model.norm.weight *= 1.5 / logits.std()
    for hook in hooks:
        hook.remove()
    return {n: w for n, w in reference.state_dict().items() if n.endswith("norm.weight")}


def texts_of(reference: PreTrainedModel) -> list[list[int]]:
    """Sample texts that the model itself would write."""
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    found: list[list[int]] = reference.generate(
        torch.arange(8)[:, None], max_new_tokens=249, **options
    ).tolist()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_safetensors(tmp_path: Path, layout: str) -> None:
    model = saved(tmp_path / "plain", "wide_groups", tie_word_embeddings=False)
    reference = save_as(layout, model, tmp_path / "quantised")
    file = tmp_path / "quantised" / "model.safetensors"
    save_file(load_file(file) | calm(reference, *model.prompts(100)), file, {"format": "pt"})
    check_perplexity(file.parent, texts_of(reference), reference, bfloat16=1e-3)


@pytest.mark.parametrize("kind", [found.name for found in GGUF_TYPES.values()])
def test_gguf_type(tmp_path: Path, kind: str) -> None:
    model = saved(tmp_path / "checkpoint", "one_kv_head", **WIDE, head_dim=64)
    path, reference = tmp_path / "model.gguf", model.reference
    write_gguf(model, path, Encoded([kind]))
    with GGUFReader(file := open_gguf(path), gguf_config(file)) as reader:
        for name, parameter in reference.named_parameters():
            parameter.data.copy_(reader.tensor(name))
    norms = calm(reference, *model.prompts(100))
    weights = model.directory / "model.safetensors"
    save_file(load_file(weights) | norms, weights, {"format": "pt"})
    write_gguf(model, path, Encoded([kind]))
    check_perplexity(path, texts_of(reference), reference, bfloat16=1e-3)


@pytest.mark.skipif(not FILES, reason="needs STEPGRAPH_GGUF_MODELS")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_trained_gguf_model(path: Path) -> None:
    tokenizer = gguf_tokenizer(GGUFFile(path))
    if tokenizer is None:
        pytest.skip("a model of random weights, without a vocabulary")
    token_ids = tokenizer.encode("".join((DOCS / name).read_text() for name in TEXTS))
    texts = [token_ids[start : start + 500] for start in range(0, 4000, 500)]
    # Rounded activations change the losses of single tokens by a standard deviation of up to
    # 0.15, so their mean over 4,000 tokens by 0.0024.
    int8 = {"int8": 1e-2} if "avx512vnni" in cpu_features() else {}
    check_perplexity(path, texts, dequantised(path), float32=1e-4, bfloat16=8e-3, **int8)
