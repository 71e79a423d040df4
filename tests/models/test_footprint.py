"""What is promised before a weight is loaded is what an engine holds afterwards."""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.cache.memory.handler import MemoryBudgetError
from stepgraph.cache.spec import group_layers, row_layout
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.runtime import ConfigError, EngineConfig
from stepgraph.runtime.engine.memory import Phase, model_footprint, weight_bytes
from stepgraph.runtime.engine.startup import start
from stepgraph.runtime.execution.inputs import DeviceRows, StepInputs
from stepgraph.runtime.execution.outputs import PromptScorer
from stepgraph.runtime.execution.step_key import most_table_updates
from stepgraph.runtime.kernels import (
    Kernels,
    load_cpu_ops,
    pack_parts,
    reference_experts,
    reference_linear,
    reference_paged_attention,
    select_kernels,
)
from stepgraph.runtime.kernels.choice import no_parts
from stepgraph.runtime.kernels.ops.packed_parts import parts_bytes
from stepgraph.runtime.kernels.weights import FP8, INT8, MODEL, WeightStorage
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.decoder import Decoder
from stepgraph.runtime.models.plan import model_plan, plan_of
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.models.sharding import allowed_ranks
from transformers import AutoConfig

from ..rigs.engine_rig import Open
from ..rigs.sharding_rig import Meeting, ThreadCollectives, random_decoder, tiny_config
from ..rigs.tiny_models import Tiny
from .test_sharding_plans import splits

CPU = torch.device("cpu")


def kernels_that(pack: bool, weights: WeightStorage = MODEL) -> Kernels:
    if pack:
        load_cpu_ops()
    return Kernels(
        name="test",
        attention=reference_paged_attention,
        linear=reference_linear,
        experts=reference_experts,
        pack_parts=pack_parts if pack else None,
        parts_bytes=parts_bytes if pack else no_parts,
        bounded_by_length=pack,
        masks=0 if pack else 1,
        weights=weights,
    )


@settings(max_examples=150, deadline=None)
@given(
    splits(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([MODEL, INT8, FP8]),
)
def test_weights_before_and_after_loading(
    split: tuple[ModelConfig, int], dtype: torch.dtype, pack: bool, weights: WeightStorage
) -> None:
    """Packed and not, of one rank or several; each expert is padded to whole blocks."""
    config, ranks = split
    kernels = kernels_that(pack, weights)
    if ranks not in allowed_ranks(model_plan(config)):
        ranks = 1
    for rank in range(ranks):
        if ranks > 1:
            config = dataclasses.replace(config, shard=(rank, ranks))
            group = ThreadCollectives(rank, Meeting(ranks))
            kernels = dataclasses.replace(kernels, collectives=group)
        decoder = random_decoder(config, kernels, dtype)
        assert decoder.weight_bytes == weight_bytes(decoder.plan, kernels, dtype)


EXPERTS = dataclasses.replace(
    tiny_config("qwen3_moe", 1).with_layers([0, 1, 2]), tie_word_embeddings=False
)
"""Layers with experts, an MLP and experts."""


def test_bytes_of_a_step() -> None:
    kernels = select_kernels(CPU, "eager", torch.float32)
    decoder = random_decoder(EXPERTS, kernels, torch.float32)
    hidden, width, experts, chosen = 48, 21, 7, 3
    expert = 4 * 3 * hidden * width  # bytes
    others = decoder.weight_bytes - 2 * experts * expert - 4 * 97 * hidden
    assert decoder.weight_bytes_read(1) == others + 2 * chosen * expert
    used = experts * (1 - (1 - chosen / experts) ** 2)
    assert decoder.weight_bytes_read(2) == round(others + 2 * used * expert)
    assert decoder.weight_bytes_read(1000) == others + 2 * experts * expert


@settings(max_examples=150, deadline=None)
@given(
    splits(),
    st.integers(1, 5000),
    st.sampled_from([1, 4, 16, 256]),
    st.integers(1, 40),
    st.integers(1, 700),
    st.sampled_from(["auto", "int8", "fp8"]),
    st.integers(1, 700),
)
def test_static_buffers_to_the_byte(
    split: tuple[ModelConfig, int],
    positions: int,
    block_size: int,
    rows: int,
    chunk: int,
    kv_dtype: str,
    tokens: int,
) -> None:
    model = dataclasses.replace(split[0], max_position_embeddings=positions)
    config = ResolvedConfig.resolve(
        EngineConfig(
            device="cpu",
            mode="eager",
            block_size=block_size,
            max_num_seqs=rows,
            prefill_chunk=chunk,
            kv_dtype=kv_dtype,
        ),
        model,
    )
    groups = group_layers(plan_of(model).states)
    footprint = model_footprint(model, config, kernels_that(False), groups, host_shared=True)
    fitted = config.fit_to_cache(
        max_model_len=model.max_position_embeddings, max_batch_tokens=tokens
    )
    inputs = StaticBuffers(
        StepInputs[torch.Tensor],
        StepInputs.layout(
            max_num_seqs=rows,
            prefill_tokens=fitted.prefill_tokens,
            prefill_rows=config.prefill_rows,
            table_updates=most_table_updates(fitted, len(groups)),
        ),
        CPU,
    )
    state = DeviceRows.of(fitted, model, len(groups), CPU)
    scorer = PromptScorer(
        cast(Decoder, SimpleNamespace(config=model, dtype=config.dtype, device=CPU)),
        inputs.device.next_ids,
        max_num_seqs=rows,
    )
    terms = footprint.terms(footprint.most_blocks, tokens)
    assert terms["static_buffers"] == inputs.nbytes + state.nbytes + scorer.nbytes
    assert terms["host_buffers"] == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["base", "odd", "micro", "lfm2", "qwen3_5"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kv_dtype": "int8", "max_num_seqs": 3},
        {"weight_dtype": "int8", "dtype": "bfloat16"},
        {"weight_dtype": "fp8", "dtype": "bfloat16"},
        {"host_cache_bytes": 1 << 18, "block_size": 4},
        {"memory_tokens": 77, "prefill_chunk": 24, "max_num_seqs": 2},
        {"prompt_embeds": True, "num_blocks": 9},
        {"structured_output": True, "dtype": "bfloat16", "max_num_seqs": 3},
    ],
    ids=str,
)
def test_what_an_engine_holds(open_engine: Open, variant: str, config: dict[str, Any]) -> None:
    engine = open_engine(variant, **config)
    memory = engine.stats()["memory"]
    names = ["weights", "cache", "static_buffers", "host_cache", "host_buffers"]
    if plan_of(engine.model_config).row_states:
        names += ["row_state", "snapshots"]
    for name in names:
        assert memory[name]["planned"] == memory[name]["measured"], name
    assert memory["captured_graphs"]["planned"] == memory["captured_graphs"]["measured"] == 0
    assert (memory["host_cache"]["measured"] > 0) == ("host_cache_bytes" in config)


