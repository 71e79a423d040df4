"""Asks a CUDA graph under capture for its nodes; see `attribution.NodeSource`.

The graph lists its nodes, in no promised order, so what a scope launched are those that it did not
list before; among them the one that depends on another is the later. That works with every driver.

What CUPTI calls a graph node id is known on top where torch has annotations of CUDA graphs
(`torch.cuda._graph_annotations`) and cuda-bindings and driver have `cudaGraphNodeGetToolsId`, all
of them of CUDA 13.1 or later: there the scopes are marked for torch too, and what it noted of a
node is what counts.

Neither torch nor CUDA is imported before a capture is recorded.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from graphlib import TopologicalSorter
from types import ModuleType
from typing import Any

from .attribution import Annotation, AttributionError, CapturedNode
from .kernel_names import NodeKind

__all__ = ["CudaGraphNodes", "cuda_graph_nodes"]

_KINDS: dict[str, NodeKind] = {
    "cudaGraphNodeTypeKernel": "kernel",
    "cudaGraphNodeTypeMemcpy": "memcpy",
    "cudaGraphNodeTypeMemset": "memset",
}

_OF_ANNOTATIONS = (
    "mark_kernels",
    "enable_annotations",
    "disable_annotations",
    "resolve_pending_annotations",
    "remap_to_exec_graph",
    "get_kernel_annotations",
    "_is_tools_id_unavailable",
)
"""What torch's annotations must have; they are no public interface, so any of it may be gone."""

_FEW_EDGES = 4
"""In one stream a node depends on one other."""

_LOW_BITS = 0xFFFFFFFF
"""Of a graph node id: the node. Those above are of the graph, another one once it is executable."""


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
    annotations, reason = _torch_annotations(runtime)
    return CudaGraphNodes(runtime, driver, stream, annotations, reason)


def _torch_annotations(runtime: ModuleType) -> tuple[ModuleType | None, str | None]:
    """Return torch's annotations, or None and why they cannot be used here."""
    without = "kernels are matched by order and name, without graph node ids: "
    if not hasattr(runtime, "cudaGraphNodeGetToolsId"):
        return None, without + "cuda-bindings is older than 13.1"
    # A null node is invalid for a driver that has the call. (Asked before torch, which would log.)
    status = runtime.cudaGraphNodeGetToolsId(0)[0]
    if status == runtime.cudaError_t.cudaErrorCallRequiresNewerDriver:
        return None, without + "the driver is older than CUDA 13.1"
    try:
        module = importlib.import_module("torch.cuda._graph_annotations")
    except ImportError:
        return None, without + "this version of torch has no annotations of CUDA graphs"
    missing = [name for name in _OF_ANNOTATIONS if not hasattr(module, name)]
    if missing:
        return None, f"{without}torch's annotations of CUDA graphs have no {', '.join(missing)}"
    if module._is_tools_id_unavailable():
        return None, without + "torch finds no graph node ids here"
    return module, None


