"""Nodes of CUDA graphs under capture, over fakes of `cuda.bindings` and torch's own annotations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from stepgraph.graphs.steps import CapturedStep, CudaGraphCapturer
from stepgraph.profiling import attribution
from stepgraph.profiling.attribution import AttributionError, KernelNames, operation
from stepgraph.profiling.graph_nodes import CudaGraphNodes, cuda_graph_nodes
from stepgraph.runtime.execution.step_functions import StepKey

from .fake_cuda_bindings import EXEC_ID, GRAPH_ID, STREAM, FakeCuda, cudaGraphNodeType

VERSIONS = ["12", "13", "13.1"]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCuda], None]:
    """Let `cuda.bindings` be a fake; torch's annotations are those of a torch that has none."""

    def put(cuda: FakeCuda) -> None:
        for name in ("cuda", "cuda.bindings"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda.runtime)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cuda.driver)

    monkeypatch.setitem(sys.modules, "torch.cuda._graph_annotations", None)
    return put


@pytest.fixture
def annotations(
    monkeypatch: pytest.MonkeyPatch, install: Callable[[FakeCuda], None]
) -> Iterator[Callable[[FakeCuda], Any]]:
    """Let torch's own annotations work on the fake."""
    monkeypatch.delitem(sys.modules, "torch.cuda._graph_annotations")
    module = pytest.importorskip("torch.cuda._graph_annotations")

    def put(cuda: FakeCuda) -> Any:
        install(cuda)
        stream = SimpleNamespace(cuda_stream=STREAM)
        monkeypatch.setattr(module, "_cuda_runtime", cuda.runtime)
        monkeypatch.setattr(module, "_HAS_CUDA_BINDINGS", True)
        monkeypatch.setattr(module, "_tools_id_available", None)
        monkeypatch.setattr(module, "_ANNOTATABLE_TYPES", None)
        monkeypatch.setattr(module, "_check_cuda_bindings", answer_of)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        return module

    yield put
    module.clear_kernel_annotations()
    module.disable_annotations()


def answer_of(result: tuple[Any, ...]) -> Any:
    """As torch has it where it is made for CUDA."""
    assert int(result[0]) == 0
    return result[1] if len(result) == 2 else result[1:]


class Graph:
    """A `torch.cuda.CUDAGraph` that is instantiated."""

    def raw_cuda_graph_exec(self) -> int:
        return 0x77


def capture(run: Callable[[], None], times: int = 1) -> KernelNames:
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
def test_nodes_are_those_that_are_new_at_a_boundary_in_the_order_of_capture(
    version: str, install: Callable[[FakeCuda], None]
) -> None:
    cuda = FakeCuda(version)
    install(cuda)
    names = capture(lambda: launches(cuda))
    assert found(names) == EXPECTED
    assert names.unattributed == 1
    assert all(node.tools_id is None for node in names.steps[0].nodes)
    assert cuda.calls.count("name") == 4  # a function is asked for its name once


def test_branches_are_in_an_order_of_their_dependencies(
    install: Callable[[FakeCuda], None],
) -> None:
    """A side stream within a scope: what joins is behind both branches."""
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

    names = found(capture(run))
    assert [label for label, _, _ in names] == ["begin", *["both"] * 4, "down"]
    order = [kernel for _, _, kernel in names]
    assert (order[0], order[4], order[5]) == ("fork", "join", "last")
    assert order.index("side") < order.index("side_end")


@pytest.mark.parametrize("branches", [3, 4, 5, 20])
def test_what_joins_many_branches_is_behind_them_all(
    branches: int, install: Callable[[FakeCuda], None]
) -> None:
    cuda = FakeCuda()
    install(cuda)

    def run() -> None:
        with operation("many"):
            fork = cuda.launch("fork")
            cuda.frontier = [cuda.launch("branch", after=[fork]) for _ in range(branches)]
            cuda.launch("join", pdl=True)

    kernels = [kernel for _, _, kernel in found(capture(run))]
    assert kernels == ["fork", *["branch"] * branches, "join"]


