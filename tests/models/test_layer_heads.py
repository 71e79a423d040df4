"""A family whose layers have different numbers of heads has the logits of transformers."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.families import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from ..rigs.tiny_models import TinyModel, randomize

HEADS = [(6, 2), (4, 1), (3, 3), (6, 2)]
"""Query and key/value heads of each layer."""
NAME = "llama_of_layers"


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register it; its config lists `layer_heads`."""
    llama = FAMILIES["llama"]
    own = dataclasses.replace(llama, defaults={**llama.defaults, "layer_heads": []})
    monkeypatch.setitem(FAMILIES, NAME, own)


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
    changes = {"model_type": NAME, "layer_heads": HEADS}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory, reference


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("options", [{"mode": "eager"}, {"kv_dtype": "int8", "mode": "eager"}])
def test_layers_with_other_heads(model: Any, base: TinyModel, options: dict[str, Any]) -> None:
    directory, reference = model
    prompts = base.prompts(40, 3, 17)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    config = EngineConfig(device="cpu", block_size=4, prefill_chunk=16, max_num_seqs=2, **options)
    with Engine.from_pretrained(directory, config, progress=False) as engine:
        outputs = engine.generate(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = [*prompt, *output.token_ids]
            with torch.no_grad():
                logits = reference(torch.tensor([ids])).logits[0, len(prompt) - 1 :]
            if "kv_dtype" not in options:
                assert output.token_ids == logits[:-1].argmax(-1).tolist()
            scored = engine.score(ids, len(prompt))
            limit = 1e-3 if "kv_dtype" not in options else 0.3
            assert (scored - logits).abs().max() < limit * logits.std()


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("heads", [HEADS[:2], [(6, 4), *HEADS[1:]], [(6, 0), *HEADS[1:]]])
def test_heads_that_cannot_be(model: Any, heads: list[tuple[int, int]]) -> None:
    config = read_config(model[0])
    assert isinstance(config, ModelConfig)
    with pytest.raises(ConfigError):
        dataclasses.replace(config, layer_heads=tuple(heads))
