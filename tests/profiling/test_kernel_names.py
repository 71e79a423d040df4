"""The document of kernel names, and the scopes that fill it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.profiling import attribution
from stepgraph.profiling.attribution import (
    CapturedNode,
    KernelNames,
    NamesFileError,
    Node,
    OperationCost,
    StepNodes,
    operation,
)
from stepgraph.runtime.models.plan import model_plan
from stepgraph.runtime.tools.step_costs import floor_bytes, kernel_costs, operation_costs

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
    read_blocks=st.integers(0, 10_000),
    full_sampler=st.booleans(),
    steps=st.integers(1, 8),
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
def test_what_was_saved_is_loaded(file: Path, names: KernelNames) -> None:
    names.save(file)
    assert attribution.load(file) == names
    assert os.listdir(file.parent) == [file.name]


NAMES = KernelNames(
    model="demo",
    device="some device",
    bandwidth_gb_s=4300.0,
    steps=[StepNodes("decode", 1, 4, False, 1, (Node(0, "down", "kernel", "k", 7),))],
    costs=[OperationCost("down", 3, 100)],
)


@given(st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_told(file: Path, share: float) -> None:
    NAMES.save(file)
    whole = file.read_bytes().rstrip()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(NamesFileError, match="no complete JSON") as caught:
        attribution.load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "no text in UTF-8"),
        (b"[" * 100_000, "no complete JSON"),
        (b'{"schema_version": 1, "bandwidth_gb_s": NaN}', "NaN is no number"),
        (b'{"traceEvents": []}', "has no schema_version"),
        (b'{"schema_version": 2}', "of schema_version 2, this reads 1"),
        (b'{"schema_version": 1, "environment": {}, "cases": []}', "model is None"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(NamesFileError, match=message) as caught:
        attribution.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("model",), 3, "model is 3; it must be text"),
        (("bandwidth_gb_s",), 0, "bandwidth_gb_s is 0; it must be a positive number or null"),
        (("steps",), {}, "steps is {}; it must be a list"),
        (("steps", 0), "x" * 100, r"steps\[0\] is 'xxx.*\.\.\.; it must be an object"),
        (("steps", 0, "phase"), "train", "must be one of decode, prefill"),
        (("steps", 0, "size"), True, "a whole number"),
        (("steps", 0, "full_sampler"), 1, "true or false"),
        (("steps", 0, "nodes", 0, "layer"), -1, r"steps\[0\]\.nodes\[0\]\.layer is -1"),
        (("costs", 0, "bytes"), -1, r"costs\[0\]\.bytes is -1"),
    ],
)
def test_a_field_of_another_kind_is_named(
    tmp_path: Path, place: tuple[Any, ...], value: object, message: str
) -> None:
    path = tmp_path / "names.kernels.json"
    NAMES.save(path)
    document = parent = json.loads(path.read_text())
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(NamesFileError, match=message):
        attribution.load(path)


def test_what_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(NamesFileError, match="cannot be read: No such file"):
        attribution.load(tmp_path / "absent")
    with pytest.raises(NamesFileError, match="cannot be read: Is a directory"):
        attribution.load(tmp_path)
    with pytest.raises(NamesFileError, match=r"cannot be written: .* is not a directory"):
        NAMES.save(tmp_path / "absent" / "names")
    with pytest.raises(NamesFileError, match="cannot be written"):
        NAMES.save(tmp_path)
    assert not list(tmp_path.iterdir())


@given(shapes(), st.integers(1, 9), st.integers(1, 99))
def test_costs_of_operations_are_the_floor_of_the_step(shape: Any, rows: int, context: int) -> None:
    model, sizes = shape
    costs = kernel_costs(model_plan(model), sizes, rows=rows, context=context, splits=1)
    operations = operation_costs(costs)
    assert len({cost.operation for cost in operations}) == len(operations)
    rounding = sum(cost.launches for cost in operations)
    total = sum(cost.launches * cost.bytes for cost in operations)
    assert abs(total - floor_bytes(costs)) <= rounding


# Scopes ------------------------------------------------------------------------------------------


class Key:
    """A `StepIdentity`."""

    phase: Any = "decode"
    size = 2
    read_blocks = 3
    full_sampler = False
    steps = 1


class Nodes:
    """A `NodeSource` whose nodes are appended to `launched`; the call `fails_in` raises."""

    def __init__(self, reason: str | None = None, fails_in: str = "") -> None:
        self.reason = reason
        self.fails_in = fails_in
        self.launched: list[str] = []
        self.ids: list[int] | None = None

    def _fail_in(self, name: str) -> None:
        if self.fails_in == name:
            raise TypeError(f"{name} has another signature")

    def launch(self, name: str) -> None:
        self.launched.append(name)

    def take(self) -> list[CapturedNode]:
        self._fail_in("take")
        new, self.launched = self.launched, []
        return [CapturedNode("kernel", name) for name in new]

    def tools_ids(self, graph: object) -> list[int] | None:
        self._fail_in("tools_ids")
        return self.ids


def run_capture(source: Nodes, fn: Any) -> None:
    with attribution.step(Key()), attribution.capturing(lambda: source) as tape:
        fn(source)
    assert tape is not None
    tape.finish(object())


def capture(source: Nodes, fn: Any) -> KernelNames:
    with attribution.recording() as names:
        run_capture(source, fn)
    return names


def labels(names: KernelNames) -> list[str]:
    (only,) = names.steps
    return [node.label for node in only.nodes]


def nested(source: Nodes) -> None:
    source.launch("before")
    with operation("begin"):
        source.launch("a")
        source.launch("b")
    for layer in range(2):
        with operation("layer", layer):
            with operation("down"):
                source.launch("c")
            source.launch("d")
            with operation("attention"), operation("rotate", 9):
                source.launch("e")
    source.launch("behind")


NESTED = [
    *("other", "begin", "begin"),
    *("0/down", "0/layer", "9/rotate"),
    *("1/down", "1/layer", "9/rotate"),
    "other",
]


def test_the_innermost_scope_names_a_node() -> None:
    source = Nodes()
    names = capture(source, nested)
    assert labels(names) == NESTED
    assert names.unattributed == 2
    assert names.reason is None
    assert [node.kernel for node in names.steps[0].nodes[:4]] == ["before", "a", "b", "c"]


def test_without_a_recording_scopes_are_one_shared_nothing() -> None:
    assert operation("a") is operation("b", 3)
    with attribution.step(Key()), attribution.capturing(Nodes) as tape:
        assert tape is None
        assert operation("a") is operation("b")
    with attribution.recording() as names, attribution.capturing(Nodes) as tape:
        assert tape is None  # a step that has no identity
    assert names.steps == []


def test_a_listener_receives_the_scopes_of_every_thread_until_it_ends() -> None:
    before = attribution.scope_listener
    heard: list[tuple[str, int | None]] = []
    leave = lambda: heard.append(("end", None))  # noqa: E731
    listener = SimpleNamespace(
        enter=lambda name, layer: heard.append((name, layer)), leave=leave, abandon=leave
    )

    def work() -> None:
        with operation("down", 3):
            pass

    with attribution.listening(listener):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        names = capture(Nodes(), nested)  # is recorded instead
    work()
    assert heard == [("down", 3), ("end", None)]
    assert labels(names) == NESTED
    assert attribution.scope_listener == before


def test_a_capture_that_fails_leaves_nothing() -> None:
    def fail(source: Nodes) -> None:
        with operation("down"):
            source.launch("a")
            raise MemoryError("no room")

    source = Nodes()
    with attribution.recording() as names, pytest.raises(MemoryError):
        run_capture(source, fail)
    assert operation("a") is operation("b")
    assert source.launched == ["a"], "the graph may be gone: its nodes are not listed"
    assert names == KernelNames()


def test_a_source_that_fails_ends_the_attribution_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each reason is given once; missing ids do not hide missing nodes."""
    with attribution.recording() as names:
        for fails_in in ("", "take", "", "take"):
            run_capture(Nodes("no ids", fails_in), nested)
    assert [len(step.nodes) for step in names.steps] == [len(NESTED), 0, len(NESTED), 0]
    failure = "steps have no nodes: TypeError: take has another signature"
    assert names.reason == f"no ids; {failure}"
    assert len(caplog.records) == 2


def test_ids_belong_to_the_nodes_in_order() -> None:
    source = Nodes()
    source.ids = list(range(50, 60))
    (step,) = capture(source, nested).steps
    assert [node.tools_id for node in step.nodes] == source.ids


@pytest.mark.parametrize("ids", [None, []])
def test_without_ids_the_names_stay(ids: list[int] | None) -> None:
    source = Nodes(fails_in="tools_ids" if ids is None else "")
    source.ids = ids
    names = capture(source, nested)
    assert labels(names) == NESTED
    assert names.reason is not None
    assert names.reason.startswith("graph node ids are not known")


def test_names_are_read_without_torch() -> None:
    program = (
        "import sys; import stepgraph.profiling.attribution, stepgraph.profiling.graph_nodes; "
        "assert not {'torch', 'cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
