"""The model in transformers has the weights and the tokens that ours has."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.bench.runtimes import transformers_model as hf_model
from stepgraph.runtime.bench.runtimes.saved_preset import save_random_weights
from stepgraph.runtime.bench.runtimes.transformers_baseline import (
    BaselineError,
    TransformersBaseline,
)
from stepgraph.runtime.bench.runtimes.transformers_config import hf_config
from stepgraph.runtime.bench.runtimes.transformers_model import load_model
from stepgraph.runtime.loading.checkpoint import CheckpointReader, read_config
from stepgraph.runtime.loading.loader import iter_weights, random_weights
from stepgraph.runtime.models.config import LatentConfig, ModelConfig
from stepgraph.runtime.models.presets import PRESETS

from ..rigs.tiny_models import VARIANTS, TinyModel

CPU = torch.device("cpu")
NEW_TOKENS = 9
QUICK_SAVED = ("qwen3-moe-7b-a1b", "qwen3-0.6b", "gemma-2-2b", "mla-small")
QUICK = ("odd", "deepseek_v3")


def latent(queries: int | None, rank: int, nope: int, rope: int, values: int) -> LatentConfig:
    return LatentConfig(
        q_lora_rank=queries,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=values,
    )


def shrunk(name: str, **changes: Any) -> ModelConfig:
    """A preset of a tiny size: its family and everything that is no size."""
    preset = PRESETS[name]
    num_layers = 7 if name.startswith("gemma-3") else 4  # of both kinds
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": num_layers,
        "num_heads": 4,
        "num_kv_heads": min(2, preset.num_kv_heads),
        "head_dim": 16,
        "max_position_embeddings": 256,
        "layer_types": preset.layer_types[:num_layers],
        "sliding_window": preset.sliding_window and 9,
        "query_pre_attn_scalar": preset.query_pre_attn_scalar and 20.0,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    if preset.rope_scaling.type == "longrope":
        factors = {"short_factor": (1.0, 1.1, 1.2, 1.4, 1.7, 2.0), "long_factor": (3.0,) * 6}
        first = {"original_max_position_embeddings": 40}
        sizes["rope_scaling"] = dataclasses.replace(preset.rope_scaling, **factors | first)
        sizes |= {"num_heads": 3, "num_kv_heads": 1}  # 48 / 3 = 16, as transformers demands
    if preset.logits_scaling != 1.0:
        sizes["logits_scaling"] = 1.5
    if preset.unrotated_layers:
        sizes["unrotated_layers"] = (0, 3)
    if preset.latent is not None:
        sizes |= {"latent": latent(None, 24, 10, 6, 14), "head_dim": 30}
    if preset.experts is not None:
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        sizes["experts"] = dataclasses.replace(preset.experts, **experts)
        if preset.family.experts.keys.get("moe_intermediate_size"):  # there is no other width
            sizes["intermediate_size"] = 24
    return dataclasses.replace(preset, **(sizes | changes))


SHRUNK = {name: shrunk(name) for name in PRESETS}
SHRUNK["biases"] = shrunk("qwen3-0.6b", attention_bias=True, mlp_bias=False)
SHRUNK["llama biases"] = shrunk("llama-3.1-8b", attention_bias=True, mlp_bias=True)
SHRUNK["latent biases"] = shrunk("mla-small", attention_bias=True)
SHRUNK["latent queries"] = shrunk(
    "mla-small", attention_bias=True, latent=latent(22, 18, 10, 8, 12), head_dim=26
)


def compare(engine: Engine, directory: Path | None, prompts: list[list[int]]) -> dict[str, Any]:
    """What both methods say of prompts that an engine decodes, by their names."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    ours = [output.token_ids for output in engine.generate(prompts, params)]
    baseline = TransformersBaseline(
        engine.model_config, directory, dtype=torch.float32, device=CPU, seed=0
    )
    with closing(baseline):
        case = baseline.prepare(prompts, NEW_TOKENS - 1, max_batch_tokens=32)
        case.run()
        return {entry["method"]: entry for entry in case.to_json([1.0], ours)}


def random_prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = torch.randint(97, (count, length), generator=generator).tolist()
    return prompts


