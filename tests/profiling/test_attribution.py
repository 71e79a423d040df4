"""The scopes of operations name the nodes of a capture; a fake of CUDA lists them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from stepgraph.graphs.steps import CudaGraphCapturer, Step
from stepgraph.profiling import attribution
from stepgraph.profiling.attribution import KernelNames, cuda_graph_nodes, operation

from ..rigs.fake_cuda_bindings import STREAM, FakeCuda, cudaGraphNodeType

KEY = ("decode", 1, False)


@pytest.fixture(params=["12", "13"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake in the place of `cuda.bindings`."""
    cuda = FakeCuda(request.param)
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda.runtime)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cuda.driver)
    return cuda


def capture(run: Callable[[], object], times: int = 1) -> KernelNames:
    with attribution.recording() as names:
        for _ in range(times):
            with attribution.capturing(KEY, lambda: cuda_graph_nodes(STREAM)):
                run()
    return names


def found(names: KernelNames) -> list[tuple[str, str, str | None]]:
    return [(node.label, node.kind, node.kernel) for node in names.steps[-1].nodes]


def launches(cuda: FakeCuda) -> None:
    """Nested scopes, with programmatic launches and copies."""
    cuda.launch("before")
    with operation("begin"):
        cuda.launch("begin_kernel")
    for layer in range(2):
        with operation("layer", layer):
            with operation("norm_linear"):
                cuda.launch("norm", pdl=True)
                cuda.launch("norm", pdl=True)
                cuda.launch("linear", library=True, pdl=True)
            cuda.add(cudaGraphNodeType.cudaGraphNodeTypeMemcpy)
            with operation("attention"), operation("rotate", 9):
                cuda.launch("rotate")
    with operation("empty"):
        pass
    with operation("head"):
        cuda.add(cudaGraphNodeType.cudaGraphNodeTypeMemset)
        cuda.add(cudaGraphNodeType.cudaGraphNodeTypeEventRecord)


def layer_of(index: int) -> list[tuple[str, str, str | None]]:
    linear = f"{index}/norm_linear"
    return [
        *((linear, "kernel", name) for name in ("norm", "norm", "linear")),
        (f"{index}/layer", "memcpy", None),
        ("9/rotate", "kernel", "rotate"),
    ]


EXPECTED = [
    ("other", "kernel", "before"),
    ("begin", "kernel", "begin_kernel"),
    *layer_of(0),
    *layer_of(1),
    ("head", "memset", None),
    ("head", "other", None),
]


def test_graph_nodes_belong_to_the_scope_in_which_they_appear(cuda: FakeCuda) -> None:
    names = capture(lambda: launches(cuda))
    assert found(names) == EXPECTED
    assert (names.unattributed, names.reason) == (1, None)
    assert [(step.phase, step.size, step.full_sampler) for step in names.steps] == [
        KEY
    ]


def test_graph_branches_are_in_an_order_of_their_dependencies(cuda: FakeCuda) -> None:
    """Side streams within a scope: what joins is behind all branches."""

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


def test_scopes_of_every_thread_reach_a_listener(cuda: FakeCuda) -> None:
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
        names = capture(lambda: launches(cuda))  # is recorded instead
    work()
    assert heard == [("down", 3), ("end", None)]
    assert found(names) == EXPECTED
    assert operation("a") is operation("b")


def test_captures_that_fail_leave_nothing(cuda: FakeCuda) -> None:
    def fail() -> None:
        with operation("down"):
            cuda.launch("a")
            cuda.fails = True  # the graph may be gone: its nodes are not listed
            raise MemoryError("no room")

    with attribution.recording() as names:
        with (
            pytest.raises(MemoryError),
            attribution.capturing(KEY, lambda: cuda_graph_nodes(STREAM)),
        ):
            fail()
        assert operation("a") is operation("b")
    assert names == KernelNames()


def test_bindings_that_fail_end_the_attribution_only(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step has all its nodes or none; the first reason is given once."""
    runs: list[None] = []

    def run() -> None:
        runs.append(None)
        cuda.begin()
        with operation("down"):
            cuda.launch("a")
        cuda.fails = len(runs) == 2
        launches(cuda)
        cuda.fails = False

    names = capture(run, times=3)
    assert [len(step.nodes) for step in names.steps] == [1 + len(EXPECTED), 0, 1 + len(EXPECTED)]
    assert "cudaGraphGetNodes" in (names.reason or "")
    for module in ("cuda.bindings", "cuda.bindings.runtime", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, module, None)
    names = capture(run, times=2)
    assert [step.nodes for step in names.steps] == [(), ()]
    assert "cuda-bindings" in (names.reason or "")
    assert len(runs) == 5
    assert len(caplog.records) == 2


@pytest.mark.gpu
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

    step = Step("graph", fn, "demo", CudaGraphCapturer("cuda"), KEY)
    with attribution.recording() as names:
        step.prepare()
    assert torch.equal(step.run(), fn())
    (captured,) = names.steps
    assert list(dict.fromkeys(node.label for node in captured.nodes)) == [
        *("0/down", "0/residual", "other", "norm"),
    ]
    assert sum(node.label == "norm" for node in captured.nodes) == 2
    assert all(node.kernel for node in captured.nodes if node.kind == "kernel")
