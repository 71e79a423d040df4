"""The memory handler: exact and tight plans, their tables, and the readings of a device."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from stepgraph.cache import device_memory
from stepgraph.cache.memory import (
    MemoryBudget,
    MemoryBudgetError,
    MemoryPlan,
    ModelFootprint,
    plan_memory,
)
from stepgraph.cache.memory_plan import TERMS, format_bytes

GIB = 1 << 30

# About Llama-3.2-1B in bfloat16, blocks of 16 slots.
LLAMA = ModelFootprint(
    weight_bytes=2_471_645_608,
    block_bytes=16 * 32768,
    activation_bytes_per_token=100_000,
    activation_bytes_fixed=1 << 20,
    logits_bytes_per_row=128_256 * 6,
    max_rows=32,
    max_model_len=8192,
    static_bytes_fixed=32 * 8192 * 8,
    static_bytes_per_batch_token=32,
    static_bytes_per_block=4,
    graph_bytes=64 << 20,
)


def sizes(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most)


def footprints() -> st.SearchStrategy[ModelFootprint]:
    return st.builds(
        ModelFootprint,
        weight_bytes=sizes(1 << 40),
        block_bytes=st.integers(1, 1 << 26),
        activation_bytes_per_token=sizes(1 << 20),
        activation_bytes_fixed=sizes(1 << 30),
        logits_bytes_per_row=sizes(1 << 20),
        max_rows=st.integers(1, 512),
        max_model_len=st.integers(1, 1 << 20),
        static_bytes_fixed=sizes(1 << 30),
        static_bytes_per_batch_token=sizes(1 << 12),
        static_bytes_per_block=sizes(1 << 12),
        mask_bytes_per_token_slot=st.sampled_from([0, 1, 2, 4]),
        masks=st.integers(0, 2),
        graph_bytes=sizes(1 << 32),
    )


def written_out(
    footprint: ModelFootprint, blocks: int, tokens: int, block_size: int, reserve: int
) -> int:
    """The bytes of a plan, independently of how the handler writes them."""
    f = footprint
    fixed = f.weight_bytes + f.activation_bytes_fixed + f.static_bytes_fixed + f.graph_bytes
    fixed += reserve + f.logits_bytes_per_row * f.max_rows
    of_blocks = blocks * (f.block_bytes + f.static_bytes_per_block)
    of_tokens = tokens * (f.activation_bytes_per_token + f.static_bytes_per_batch_token)
    return (
        fixed
        + of_blocks
        + of_tokens
        + (f.masks * f.mask_bytes_per_token_slot * tokens * blocks * block_size)
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A random question to the handler, with a budget that is a share of enough or too little."""

    footprint: ModelFootprint
    budget: MemoryBudget
    available: int
    block_size: int
    resident: bool
    ratio: Fraction
    reserve: int

    @property
    def ceiling(self) -> int:
        if self.budget.bytes is not None:
            return self.budget.bytes
        share = math.floor(Fraction(self.budget.fraction) * self.available)
        return share + (self.footprint.weight_bytes if self.resident else 0)

    def total(self, blocks: int, tokens: int) -> int:
        return written_out(self.footprint, blocks, tokens, self.block_size, self.reserve)

    def tokens_of(self, blocks: int) -> int:
        f = self.footprint
        wanted = max(f.max_rows, math.ceil(self.ratio * blocks))
        return min(wanted, f.max_rows * f.max_model_len)

    def solve(self, **fixed: int) -> MemoryPlan:
        plan = plan_memory(
            self.footprint,
            self.budget,
            available_bytes=self.available,
            block_size=self.block_size,
            weights_resident=self.resident,
            batch_tokens_per_block=self.ratio,
            reserve_bytes=self.reserve,
            **fixed,
        )
        assert plan.budget_bytes == self.ceiling
        assert plan.total == self.total(plan.num_blocks, plan.max_batch_tokens) <= self.ceiling
        return plan


@st.composite
def cases(draw: st.DrawFn) -> Case:
    footprint = draw(footprints())
    block_size = draw(st.sampled_from([1, 7, 16, 128]))
    reserve = draw(sizes(1 << 30))
    least = written_out(footprint, 2, footprint.max_rows, block_size, reserve)
    room = max(1, least + draw(st.integers(-(1 << 20), 1 << 42)))
    budget = draw(
        st.sampled_from([MemoryBudget(fraction=f) for f in (0.1, 0.5, 0.9, 1.0)] + [None])
    )
    if budget is None:
        budget = MemoryBudget(bytes=room)
    ratio = Fraction(draw(st.integers(1, 500)), draw(st.integers(1, 5000)))
    return Case(footprint, budget, room, block_size, draw(st.booleans()), ratio, reserve)


