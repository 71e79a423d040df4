"""The C++ stack on random plans: every trait it lists, layers that differ, odd sizes."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels import WeightStorage
from stepgraph.runtime.kernels.ops.layer_plan import ModelPlan
from stepgraph.runtime.kernels.ops.stack import stack_obstacle

from ..rigs.stack_plans import PlanRig, plans
from ..rigs.stack_rig import CHUNKS, assert_agrees
from ..rigs.thread_rig import kernel_threads, other_threads, starved

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

FORMS: list[tuple[torch.dtype, WeightStorage]] = list(
    itertools.product((torch.float32, torch.bfloat16), ("model", "int8"))
)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), form=st.sampled_from(FORMS), seed=st.integers(0, 99))
def test_random_plans_agree_with_the_modules(
    data: st.DataObject, form: tuple[torch.dtype, WeightStorage], seed: int
) -> None:
    plan = data.draw(plans(all_experts=form[0] == torch.bfloat16))
    assert stack_obstacle(plan) is None
    rig = PlanRig(plan, *form, seed=seed)
    arena = rig.arena
    for chunks in CHUNKS.values():
        inputs = rig.inputs(chunks)
        rig.arena = arena.clone()
        rig.poison(inputs)
        assert_agrees(rig, inputs, rig.hidden(inputs))


@settings(max_examples=15, deadline=None)
@given(plan=plans(wide=True), form=st.sampled_from(FORMS))
def test_rows_are_independent_of_batch_and_threads(
    plan: ModelPlan, form: tuple[torch.dtype, WeightStorage]
) -> None:
    rig = PlanRig(plan, *form)
    inputs = rig.inputs(CHUNKS["T=130"])
    x_TD = rig.hidden(inputs)
    expected, expected_arena = rig.step(inputs, x_TD)
    for count in (2, 3):
        with kernel_threads(count):
            out, arena = rig.step(inputs, x_TD)
            assert torch.equal(out, expected)
            assert torch.equal(arena, expected_arena)
            alone = rig.inputs([CHUNKS["T=130"][2]])
            assert torch.equal(rig.step(alone, x_TD[129:])[0], expected[129:])


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux' schedulers")
def test_starved_threads_change_nothing() -> None:
    @settings(max_examples=4, deadline=None)
    @given(plan=plans(wide=True))
    def check(plan: ModelPlan) -> None:
        rig = PlanRig(plan, torch.bfloat16)
        steps = [(inputs := rig.inputs(CHUNKS[name]), rig.hidden(inputs)) for name in CHUNKS]
        expected = [rig.step(*step) for step in steps]
        with kernel_threads(4):
            rig.step(*steps[-1])
        with kernel_threads(4), starved(other_threads()):
            for _ in range(5):
                for step, (out, arena) in zip(steps, expected, strict=True):
                    found, found_arena = rig.step(*step)
                    assert torch.equal(found, out)
                    assert torch.equal(found_arena, arena)

    check()


def test_what_an_earlier_step_left_behind_is_not_read() -> None:
    @settings(max_examples=10, deadline=None)
    @given(plan=plans(), form=st.sampled_from(FORMS))
    def check(plan: ModelPlan, form: tuple[torch.dtype, WeightStorage]) -> None:
        rig = PlanRig(plan, *form)
        nan = rig.inputs(CHUNKS["T=130"])
        for chunks in CHUNKS.values():
            inputs = rig.inputs(chunks)
            x_TD = rig.hidden(inputs)
            expected, _ = rig.step(inputs, x_TD)
            rig.step(nan, torch.full_like(rig.hidden(nan), torch.nan))
            assert torch.equal(rig.step(inputs, x_TD)[0], expected)

    check()
