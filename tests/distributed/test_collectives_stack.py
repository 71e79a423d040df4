"""The C++ stack on the ranks of a tensor-parallel group, on random plans."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgraph.runtime import kernels
from stepgraph.runtime.distributed.shared_memory_collectives import SharedMemoryCollectives
from stepgraph.runtime.errors import RankError
from stepgraph.runtime.kernels.ops.layer_plan import ModelPlan
from stepgraph.runtime.kernels.ops.stack import stack_obstacle
from stepgraph.runtime.models.sharding import shard_plan

from ..rigs.forked_ranks import ForkedGroup, run_ranks
from ..rigs.rank_stacks import RankRig, bits
from ..rigs.stack_plans import PlanRig, plans
from ..rigs.stack_rig import CHUNKS, assert_agrees

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
PARTS = st.sampled_from([1024, 2048, 1 << 18])  # bytes: of a few rows, of all rows


def check(whole: PlanRig, group: SharedMemoryCollectives) -> list[Any]:
    """Compare the steps of this rank with those of the whole model; return its hidden states."""
    rig = RankRig(whole, group)
    arena, found = whole.arena, []
    for chunks in CHUNKS.values():
        inputs = whole.inputs(chunks)
        whole.arena = arena.clone()
        whole.poison(inputs)
        x_TD = whole.hidden(inputs)
        assert_agrees(rig, inputs, x_TD)  # type: ignore[arg-type]  # has what it takes of a rig
        found.append(bits(rig.step(inputs, x_TD)[0]))
    return found


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    ranks=st.integers(2, 4),
    dtype=DTYPES,
    part_bytes=PARTS,
    threads=st.sampled_from([1, 1, 2]),
)
def test_ranks_agree_with_the_modules_of_the_whole_model(
    data: st.DataObject,
    ranks: int,
    dtype: torch.dtype,
    part_bytes: int,
    threads: int,
) -> None:
    plan = data.draw(plans(all_experts=dtype == torch.bfloat16, ranks=ranks))
    assert stack_obstacle(shard_plan(plan, 0, ranks)) is None
    whole = PlanRig(plan, dtype)
    found = run_ranks(
        ranks, lambda group: check(whole, group), part_bytes=part_bytes, threads=threads
    )
    assert all(each == found[0] for each in found)


@settings(max_examples=1, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans(wide=True, ranks=2), dtype=DTYPES, part_bytes=PARTS)
def test_threads_and_delays_of_ranks_change_nothing(
    plan: ModelPlan, dtype: torch.dtype, part_bytes: int
) -> None:
    whole = PlanRig(plan, dtype)

    def body(group: SharedMemoryCollectives) -> list[Any]:
        rig, found = RankRig(whole, group), []
        for turn in range(3):
            for chunks in CHUNKS.values():
                inputs = whole.inputs(chunks)
                if (turn + group.rank) % 3 == 0:
                    time.sleep(0.002)
                found.append(tuple(map(bits, rig.step(inputs, whole.hidden(inputs)))))
        return found

    part_bytes = max(part_bytes, 2048)
    one, other = run_ranks(2, body, part_bytes=part_bytes)
    assert [out for out, _ in one] == [out for out, _ in other]
    assert run_ranks(2, body, part_bytes=part_bytes, threads=3) == [one, other]


@settings(max_examples=1, deadline=None)
@given(plan=plans(wide=True, ranks=3))
def test_a_rank_that_dies_in_a_step_ends_the_others(plan: ModelPlan) -> None:
    whole = PlanRig(plan, torch.float32)

    def body(group: SharedMemoryCollectives) -> float:
        rig = RankRig(whole, group)
        inputs = whole.inputs(CHUNKS["T=33"])
        x_TD = whole.hidden(inputs)
        while True:
            began = time.monotonic()
            try:
                with group.rank_errors():
                    rig.step(inputs, x_TD)
            except RankError:
                return time.monotonic() - began

    group = ForkedGroup(3, 1 << 18)
    group.start(body, timeout=3.0, threads=2)  # longer than a busy machine keeps a rank waiting
    time.sleep(0.5)
    os.kill(group.processes[1].pid, signal.SIGKILL)
    first, killed, last = group.results()
    assert killed is None
    assert first < 8.0
    assert last < 8.0