def solve_or_prove_too_small(case: Case, least: int, **fixed: int) -> MemoryPlan | None:
    """The plan, or None after checking that the smallest plan, of `least` bytes, does not fit."""
    if least > case.ceiling:
        with pytest.raises(MemoryBudgetError, match=f"need {least} bytes"):
            case.solve(**fixed)
        return None
    return case.solve(**fixed)


@settings(max_examples=1000, deadline=None)
@given(cases())
def test_both_free(case: Case) -> None:
    plan = solve_or_prove_too_small(case, case.total(2, case.tokens_of(2)))
    if plan is None:
        return
    assert plan.max_batch_tokens == case.tokens_of(plan.num_blocks)
    more = plan.num_blocks + 1
    assert case.total(more, case.tokens_of(more)) > case.ceiling


@settings(max_examples=1000, deadline=None)
@given(cases(), st.integers(0, 1 << 16))
def test_batch_tokens_fixed(case: Case, extra: int) -> None:
    tokens = case.footprint.max_rows + extra
    plan = solve_or_prove_too_small(case, case.total(2, tokens), max_batch_tokens=tokens)
    if plan is not None:
        assert plan.max_batch_tokens == tokens
        assert case.total(plan.num_blocks + 1, tokens) > case.ceiling


@settings(max_examples=1000, deadline=None)
@given(cases(), st.integers(2, 1 << 20))
def test_blocks_fixed(case: Case, blocks: int) -> None:
    least = case.total(blocks, case.footprint.max_rows)
    plan = solve_or_prove_too_small(case, least, num_blocks=blocks)
    if plan is None:
        return
    assert plan.num_blocks == blocks
    at_most = case.footprint.max_rows * case.footprint.max_model_len
    if plan.max_batch_tokens < at_most:
        assert case.total(blocks, plan.max_batch_tokens + 1) > case.ceiling
    else:
        assert plan.max_batch_tokens == at_most


@settings(max_examples=300, deadline=None)
@given(cases())
def test_fixing_one_unknown_at_its_solution_returns_the_other(case: Case) -> None:
    try:
        both = case.solve()
    except MemoryBudgetError:
        assume(False)
    by_tokens = case.solve(max_batch_tokens=both.max_batch_tokens)
    # At least as many: with both free one more block may bring a batch token that does not fit.
    assert by_tokens.num_blocks >= both.num_blocks
    by_blocks = case.solve(num_blocks=by_tokens.num_blocks)
    assert by_blocks.max_batch_tokens >= both.max_batch_tokens
    again = case.solve(max_batch_tokens=by_blocks.max_batch_tokens)
    assert (again.num_blocks, again.max_batch_tokens) == (
        by_blocks.num_blocks,
        by_blocks.max_batch_tokens,
    )
    fixed = case.solve(num_blocks=again.num_blocks, max_batch_tokens=again.max_batch_tokens)
    assert fixed == again


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(2, 1 << 12))
def test_cap(case: Case, cap: int) -> None:
    try:
        free = case.solve()
    except MemoryBudgetError:
        assume(False)
    plan = case.solve(cap_blocks=cap)
    assert plan.num_blocks == min(cap, free.num_blocks)
    assert plan.capped == (cap < free.num_blocks)
    assert plan.max_batch_tokens == case.tokens_of(plan.num_blocks)


@settings(max_examples=300, deadline=None)
@given(footprints(), st.sampled_from([1, 16, 100]), st.integers(1, 1 << 30))
@example(LLAMA, 16, 1)
@example(LLAMA, 16, 16)
@example(LLAMA, 16, 17)
def test_budget_of_context(footprint: ModelFootprint, block_size: int, tokens: int) -> None:
    def ask(budget: MemoryBudget) -> MemoryPlan:
        return plan_memory(footprint, budget, available_bytes=1 << 80, block_size=block_size)

    plan = ask(MemoryBudget(context_tokens=tokens))
    assert tokens <= plan.usable_slots < tokens + block_size
    assert plan == ask(MemoryBudget(num_blocks=plan.num_blocks))


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
        plan_memory(LLAMA, budget, available_bytes=16 * GIB, block_size=16)


