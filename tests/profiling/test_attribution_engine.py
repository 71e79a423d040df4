"""Every node of the captured steps of whole engines has a layer and an operation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
from stepgraph.profiling import attribution
from stepgraph.profiling.attribution import KernelNames, StepNodes
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.operation_scopes import operation
from stepgraph.runtime.tools import compile_ahead
from stepgraph.runtime.tools.step_costs import floor_bytes, operation_bytes, step_bytes

from ..rigs.engine_rig import Open, greedy
from ..rigs.fake_graphs import FakeGraphs, ListedNodes, make_fake_graphs  # noqa: F401

GRAPH = {"mode": "graph", "compile": False, "max_model_len": 32, "buckets": (2,), "max_num_seqs": 2}

FUSED_LAYER = ["norm_linear", "decode_attention", "output", "gate_up", "down"]


def scopes(step: StepNodes) -> list[str]:
    """What the nodes belong to, in order, neighbours of the same scope once."""
    return [label for label, _ in groupby(node.label for node in step.nodes)]


@pytest.mark.parametrize("variant", ["base", "gemma2", "deepseek_v3"])
def test_nodes_of_every_step_have_layers_and_operations(
    variant: str, open_engine: Open, fake_graphs: FakeGraphs
) -> None:
    with attribution.recording() as names:
        engine = open_engine(variant, **GRAPH)
    assert names.reason is None
    assert names.unattributed == 0
    keys = list(engine._parts.runner.library.steps)
    assert [(s.phase, s.size, s.full_sampler) for s in names.steps] == [
        (key.phase, key.size, key.full_sampler) for key in keys
    ]
    for step in names.steps:
        inside: dict[int | None, list[str]] = {}
        for (layer, name), _ in groupby((n.layer, n.operation) for n in step.nodes):
            inside.setdefault(layer, []).append(name)
        around = set(inside.pop(None))
        assert list(inside) == list(range(engine.model_config.num_layers))
        assert all(operations == inside[0] for operations in inside.values())
        assert {"down_linear", "attention", "output_linear"} <= set(inside[0])
        assert {"begin", "final_norm", "head"} <= around
        assert ("sample" if step.full_sampler else "greedy") in around


def test_recording_changes_no_token(open_engine: Open, fake_graphs: FakeGraphs) -> None:
    prompts = [[3, 4, 5], [9, 8]]
    plain = open_engine("micro", **GRAPH).generate(prompts, greedy(6))
    captured = [len(graph.operations) for graph in fake_graphs.graphs]
    with attribution.recording() as names:
        recorded = open_engine("micro", **GRAPH).generate(prompts, greedy(6))
    assert [o.token_ids for o in recorded] == [o.token_ids for o in plain]
    assert [len(graph.operations) for graph in fake_graphs.graphs[len(captured) :]] == captured
    assert names.steps


@pytest.fixture
def record_names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KernelNames]:
    """Record the names of the steps that a GPU would run, on tensors without memory."""
    pytest.importorskip("triton")
    record_kernel_calls = compile_ahead.record_kernel_calls

    @contextlib.contextmanager
    def attributed(capability: int) -> Iterator[list[Any]]:
        identity = ("decode", 1, False)
        with (
            record_kernel_calls(capability) as calls,
            attribution.capturing(identity, lambda: ListedNodes(calls, lambda call: call.name)),
        ):
            yield calls

    def make(*args: Any, **kwargs: Any) -> KernelNames:
        with attribution.recording() as names:
            compile_ahead.record_steps(*args, **kwargs)
        return names

    monkeypatch.setattr(compile_ahead, "record_kernel_calls", attributed)
    return make


@pytest.mark.parametrize(
    ("model", "rows"),
    [("preset:llama-3.2-1b", 1), ("preset:llama-3.2-1b", 32), ("preset:gemma-2-2b", 8)],
)
def test_a_decode_step_on_a_gpu_has_five_operations_a_layer(
    record_names: Callable[..., KernelNames], model: str, rows: int
) -> None:
    names = record_names(model, EngineConfig(max_num_seqs=32), rows=[rows], tokens=[])
    greedy, sampled = (scopes(step) for step in names.steps)
    layers = max(node.layer for node in names.steps[0].nodes if node.layer is not None) + 1
    # The library's products are no launches of Triton, and some scopes have nothing else.
    few = FUSED_LAYER if rows <= 4 else ["norm_linear", "decode_attention", "gate_up"]
    for layer in range(layers):
        inside = [label for label in greedy if label.startswith(f"{layer}/")]
        in_order = [f"{layer}/{name}" for name in FUSED_LAYER]
        assert inside == [label for label in in_order if label in inside]
        assert {f"{layer}/{name}" for name in few} <= set(inside)
    last = ["head"] if rows <= 4 else []
    assert [label for label in greedy if "/" not in label] == [
        *("begin", "final_norm", *last, "greedy")
    ]
    assert sampled == [*greedy[:-1], "sample"]


def test_a_chunk_on_a_gpu_runs_its_kernels_in_the_scopes_of_its_layers(
    record_names: Callable[..., KernelNames],
) -> None:
    names = record_names("demo", EngineConfig(max_num_seqs=2), rows=[1], tokens=[16])
    attends = "prefill_attention"
    (prefill,) = (s.nodes for s in names.steps if any(n.operation == attends for n in s.nodes))
    inside = [node for node in prefill if node.layer is not None]
    operations = {"norm_linear", "rotate_and_store", attends, "gate_up"}
    for layer in range(max(node.layer or 0 for node in inside) + 1):
        assert {node.operation for node in inside if node.layer == layer} >= operations
    assert {node.operation for node in prefill if node.layer is None} <= {
        "prefill_tiles",
        "final_norm",
        "head",
        "greedy",
    }


def test_operations_and_scopes_have_the_same_names(
    record_names: Callable[..., KernelNames], open_engine: Open
) -> None:
    names = record_names("demo", EngineConfig(max_num_seqs=1), rows=[1], tokens=[])
    engine = open_engine("gemma2")
    read = operation_bytes(engine.model_config, engine.config, rows=2, context=20)
    assert list(read) == ["begin", *FUSED_LAYER, "final_norm", "head", "greedy"]
    assert read.keys() == {node.operation for node in names.steps[0].nodes}
    step = step_bytes(model_plan(engine.model_config), engine.config, rows=2, context=20)
    assert sum(read.values()) == floor_bytes(step)
    latent = open_engine("deepseek_v2")
    assert operation_bytes(latent.model_config, latent.config, rows=1, context=1) == {}


def test_scopes_are_nothing_to_compiled_code() -> None:
    """One graph, and the same code whether or not somebody records when it is made or called."""

    def part(x: torch.Tensor) -> torch.Tensor:
        for layer in range(2):
            with operation("layer", layer):
                with operation("down"):
                    x = x * 2
                x = x + 1
        return x

    code = torch.compile(part, fullgraph=True, backend="eager")
    x = torch.arange(5.0)
    with attribution.recording() as names:
        with attribution.capturing(("decode", 1, False), lambda: ListedNodes([], str)):
            assert torch.equal(code(x), part(x))
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(code(x), part(x))
    assert names.reason is None
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(code(x), part(x))
