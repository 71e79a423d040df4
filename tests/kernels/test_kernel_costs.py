"""The kernels of a decode step in plain numbers: together they are the step, and what it leaves out
is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.profiling.roofline import floor_seconds
from stepgraph.runtime.models.config import ModelConfig, Rope
from stepgraph.runtime.models.families import ExpertsConfig
from stepgraph.runtime.models.layout import fused_layout
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.tools.step_costs import (
    DEPENDENT_EDGE_SECONDS,
    EDGE_SECONDS,
    FEW_ROWS,
    StoredSizes,
    floor_bytes,
    kernel_costs,
    predicted_seconds,
)

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
SIZES = StoredSizes(lambda n, k: 2 * n * k, element_bytes=2, kv_vector_bytes=8)
counts = st.integers(1, 50)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[ModelConfig, StoredSizes]:
    """Models of all traits that kernels have, stored in any way."""
    number, scales = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
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
    element_bytes = draw(st.sampled_from([2, 4]))
    return model, StoredSizes(
        lambda n, k: n * k * number + (4 * n if scales else 0), element_bytes, draw(counts)
    )


def weights_of_a_step(model: ModelConfig, sizes: StoredSizes) -> int:
    """Every parameter but an embedding that is not the head, counted one by one."""
    layout = fused_layout(model)
    if not model.tie_word_embeddings:
        del layout["embed_tokens.weight"]
    return sum(
        sizes.matrix_bytes(*shape) if len(shape) == 2 else sizes.element_bytes * shape[0]
        for shape in (parameter.shape for parameter in layout.values())
    )


@given(shapes(), counts, counts, counts, st.integers(0, 4))
def test_the_kernels_together_are_the_step(
    shape: tuple[ModelConfig, StoredSizes], rows: int, context: int, splits: int, parts: int
) -> None:
    model, sizes = shape
    costs = kernel_costs(
        model_plan(model),
        sizes,
        rows=rows,
        context=context,
        splits=splits,
        parts=lambda operation, n, k: parts,
    )
    windows = [model.window(layer) for layer in range(model.num_layers)]
    attended = sum(min(context, window or context) for window in windows)
    kv_bytes = attended * 2 * model.num_kv_heads * sizes.kv_vector_bytes
    assert floor_bytes(costs) == weights_of_a_step(model, sizes) + rows * kv_bytes
    others = sum(cost.launches * cost.other_bytes for cost in costs)
    everything = sum(cost.launches * cost.bytes for cost in costs)
    assert everything == floor_bytes(costs) + others
    assert all(cost.other_bytes > 0 for cost in costs)
    assert sum(cost.launches for cost in costs) == 3 + 5 * model.num_layers
    seconds = predicted_seconds(costs, 1e9, edge_seconds=2e-6)
    kernels = sum(cost.launches * cost.kernels for cost in costs)
    assert seconds == pytest.approx(everything / 1e9 + 2e-6 * kernels)
    fewest = 3 + 5 * model.num_layers
    assert kernels == fewest if rows <= FEW_ROWS else kernels > fewest


def test_each_kernel_by_hand() -> None:
    costs = kernel_costs(PLAN, SIZES, rows=3, context=9, splits=2)
    found = {(cost.name, cost.window): cost for cost in costs}
    names = ["begin", "norm_linear", *["decode_attention"] * 2, "combine_output", "gate_up", "down"]
    assert [cost.name for cost in costs] == [*names, "head", "greedy"]
    x, qkv, partials = 3 * 12 * 2, 3 * 40 * 2, 3 * 6 * 2 * (4 + 2) * 4
    new = 3 * 2 * 2 * 8  # keys and values of two heads
    inner, maxima, rotations = 3 * 20 * 2, 3 * 10, 3 * 4 * 4
    expected = {
        ("begin", None): (1, 0, 0, x + x + rotations),
        ("norm_linear", None): (3, 2 * (40 * 12 + 12), 0, x + qkv),
        ("decode_attention", None): (2, 0, 9 * new, qkv + rotations + new + partials),
        ("decode_attention", 5): (1, 0, 5 * new, qkv + rotations + new + partials),
        ("combine_output", None): (3, 2 * 24 * 12, 0, partials + 2 * x),
        ("gate_up", None): (3, 2 * (40 * 12 + 12), 0, x + inner),
        ("down", None): (3, 2 * 20 * 12, 0, inner + 2 * x),
        ("head", None): (1, 2 * (300 * 12 + 12), 0, x + 3 * 300 * 2 + maxima * 8),
        ("greedy", None): (1, 0, 0, maxima * 4 + 3 * 24),
    }
    assert {
        key: (cost.launches, cost.weight_bytes, cost.cache_bytes, cost.other_bytes)
        for key, cost in found.items()
    } == expected


def test_products_of_many_rows_by_hand() -> None:
    """The library's, then a kernel of this package in one part and in three."""
    x, qkv, inner, logits = 8 * 12 * 2, 8 * 40 * 2, 8 * 20 * 2, 8 * 300 * 2
    attended, both = 8 * 24 * 2, 2 * 8 * 4  # a float32 of each row, written and read
    bare = {
        "norm_linear": x + qkv + 2 * x,
        "combine_output": attended + 2 * x,
        "gate_up": x + inner + 2 * x,
        "down": inner + 2 * x,
        "head": x + logits + 2 * x,
    }
    behind = {
        0: (0, 2 * x, 4 * inner, 2 * x, logits),
        1: (0, 0, 0, 0, 0),
        3: (both * 3 * 40, both * 3 * 12, both * 3 * 40, both * 3 * 12, both * 3 * 300),
    }
    kernels = {0: (2, 2, 3, 2, 3), 1: (2, 1, 2, 1, 2), 3: (3, 2, 3, 2, 3)}
    for parts in (0, 1, 3):
        costs = kernel_costs(
            PLAN, SIZES, rows=8, context=9, splits=1, parts=lambda *_, parts=parts: parts
        )
        found = {cost.name: cost for cost in costs if cost.name in bare}
        assert tuple(found[name].kernels for name in bare) == kernels[parts]
        assert {found[name].library_kernels for name in bare} == {int(parts == 0)}
        chunks = 8 * 8 * (1 if parts == 0 else 3)  # of the vocabulary: 1024 tokens each, or 128
        for name, more in zip(bare, behind[parts], strict=True):
            assert found[name].other_bytes == bare[name] + more + chunks * (name == "head")


