"""What the operations of a decode step must read: together they are the floor of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.layers.experts import ExpertsConfig
from stepgraph.runtime.models.plan import fused_layout, model_plan
from stepgraph.runtime.models.resolved_config import ResolvedConfig
from stepgraph.runtime.models.rope import Rope
from stepgraph.runtime.tools.step_costs import floor_bytes, step_bytes

FIELDS: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64}


def windowed(windows: Sequence[int | None]) -> dict[str, Any]:
    """Fields of a model that has layers without a window and layers with one."""
    types = tuple("full_attention" if w is None else "sliding_attention" for w in windows)
    sliding = max((w for w in windows if w is not None), default=None)
    return {"num_layers": len(types), "layer_types": types, "sliding_window": sliding}


SMALL = ModelConfig(
    hidden_size=12,
    intermediate_size=20,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=300,
    tie_word_embeddings=True,
    **windowed((None, 5, None)),
    **FIELDS,
)
PLAN = model_plan(SMALL)


def stored(model: ModelConfig, **dtypes: str) -> ResolvedConfig:
    return ResolvedConfig.resolve(EngineConfig(device="cpu", mode="eager", **dtypes), model)


BFLOAT16 = stored(SMALL, dtype="bfloat16")
counts = st.integers(1, 50)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[ModelConfig, ResolvedConfig]:
    """Models of all traits that kernels have, stored in any way."""
    kind = draw(st.sampled_from(["llama", "qwen3", "gemma2", "gemma3_text"]))
    window = draw(st.integers(1, 40))
    slides = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    kv_heads = draw(counts)
    model = ModelConfig(
        model_type=kind,
        hidden_size=draw(counts),
        intermediate_size=draw(counts),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(counts),
        vocab_size=draw(st.integers(1, 1000)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        sliding_rope=draw(st.sampled_from([None, Rope(1e3)])),
        **windowed([window if slide else None for slide in slides]),
        **FIELDS,
    )
    stored_as = st.sampled_from(["auto", "int8", "fp8"])
    return model, stored(
        model,
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        weight_dtype=draw(stored_as),
        kv_dtype=draw(stored_as),
    )


def weights_of_a_step(model: ModelConfig, config: ResolvedConfig) -> int:
    """Every parameter but an embedding that is not the head, counted one by one."""
    layout = fused_layout(model)
    if not model.tie_word_embeddings:
        del layout["embed_tokens.weight"]
    return sum(
        config.weights.nbytes(*shape, config.dtype)
        if len(shape) == 2
        else config.dtype.itemsize * shape[0]
        for shape in (parameter.shape for parameter in layout.values())
    )


@given(shapes(), counts, counts)
def test_operations_together_are_the_step(
    shape: tuple[ModelConfig, ResolvedConfig], rows: int, context: int
) -> None:
    model, config = shape
    reads = step_bytes(model_plan(model), config, rows=rows, context=context)
    windows = [model.window(layer) for layer in range(model.num_layers)]
    attended = sum(min(context, window or context) for window in windows)
    vector = model.head_dim * config.kv_element_bytes + (0 if config.storage == "model" else 2)
    kv_bytes = attended * 2 * model.num_kv_heads * vector
    assert floor_bytes(reads) == weights_of_a_step(model, config) + rows * kv_bytes
    assert sum(read.launches for read in reads) == 4 + 5 * model.num_layers


def test_operations_by_hand() -> None:
    reads = step_bytes(PLAN, BFLOAT16, rows=3, context=9)
    found = {(read.name, read.window): read for read in reads}
    names = ["begin", "norm_linear", *["decode_attention"] * 2, "output", "gate_up", "down"]
    assert [read.name for read in reads] == [*names, "final_norm", "head", "greedy"]
    new = 3 * 2 * 2 * 8  # keys and values of two heads
    expected = {
        ("begin", None): (1, 0, 0),
        ("norm_linear", None): (3, 2 * (40 * 12 + 12), 0),
        ("decode_attention", None): (2, 0, 9 * new),
        ("decode_attention", 5): (1, 0, 5 * new),
        ("output", None): (3, 2 * 24 * 12, 0),
        ("gate_up", None): (3, 2 * (40 * 12 + 12), 0),
        ("down", None): (3, 2 * 20 * 12, 0),
        ("final_norm", None): (1, 2 * 12, 0),
        ("head", None): (1, 2 * 300 * 12, 0),
        ("greedy", None): (1, 0, 0),
    }
    assert {key: (r.launches, r.weights, r.cache) for key, r in found.items()} == expected


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_mixture_reads_the_experts_that_its_tokens_choose(rows: int) -> None:
    experts = ExpertsConfig(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=10, dense_layers=(1,)
    )
    model = dataclasses.replace(SMALL, model_type="qwen3_moe", experts=experts)
    reads = {r.name: r for r in step_bytes(model_plan(model), BFLOAT16, rows=rows, context=9)}
    assert reads["norm_rows"].launches == reads["route"].launches == reads["experts"].launches == 2
    assert reads["gate_up"].launches == reads["down"].launches == 1
    assert reads["route"].weights == 8 * 12 * 2
    assert reads["experts"].weights == round(8 * (1 - 0.75**rows) * 3 * 10 * 12 * 2)