def test_loaded_weights_are_outside_a_fraction_and_inside_bytes() -> None:
    def blocks(budget: MemoryBudget, resident: bool) -> int:
        free = 80 * GIB - (LLAMA.weight_bytes if resident else 0)
        plan = plan_memory(
            LLAMA,
            budget,
            available_bytes=free,
            block_size=16,
            weights_resident=resident,
            max_batch_tokens=2048,
        )
        return plan.num_blocks

    all_of_it = MemoryBudget(fraction=1.0)
    assert blocks(all_of_it, resident=True) == blocks(all_of_it, resident=False)
    # After loading, half of what is left is more than half of everything less the weights.
    half = MemoryBudget(fraction=0.5)
    saved = LLAMA.weight_bytes // 2 // (LLAMA.block_bytes + LLAMA.static_bytes_per_block)
    assert blocks(half, resident=True) - blocks(half, resident=False) in (saved, saved + 1)
    absolute = MemoryBudget(bytes=40 * GIB)
    assert blocks(absolute, resident=True) == blocks(absolute, resident=False)


def test_cap_of_the_model_serves_a_full_batch() -> None:
    assert LLAMA.most_blocks(16) == 32 * 512 + 1
    assert LLAMA.most_blocks(1000) == 32 * 9 + 1


def test_message_of_a_budget_that_is_too_small() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan_memory(LLAMA, MemoryBudget(bytes=GIB), available_bytes=80 * GIB, block_size=16)
    message = str(caught.value)
    assert "memory budget of 1073741824 bytes (1.00 GiB) is too small" in message
    assert "the null block and 1 block for tokens, with 32 batch tokens" in message
    assert f"need {written_out(LLAMA, 2, 32, 16, 0)} bytes" in message
    for name in TERMS:
        assert name.replace("_", " ") in message
    assert "weights 2.30 GiB, cache 1.00 MiB" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "got none"),
        ({"fraction": 0.5, "bytes": 7}, "got fraction and bytes"),
        ({"fraction": 0.0}, "fraction must be above 0"),
        ({"fraction": 1.5}, "at most 1, got 1.5"),
        ({"fraction": math.nan}, "fraction must be"),
        ({"bytes": 0}, "bytes must be at least 1"),
        ({"context_tokens": 0}, "context_tokens must be at least 1"),
        ({"num_blocks": 1}, "num_blocks must be at least 2, got 1"),
    ],
)
def test_malformed_budget(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(MemoryBudgetError, match=message):
        MemoryBudget(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"available_bytes": -1}, "available_bytes must be at least 0"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"max_batch_tokens": 31}, "max_batch_tokens must be at least 32, one token for each"),
        ({"cap_blocks": 1}, "cap_blocks must be at least 2"),
        ({"reserve_bytes": -1}, "reserve_bytes must be at least 0"),
        ({"batch_tokens_per_block": 0}, "batch_tokens_per_block must be above 0"),
        ({"budget": MemoryBudget(num_blocks=9), "num_blocks": 8}, "num_blocks=8 is given beside"),
    ],
)
def test_malformed_question(arguments: dict[str, object], message: str) -> None:
    good = {
        "footprint": LLAMA,
        "budget": MemoryBudget(fraction=0.9),
        "available_bytes": 80 * GIB,
        "block_size": 16,
    }
    with pytest.raises(MemoryBudgetError, match=message):
        plan_memory(**{**good, **arguments})


def test_malformed_footprint() -> None:
    with pytest.raises(ValueError, match="block_bytes must be at least 1, got 0"):
        dataclasses.replace(LLAMA, block_bytes=0)
    with pytest.raises(ValueError, match="graph_bytes must be at least 0, got -1"):
        dataclasses.replace(LLAMA, graph_bytes=-1)
    with pytest.raises(ValueError, match="masks must be 0, 1 or 2, got 3"):
        dataclasses.replace(LLAMA, masks=3)


def llama_plan(**arguments: object) -> MemoryPlan:
    budget = MemoryBudget(fraction=0.9)
    return plan_memory(
        LLAMA, budget, available_bytes=80 * GIB, block_size=16, reserve_bytes=GIB, **arguments
    )


def test_table_is_aligned_and_complete() -> None:
    plan = llama_plan(max_batch_tokens=2048)
    *table, last = plan.format().splitlines()
    assert [line[:15].strip() for line in table] == [
        *(name.replace("_", " ") for name in TERMS),
        "total",
        "budget",
        "available",
    ]
    assert len({len(line) for line in table}) == 1
    assert table[0].split() == ["weights", "2.30", "GiB"]
    assert last.startswith(f"{plan.num_blocks:,} blocks of 16 slots: {plan.usable_slots:,} tokens")
    assert last.endswith("2,048 tokens a step")


def test_table_shows_the_cap_and_loaded_weights() -> None:
    text = llama_plan(cap_blocks=LLAMA.most_blocks(16), weights_resident=True).format()
    assert "16,385 blocks of 16 slots, all that the context can use: 262,144 tokens" in text
    assert text.startswith("weights (loaded)")


