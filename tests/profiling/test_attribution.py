"""The scopes of operations name the nodes of a capture; a fake of CUDA lists them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from stepgraph.graphs.steps import CapturedStep, CudaGraphCapturer
from stepgraph.profiling import attribution
from stepgraph.profiling.attribution import (
    CapturedNode,
    cuda_graph_nodes,
    operation,
)
from stepgraph.profiling.kernel_names import KernelNames
from stepgraph.runtime.execution.step_key import StepKey

from ..rigs.fake_cuda_bindings import EXEC_ID, STREAM, FakeCuda, cudaGraphNodeType

VERSIONS = ["12", "13", "13.1"]


class Key:
    """A `StepIdentity`."""

    phase: Any = "decode"
    size = 2
    full_sampler = False


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


def test_scopes_name_the_nodes_inside() -> None:
    source = Nodes()
    names = capture(source, nested)
    assert labels(names) == NESTED
    assert names.unattributed == 2
    assert names.reason is None
    assert [node.kernel for node in names.steps[0].nodes[:4]] == ["before", "a", "b", "c"]


def test_scopes_of_every_thread_reach_a_listener() -> None:
    heard: list[tuple[str, int | None]] = []
    listener = SimpleNamespace(
        enter=lambda name, layer: heard.append((name, layer)),
        leave=lambda failed: heard.append(("end", None)),
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
    assert operation("a") is operation("b")


def test_captures_that_fail_leave_nothing() -> None:
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


def test_sources_that_fail_end_the_attribution_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each reason is given once; missing ids do not hide missing nodes."""
    with attribution.recording() as names:
        for fails_in in ("", "take", "", "take"):
            run_capture(Nodes("no ids", fails_in), nested)
    assert [len(step.nodes) for step in names.steps] == [len(NESTED), 0, len(NESTED), 0]
    assert names.reason is not None
    assert names.reason.startswith("no ids; ")
    assert len(caplog.records) == 2


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCuda], None]:
    """Let `cuda.bindings` be a fake."""

    def put(cuda: FakeCuda) -> None:
        for name in ("cuda", "cuda.bindings"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda.runtime)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cuda.driver)

    return put


class Graph:
    """A `torch.cuda.CUDAGraph` that is instantiated."""

    def raw_cuda_graph_exec(self) -> int:
        return 0x77


def capture_cuda(run: Callable[[], None], times: int = 1) -> KernelNames:
    with attribution.recording() as names:
        for _ in range(times):
            with (
                attribution.step(StepKey("decode", 1, 1, full_sampler=False)),
                attribution.capturing(lambda: cuda_graph_nodes(STREAM)) as tape,
            ):
                run()
            assert tape is not None
            tape.finish(Graph())
    return names


def launches(cuda: FakeCuda) -> None:
    """Three scopes, two of them nested, with programmatic launches and a copy."""
    cuda.launch("before")
    with operation("begin"):
        cuda.launch("begin_kernel")
    with operation("layer", 0):
        with operation("norm_linear"):
            cuda.launch("norm", pdl=True)
            cuda.launch("norm", pdl=True)
            cuda.launch("linear", library=True, pdl=True)
        cuda.add(cudaGraphNodeType.cudaGraphNodeTypeMemcpy)
    with operation("empty"):
        pass
    with operation("head"):
        cuda.add(cudaGraphNodeType.cudaGraphNodeTypeMemset)
        cuda.add(cudaGraphNodeType.cudaGraphNodeTypeEventRecord)


EXPECTED = [
    ("other", "kernel", "before"),
    ("begin", "kernel", "begin_kernel"),
    ("0/norm_linear", "kernel", "norm"),
    ("0/norm_linear", "kernel", "norm"),
    ("0/norm_linear", "kernel", "linear"),
    ("0/layer", "memcpy", None),
    ("head", "memset", None),
    ("head", "other", None),
]


