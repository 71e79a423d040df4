"""The memory handler's face: budgets, messages, tables and the reconciliation."""

from __future__ import annotations

import dataclasses

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
