"""Swap or compute again: the choice, its price, and how the price is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepgraph.runtime.engine import startup
from stepgraph.runtime.engine.startup import preemption_policy
from stepgraph.runtime.scheduling.step_budget import PreemptionPolicy


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "swaps"),
    [(1, 0, False), (1, 20, False), (1, 21, True), (2, 40, False), (2, 41, True)],
)
def test_a_block_crosses_twice(num_blocks: int, num_tokens: int, swaps: bool) -> None:
    policy = PreemptionPolicy("auto", block_seconds=10.0, token_seconds=1.0)
    assert policy.swaps(num_blocks, num_tokens) == swaps


class FakeHostArena:
    """Takes a second for each block it copies."""

    def __init__(self, clock: list[float], num_blocks: int, arena_blocks: int) -> None:
        self.clock = clock
        self.num_blocks = num_blocks
        self.arena_blocks = arena_blocks

    def copy_blocks(self, copy: str, pairs: list[tuple[int, int]]) -> None:
        if copy == "from_host":
            pairs = [(block, host) for host, block in pairs]
        else:
            assert copy == "to_host"
        assert all(0 < block < self.arena_blocks for block, _ in pairs), "the null block is taboo"
        assert all(0 <= host < self.num_blocks for _, host in pairs)
        self.clock[0] += len(pairs)


def fake_runner(clock: list[float], host_blocks: int, arena_blocks: int = 100) -> Any:
    """Prefills 32 tokens in a quarter of a second."""
    key = SimpleNamespace(size=32)

    def run(launched: object) -> None:
        assert launched is key
        clock[0] += 0.25

    arena = FakeHostArena(clock, host_blocks, arena_blocks)
    return SimpleNamespace(
        host_arena=arena if host_blocks else None,
        blocks=SimpleNamespace(copy=arena.copy_blocks),
        num_blocks=arena_blocks,
        device=torch.device("cpu"),
        sizes=SimpleNamespace(
            tokens=SimpleNamespace(largest=32),
            read_blocks=SimpleNamespace(largest=7),
            prefill_key=lambda tokens, width, full: key if tokens == 32 and not full else None,
        ),
        run=run,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(startup.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(("host_blocks", "arena_blocks"), [(50, 100), (1, 100), (50, 2), (3, 5)])
def test_auto_measures_both_ways(clock: list[float], host_blocks: int, arena_blocks: int) -> None:
    policy = preemption_policy(fake_runner(clock, host_blocks, arena_blocks), "auto")
    assert policy == PreemptionPolicy("auto", block_seconds=1.0, token_seconds=0.25 / 32)


@pytest.mark.parametrize("choice", ["auto", "swap", "recompute"])
def test_without_a_host_arena_all_is_computed_again(clock: list[float], choice: Any) -> None:
    assert preemption_policy(fake_runner(clock, 0), choice) == PreemptionPolicy("recompute")
    assert clock == [0.0]