@pytest.mark.parametrize(
    ("version", "new_driver", "reason"),
    [
        ("12", True, "cuda-bindings is older than 13.1"),
        ("13", True, "cuda-bindings is older than 13.1"),
        ("13.1", False, "the driver is older than CUDA 13.1"),
        ("13.1", True, "this version of torch has no annotations"),
    ],
)
def test_why_there_are_no_ids_is_told_once(
    version: str,
    new_driver: bool,
    reason: str,
    install: Callable[[FakeCuda], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda = FakeCuda(version, driver_has_tools_ids=new_driver)
    install(cuda)
    names = capture(lambda: launches(cuda))
    capture_again = capture(lambda: cuda.launch("again"), times=2)
    assert found(names) == EXPECTED
    assert reason in (names.reason or "")
    assert capture_again.reason == names.reason
    assert len(caplog.records) == 2  # recordings


def test_torch_whose_annotations_have_changed_is_told(
    install: Callable[[FakeCuda], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda("13.1")
    install(cuda)
    changed = SimpleNamespace(mark_kernels=None, enable_annotations=None)
    monkeypatch.setitem(sys.modules, "torch.cuda._graph_annotations", changed)
    names = capture(lambda: launches(cuda))
    assert found(names) == EXPECTED
    assert "have no disable_annotations, resolve_pending" in (names.reason or "")


def test_without_bindings_steps_have_no_nodes_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("cuda.bindings", "cuda.bindings.runtime", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    ran: list[bool] = []

    def run() -> None:
        with operation("down"):
            ran.append(True)

    names = capture(run, times=2)
    assert ran == [True, True]
    assert [step.nodes for step in names.steps] == [(), ()]
    assert "cuda.bindings cannot be imported" in (names.reason or "")
    assert "pip install cuda-bindings" in (names.reason or "")
    assert len(caplog.records) == 1


def test_a_stream_that_captures_nothing_is_told(install: Callable[[FakeCuda], None]) -> None:
    cuda = FakeCuda(capturing=False)
    install(cuda)
    with pytest.raises(AttributionError, match="not capturing"):
        cuda_graph_nodes(STREAM)


def test_a_call_that_fails_or_is_missing_is_named() -> None:
    cuda = FakeCuda()
    runtime = cuda.runtime
    source = CudaGraphNodes(runtime, cuda.driver, STREAM)
    cuda.launch("a")
    runtime.cudaGraphGetNodes = lambda graph, numNodes=0: (runtime.cudaError_t(1), None, None)
    with pytest.raises(AttributionError, match="cudaGraphGetNodes failed: cudaErrorInvalidValue"):
        source.take()
    del runtime.cudaGraphGetNodes
    with pytest.raises(AttributionError, match="cuda-bindings has no cudaGraphGetNodes"):
        source.take()


@pytest.mark.parametrize("missing", ["cuGraphKernelNodeGetParams", "cuFuncGetName", "names"])
def test_kernels_without_a_name_have_none(missing: str) -> None:
    cuda = FakeCuda()
    driver = cuda.driver
    cuda.launch("a")
    if missing == "names":
        cuda.names.clear()
    else:
        delattr(driver, missing)
    (node,) = CudaGraphNodes(cuda.runtime, driver, STREAM).take()
    assert (node.kind, node.kernel) == ("kernel", None)


def test_a_library_that_is_not_there_leaves_kernels_unnamed() -> None:
    cuda = FakeCuda()

    def fails(node: object) -> object:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    cuda.launch("a")
    driver = cuda.driver
    driver.cuGraphKernelNodeGetParams = fails
    (node,) = CudaGraphNodes(cuda.runtime, driver, STREAM).take()
    assert node.kernel is None


def test_torchs_annotations_give_ids_of_the_executable_graph(
    annotations: Callable[[FakeCuda], Any], caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda("13.1")
    module = annotations(cuda)
    names = capture(lambda: launches(cuda))
    assert names.reason is None
    assert found(names) == EXPECTED
    ids = [node.tools_id for node in names.steps[0].nodes]
    assert ids == [EXEC_ID << 32 | index for index in range(len(EXPECTED))]
    assert not module._annotations_enabled
    assert not caplog.records
    # What torch writes into its own traces has the names too.
    noted = module.get_kernel_annotations()
    assert noted[EXEC_ID << 32 | 2] == [{"operation": "norm_linear", "layer": 0}]


def test_the_annotations_of_others_are_left_alone(
    annotations: Callable[[FakeCuda], Any],
) -> None:
    cuda = FakeCuda("13.1")
    module = annotations(cuda)
    module.get_kernel_annotations()[5 << 32 | 1] = [{"str": "theirs"}]
    module.enable_annotations()

    def run() -> None:
        with module.mark_kernels("phase A"), operation("down", 4):
            cuda.launch("a")

    names = capture(run)
    assert [node.label for node in names.steps[0].nodes] == ["4/down"]
    assert module._annotations_enabled
    noted = module.get_kernel_annotations()
    assert noted[5 << 32 | 1] == [{"str": "theirs"}]
    assert noted[EXEC_ID << 32] == [{"operation": "down", "layer": 4, "str": "phase A"}]


def test_a_driver_without_ids_is_asked_once_and_torch_marks_nothing(
    annotations: Callable[[FakeCuda], Any],
) -> None:
    cuda = FakeCuda("13.1", driver_has_tools_ids=False)
    module = annotations(cuda)
    names = capture(lambda: launches(cuda))
    assert found(names) == EXPECTED
    assert "driver is older" in (names.reason or "")
    assert not module.get_kernel_annotations()
    assert GRAPH_ID not in {(node.tools_id or 0) >> 32 for node in names.steps[0].nodes}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_real_capture() -> None:
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
    assert torch.equal(step.launch(), fn())
    (captured,) = names.steps
    assert list(dict.fromkeys(node.label for node in captured.nodes)) == [
        *("0/down", "0/residual", "other", "norm"),
    ]
    assert sum(node.label == "norm" for node in captured.nodes) == 2
    assert all(node.kernel for node in captured.kernels)
