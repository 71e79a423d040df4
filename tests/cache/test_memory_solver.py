"""The memory handler solves exactly: a plan fits its budget, and one more of anything would not."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.cache.memory.handler import (
    MemoryBudgetError,
    MemoryPlan,
    ModelFootprint,
    plan_memory,
)

from ..rigs.cache_rig import layer_group


def sizes(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most)


@st.composite
def footprints(draw: st.DrawFn) -> ModelFootprint:
    windows = draw(st.lists(st.none() | st.integers(1, 1 << 13), min_size=1, max_size=6))
    aligned, per_block = draw(st.sampled_from([1, 64, 256])), draw(sizes(1 << 12))

    def buffers(tokens: int, row_blocks: int) -> tuple[int, int]:
        return -(-8 * tokens // aligned) * aligned + per_block * row_blocks, 9 * row_blocks

    return ModelFootprint(
        weight_bytes=draw(sizes(1 << 40)),
        groups=tuple(layer_group(i, window) for i, window in enumerate(windows)),
        block_size=draw(st.sampled_from([1, 4, 7, 16, 32, 256])),
        block_bytes=draw(st.integers(1, 1 << 26)),
        max_num_seqs=draw(st.integers(1, 512)),
        max_model_len=draw(st.integers(1, 1 << 18)),
        prefill_chunk=draw(st.integers(1, 1 << 12)),
        mixed_rows=draw(st.just(0) | st.integers(1, 512)),
        activation_bytes_fixed=draw(sizes(1 << 30)),
        activation_bytes_per_token=draw(sizes(1 << 20)),
        read_bytes_per_position=draw(st.just(0) | sizes(1 << 12)),
        mask_bytes_per_token_position=draw(st.sampled_from([0, 1, 13, 400])),
        logits_bytes_fixed=draw(sizes(1 << 20)),
        logits_bytes_per_row=draw(sizes(1 << 20)),
        buffer_bytes=buffers,
        graph_bytes=draw(sizes(1 << 32)),
        reserve_bytes=draw(sizes(1 << 30)),
        host_blocks=draw(st.just(0) | sizes(1 << 10)),
        host_shared=draw(st.booleans()),
    )


def written_out(f: ModelFootprint, blocks: int, tokens: int) -> int:
    """The bytes of a plan, independently of how the handler writes them."""
    held = [g.most_blocks for g in f.groups]
    longest = bisect_left(  # the longest request that fits alone
        range(1, f.max_model_len + 1),
        max(blocks, 1),
        key=lambda n: sum(most(n, f.block_size, f.prefill_chunk) for most in held),
    )
    chunk = min(tokens, f.prefill_chunk)
    step = chunk + f.mixed_rows
    row_blocks = max(1, math.ceil(longest / f.block_size))
    positions = row_blocks * f.block_size
    of_prefill = step * f.activation_bytes_per_token + positions * f.read_bytes_per_position
    of_decode = f.max_num_seqs * f.activation_bytes_per_token
    of_decode += f.max_num_seqs * positions * f.read_bytes_per_position
    buffers, mirrors = f.buffer_bytes(chunk, row_blocks)
    on_host = f.host_blocks * f.block_bytes + mirrors
    return (
        f.weight_bytes
        + f.block_bytes * blocks
        + buffers
        + f.activation_bytes_fixed
        + max(of_prefill, of_decode)
        + f.logits_bytes_fixed
        + f.logits_bytes_per_row * f.max_num_seqs
        + f.mask_bytes_per_token_position * max(step, f.max_num_seqs) * positions
        + f.graph_bytes
        + f.reserve_bytes
        + (on_host if f.host_shared else 0)
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A random question to the handler, with a budget that is a share of enough or too little."""

    footprint: ModelFootprint
    ceiling: int
    available: int

    def total(self, blocks: int, tokens: int) -> int:
        return written_out(self.footprint, blocks, tokens)

    def tokens_of(self, blocks: int) -> int:
        f = self.footprint
        wanted = max(f.max_num_seqs + 1, f.block_size * blocks)
        return min(wanted, f.max_num_seqs + f.prefill_chunk)

    def solve(self, *, capped: bool, **fixed: int | None) -> MemoryPlan:
        plan = plan_memory(
            self.footprint,
            available_bytes=self.available,
            budget_bytes=self.ceiling,
            capped=capped,
            **fixed,
        )
        assert plan.budget_bytes == self.ceiling
        assert plan.total == self.total(plan.num_blocks, plan.max_batch_tokens) <= self.ceiling
        return plan


@st.composite
def cases(draw: st.DrawFn) -> Case:
    footprint = draw(footprints())
    least = written_out(footprint, footprint.least_blocks, footprint.max_num_seqs + 1)
    room = max(1, least + draw(st.integers(-(1 << 20), 1 << 24) | sizes(1 << 42)))
    share = draw(st.sampled_from([Fraction(f) for f in (0.1, 0.5, 0.9, 1.0)]))
    return Case(footprint, math.floor(share * room), room)