def test_a_cuda_device_is_measured_by_its_allocator(tiny: Tiny) -> None:
    """Whatever the tensors say of their sizes. The host's are not in it."""
    config = EngineConfig(device="cpu", mode="eager", max_num_seqs=2, host_cache_bytes=1 << 18)
    parts = start(tiny("micro").directory, config, progress=False)
    held = {"load": 1000, "cache": 200, "host_cache": 9, "static_buffers": 30, "prepare": 4}
    ends = list(accumulate(held.values(), initial=7))
    on_cuda = dataclasses.replace(
        parts,
        config=dataclasses.replace(parts.config, device=torch.device("cuda")),
        phases=tuple(
            Phase(name, before, after, 0.5)
            for name, (before, after) in zip(held, pairwise(ends), strict=True)
        ),
    )
    terms = on_cuda.reconcile()
    measured = {name: terms[name]["measured"] for name in ("weights", "cache", "static_buffers")}
    assert measured == {"weights": 1000, "cache": 200, "static_buffers": 30}
    assert not any(terms[name]["note"] for name in measured)
    ((_, host),) = parts.runner.blocks.arenas
    assert host is not None
    assert terms["host_cache"]["measured"] == host.nbytes
    assert terms["host_buffers"]["measured"] == parts.runner.inputs.nbytes


def test_a_small_cache_shortens_rows_and_reads(open_engine: Open) -> None:
    """What rows cannot grow to needs no table and no mask."""
    small = open_engine("base", num_blocks=5)
    large = open_engine("base")
    assert small.max_model_len == 4 * 16
    assert large.max_model_len == 256
    for name in ("static_buffers", "activations", "attention_masks"):
        sizes = [engine.stats()["memory"][name]["planned"] for engine in (small, large)]
        assert sizes[0] < sizes[1], name


def test_weights_that_are_unpacked_to_be_multiplied(open_engine: Open) -> None:
    """In float32, a layer's largest beside its activations and the head beside the logits."""
    kinds = ("auto", "int8", "fp8")
    plans = [open_engine("base", weight_dtype=kind).stats()["memory"] for kind in kinds]
    for plan in plans[1:]:
        grown = {
            name: plan[name]["planned"] - plans[0][name]["planned"]
            for name in ("activations", "logits")
        }
        assert grown == {"activations": 4 * 160 * 48, "logits": 4 * 97 * 48}


@pytest.mark.parametrize("name", ["base", "odd", "gemma2"])
def test_the_plan_has_room_for_what_the_stack_of_layers_keeps(open_engine: Open, name: str) -> None:
    engine = open_engine(name, mode="compile")
    activations = engine.stats()["memory"]["activations"]
    assert 0 < activations["measured"] <= activations["planned"]


@pytest.mark.parametrize(("size", "error"), [(100, ConfigError), (1 << 40, MemoryBudgetError)])
def test_host_caches_smaller_than_a_block_or_larger_than_the_budget(
    open_engine: Open, size: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        open_engine("base", host_cache_bytes=size)


def test_published_snapshots() -> None:
    """As in docs/hybrid-models.md: Qwen3.5 27B and LFM2 1.2B."""
    delta = {f"linear_num_{kind}_heads": n for kind, n in (("key", 16), ("value", 48))}
    delta |= {f"linear_{kind}_head_dim": 128 for kind in ("key", "value")}
    conv = [
        "conv" if layer not in (2, 5, 8, 10, 12, 14) else "full_attention" for layer in range(16)
    ]
    for model_type, fields, sizes in (
        ("qwen3_5_text", {"num_hidden_layers": 64, "hidden_size": 5120, **delta}, (146.8, 2505)),
        ("lfm2", {"layer_types": conv, "num_hidden_layers": 16, "hidden_size": 2048}, (0.08, 40)),
    ):
        config = AutoConfig.for_model(model_type, **fields).to_dict()
        layout = row_layout(plan_of(ModelConfig.from_hf(config, {})).row_states, itemsize=2)
        snapshot, token = sizes
        assert layout.snapshot_bytes / 2**20 == pytest.approx(snapshot, abs=0.05)
        assert layout.token_bytes / 2**10 == pytest.approx(token, abs=0.5)