class CudaGraphNodes:
    """See `NodeSource`. Signatures of cuda-bindings 12.8 to 13.x."""

    def __init__(
        self,
        runtime: Any,
        driver: Any,
        stream: int,
        annotations: Any | None = None,
        reason: str | None = None,
    ) -> None:
        """Find the graph that the stream is capturing.

        Args:
            runtime: `cuda.bindings.runtime`.
            driver: `cuda.bindings.driver`.
            stream: its handle.
            annotations: `torch.cuda._graph_annotations`, if it can be used.
            reason: why it cannot.

        Raises:
            AttributionError: the stream captures nothing, or cannot be asked.
        """
        self.reason = reason
        self._runtime = runtime
        self._driver = driver
        self._annotations = annotations
        self._annotated_before: set[int] = set()
        if annotations is not None:
            self._annotated_before = set(annotations.get_kernel_annotations())
        types = runtime.cudaGraphNodeType
        self._kinds = {getattr(types, name): kind for name, kind in _KINDS.items()}
        self._known: set[int] = set()
        self._tools_ids: list[int | None] = []
        self._functions: dict[tuple[bool, int], str | None] = {}
        # The graph stands at the same place in all versions; what comes behind it does not.
        status, _, self._graph, *_ = self._call(
            "cudaStreamGetCaptureInfo", runtime.cudaStream_t(init_value=stream)
        )
        if status != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive:
            raise AttributionError("the stream is not capturing")

    def take(self) -> list[CapturedNode]:
        """Return the nodes captured since the last call, each behind those it depends on."""
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
            self._tools_ids.append(self._tools_id(node))
        return taken

    @contextlib.contextmanager
    def mark(self, name: str, layer: int | None) -> Iterator[None]:
        """Tell torch too that what is launched inside belongs to an operation."""
        torch = self._annotations
        if torch is None:
            yield
            return
        enabled = getattr(torch, "_annotations_enabled", False)
        with contextlib.ExitStack() as stack:
            torch.enable_annotations()
            try:  # it looks at the switch on entry only: others' captures keep their setting
                stack.enter_context(torch.mark_kernels({"operation": name, "layer": layer}))
            finally:
                if not enabled:
                    torch.disable_annotations()
            yield

    def end(self) -> None:
        """Let torch settle what it noted, while the graph is still under capture."""
        if self._annotations is not None:
            self._annotations.resolve_pending_annotations()

    def annotations(self, graph: object) -> list[Annotation | None]:
        """Return what torch noted of every node taken, in order.

        Raises:
            AttributionError: the ids of the executable graph are not those of one graph.
        """
        torch = self._annotations
        if torch is None:
            return [None] * len(self._tools_ids)
        torch.remap_to_exec_graph(graph)
        noted = torch.get_kernel_annotations()
        new = {key: values for key, values in noted.items() if key not in self._annotated_before}
        graphs = {key >> 32 for key in new}
        if len(graphs) > 1:
            raise AttributionError(f"torch annotated {len(graphs)} graphs for one capture")
        if not graphs:
            return [None] * len(self._tools_ids)
        (exec_graph,) = graphs
        found: list[Annotation | None] = []
        for tools_id in self._tools_ids:
            if tools_id is None:
                found.append(None)
                continue
            exec_id = exec_graph << 32 | tools_id & _LOW_BITS
            ours = [v for v in new.get(exec_id, ()) if isinstance(v, dict) and "operation" in v]
            scope = ours[-1] if ours else {}
            found.append(Annotation(exec_id, scope.get("layer"), scope.get("operation")))
        return found

    def _in_order(self, new: dict[int, Any]) -> Sequence[Any]:
        """Return nodes, each behind those it depends on; else in the order given."""
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
        # With room for them at once: asked for their number alone it is given no room for that
        # data either, for which the answer may be an error.
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
        except (AttributeError, RuntimeError, TypeError):  # of another version, or not in libcuda
            return None
        key = of_library, int(handle)
        if key not in self._functions:
            self._functions[key] = self._function_name(handle, of_library)
        return self._functions[key]

    def _function_name(self, handle: Any, of_library: bool) -> str | None:
        driver = self._driver
        try:
            ask: Callable[[Any], tuple[Any, bytes | None]] = (
                driver.cuKernelGetName if of_library else driver.cuFuncGetName
            )
            status, name = ask(handle)
        except (AttributeError, RuntimeError, TypeError):
            return None
        if status != driver.CUresult.CUDA_SUCCESS or not name:
            return None
        return name.decode("utf-8", errors="replace")

    def _tools_id(self, node: Any) -> int | None:
        """Return the id of a node in the graph under capture."""
        if self._annotations is None:
            return None
        (tools_id,) = self._call("cudaGraphNodeGetToolsId", node)
        return int(tools_id)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a function of the runtime and return what it answers behind the status."""
        function = getattr(self._runtime, name, None)
        if function is None:
            raise AttributionError(f"cuda-bindings has no {name}: install a newer version")
        status, *answer = function(*arguments)
        if status != self._runtime.cudaError_t.cudaSuccess:
            raise AttributionError(f"{name} failed: {getattr(status, 'name', status)}")
        return tuple(answer)
