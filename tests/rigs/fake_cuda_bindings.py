"""`cuda.bindings` with the signatures and answers of its versions, over a graph that is a list.

As documented for cuda-bindings 12.9 ("12") and 13.0 ("13"): 13 answers with the data of edges, as
12 does only to the second version of a call.
"""
# ruff: noqa: N802, N816  the names are CUDA's

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class Handle:
    """Of a stream, a graph, a node or a function: a number."""

    def __init__(self, init_value: int = 0) -> None:
        self.value = int(init_value)

    def __int__(self) -> int:
        return self.value


cudaError_t = SimpleNamespace(cudaSuccess=0, cudaErrorInvalidValue=1, cudaErrorLossyQuery=402)
CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_INVALID_VALUE=1)
cudaGraphNodeType = SimpleNamespace(
    cudaGraphNodeTypeKernel=0,
    cudaGraphNodeTypeMemcpy=1,
    cudaGraphNodeTypeMemset=2,
    cudaGraphNodeTypeEventRecord=7,
)
cudaStreamCaptureStatus = SimpleNamespace(cudaStreamCaptureStatusActive=1)
STREAM = 0xABC
OK = cudaError_t.cudaSuccess


@dataclass
class FakeNode:
    kind: int
    function: int
    library: bool
    before: list[int]
    programmatic: bool


@dataclass
class FakeCuda:
    """A stream under capture, and the two modules that can be asked about it."""

    version: str = "13"
    fails: bool = False
    """Whether the nodes of the graph cannot be listed now."""
    nodes: dict[int, FakeNode] = field(default_factory=dict)
    """By handle; their order tells nothing."""
    names: dict[tuple[bool, int], bytes] = field(default_factory=dict)
    """(whether a kernel of a library, handle) -> name."""

    def __post_init__(self) -> None:
        self._random = random.Random(5)
        self.begin()

    def begin(self) -> None:
        """Begin a capture."""
        self.nodes.clear()
        self.frontier: list[int] = []

    def launch(
        self, name: str, *, library: bool = False, after: list[int] | None = None, pdl: bool = False
    ) -> int:
        """A kernel in the stream, or in another one, behind other nodes."""
        function = len(self.names) + 0x100
        known = [key[1] for key, value in self.names.items() if value == name.encode()]
        function = known[0] if known else function
        self.names[library, function] = name.encode()
        kind = cudaGraphNodeType.cudaGraphNodeTypeKernel
        return self.add(kind, function, library=library, after=after, pdl=pdl)

    def add(
        self,
        kind: int,
        function: int = 0,
        *,
        library: bool = False,
        after: list[int] | None = None,
        pdl: bool = False,
    ) -> int:
        handle = self._random.randrange(1, 2**47)  # addresses in no order
        before = self.frontier if after is None else after
        self.nodes[handle] = FakeNode(kind, function, library, list(before), pdl)
        if after is None:
            self.frontier = [handle]
        return handle

    def _listed(self, handles: list[int], count: int) -> tuple[list[Handle], int]:
        """What a call answers that is asked for the number first (0), then for so many."""
        if count == 0:
            return [], len(handles)
        found = [Handle(handle) for handle in handles[:count]]
        found += [Handle() for _ in range(count - len(found))]
        return found, min(count, len(handles))

    @property
    def runtime(self) -> Any:
        """`cuda.bindings.runtime`."""
        edges = self.version != "12"

        def cudaStreamGetCaptureInfo(stream: Handle) -> tuple[Any, ...]:
            assert int(stream) == STREAM
            active = cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
            frontier = [Handle(handle) for handle in self.frontier]
            data = [[None] * len(frontier)] if edges else []
            return OK, active, 1, Handle(7), frontier, *data, len(frontier)

        def cudaGraphGetNodes(graph: Handle, numNodes: int = 0) -> tuple[Any, ...]:
            assert int(graph) == 7
            if self.fails:
                return cudaError_t.cudaErrorInvalidValue, None, None
            handles = list(self.nodes)
            self._random.shuffle(handles)
            return OK, *self._listed(handles, numNodes)

        def cudaGraphNodeGetType(node: Handle) -> tuple[Any, ...]:
            return OK, self.nodes[int(node)].kind

        def dependencies(node: Handle, pNumDependencies: int = 0) -> tuple[Any, ...]:
            if not pNumDependencies and self.nodes[int(node)].programmatic:
                return cudaError_t.cudaErrorLossyQuery, None, None, None  # no room for their data
            nodes, count = self._listed(self.nodes[int(node)].before, pNumDependencies)
            return OK, nodes, [None] * len(nodes), count

        def lossy(node: Handle, pNumDependencies: int = 0) -> tuple[Any, ...]:
            if self.nodes[int(node)].programmatic:
                return cudaError_t.cudaErrorLossyQuery, None, None
            status, nodes, _, count = dependencies(node, pNumDependencies)
            return status, nodes, count

        module = SimpleNamespace(
            cudaError_t=cudaError_t,
            cudaGraphNodeType=cudaGraphNodeType,
            cudaStreamCaptureStatus=cudaStreamCaptureStatus,
            cudaStream_t=Handle,
            cudaStreamGetCaptureInfo=cudaStreamGetCaptureInfo,
            cudaGraphGetNodes=cudaGraphGetNodes,
            cudaGraphNodeGetType=cudaGraphNodeGetType,
            cudaGraphNodeGetDependencies=dependencies if edges else lossy,
        )
        if not edges:
            module.cudaGraphNodeGetDependencies_v2 = dependencies
        return module

    @property
    def driver(self) -> Any:
        """`cuda.bindings.driver`."""

        def cuGraphKernelNodeGetParams(hNode: Handle) -> tuple[Any, ...]:
            node = self.nodes[int(hNode)]
            func, kern = (0, node.function) if node.library else (node.function, 0)
            return CUresult.CUDA_SUCCESS, SimpleNamespace(func=Handle(func), kern=Handle(kern))

        def name(library: bool, hfunc: Handle) -> tuple[Any, ...]:
            found = self.names.get((library, int(hfunc)))
            if found is None:
                return CUresult.CUDA_ERROR_INVALID_VALUE, None
            return CUresult.CUDA_SUCCESS, found

        return SimpleNamespace(
            CUresult=CUresult,
            cuGraphKernelNodeGetParams=cuGraphKernelNodeGetParams,
            cuFuncGetName=lambda hfunc: name(False, hfunc),
            cuKernelGetName=lambda hfunc: name(True, hfunc),
        )
