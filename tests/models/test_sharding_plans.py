"""Random models and numbers of ranks: which are refused, and that the others compute the same."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from stepgraph.runtime.errors import ConfigError
from stepgraph.runtime.kernels.ops.layer_plan import LayerPlan
from stepgraph.runtime.kernels.ops.operation import AllReduce, Opaque
from stepgraph.runtime.kernels.ops.parameter import Parameter, Source
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan, shard_config
from stepgraph.runtime.models.presets import PRESETS, preset
from stepgraph.runtime.models.sharding import allowed_ranks, check_ranks, shard_plan

from ..rigs.sharding_rig import sharded_runs, tiny_config, whole_run, write_checkpoint

FAMILIES = ("base", "biases", "phi3", "glm4", "olmo2", "gemma2", "gpt_oss", "mixtral", "llama4")
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v2_moe", "deepseek_v3_moe")


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    """Small models of odd sizes, and a number of ranks, which divides most of them."""
    config = tiny_config(draw(st.sampled_from((*FAMILIES, *LATENT))), 1)
    ranks = draw(st.integers(2, 5))

    def size(most: int) -> int:
        return draw(st.integers(1, most)) * (ranks if draw(st.integers(0, 9)) else 1)

    experts, kv_heads = config.experts, 1
    if experts is not None:
        experts = dataclasses.replace(experts, moe_intermediate_size=size(9))
    if config.latent is None:
        kv_heads = draw(st.sampled_from([1, 2, 3, ranks, 2 * ranks]))
    config = dataclasses.replace(
        config.with_layers(range(min(2, config.num_layers))),
        vocab_size=draw(st.integers(31, 70)),
        hidden_size=draw(st.integers(4, 40)),
        intermediate_size=size(9),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * size(2),
        experts=experts,
        bos_token_id=None,
        eos_token_ids=(),
    )
    return config, ranks


@settings(max_examples=25)
@given(splits())
def test_a_model_is_split_or_refused(split: tuple[ModelConfig, int]) -> None:
    config, ranks = split
    plan = model_plan(config)
    if ranks not in allowed_ranks(plan):
        with pytest.raises(ConfigError):
            shard_config(config, 0, ranks)
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_checkpoint(config, directory)
        expected = whole_run(config, directory)
        for run in sharded_runs(config, directory, ranks):
            for logits, wanted in zip(run.logits, expected.logits, strict=True):
                assert (logits - wanted).abs().max() < 1e-3 * max(1, wanted.abs().max())


@pytest.mark.parametrize("name", PRESETS)
def test_ranks_of_presets_hold_the_whole_model(name: str) -> None:
    """Each element once, or on all ranks: norms, routers, latents and key/value heads."""
    config = preset(name)
    plan = model_plan(config.with_layers(range(min(4, config.num_layers))))
    ranks = next(n for n in reversed(allowed_ranks(plan)) if n <= 8)
    shards = [shard_plan(plan, rank, ranks) for rank in range(ranks)]
    assert all(
        [type(op) for op in layer.operations].count(AllReduce) == (2 if ranks > 1 else 0)
        for shard in shards
        for layer in shard.layers
    )
    by_rank = [{p.name: p for p in shard.parameters()} for shard in shards]
    for parameter in plan.parameters():
        parts = [parameters[parameter.name] for parameters in by_rank]
        if parts[0].cut is None:
            assert {part.shape for part in parts} == {parameter.shape}
            continue
        columns = parameter.elements // parameter.stacked_shape[0]
        held = {
            (rows, part.cut.columns or range(columns))
            for part in parts
            if part.cut is not None
            for rows in part.cut.rows
        }
        assert sum(len(rows) * len(columns) for rows, columns in held) == parameter.elements


@pytest.mark.parametrize(
    ("variant", "changes", "ranks"),
    [
        ("base", {"num_heads": 6, "num_kv_heads": 2}, 4),
        ("base", {"num_heads": 12, "num_kv_heads": 2}, 3),
        ("base", {"intermediate_size": 81}, 2),
        ("base", {"vocab_size": 3}, 6),
        ("lfm2", {"hidden_size": 49}, 6),
        ("qwen3_5", {}, 4),
        ("kimi_linear", {}, 2),
    ],
)
def test_refusals_of_what_does_not_divide(
    variant: str, changes: dict[str, int], ranks: int
) -> None:
    config = dataclasses.replace(tiny_config(variant, 6), bos_token_id=None, eos_token_ids=())
    config = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, check=lambda error: error.field == "tensor_parallel"):
        shard_config(config, 0, ranks)


def test_models_of_transformers_are_refused() -> None:
    plan = model_plan(tiny_config("base", 2))
    held = Parameter("held", (Source("held", (8,)),))
    opaque = Opaque(name="opaque", held=held, activation_bytes=8)
    layers = (LayerPlan((*plan.layers[0].operations, opaque)),)
    plan = dataclasses.replace(plan, layers=layers)
    assert allowed_ranks(plan) == (1,)
    with pytest.raises(ConfigError):
        check_ranks(plan, 2)