def test_reconciliation() -> None:
    plan = llama_plan()
    measured = {"weights": plan.weights, "cache": plan.cache + 512, "captured_graphs": 0}
    reconciliation = plan.reconcile(measured)
    by_name = {term.name: term for term in reconciliation.terms}
    assert tuple(by_name) == TERMS
    assert by_name["weights"].difference == 0
    assert by_name["cache"].difference == 512
    assert by_name["captured_graphs"].difference == -LLAMA.graph_bytes
    assert by_name["reserve"].measured is by_name["reserve"].difference is None
    assert reconciliation.difference == 512 - LLAMA.graph_bytes
    lines = reconciliation.format().splitlines()
    assert lines[0].split() == ["planned", "measured", "difference"]
    assert lines[2].split()[0] == "cache"
    assert lines[2].endswith("+512 B")
    assert lines[7].split() == ["captured", "graphs", "64.00", "MiB", "0", "B", "-64.00", "MiB"]
    with pytest.raises(ValueError, match="unknown memory terms kv; the terms are weights, cache"):
        plan.reconcile({"kv": 1})


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (-1023, "-1023 B"),
        (1536, "1.50 KiB"),
        (5 << 20, "5.00 MiB"),
        (-(3 << 30), "-3.00 GiB"),
        (7 << 50, "7168.00 TiB"),
    ],
)
def test_human_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


# --- what the device says ---------------------------------------------------------------------


def write_group(directory: Path, version: int, limit: str, usage: int, inactive_file: int) -> None:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limit_name, usage_name, inactive_name = names[version]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / limit_name).write_text(f"{limit}\n")
    (directory / usage_name).write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 12\n{inactive_name} {inactive_file}\n")


def test_headroom_of_nested_groups(tmp_path: Path) -> None:
    write_group(tmp_path / "service", 2, "1000", usage=700, inactive_file=50)
    write_group(tmp_path / "service" / "worker", 2, "max", usage=600, inactive_file=0)
    assert device_memory.cgroup_headroom("0::/service/worker\n", tmp_path) == 350
    write_group(tmp_path / "service" / "worker", 2, "640", usage=600, inactive_file=0)
    assert device_memory.cgroup_headroom("0::/service/worker\n", tmp_path) == 40


def test_headroom_in_a_container(tmp_path: Path) -> None:
    # The path names a group of the host; what is mounted is the container's own.
    write_group(tmp_path / "memory", 1, "1000", usage=1200, inactive_file=100)
    membership = "4:cpu,cpuacct:/x\n3:memory:/docker/abc\n0::/\n"
    assert device_memory.cgroup_headroom(membership, tmp_path) == 0


def test_no_limit(tmp_path: Path) -> None:
    write_group(tmp_path / "a", 2, "max", usage=1, inactive_file=0)
    assert device_memory.cgroup_headroom("0::/a\n", tmp_path) is None
    assert device_memory.cgroup_headroom("2:cpu:/a\n", tmp_path) is None


def test_limit_is_below_what_the_system_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    write_group(tmp_path, 2, "5000", usage=1000, inactive_file=0)
    monkeypatch.setattr(device_memory, "_CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(device_memory, "_CGROUP_ROOT", tmp_path)
    assert device_memory.available_bytes(torch.device("cpu")) == 4000
    write_group(tmp_path, 2, str(1 << 80), usage=1000, inactive_file=0)
    assert 4000 < device_memory.available_bytes(torch.device("cpu")) < 1 << 60


def test_cpu_memory() -> None:
    cpu = torch.device("cpu")
    assert device_memory.is_shared_with_os(cpu)
    before = device_memory.resident_bytes(cpu)
    kept = torch.ones(256 << 20, dtype=torch.uint8)  # more than lies around freed
    assert device_memory.resident_bytes(cpu) - before > kept.nbytes // 2


def test_unknown_device() -> None:
    for ask in (
        device_memory.available_bytes,
        device_memory.is_shared_with_os,
        device_memory.resident_bytes,
    ):
        with pytest.raises(ValueError, match="memory of device meta cannot be read"):
            ask(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_memory() -> None:
    device = torch.device("cuda")
    before, held = device_memory.available_bytes(device), device_memory.resident_bytes(device)
    kept = torch.ones(256 << 20, dtype=torch.uint8, device=device)
    assert device_memory.resident_bytes(device) - held == kept.nbytes
    assert before - device_memory.available_bytes(device) >= kept.nbytes
    assert isinstance(device_memory.is_shared_with_os(device), bool)