def test_edges_of_the_library_are_not_dependent() -> None:
    (cost,) = {
        cost
        for cost in kernel_costs(PLAN, SIZES, rows=8, context=9, splits=1)
        if cost.name == "norm_linear"
    }
    assert cost.edge_seconds(0.0) == pytest.approx(2 * EDGE_SECONDS)
    dependent = cost.edge_seconds(DEPENDENT_EDGE_SECONDS)
    assert dependent == pytest.approx(2 * EDGE_SECONDS)  # instead of one of both and one behind
    assert cost.edge_seconds(2e-6) == pytest.approx(4e-6)


def test_time_is_bytes_and_edges() -> None:
    costs = kernel_costs(PLAN, SIZES, rows=1, context=4, splits=1)
    assert costs[1].seconds(2e9) == costs[1].bytes / 2e9
    seconds = [
        predicted_seconds(costs, 1e12, edge) for edge in (0.0, DEPENDENT_EDGE_SECONDS, EDGE_SECONDS)
    ]
    assert seconds[1] == predicted_seconds(costs, 1e12)
    assert seconds[1] - seconds[0] == pytest.approx(18 * 0.35e-6)
    assert seconds[2] - seconds[0] == pytest.approx(18 * 1.3e-6)
    assert seconds[0] >= floor_seconds(floor_bytes(costs), 1e12)


def test_windows_and_weights_in_fewer_bytes_count_less() -> None:
    def floor(windows: Sequence[int | None] = (None, 5, None), number: int = 2) -> int:
        model = dataclasses.replace(SMALL, **windowed(windows))
        sizes = SIZES._replace(matrix_bytes=lambda n, k: number * n * k)
        return floor_bytes(kernel_costs(model_plan(model), sizes, rows=2, context=30, splits=1))

    assert floor((5, 5, 5)) < floor() < floor((None,) * 3)
    assert floor((40,) * 3) == floor((None,) * 3)
    assert floor(number=1) < floor()


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_mixture_reads_the_experts_that_its_tokens_choose(rows: int) -> None:
    experts = ExpertsConfig(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=10, dense_layers=(1,)
    )
    model = dataclasses.replace(SMALL, model_type="qwen3_moe", experts=experts)
    costs = {c.name: c for c in kernel_costs(
        model_plan(model), SIZES, rows=rows, context=9, splits=1
    )}  # fmt: skip
    assert costs["norm_rows"].launches == costs["route"].launches == costs["experts"].launches == 2
    assert costs["gate_up"].launches == costs["down"].launches == 1
    assert costs["route"].weight_bytes == 8 * 12 * 2
    chosen = 8 * (1 - 0.75**rows)
    assert costs["experts"].weight_bytes == round(chosen * 3 * 10 * 12 * 2)
