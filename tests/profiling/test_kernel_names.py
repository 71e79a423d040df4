"""The document of kernel names; the kernels of a replay get right names or none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.profiling import attribution
from stepgraph.profiling.atomic_write import WriteError
from stepgraph.profiling.attribution import (
    DeviceWork,
    KernelNames,
    NamesFileError,
    Node,
    StepNodes,
    nodes_of_replay,
)
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.tools.step_costs import floor_bytes, operation_costs, step_bytes

from ..kernels.test_kernel_costs import shapes

infer: Any = ...
documents = st.builds(
    KernelNames,
    bandwidth_gb_s=st.none() | st.floats(0.1, 1e5),
    **dict.fromkeys(("model", "device", "steps", "costs", "reason"), infer),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("names") / "trace.kernels.json"


@given(documents)
@settings(max_examples=20)
def test_names_survive_a_file(file: Path, names: KernelNames) -> None:
    names.save(file)
    assert attribution.load(file) == names
    assert os.listdir(file.parent) == [file.name]


NAMES = KernelNames(steps=[StepNodes("decode", 1, False, (Node(0, "down", "kernel", "k"),))])


def test_files_without_kernel_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "names.kernels.json"
    NAMES.save(path)
    whole = path.read_bytes()
    contents = [whole[:length] for length in range(0, len(whole) - 2, 7)]
    contents += [b"\xff\xfe\x00", b"[" * 100_000, b"[]", b'{"traceEvents": []}']
    contents += [whole.replace(b'"schema_version": 1', b'"schema_version": 2')]
    contents += [whole.replace(b'"layer"', b'"layers"')]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(NamesFileError):
            attribution.load(path)
    for missing in (tmp_path / "absent", tmp_path):
        with pytest.raises(NamesFileError):
            attribution.load(missing)
    with pytest.raises(WriteError):
        NAMES.save(tmp_path / "absent" / "names")


@given(shapes(), st.integers(1, 9), st.integers(1, 99))
def test_costs_of_operations_are_the_floor_of_the_step(shape: Any, rows: int, context: int) -> None:
    model, config = shape
    costs = step_bytes(model_plan(model), config, rows=rows, context=context)
    operations = operation_costs(costs)
    assert len({cost.operation for cost in operations}) == len(operations)
    rounding = sum(cost.launches for cost in operations)
    total = sum(cost.launches * cost.bytes for cost in operations)
    assert abs(total - floor_bytes(costs)) <= rounding


def step_of(*kernels: str | None, size: int = 1) -> StepNodes:
    """A node for each kernel, told apart by their layer."""
    nodes = [Node(layer, "down", "kernel", name) for layer, name in enumerate(kernels)]
    return StepNodes("decode", size, False, tuple(nodes))


def match(nodes: list[str | None], kernels: list[str]) -> list[int | None]:
    """The layers of the nodes of the kernels of a replay."""
    work = [DeviceWork("kernel", name) for name in kernels]
    found = nodes_of_replay(KernelNames(steps=[step_of(*nodes)]), work)
    return [None if node is None else node.layer for node in found or [None] * len(work)]


letters = st.lists(st.sampled_from("abc"), max_size=12)


@given(letters, letters)
def test_replays_are_named_by_order_if_equal(names: list[str], kernels: list[str]) -> None:
    assert match([*names], names) == list(range(len(names)))
    if kernels != names:
        assert match([*names], kernels) == [None] * len(kernels)


MANGLED = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT_"
DEMANGLED = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(T3)"
OTHER = MANGLED.replace("Li512", "Li128")  # the same template, another function


@pytest.mark.parametrize(
    ("nodes", "kernels", "found"),
    [
        ([None, "a", None], ["x", "a", "y"], [0, 1, 2]),  # without a name: any kernel
        ([None, "a", None], ["x", "b", "y"], [None] * 3),
        ([None, "a", None], ["x", "a"], [None] * 2),
        *(([MANGLED, "b"], [name, "b"], [0, 1]) for name in (MANGLED, DEMANGLED, "reduce_kernel")),
        ([MANGLED, "b"], [OTHER, "b"], [None] * 2),
        (["fill", "f"], ["void at::<unnamed>::fill<int, 4>(int *)", "f"], [0, 1]),
        (["fill", "f"], ["(anonymous namespace)::fill()", "f"], [0, 1]),
        (["fill", "f"], ["void fill_all<int>(int *)", "f"], [None] * 2),
    ],
)
def test_replays_have_mangled_full_or_short_names(
    nodes: list[str | None], kernels: list[str], found: list[int | None]
) -> None:
    assert match(nodes, kernels) == found


def test_the_step_of_a_replay_is_found_by_bucket_and_kernels() -> None:
    """Copies and kernels are matched apart: a trace may lack the copies."""
    copy = Node(None, "inputs", "memcpy", None)
    greedy, sampled = step_of("a", "pick", size=2), step_of("a", "sort", "draw", size=2)
    greedy = StepNodes("decode", 2, False, (copy, *greedy.nodes))
    names = KernelNames(steps=[step_of("a"), sampled, greedy])

    def found(bucket: int | None, *kernels: str) -> list[Node | None] | None:
        return nodes_of_replay(names, [DeviceWork("kernel", name) for name in kernels], bucket)

    assert found(2, "a", "pick") == [*greedy.nodes[1:]]
    assert found(None, "a", "sort", "draw") == [*sampled.nodes]
    assert found(8, "a") is found(2, "z") is None
    work = [DeviceWork("kernel", "a"), DeviceWork("memcpy", ""), DeviceWork("kernel", "pick")]
    assert nodes_of_replay(names, work) == [greedy.nodes[1], copy, greedy.nodes[2]]