@pytest.mark.parametrize("name", PRESETS)
def test_the_shapes_of_a_preset_survive_the_way_to_transformers(name: str) -> None:
    preset = PRESETS[name]
    there = hf_config(preset).to_dict() | {"dtype": preset.torch_dtype}
    assert ModelConfig.from_hf(there) == preset


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SHRUNK)
def test_a_preset_has_the_same_weights_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHRUNK[name]
    monkeypatch.setitem(PRESETS, "tiny", config)
    (token_ids,) = random_prompts(1, 30)
    with Engine.from_pretrained("preset:tiny", EngineConfig(mode="eager", seed=5)) as engine:
        ours = engine.score(token_ids, 20)
    model = load_model(config, None, dtype=torch.float32, device=CPU, seed=5)
    with torch.no_grad():
        theirs = model(torch.tensor([token_ids])).logits[0, 19:]
    assert theirs.std() > 0.05
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize(
    "name", ["gemma-3-1b", pytest.param("llama-3.1-8b", marks=pytest.mark.slow)]
)
def test_a_preset_has_the_same_tokens_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", SHRUNK[name])
    with Engine.from_pretrained("preset:tiny", EngineConfig(mode="eager")) as engine:
        found = compare(engine, None, random_prompts(2, 24))
    assert [found[name]["tokens_equal"] for name in ("continuous", "static")] == [1.0, 1.0]


@pytest.mark.parametrize(
    "variant",
    [
        variant if variant in QUICK else pytest.param(variant, marks=pytest.mark.slow)
        for variant in VARIANTS
    ],
)
def test_a_checkpoint_has_the_same_tokens_there(
    variant: str, tiny: Callable[[str], TinyModel], open_engine: Callable[..., Engine]
) -> None:
    model = tiny(variant)
    found = compare(open_engine(variant), model.directory, model.prompts(24, 24))
    assert found["static"]["tokens_equal"] == 1.0
    if variant.startswith("deepseek"):  # its paged cache has keys and values of one size
        assert "index_copy_" in found["continuous"]["error"]
        assert found["continuous"]["tokens_equal"] is None
    elif variant.startswith("llama4"):  # its paged cache has no chunks
        assert "chunked_attention" in found["continuous"]["error"]
    elif variant == "gemma2":  # its paged attention leaves the soft cap out, which tokens tell
        assert found["continuous"]["tokens_equal"] < 0.5
    else:
        assert found["continuous"]["tokens_equal"] == 1.0


def test_weights_that_do_not_fit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHRUNK["qwen3-0.6b"]

    def load(there: ModelConfig) -> None:
        monkeypatch.setattr(hf_model, "hf_config", lambda ours: hf_config(there))
        load_model(config, None, dtype=torch.float32, device=CPU, seed=0)

    with pytest.raises(BaselineError, match=r"weights that ours has not: lm_head\.weight"):
        load(dataclasses.replace(config, tie_word_embeddings=False))
    with pytest.raises(BaselineError, match=r"no model.embed_tokens.weight of shape \[97, 48\]"):
        load(dataclasses.replace(config, vocab_size=101))
    with pytest.raises(BaselineError, match=r"no model.layers.2.input_layernorm.weight of shape"):
        load(dataclasses.replace(config, num_layers=2))


def test_a_broken_checkpoint_is_an_error_of_ours(base: TinyModel, tmp_path: Path) -> None:
    directory = shutil.copytree(base.directory, tmp_path / "truncated")
    (directory / "model.safetensors").write_bytes(b"no tensors")
    for broken in (directory, tmp_path):
        with pytest.raises(BaselineError, match=r"^transformers cannot load the model: .+$"):
            load_model(SHRUNK["qwen3-0.6b"], broken, dtype=torch.float32, device=CPU, seed=0)


@pytest.mark.parametrize("name", QUICK_SAVED)
def test_a_saved_preset_is_read_back(name: str, tmp_path: Path) -> None:
    """By transformers, too, whose logits are those of the same weights in memory."""
    config = SHRUNK[name]
    save_random_weights(config, tmp_path, torch.float32, seed=5, file_bytes=20_000)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    found = read_config(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        read = dict(iter_weights(reader, found, torch.float32))
    for key, tensor in random_weights(config, torch.float32, 5):
        assert torch.equal(read[key], tensor), key
    ids = torch.arange(12)[None]
    expected = load_model(config, None, dtype=torch.float32, device=CPU, seed=5)
    loaded = load_model(found, tmp_path, dtype=torch.float32, device=CPU, seed=5)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
