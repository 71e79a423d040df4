"""The memory handler's face: budgets, messages, tables and the reconciliation."""

from __future__ import annotations

import dataclasses
import math

import pytest
from stepgraph.cache.memory.handler import (
    HOST_TERMS,
    TERMS,
    MemoryBudget,
    MemoryBudgetError,
    MemoryPlan,
    ModelFootprint,
    plan_memory,
)
from stepgraph.cache.spec import FullAttentionSpec, LayerGroup

GIB = 1 << 30

# About Llama-3.2-1B in bfloat16, blocks of 16 slots.
LLAMA = ModelFootprint(
    weight_bytes=2_471_645_608,
    groups=(LayerGroup(0, FullAttentionSpec(8, 64, 2), tuple(range(16))),),
    block_size=16,
    activation_bytes_per_token=100_000,
    activation_bytes_fixed=1 << 20,
    logits_bytes_per_row=128_256 * 6,
    max_num_seqs=32,
    max_model_len=8192,
    prefill_chunk=2048,
    static_bytes=lambda tokens, row_blocks: 33 * 4 * row_blocks + 32 * tokens,
    graph_bytes=64 << 20,
)


@pytest.mark.parametrize(
    "budget",
    [
        MemoryBudget(num_blocks=1 << 20),
        MemoryBudget(context_tokens=1 << 24),
        MemoryBudget(bytes=20 * GIB),
    ],
)
def test_budget_above_what_the_device_has(budget: MemoryBudget) -> None:
    expected = r"available memory of 17179869184 bytes .* or free memory on the device"
    with pytest.raises(MemoryBudgetError, match=expected):
        plan_memory(LLAMA, budget, available_bytes=16 * GIB)


def test_loaded_weights_are_outside_a_fraction_and_inside_bytes() -> None:
    def blocks(budget: MemoryBudget, resident: bool) -> int:
        free = 80 * GIB - (LLAMA.weight_bytes if resident else 0)
        plan = plan_memory(
            LLAMA,
            budget,
            available_bytes=free,
            weights_resident=resident,
            max_batch_tokens=2048,
        )
        return plan.num_blocks

    all_of_it = MemoryBudget(fraction=1.0)
    assert blocks(all_of_it, resident=True) == blocks(all_of_it, resident=False)
    # After loading, half of what is left is more than half of everything less the weights.
    half = MemoryBudget(fraction=0.5)
    saved = LLAMA.weight_bytes // 2 // LLAMA.block_bytes
    assert blocks(half, resident=True) - blocks(half, resident=False) in (saved, saved + 1)
    absolute = MemoryBudget(bytes=40 * GIB)
    assert blocks(absolute, resident=True) == blocks(absolute, resident=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "got none"),
        ({"fraction": 0.5, "bytes": 7}, "got fraction and bytes"),
        ({"fraction": 0.0}, "fraction must be above 0"),
        ({"fraction": 1.5}, "at most 1, got 1.5"),
        ({"fraction": math.nan}, "fraction must be"),
    ],
)
def test_malformed_budget(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(MemoryBudgetError, match=message):
        MemoryBudget(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_tokens_per_block": 0}, "batch_tokens_per_block must be above 0"),
        (
            {"budget": MemoryBudget(num_blocks=9), "num_blocks": 8},
            "num_blocks=8 and a budget of 9 blocks",
        ),
    ],
)
def test_malformed_question(arguments: dict[str, object], message: str) -> None:
    good = {
        "footprint": LLAMA,
        "budget": MemoryBudget(fraction=0.9),
        "available_bytes": 80 * GIB,
    }
    with pytest.raises(MemoryBudgetError, match=message):
        plan_memory(**{**good, **arguments})


def test_malformed_footprint() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        dataclasses.replace(LLAMA, block_size=0)
    with pytest.raises(ValueError, match="at least one layer group, got none"):
        dataclasses.replace(LLAMA, groups=())
    with pytest.raises(ValueError, match="graph_bytes must be at least 0, got -1"):
        dataclasses.replace(LLAMA, graph_bytes=-1)


def llama_plan(**arguments: object) -> MemoryPlan:
    budget = MemoryBudget(fraction=0.9)
    return plan_memory(LLAMA, budget, available_bytes=80 * GIB, reserve_bytes=GIB, **arguments)


def test_reconciliation() -> None:
    plan = llama_plan()
    measured = {"weights": plan.weights, "cache": plan.cache + 512, "captured_graphs": 0}
    reconciliation = plan.reconcile(measured, {"logits": "from 1 row"})
    by_name = {term.name: term for term in reconciliation.terms}
    assert tuple(by_name) == TERMS
    assert by_name["weights"].difference == 0
    assert by_name["cache"].difference == 512
    assert by_name["captured_graphs"].difference == -LLAMA.graph_bytes
    assert by_name["reserve"].measured is by_name["reserve"].difference is None
    assert reconciliation.difference == 512 - LLAMA.graph_bytes
    assert by_name["logits"].note == "from 1 row"
    with pytest.raises(ValueError, match="unknown memory terms kv; the terms are weights, cache"):
        plan.reconcile({"kv": 1})


def test_host_terms_count_where_the_memory_is_one() -> None:
    swapping = dataclasses.replace(
        LLAMA, host_blocks=1000, host_buffer_bytes=lambda tokens, row_blocks: 5000
    )

    def plan(shared: bool) -> MemoryPlan:
        footprint = dataclasses.replace(swapping, host_shared=shared)
        budget = MemoryBudget(bytes=40 * GIB)
        return plan_memory(footprint, budget, available_bytes=80 * GIB, max_batch_tokens=64)

    one, two = plan(shared=True), plan(shared=False)
    assert one.host_total == two.host_total == 1000 * LLAMA.block_bytes + 5000
    assert one.total == sum(one.terms().values())
    assert two.total == sum(two.terms().values()) - two.host_total
    assert two.num_blocks - one.num_blocks in (1000, 1001)
    assert set(HOST_TERMS) < set(TERMS)