def found(names: KernelNames) -> list[tuple[str, str, str | None]]:
    return [(node.label, node.kind, node.kernel) for node in names.steps[-1].nodes]


@pytest.mark.parametrize("version", VERSIONS)
def test_graph_nodes_belong_to_the_scope_in_which_they_appear(
    version: str, install: Callable[[FakeCuda], None]
) -> None:
    cuda = FakeCuda(version)
    install(cuda)
    names = capture_cuda(lambda: launches(cuda))
    assert found(names) == EXPECTED
    assert names.unattributed == 1
    ids = [node.tools_id for node in names.steps[0].nodes]
    if version == "13.1":
        assert ids == [EXEC_ID << 32 | index for index in range(len(EXPECTED))]
        assert names.reason is None
    else:
        assert set(ids) == {None}
    assert cuda.calls.count("name") == 4  # a function is asked for its name once


def test_graph_branches_are_in_an_order_of_their_dependencies(
    install: Callable[[FakeCuda], None],
) -> None:
    """Side streams within a scope: what joins is behind all branches."""
    cuda = FakeCuda()
    install(cuda)

    def run() -> None:
        with operation("begin"):
            fork = cuda.launch("fork")
        with operation("both"):
            side = [cuda.launch("side", after=[fork])]
            side = [cuda.launch("side_end", after=side)]
            main = cuda.launch("main")
            cuda.frontier = [main, *side]
            cuda.launch("join")
        with operation("down"):
            cuda.launch("last")

    names = found(capture_cuda(run))
    assert [label for label, _, _ in names] == ["begin", *["both"] * 4, "down"]
    order = [kernel for _, _, kernel in names]
    assert (order[0], order[4], order[5]) == ("fork", "join", "last")
    assert order.index("side") < order.index("side_end")


@pytest.mark.parametrize(
    ("version", "new_driver", "reason"),
    [
        ("12", True, "cuda-bindings is older than 13.1"),
        ("13", True, "cuda-bindings is older than 13.1"),
        ("13.1", False, "the driver is older than CUDA 13.1"),
    ],
)
def test_graph_nodes_without_ids_have_one_reason(
    version: str,
    new_driver: bool,
    reason: str,
    install: Callable[[FakeCuda], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda = FakeCuda(version, driver_has_tools_ids=new_driver)
    install(cuda)
    names = capture_cuda(lambda: launches(cuda))
    capture_again = capture_cuda(lambda: cuda.launch("again"), times=2)
    assert found(names) == EXPECTED
    assert reason in (names.reason or "")
    assert capture_again.reason == names.reason
    assert len(caplog.records) == 2  # recordings


def test_graph_nodes_without_bindings_have_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cuda.bindings", "cuda.bindings.runtime", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    ran: list[bool] = []

    def run() -> None:
        with operation("down"):
            ran.append(True)

    names = capture_cuda(run, times=2)
    assert ran == [True, True]
    assert [step.nodes for step in names.steps] == [(), ()]
    assert "cuda-bindings" in (names.reason or "")
    assert len(caplog.records) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_graph_nodes_of_a_real_capture() -> None:
    pytest.importorskip("cuda.bindings")
    x = torch.randn(64, 64, device="cuda")

    def fn() -> torch.Tensor:
        with operation("layer", 0):
            with operation("down"):
                y = x @ x
            with operation("residual"):
                y = y + x
        z = y.clone()
        with operation("norm"):
            return (z * 2).relu()

    step = CapturedStep(fn, "demo", CudaGraphCapturer("cuda"), StepKey("decode", 1, 1, False))
    with attribution.recording() as names:
        step.prepare()
    assert torch.equal(step.run(), fn())
    (captured,) = names.steps
    assert list(dict.fromkeys(node.label for node in captured.nodes)) == [
        *("0/down", "0/residual", "other", "norm"),
    ]
    assert sum(node.label == "norm" for node in captured.nodes) == 2
    assert all(node.kernel for node in captured.nodes if node.kind == "kernel")
