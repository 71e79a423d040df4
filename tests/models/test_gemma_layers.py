"""Gemma 3n and Gemma 4 of random sizes decode as in transformers, over a small and shared cache."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.cache.arena import Arena
from stepgraph.cache.spec import group_layers
from stepgraph.runtime.errors import CheckpointError, ConfigError
from stepgraph.runtime.kernels.ops.attention import Attend
from stepgraph.runtime.loading.checkpoint import read_config
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.sharding import allowed_ranks
from stepgraph.runtime.prompt_embeds import EmbeddedSpan, EncodedContent, PromptEmbeds

from ..rigs.engine_rig import greedy, opened
from ..rigs.sharding_rig import sharded_runs, whole_run, write_checkpoint
from ..rigs.tiny_models import BASE, TinyModel, random_model

TYPES = {
    "3n": "gemma3n_text",
    "4_dense": "gemma4_text",
    "4_E": "gemma4_text",
    "4_experts": "gemma4_text",
    "4_unified": "gemma4_unified_text",
}
PROMPTS = (1, 63, 64, 65, 130)
NEW_TOKENS = 30


def fields(kind: str, seed: int) -> dict[str, Any]:
    """A configuration of a kind with random sizes; its last layer attends to all tokens."""
    draw = random.Random(f"{kind} {seed}")
    kv_heads, shared = draw.choice([1, 2, 3]), draw.choice([2, 3])
    layers = [*draw.sample("ssff", 4), *draw.sample("sf", 2), "f"]
    named = {"s": "sliding_attention", "f": "full_attention"}
    found = BASE | {
        **{"model_type": TYPES[kind], "hidden_size": 2 * draw.randint(12, 30)},
        **{"num_attention_heads": kv_heads * draw.choice([1, 2, 4]), "pad_token_id": 0},
        **{"num_key_value_heads": kv_heads, "head_dim": 2 * draw.randint(3, 9)},
        **{"intermediate_size": draw.randint(30, 80), "sliding_window": draw.randint(9, 70)},
        **{"layer_types": [named[i] for i in layers], "num_hidden_layers": len(layers)},
        **{"final_logit_softcapping": 9.0, "num_kv_shared_layers": 0},
    }
    inputs = {
        **{"hidden_size_per_layer_input": draw.randint(4, 20), "num_kv_shared_layers": shared},
        "vocab_size_per_layer_input": BASE["vocab_size"],
    }
    if kind == "3n":
        found["hidden_size"] = found["num_attention_heads"] * draw.randint(8, 12)
        sparsity = [draw.choice([0.0, 0.5, 0.95]) for _ in layers]
        return (
            found
            | inputs
            | {"laurel_rank": draw.randint(2, 9)}
            | {
                "altup_num_inputs": draw.choice([2, 4]),
                "activation_sparsity_pattern": sparsity,
                "vocab_size_per_layer_input": draw.randint(50, BASE["vocab_size"]),
            }
        )
    found["global_head_dim"] = 2 * draw.randint(3, 12)
    if kind == "4_unified":
        return found | {"num_kv_shared_layers": shared, "use_double_wide_mlp": True}
    if kind == "4_E":
        return found | inputs | {"use_double_wide_mlp": True}
    found |= {"hidden_size_per_layer_input": 0, "attention_k_eq_v": draw.random() < 0.7}
    found["num_global_key_value_heads"] = draw.choice([None, 1, kv_heads])
    if kind == "4_experts":
        count = draw.randint(3, 9)
        found |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": 2}
        found["moe_intermediate_size"] = draw.randint(8, 40)
    return found


def saved(directory: Path, kind: str, seed: int) -> TinyModel:
    reference = random_model(fields(kind, seed))
    reference.save_pretrained(directory)
    return TinyModel(directory, reference)


def assert_same(
    model: TinyModel, prompts: list[list[int]], found: list[list[int]], expected: list[list[int]]
) -> None:
    """Tokens are equal up to the first one of which the two best are equal but for rounding."""
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        if ours != theirs:
            first = next(i for i in range(NEW_TOKENS) if ours[i] != theirs[i])
            logits = model.logits([*prompt, *theirs[:first]])[-1]
            assert logits[theirs[first]] - logits[ours[first]] < 2e-3


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("chunk", [13, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", TYPES)
def test_random_sizes_decode_as_in_transformers(
    tmp_path: Path, kind: str, seed: int, chunk: int
) -> None:
    model = saved(tmp_path, kind, seed)
    prompts = model.prompts(*PROMPTS, seed=seed)
    expected = [model.greedy([prompt], NEW_TOKENS)[0] for prompt in prompts]
    assert len({token for row in expected for token in row}) > 15
    sizes = {"block_size": 4, "prefill_chunk": chunk, "max_model_len": 162}
    with opened(tmp_path, num_blocks=2000, **sizes) as engine:
        for hits in (False, True):
            outputs = engine.generate(prompts, greedy(NEW_TOKENS))
            assert_same(model, prompts, [o.token_ids for o in outputs], expected)
            assert (engine.stats()["cache"]["hit_tokens"] > 0) == hits
    # Less room than the first four rows need.
    with opened(tmp_path, memory_tokens=200, **sizes) as engine:
        outputs = engine.generate([*prompts, *prompts[-2:]], greedy(NEW_TOKENS))
        found, repeated = [o.token_ids for o in outputs], [*expected, *expected[-2:]]
        assert_same(model, [*prompts, *prompts[-2:]], found, repeated)
        # Of other sizes, windows and longer chunks may leave room for all rows.
        assert engine.stats()["preemptions"] > 0 or (seed, chunk) != (0, 13)
        engine.check_integrity()


def config_of(kind: str, directory: Path, **changed: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields(kind, 0) | changed))
    found = read_config(directory)
    assert isinstance(found, ModelConfig)
    return found


@pytest.mark.parametrize("kind", ["3n", "4_E"])
def test_cache_has_room_only_for_layers_that_store(tmp_path: Path, kind: str) -> None:
    sharing, own = config_of(kind, tmp_path), config_of(kind, tmp_path, num_kv_shared_layers=0)
    storing = sharing.num_layers - len(sharing.kv_shared_layers)
    assert len(model_plan(own).states) == sharing.num_layers
    assert len(model_plan(sharing).states) == storing < sharing.num_layers
    model = saved(tmp_path, kind, 0)
    with opened(tmp_path, block_size=4) as engine:
        groups = group_layers(model_plan(sharing).states)
        assert sum(len(group.layers) for group in groups) == storing
        plan, on_meta = engine.memory_plan, (torch.float32, torch.device("meta"))
        assert plan.terms["cache"] == Arena(groups, plan.num_blocks, 4, *on_meta).nbytes
        assert engine.weight_bytes_read(1) < sum(p.nbytes for p in model.reference.parameters())


def test_shared_layers_read_the_last_layer_of_their_type(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 3
    shape = {"layer_types": types, "num_hidden_layers": 6, "num_kv_shared_layers": 3}
    plan = model_plan(config_of("4_E", tmp_path, **shape))
    attends = [op for layer in plan.layers for op in layer.operations if isinstance(op, Attend)]
    assert [op.keys_of for op in attends] == [None, None, None, 1, 2, 1]
    windows = [op.window for op in attends]
    assert [windows[op.keys_of or i] for i, op in enumerate(attends)] == windows


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("4_E", {"num_kv_shared_layers": 7}),
        ("4_E", {"num_kv_shared_layers": -1}),
        ("4_E", {"layer_types": ["sliding_attention"] * 7, "num_kv_shared_layers": 3}),
        ("4_E", {"use_bidirectional_attention": "all"}),
        ("4_dense", {"per_layer_config": {"1": 7}}),
        ("3n", {"intermediate_size": [8, "8"]}),
        ("3n", {"activation_sparsity_pattern": [0.5]}),
        ("3n", {"altup_active_idx": 9}),
    ],
)
def test_configs_that_cannot_be(tmp_path: Path, kind: str, changed: dict[str, Any]) -> None:
    with pytest.raises((CheckpointError, ConfigError)):
        config_of(kind, tmp_path, **changed)


def test_heads_as_published_and_as_saved(tmp_path: Path) -> None:
    """transformers 5.24 writes the heads of full layers in another form than published files."""
    written = random_model(fields("4_dense", 2)).config.to_dict()
    found = [config_of("4_dense", tmp_path, **fields("4_dense", 2))]
    own = {"per_layer_config": written["per_layer_config"], "global_head_dim": None}
    found.append(config_of("4_dense", tmp_path, **fields("4_dense", 2) | own))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["3n", "4_E"])
def test_prompts_with_embeddings(tmp_path: Path, kind: str) -> None:
    """Their layers have the inputs of token 0."""
    model = saved(tmp_path, kind, 0)
    (prompt,) = model.prompts(20, seed=4)
    zeros = [*prompt[:5], 0, 0, 0, *prompt[8:]]
    embeddings = model.reference.get_input_embeddings()
    with opened(tmp_path, prompt_embeds=True) as engine:
        content = EncodedContent.of(embeddings(torch.tensor([0, 0, 0])).detach())
        given = PromptEmbeds(prompt, [EmbeddedSpan(5, content)])
        (output,) = engine.generate([given], greedy(8))
    assert output.token_ids == model.greedy([zeros], 8)[0]


@pytest.mark.parametrize("kind", TYPES)
def test_ranks_compute_the_same(tmp_path: Path, kind: str) -> None:
    shape = {
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 40},
        **{"hidden_size": 40, "num_global_key_value_heads": 2, "moe_intermediate_size": 12},
        "activation_sparsity_pattern": [0.0] * 7,
    }
    config = config_of(kind, tmp_path, **shape)
    write_checkpoint(config, tmp_path)
    expected = whole_run(config, tmp_path)
    for run in sharded_runs(config, tmp_path, 2):
        for logits, wanted in zip(run.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-3)
        assert torch.equal(run.tokens, expected.tokens)


def test_sparse_activations_are_not_split(tmp_path: Path) -> None:
    sparse = {"activation_sparsity_pattern": [0.5] * 7}
    assert allowed_ranks(model_plan(config_of("3n", tmp_path, **sparse))) == (1,)
