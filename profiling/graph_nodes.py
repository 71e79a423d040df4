"""Lists the nodes of a CUDA graph under capture; see `attribution.NodeSource`.

CUDA lists the nodes of a graph in no particular order. The nodes of a scope are those that were not
listed before it, sorted so that each comes after those it depends on. That works with every driver.

With cuda-bindings and a driver of CUDA 13.1 or later a node also has the id that CUPTI shows in
traces (`cudaGraphNodeGetToolsId`). Neither torch nor CUDA is imported before a capture is recorded.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Any

from .attribution import AttributionError, CapturedNode
from .kernel_names import NodeKind

__all__ = ["CudaGraphNodes", "cuda_graph_nodes"]

_KINDS: dict[str, NodeKind] = {
    "cudaGraphNodeTypeKernel": "kernel",
    "cudaGraphNodeTypeMemcpy": "memcpy",
    "cudaGraphNodeTypeMemset": "memset",
}

_FEW_EDGES = 4
"""In one stream a node depends on one other."""

_LOW_BITS = 0xFFFFFFFF
"""Of a graph node id: the node. The bits above are the graph, which instantiation changes."""


def cuda_graph_nodes(stream: int) -> CudaGraphNodes:
    """Return the source for what `stream` (its handle) is capturing now.

    Raises:
        AttributionError: cuda-bindings is not installed, or the stream cannot be asked.
    """
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise AttributionError(
            f"cuda.bindings cannot be imported ({error}); PyTorch for CUDA brings it from version"
            " 2.10 on, for others: pip install cuda-bindings, of the CUDA version that torch has"
        ) from error
    return CudaGraphNodes(runtime, driver, stream)


class CudaGraphNodes:
    """See `NodeSource`. Signatures of cuda-bindings 12.8 to 13.x."""

    def __init__(self, runtime: Any, driver: Any, stream: int) -> None:
        """Find the graph that the stream is capturing.

        Args:
            runtime: `cuda.bindings.runtime`.
            driver: `cuda.bindings.driver`.
            stream: its handle.

        Raises:
            AttributionError: the stream captures nothing, or cannot be asked.
        """
        self._runtime = runtime
        self._driver = driver
        self.reason = self._why_no_ids()
        types = runtime.cudaGraphNodeType
        self._kinds = {getattr(types, name): kind for name, kind in _KINDS.items()}
        self._known: set[int] = set()
        self._node_ids: list[int] = []
        self._functions: dict[tuple[bool, int], str | None] = {}
        # The graph has the same place in all versions; what comes after it differs.
        status, _, self._graph, *_ = self._call(
            "cudaStreamGetCaptureInfo", runtime.cudaStream_t(init_value=stream)
        )
        if status != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive:
            raise AttributionError("the stream is not capturing")

    def _why_no_ids(self) -> str | None:
        runtime = self._runtime
        without = "kernels are matched by order and name, without graph node ids: "
        if not hasattr(runtime, "cudaGraphNodeGetToolsId"):
            return without + "cuda-bindings is older than 13.1"
        # A null node is invalid for a driver that has the call.
        status = runtime.cudaGraphNodeGetToolsId(0)[0]
        if status == runtime.cudaError_t.cudaErrorCallRequiresNewerDriver:
            return without + "the driver is older than CUDA 13.1"
        return None

    def take(self) -> list[CapturedNode]:
        """Return the nodes captured since the last call, each after those it depends on."""
        _, count = self._call("cudaGraphGetNodes", self._graph)
        if count == len(self._known):
            return []
        nodes, count = self._call("cudaGraphGetNodes", self._graph, count)
        new = {int(node): node for node in nodes[:count] if int(node) not in self._known}
        self._known.update(new)
        taken: list[CapturedNode] = []
        for node in self._in_order(new):
            (found,) = self._call("cudaGraphNodeGetType", node)
            kind = self._kinds.get(found, "other")
            taken.append(CapturedNode(kind, self._name(node) if kind == "kernel" else None))
            if self.reason is None:
                (tools_id,) = self._call("cudaGraphNodeGetToolsId", node)
                self._node_ids.append(int(tools_id) & _LOW_BITS)
        return taken

    def tools_ids(self, graph: Any) -> list[int] | None:
        """Return the ids that CUPTI shows, of every node taken, in order; None: not known.

        Args:
            graph: the `torch.cuda.CUDAGraph` that was captured, instantiated.
        """
        if self.reason is not None:
            return None
        executable = self._runtime.cudaGraphExec_t(init_value=graph.raw_cuda_graph_exec())
        (graph_id,) = self._call("cudaGraphExecGetId", executable)
        return [int(graph_id) << 32 | node_id for node_id in self._node_ids]

    def _in_order(self, new: dict[int, Any]) -> Sequence[Any]:
        """Return nodes, each after those it depends on; else in the order given."""
        if len(new) < 2:
            return list(new.values())
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for handle, node in new.items():
            before = (int(other) for other in self._dependencies(node))
            sorter.add(handle, *(other for other in before if other in new))
        return [new[handle] for handle in sorter.static_order()]

    def _dependencies(self, node: Any) -> Sequence[Any]:
        # Edges of programmatic dependent launch carry data, without which CUDA 12 answers only to
        # the second version of the call; in CUDA 13 that is the only one, under the plain name.
        name = "cudaGraphNodeGetDependencies_v2"
        if not hasattr(self._runtime, name):
            name = "cudaGraphNodeGetDependencies"
        # A call for their number alone has no room for that data, and may answer with an error.
        room = _FEW_EDGES
        while True:
            nodes, *_, count = self._call(name, node, room)
            if count < room:
                found: Sequence[Any] = nodes[:count]
                return found
            room *= 2

    def _name(self, node: Any) -> str | None:
        """Return the name of a kernel's function; None where the driver has none."""
        driver = self._driver
        try:
            status, parameters = driver.cuGraphKernelNodeGetParams(node)
            if status != driver.CUresult.CUDA_SUCCESS:
                return None
            of_library = not int(parameters.func)
            handle = parameters.kern if of_library else parameters.func
            key = of_library, int(handle)
            if key not in self._functions:
                get_name = driver.cuKernelGetName if of_library else driver.cuFuncGetName
                status, name = get_name(handle)
                found = status == driver.CUresult.CUDA_SUCCESS and name
                self._functions[key] = name.decode(errors="replace") if found else None
        except (AttributeError, RuntimeError, TypeError):  # of another version, or not in libcuda
            return None
        return self._functions[key]

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a function of the runtime and return its results after the status."""
        function = getattr(self._runtime, name, None)
        if function is None:
            raise AttributionError(f"cuda-bindings has no {name}: install a newer version")
        status, *results = function(*arguments)
        if status != self._runtime.cudaError_t.cudaSuccess:
            raise AttributionError(f"{name} failed: {getattr(status, 'name', status)}")
        return tuple(results)
