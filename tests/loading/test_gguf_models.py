"""Trained models in GGUF decode as transformers does, and are tokenised as llama.cpp does.

STEPGRAPH_GGUF_MODELS names the directory with their files.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stepgraph.runtime.loading.gguf_file import GGUFFile
from stepgraph.runtime.loading.gguf_tokenizer import gguf_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ..rigs.engine_rig import greedy, opened

FILES = sorted(Path(os.environ.get("STEPGRAPH_GGUF_MODELS", "-")).glob("*.gguf"))
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at 100 °C; it freezes at",
)
CHARACTERS = "abc ABC123.,!?'\"-_\n\t <>|/\\éß中日한😀▁ \u0301\u200d"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILES, reason="needs STEPGRAPH_GGUF_MODELS"),
]


def dequantised(path: Path) -> PreTrainedModel:
    """The model in float32 as transformers reads it (`from_pretrained` also needs accelerate)."""
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_model_decodes_as_in_transformers(path: Path) -> None:
    with opened(path, dtype="float32", max_model_len=128) as engine:
        assert engine.tokenizer is not None
        prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
        outputs = engine.generate(prompts, greedy(32))
    reference = dequantised(path)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None
        )
        assert output.token_ids == expected[0, len(prompt) :].tolist()


def texts() -> Iterator[str]:
    """Lines of code and prose, text with control tokens, and random mixtures of scripts."""
    root = Path(__file__).parents[2]
    for path in (*root.glob("docs/*.md"), *root.glob("runtime/*/*.py")):
        yield from filter(None, path.read_text().splitlines())
    yield from ("<|im_start|>user\nHi<|im_end|>", "<bos><start_of_turn>user\nHi<end_of_turn>\n")
    generator = random.Random(0)
    for _ in range(3000):
        yield "".join(generator.choices(CHARACTERS, k=generator.randint(1, 60)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_texts_are_tokenised_as_in_llama_cpp(path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = gguf_tokenizer(GGUFFile(path))
    assert ours is not None
    for text in texts():
        assert ours.encode(text) == theirs.tokenize(text.encode(), add_bos=True, special=True), text
