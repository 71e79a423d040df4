"""The document of kernel names; the kernels of a replay get right names or none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.profiling import kernel_names
from stepgraph.profiling.atomic_write import WriteError
from stepgraph.profiling.kernel_names import (
    DeviceWork,
    KernelNames,
    NamesFileError,
    Node,
    OperationCost,
    StepNodes,
    function_name,
    nodes_of_replay,
)
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.tools.step_costs import floor_bytes, operation_costs, step_bytes

from ..kernels.test_kernel_costs import shapes

texts = st.text(max_size=8)
ids = st.none() | st.integers(0, 2**64 - 1)
nodes = st.builds(
    Node,
    layer=st.none() | st.integers(0, 200),
    operation=texts,
    kind=st.sampled_from(["kernel", "memcpy", "memset", "other"]),
    kernel=st.none() | texts,
    tools_id=ids,
)
steps = st.builds(
    StepNodes,
    phase=st.sampled_from(["decode", "prefill"]),
    size=st.integers(1, 10_000),
    full_sampler=st.booleans(),
    nodes=st.lists(nodes, max_size=4).map(tuple),
)
documents = st.builds(
    KernelNames,
    model=texts,
    device=texts,
    bandwidth_gb_s=st.none() | st.floats(0.1, 1e5),
    steps=st.lists(steps, max_size=3),
    costs=st.lists(
        st.builds(
            OperationCost,
            operation=texts,
            launches=st.integers(1, 200),
            bytes=st.integers(0, 2**40),
        ),
        max_size=3,
    ),
    reason=st.none() | texts,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("names") / "trace.kernels.json"


@given(documents)
def test_names_survive_a_file(file: Path, names: KernelNames) -> None:
    names.save(file)
    assert kernel_names.load(file) == names
    assert os.listdir(file.parent) == [file.name]


NAMES = KernelNames(steps=[StepNodes("decode", 1, False, (Node(0, "down", "kernel", "k", 7),))])


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
            kernel_names.load(path)
    for missing in (tmp_path / "absent", tmp_path):
        with pytest.raises(NamesFileError):
            kernel_names.load(missing)
    with pytest.raises(WriteError):
        NAMES.save(tmp_path / "absent" / "names")


@given(shapes(), st.integers(1, 9), st.integers(1, 99))
def test_costs_of_operations_are_the_floor_of_the_step(shape: Any, rows: int, context: int) -> None:
    model, sizes = shape
    costs = step_bytes(model_plan(model), sizes, rows=rows, context=context)
    operations = operation_costs(costs)
    assert len({cost.operation for cost in operations}) == len(operations)
    rounding = sum(cost.launches for cost in operations)
    total = sum(cost.launches * cost.bytes for cost in operations)
    assert abs(total - floor_bytes(costs)) <= rounding


def nodes_of(names: list[str | None], tools_ids: list[int | None] | None = None) -> list[Node]:
    """A node each, told apart by their layer."""
    ids = tools_ids or [None] * len(names)
    return [
        Node(layer, f"operation{layer}", "kernel", name, tools_id)
        for layer, (name, tools_id) in enumerate(zip(names, ids, strict=True))
    ]


def match(
    nodes: list[Node], kernels: list[str], ids: list[int | None] | None = None
) -> list[int | None]:
    """The layers of the nodes of the kernels of a replay."""
    names = KernelNames(steps=[StepNodes("decode", 1, False, tuple(nodes))])
    pairs = zip(kernels, ids or [None] * len(kernels), strict=True)
    found = nodes_of_replay(names, [DeviceWork("kernel", *pair) for pair in pairs])
    if found is None:
        return [None] * len(kernels)
    return [None if node is None else node.layer for node in found]


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_replays_are_named_by_order_if_equal(names: list[str], kernels: list[str]) -> None:
    nodes = nodes_of(list(names))
    assert match(nodes, names) == list(range(len(names)))
    if kernels != names:
        assert match(nodes, kernels) == [None] * len(kernels)


def test_nodes_without_names_match_any_kernel() -> None:
    nodes = nodes_of([None, "a", None])
    assert match(nodes, ["x", "a", "y"]) == [0, 1, 2]
    assert match(nodes, ["x", "b", "y"]) == [None] * 3
    assert match(nodes, ["x", "a"]) == [None] * 2


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_ids_of_nodes_win_over_order(order: list[int], unknown: set[int]) -> None:
    nodes = nodes_of(["same"] * 6, [(7 << 32) | index for index in range(6)])
    ids = [None if index in unknown else (7 << 32) | index for index in order]
    matched = match(nodes, ["same"] * 6, ids)
    if len(unknown) == 6:
        assert matched == list(range(6))  # by order, as no id says otherwise
    else:
        assert matched == [None if index in unknown else index for index in order]
        assert match(nodes, ["same"] * 5, ids[:5]) == matched[:5] or set(ids[:5]) == {None}


def test_ids_do_not_name_another_function() -> None:
    nodes = nodes_of(["a", "b"], [1, 2])
    assert match(nodes, ["a", "c"], [1, 2]) == [0, None]
    assert match(nodes, ["a", "b"], [9, 8]) == [0, 1], "ids of another process: by order"


def test_copies_and_kernels_are_matched_apart() -> None:
    copy = Node(None, "inputs", "memcpy", None, None)
    names = KernelNames(steps=[StepNodes("decode", 1, False, (copy, *nodes_of(["a"])))])
    kernel = DeviceWork("kernel", "a", None)
    found = nodes_of_replay(names, [kernel, DeviceWork("memcpy", "", None)])
    assert found is not None
    assert [node.operation for node in found if node] == ["operation0", "inputs"]
    found = nodes_of_replay(names, [kernel])
    assert found is not None
    assert [node.operation for node in found if node] == ["operation0"]


MANGLED = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT_"
DEMANGLED = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(T3)"


@pytest.mark.parametrize(
    ("name", "base"),
    [
        (DEMANGLED, "reduce_kernel"),
        ("(anonymous namespace)::bar()", "bar"),
        ("void at::native::<unnamed>::fill<int, 4>(int *, int)", "fill"),
        ("_norm_linear_kernel", "_norm_linear_kernel"),
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "nvjet_tst_128x8_64x12_4x1_v_bz_TNT"),
        ("", ""),
    ],
)
def test_function_names(name: str, base: str) -> None:
    assert function_name(name) == base


def test_replays_have_mangled_full_or_short_names() -> None:
    nodes = nodes_of([MANGLED, "triton_kernel"])
    for shown in (MANGLED, DEMANGLED, "reduce_kernel"):
        assert match(nodes, [shown, "triton_kernel"]) == [0, 1]
    other = MANGLED.replace("Li512", "Li128")  # the same template, another function
    assert match(nodes, [other, "triton_kernel"]) == [None, None]


def test_the_step_of_a_replay_is_found_by_bucket_and_kernels() -> None:
    def step(size: int, names: list[str], *, full: bool = False) -> StepNodes:
        return StepNodes("decode", size, full, tuple(nodes_of(list(names))))

    greedy, sampled = step(2, ["a", "b", "pick"]), step(2, ["a", "b", "sort", "draw"], full=True)
    names = KernelNames(steps=[step(1, ["a"]), sampled, greedy, step(2, ["a", "b", "pick"])])

    def found(kernels: list[str], bucket: int | None) -> Any:
        work = [DeviceWork("kernel", kernel, None) for kernel in kernels]
        match = nodes_of_replay(names, work, bucket)
        return match and match[0]

    assert found(["a", "b", "pick"], 2) is greedy.nodes[0]
    assert found(["a", "b", "sort", "draw"], None) is sampled.nodes[0]
    assert found(["a"], 8) is None
    assert found(["z"], 2) is None
