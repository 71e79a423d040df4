"""The decoder's layers as one operation against the modules that they are written down as."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.cache.arena import Storage
from stepgraph.runtime import kernels
from stepgraph.runtime.kernels import RaggedBatch
from stepgraph.runtime.kernels.ops.attention import Attend
from stepgraph.runtime.kernels.ops.layer_plan import LayerPlan, ModelPlan
from stepgraph.runtime.kernels.ops.stack import stack_obstacle
from stepgraph.runtime.kernels.weights import INT8, MODEL, WeightStorage
from stepgraph.runtime.loading.loader import random_weights
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.models.presets import preset
from torch.multiprocessing.reductions import StorageWeakRef

from ..rigs.stack_plans import PlanRig, plans
from ..rigs.stack_rig import CHUNKS, LENGTH, ROWS, Rig, assert_agrees
from ..rigs.thread_rig import kernel_threads, other_threads, starved
from ..rigs.tiny_models import Tiny

pytestmark = pytest.mark.skipif(not kernels.have_compiler(), reason="needs a C++ compiler")

M_PERTURB = -6
"""`mallopt`'s option to fill freed memory, in malloc.h."""

FORMS: list[tuple[torch.dtype, WeightStorage]] = list(
    itertools.product((torch.float32, torch.bfloat16), (MODEL, INT8))
)
STORED_FORMS: list[tuple[torch.dtype, WeightStorage, Storage]] = [
    *((*form, "model") for form in FORMS),
    *((torch.float32, MODEL, storage) for storage in ("int8", "fp8")),
]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), form=st.sampled_from(STORED_FORMS), seed=st.integers(0, 99))
def test_random_plans_agree_with_the_modules(
    data: st.DataObject, form: tuple[torch.dtype, WeightStorage, Storage], seed: int
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


@pytest.mark.parametrize(
    ("weights", "name", "wrong"),
    [
        (INT8, "weight", torch.zeros(999, dtype=torch.uint8)),
        (INT8, "scales", torch.ones(64)),
        (MODEL, "weight", torch.zeros(3, 4, 32, 2, dtype=torch.bfloat16)),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tiny: Tiny, weights: WeightStorage, name: str, wrong: torch.Tensor
) -> None:
    rig = Rig.of(tiny("base"), torch.bfloat16, weights=weights)
    down = rig.decoder.layers[1].get_submodule("down")
    setattr(down, name, torch.nn.Parameter(wrong, False))
    with pytest.raises(RuntimeError):
        rig.decoder.store([])


@settings(max_examples=8, deadline=None)
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
            spoiled = x_TD.clone()
            spoiled[79] = torch.nan  # the last token of the first row
            out, _ = rig.step(inputs, spoiled)
            assert out[79].isnan().all()
            others = torch.arange(130) != 79
            assert torch.equal(out[others], expected[others])


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux' schedulers")
@settings(max_examples=4, deadline=None)
@given(plan=plans(wide=True))
def test_starved_threads_change_nothing(plan: ModelPlan) -> None:
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


@settings(max_examples=10, deadline=None)
@given(plan=plans(), form=st.sampled_from(FORMS))
def test_what_an_earlier_step_left_behind_is_not_read(
    plan: ModelPlan, form: tuple[torch.dtype, WeightStorage]
) -> None:
    rig = PlanRig(plan, *form)
    nan = rig.inputs(CHUNKS["T=130"])
    for chunks in CHUNKS.values():
        inputs = rig.inputs(chunks)
        x_TD = rig.hidden(inputs)
        expected, _ = rig.step(inputs, x_TD)
        rig.step(nan, torch.full_like(rig.hidden(nan), torch.nan))
        assert torch.equal(rig.step(inputs, x_TD)[0], expected)


def wide(dtype: torch.dtype, **fields: Any) -> Rig:
    """A model of which two threads get something to do in every phase."""
    config = ModelConfig(
        **{
            "vocab_size": 64, "hidden_size": 264, "intermediate_size": 640, "num_layers": 2,
            "num_heads": 6, "num_kv_heads": 3, "head_dim": 48, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
            **fields,
        }
    )  # fmt: skip
    rig = Rig(config, dtype)
    rig.decoder.store(random_weights(config, dtype))
    return rig


def test_closing_a_stack_waits_for_late_threads() -> None:
    """Freed under a late thread, a stack ends the process in most runs of 100 rounds."""
    try:
        fill_freed_memory = ctypes.CDLL(None).mallopt
    except AttributeError:
        pytest.skip("needs mallopt, which glibc has")
    rig = wide(torch.float32)
    inputs = rig.inputs(CHUNKS["T=1"])
    x_TD = rig.hidden(inputs)
    expected, _ = rig.step(inputs, x_TD)
    fill_freed_memory(M_PERTURB, 0xA5)
    try:
        for _ in range(100):
            rig = wide(torch.float32)
            with kernel_threads(32):
                assert torch.equal(rig.step(inputs, x_TD)[0], expected)
                assert rig.decoder.stack is not None
                rig.decoder.stack.close()
    finally:
        fill_freed_memory(M_PERTURB, 0)


def test_stacks_do_not_know_each_other() -> None:
    one, two = wide(torch.bfloat16), wide(torch.float32, num_layers=3, head_dim=32)
    inputs_one, inputs_two = one.inputs(CHUNKS["T=7"]), two.inputs(CHUNKS["T=33"])
    first, _ = one.step(inputs_one, one.hidden(inputs_one))
    second, _ = two.step(inputs_two, two.hidden(inputs_two))
    assert torch.equal(one.step(inputs_one, one.hidden(inputs_one))[0], first)
    assert one.decoder.stack is not None
    one.decoder.stack.close()
    assert torch.equal(two.step(inputs_two, two.hidden(inputs_two))[0], second)
    with pytest.raises(RuntimeError, match="has been destroyed"):
        one.step(inputs_one, one.hidden(inputs_one))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_drops_a_stack_without_waiting_for_threads() -> None:
    rig = wide(torch.bfloat16)
    inputs = rig.inputs(CHUNKS["T=33"])
    assert rig.decoder.stack is not None
    with kernel_threads(3):
        rig.step(inputs, rig.hidden(inputs))
        if (child := os.fork()) == 0:
            rig.decoder.stack.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        rig.step(inputs, rig.hidden(inputs))


@pytest.mark.parametrize("held", [False, True])
def test_weights_are_freed_with_the_decoder_and_its_stack(held: bool) -> None:
    rig = wide(torch.float32)
    weight = rig.decoder.layers[0].get_submodule("down").get_parameter("weight")
    alive = StorageWeakRef(weight.untyped_storage())
    stack = rig.decoder.stack if held else None
    del rig, weight
    gc.collect()
    assert alive.expired() == (not held)
    if stack is not None:
        stack.close()
        stack.close()
    assert alive.expired()


def _set(tensor: torch.Tensor, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = value
    return changed


@pytest.mark.parametrize(
    ("field", "change", "error"),
    [
        ("slots", lambda x: _set(x, 10**6), IndexError),
        ("slots", lambda x: _set(x, -1), IndexError),
        ("slots", lambda x: x[:, :-1], RuntimeError),
        ("slots", lambda x: x[0], RuntimeError),
        ("positions", lambda x: _set(x, LENGTH), IndexError),
        ("positions", lambda x: x.int(), RuntimeError),
        ("token_rows", lambda x: _set(x, ROWS + 1), IndexError),
        ("block_tables", lambda x: torch.full_like(x, 10**6), IndexError),
        ("block_tables", lambda x: torch.full_like(x, -1), IndexError),
        ("block_tables", lambda x: x[0], RuntimeError),
        ("block_tables", lambda x: x[..., ::2], RuntimeError),
        ("read_blocks", lambda x: x + 1, RuntimeError),
        ("read_blocks", lambda x: 0, RuntimeError),
        ("hidden", lambda x: x.float(), RuntimeError),
        ("hidden", lambda x: x[:, :-1], RuntimeError),
        ("hidden", lambda x: x[0], RuntimeError),
        ("arena", lambda x: x.float(), RuntimeError),
        ("arena", lambda x: x[:1], RuntimeError),
        ("arena", lambda x: x[:, :1], RuntimeError),
        ("arena", lambda x: x[..., 2:], RuntimeError),
    ],
)
def test_bad_inputs_are_refused_before_anything_is_written(
    field: str, change: Callable[[Any], Any], error: type[Exception]
) -> None:
    rig = wide(torch.bfloat16)
    inputs = rig.inputs(CHUNKS["T=33"])
    given: dict[str, Any] = {"hidden": rig.hidden(inputs), "arena": rig.arena.clone()}
    if field in given:
        given[field] = change(given[field])
    else:
        inputs = dataclasses.replace(inputs, **{field: change(getattr(inputs, field))})
    before = given["arena"].clone()
    with pytest.raises(error), torch.no_grad():
        rig.decoder.decode(given["hidden"], given["arena"], inputs)
    assert torch.equal(given["arena"], before)


def test_compiles_without_breaks_for_any_number_of_tokens() -> None:
    rig = wide(torch.bfloat16)
    graphs: list[torch.fx.GraphModule] = []

    def count(module: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    def forward(x_TD: torch.Tensor, arena: torch.Tensor, inputs: RaggedBatch) -> torch.Tensor:
        return rig.decoder.decode(x_TD, arena, inputs)

    compiled = torch.compile(forward, backend=count, fullgraph=True, dynamic=True)
    for name in ("T=7", "T=2", "T=33", "T=130"):
        inputs = rig.inputs(CHUNKS[name])
        x_TD = rig.hidden(inputs)
        expected, expected_arena = rig.step(inputs, x_TD)
        arena = rig.arena.clone()
        with torch.no_grad():
            out = compiled(x_TD, arena, inputs)
        assert torch.equal(out, expected)
        assert torch.equal(arena, expected_arena)
    (graph,) = graphs
    calls = [str(n.target) for n in graph.graph.nodes if "stepgraph" in str(n.target)]
    assert calls == ["stepgraph.rotations.default", "stepgraph.decoder_stack.default"]


def test_traits_that_the_stack_does_not_list_are_unsupported() -> None:
    plan = model_plan(preset("smollm2-135m"))
    assert stack_obstacle(plan) is None
    shared = tuple(
        dataclasses.replace(op, shared_values=True) if isinstance(op, Attend) else op
        for op in plan.layers[0].operations
    )
    unknown = dataclasses.replace(plan, layers=(LayerPlan(shared), *plan.layers[1:]))
    assert stack_obstacle(unknown) == "attention with shared_values"
