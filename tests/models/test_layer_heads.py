"""A family whose layers have different numbers of heads has the logits of transformers."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.families import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from ..rigs.engine_rig import greedy, opened
from ..rigs.tiny_models import TinyModel, randomize

HEADS = [(6, 2), (4, 1), (3, 3), (6, 2)]
"""Query and key/value heads of each layer."""
NAME = "llama_of_layers"


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register it; its config lists `layer_heads`."""
    defaults = {**FAMILIES["llama"].defaults, "layer_heads": []}
    monkeypatch.setitem(FAMILIES, NAME, dataclasses.replace(FAMILIES["llama"], defaults=defaults))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, base: TinyModel) -> Any:
    """The directory of a checkpoint, and its model in transformers."""
    directory = tmp_path_factory.mktemp("heads")
    config = AutoConfig.from_pretrained(base.directory)
    config.num_hidden_layers = len(HEADS)
    config._attn_implementation = "eager"
    reference = AutoModelForCausalLM.from_config(config).eval()
    for layer, (heads, kv_heads) in enumerate(HEADS):
        own = copy.deepcopy(config)
        own.num_attention_heads, own.num_key_value_heads = heads, kv_heads
        reference.model.layers[layer].self_attn = LlamaAttention(own, layer)
    randomize(reference)
    reference.save_pretrained(directory)
    path = directory / "config.json"
    changed = json.loads(path.read_text()) | {"model_type": NAME, "layer_heads": HEADS}
    path.write_text(json.dumps(changed))
    return directory, reference


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(
    ("mode", "kv_dtype", "within"),
    [
        ("eager", "auto", 1e-3),
        ("eager", "int8", 0.3),
        pytest.param("compile", "auto", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_layers_with_other_heads(
    model: Any, base: TinyModel, mode: str, kv_dtype: str, within: float
) -> None:
    directory, reference = model
    sizes = {"block_size": 4, "prefill_chunk": 16, "max_num_seqs": 2}
    prompts = base.prompts(40, 3, 17)
    with opened(directory, kv_dtype=kv_dtype, mode=mode, **sizes) as engine:
        for prompt, output in zip(prompts, engine.generate(prompts, greedy(12)), strict=True):
            ids = [*prompt, *output.token_ids]
            with torch.no_grad():
                logits = reference(torch.tensor([ids])).logits[0, len(prompt) - 1 :]
            assert kv_dtype != "auto" or output.token_ids == logits[:-1].argmax(-1).tolist()
            assert (engine.score(ids, len(prompt)) - logits).abs().max() < within * logits.std()


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("heads", [HEADS[:2], [(6, 4), *HEADS[1:]], [(6, 0), *HEADS[1:]]])
def test_heads_that_cannot_be(model: Any, heads: list[tuple[int, int]]) -> None:
    config = read_config(model[0])
    assert isinstance(config, ModelConfig)
    with pytest.raises(ConfigError):
        dataclasses.replace(config, layer_heads=tuple(heads))