@settings(max_examples=150)
@given(
    cases(),
    st.sampled_from(["nothing", "cap", "tokens", "blocks", "tokens and blocks"]),
    st.integers(1, 1 << 13),
    st.integers(0, 1 << 20),
)
def test_a_plan_is_maximal(case: Case, fixed: str, extra: int, extra_blocks: int) -> None:
    """Or the smallest plan does not fit."""
    f = case.footprint
    tokens = f.max_num_seqs + extra if "tokens" in fixed else None
    blocks = f.least_blocks + extra_blocks if "blocks" in fixed else None
    at_least = f.least_blocks if blocks is None else blocks
    least_tokens = case.tokens_of(at_least) if blocks is None else f.max_num_seqs + 1
    least = case.total(at_least, tokens or least_tokens)
    given_ = {"num_blocks": blocks, "max_batch_tokens": tokens}
    if least > case.ceiling:
        with pytest.raises(MemoryBudgetError) as refused:
            case.solve(capped=fixed == "cap", **given_)
        assert refused.value.needed_bytes == least
        return
    plan = case.solve(capped=fixed == "cap", **given_)
    if blocks is not None:
        assert plan.num_blocks == blocks
        assert plan.max_batch_tokens == (tokens or plan.max_batch_tokens)
        most = tokens or f.max_num_seqs + f.prefill_chunk
        more = blocks, plan.max_batch_tokens + 1
        assert plan.max_batch_tokens == most or case.total(*more) > case.ceiling
        return
    assert plan.max_batch_tokens == (tokens or case.tokens_of(plan.num_blocks))
    more = plan.num_blocks + 1, tokens or case.tokens_of(plan.num_blocks + 1)
    if plan.capped:
        assert fixed == "cap"
        assert plan.num_blocks == f.most_blocks
    assert plan.capped == (case.total(*more) <= case.ceiling)


@settings(max_examples=60)
@given(footprints(), sizes(1 << 12), sizes(1 << 12))
def test_no_term_falls(footprint: ModelFootprint, blocks: int, tokens: int) -> None:
    """What makes bisection right."""
    at = footprint.terms(blocks, tokens + 1)
    for more in (footprint.terms(blocks + 1, tokens + 1), footprint.terms(blocks, tokens + 2)):
        assert all(more[name] >= at[name] for name in at)


# --- requests and blocks ------------------------------------------------------------------------


@settings(max_examples=60)
@given(footprints(), st.integers(1, 1 << 22))
def test_budget_of_context(footprint: ModelFootprint, tokens: int) -> None:
    plan = plan_memory(footprint, context_tokens=tokens, available_bytes=1 << 90)
    assert plan.context_tokens >= tokens
    assert plan == plan_memory(footprint, num_blocks=plan.num_blocks, available_bytes=1 << 90)
    if plan.num_blocks > footprint.least_blocks:
        assert footprint.context_tokens(plan.num_blocks - 1) < tokens


def hybrid(**changes: int) -> ModelFootprint:
    """Two groups of four layers, one of them sliding over 64 tokens; 16 slots a block."""
    given_ = {
        "block_size": 16,
        "block_bytes": 1 << 14,
        "max_num_seqs": 4,
        "max_model_len": 1000,
        "prefill_chunk": 32,
    } | changes
    groups = (layer_group(0, None, 4), layer_group(1, 64, 4))
    return ModelFootprint(weight_bytes=0, groups=groups, **given_)


def test_sliding_groups_are_capped() -> None:
    footprint = hybrid()
    # 1000 tokens: 63 blocks, and of 63 + 32 tokens that may begin anywhere in a block, 7.
    assert footprint.request_blocks(1000) == 63 + 7
    assert footprint.request_blocks(100) == 7 + 7
    assert footprint.request_blocks(17) == 2 + 2
    assert footprint.most_blocks == 4 * 70 + 1
    assert footprint.longest_request(71) == 1000
    assert footprint.longest_request(70) == 62 * 16
    assert footprint.longest_request(1 + 2 + 2) == 32
    assert footprint.longest_request(1 + 1) == 0
    assert footprint.context_blocks(2017) == 1 + 70 + 70 + 4
    assert footprint.context_tokens(1 + 70 + 70 + 4) == 2032


def test_every_group_takes_a_block_at_least() -> None:
    with pytest.raises(MemoryBudgetError):
        plan_memory(hybrid(), num_blocks=2, available_bytes=1 << 40)
    plan = plan_memory(hybrid(), num_blocks=3, available_bytes=1 << 40)
    assert (plan.longest_request, plan.context_tokens) == (16, 16)


@pytest.mark.parametrize(
    "budget",
    [
        {"num_blocks": 1 << 20},
        {"context_tokens": 1 << 24},
        {"budget_bytes": 20 << 30},
    ],
)
def test_budget_above_what_the_device_has(budget: dict[str, int]) -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        plan_memory(hybrid(), available_bytes=1 << 30, **budget)
    assert refused.value.limit_bytes == 1 << 30


@pytest.mark.parametrize("shared", [True, False])
def test_host_terms_count_where_the_memory_is_one(shared: bool) -> None:
    footprint = dataclasses.replace(
        hybrid(), host_blocks=1000, buffer_bytes=lambda *_: (0, 5000), host_shared=shared
    )
    plan = plan_memory(
        footprint, available_bytes=1 << 31, budget_bytes=1 << 30, max_batch_tokens=64
    )
    assert plan.host_total == 1000 * footprint.block_bytes + 5000
    assert plan.total == sum(plan.terms.values()) - (0 if shared else plan.host_total)
    assert 0 <= (1 << 30) - plan.total < footprint.block_bytes
