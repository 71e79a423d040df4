"""Nodes of CUDA graphs under capture, over fakes of `cuda.bindings`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from stepgraph.graphs.steps import CapturedStep, CudaGraphCapturer
from stepgraph.profiling import attribution
from stepgraph.profiling.attribution import AttributionError, KernelNames, operation
from stepgraph.profiling.graph_nodes import CudaGraphNodes, cuda_graph_nodes
from stepgraph.runtime.execution.step_key import StepKey

from ..rigs.fake_cuda_bindings import EXEC_ID, STREAM, FakeCuda, cudaGraphNodeType

VERSIONS = ["12", "13", "13.1"]


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
    ids = [node.tools_id for node in names.steps[0].nodes]
    if version == "13.1":
        assert ids == [EXEC_ID << 32 | index for index in range(len(EXPECTED))]
        assert names.reason is None
    else:
        assert set(ids) == {None}
    assert cuda.calls.count("name") == 4  # a function is asked for its name once


def test_branches_are_in_an_order_of_their_dependencies(
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

    names = found(capture(run))
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
    assert torch.equal(step.run(), fn())
    (captured,) = names.steps
    assert list(dict.fromkeys(node.label for node in captured.nodes)) == [
        *("0/down", "0/residual", "other", "norm"),
    ]
    assert sum(node.label == "norm" for node in captured.nodes) == 2
    assert all(node.kernel for node in captured.kernels)
