"""Names for the kernels inside a replayed graph.

A profiler sees the kernels of a replay without the layers and operations that launched them. They
are therefore recorded at capture:

    with attribution.recording() as names:
        engine = Engine.from_pretrained(...)    # captures its steps
    names.save("trace.kernels.json")            # next to the trace of a later replay

Model code opens a scope for each operation: `with operation("down"):`. At the begin and end of
every scope the new nodes of the graph under capture are assigned to the innermost scope.

CUDA lists the nodes of a graph in no particular order. The nodes of a scope are the nodes that were
not listed before it, sorted so that each comes after those it depends on.

Neither torch nor CUDA is imported here before a capture is recorded.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from graphlib import TopologicalSorter
from typing import Any, Protocol

from .kernel_names import OTHER, KernelNames, Node, NodeKind, StepNodes
from .ranges import NOTHING

__all__ = [
    "AttributionError",
    "CudaGraphNodes",
    "ScopeListener",
    "StepIdentity",
    "capturing",
    "cuda_graph_nodes",
    "listening",
    "operation",
    "recording",
    "step",
]

logger = logging.getLogger("stepgraph.profiling")


class AttributionError(RuntimeError):
    """The nodes of a graph cannot be listed; the message names what is missing."""


class StepIdentity(Protocol):
    """Identifies a captured step of an engine; `StepNodes` describes the fields."""

    @property
    def phase(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def full_sampler(self) -> bool: ...


class ScopeListener(Protocol):
    """Receives the scopes of operations, from any thread."""

    def enter(self, name: str, layer: int | None) -> None:
        """A scope began."""

    def leave(self, *, failed: bool) -> None:
        """The innermost scope ended; `failed`: with an exception."""


_names: ContextVar[KernelNames | None] = ContextVar("stepgraph_kernel_names", default=None)
_step: ContextVar[StepIdentity | None] = ContextVar("stepgraph_captured_step", default=None)
capture_listener: ContextVar[ScopeListener | None] = ContextVar("stepgraph_capture", default=None)
"""Of the capture on this thread, if its kernels are recorded."""
scope_listener: ScopeListener | None = None
"""Of all threads; see `listening`."""


@contextlib.contextmanager
def recording() -> Iterator[KernelNames]:
    """Record, at each capture on this thread, which operation every node of the graph belongs to.

    Captures take longer, replays do not. If nodes cannot be listed, steps have none, and
    `names.reason` says why.
    """
    names = KernelNames()
    token = _names.set(names)
    try:
        yield names
    finally:
        _names.reset(token)


def operation(
    name: str, layer: int | None = None
) -> contextlib.AbstractContextManager[object, bool | None]:
    """Return a context manager around the launch of an operation; does nothing without a listener.

    Args:
        name: of the operation; for operations with a cost, the name in the table of costs.
        layer: index of the layer; None: the layer of the enclosing scope, if any. A scope of a
            whole layer names the nodes that no scope inside it names.
    """
    listener = capture_listener.get() or scope_listener
    return NOTHING if listener is None else scope(listener, name, layer)


@contextlib.contextmanager
def listening(listener: ScopeListener) -> Iterator[None]:
    """Send the scopes of all threads to a listener, except scopes of a recorded capture.

    A replayed graph enters no scopes, and compiled code only the scopes around it. The innermost
    `listening` receives them.
    """
    global scope_listener
    before, scope_listener = scope_listener, listener
    try:
        yield
    finally:
        scope_listener = before


@contextlib.contextmanager
def step(identity: StepIdentity | None) -> Iterator[None]:
    """Set the identity of the step that is captured inside; None: it is not recorded."""
    token = _step.set(identity)
    try:
        yield
    finally:
        _step.reset(token)


@contextlib.contextmanager
def capturing(open_source: Callable[[], CudaGraphNodes]) -> Iterator[None]:
    """Attribute what is captured inside; the capture must have begun, and end after this.

    Does nothing without a recording. A body that raises leaves no record.

    Args:
        open_source: called only in a recording.
    """
    names, key = _names.get(), _step.get()
    if names is None or key is None:
        yield
        return
    tape = _Tape(names, open_source)
    token = capture_listener.set(tape)
    try:
        yield
        tape.boundary()
    finally:
        capture_listener.reset(token)
    names.steps.append(StepNodes(key.phase, key.size, key.full_sampler, tuple(tape.nodes)))


class _Tape:
    """The nodes of one capture."""

    def __init__(self, names: KernelNames, open_source: Callable[[], CudaGraphNodes]) -> None:
        self.nodes: list[Node] = []
        self._names = names
        self._scopes: list[tuple[str, int | None]] = []
        self._source: CudaGraphNodes | None = None
        try:
            self._source = open_source()
        except Exception as error:  # a capture never fails for its names
            self._give_up(error)

    def boundary(self) -> None:
        """Attribute the nodes since the last boundary to the innermost scope."""
        if self._source is None:
            return
        name, layer = self._scopes[-1] if self._scopes else (OTHER, None)
        try:
            taken = self._source.take()
        except Exception as error:
            self._give_up(error)
            return
        self.nodes += [Node(layer, name, kind, kernel) for kind, kernel in taken]

    def enter(self, name: str, layer: int | None) -> None:
        """Open a scope."""
        self.boundary()
        if layer is None and self._scopes:
            layer = self._scopes[-1][1]
        self._scopes.append((name, layer))

    def leave(self, *, failed: bool) -> None:
        """Close the innermost scope.

        An exception may have ended the capture, and with it the graph: its nodes are not listed
        again.
        """
        if failed:
            self._source = None
            self.nodes.clear()
        self.boundary()
        self._scopes.pop()

    def _give_up(self, error: Exception) -> None:
        """Keep no nodes of this step: a part of them would get wrong names."""
        self._source = None
        self.nodes.clear()
        if self._names.reason is None:
            kind = "" if isinstance(error, AttributionError) else f"{type(error).__name__}: "
            self._names.reason = f"steps have no nodes: {kind}{error}"
            logger.warning("kernels of captured steps: %s", self._names.reason)


@contextlib.contextmanager
def scope(listener: ScopeListener, name: str, layer: int | None) -> Iterator[None]:
    """Run the body in the scope of an operation, for a listener."""
    listener.enter(name, layer)
    try:
        yield
    except BaseException:
        listener.leave(failed=True)
        raise
    listener.leave(failed=False)


_KINDS: dict[str, NodeKind] = {
    "cudaGraphNodeTypeKernel": "kernel",
    "cudaGraphNodeTypeMemcpy": "memcpy",
    "cudaGraphNodeTypeMemset": "memset",
}

_FEW_EDGES = 4
"""In one stream a node depends on one other."""


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
    """The graph under capture. Its errors end the attribution, never the capture.

    Signatures of cuda-bindings 12.8 to 13.x.
    """

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
        types = runtime.cudaGraphNodeType
        self._kinds = {getattr(types, name): kind for name, kind in _KINDS.items()}
        self._known: set[int] = set()
        self._functions: dict[tuple[bool, int], str | None] = {}
        # The graph has the same place in all versions; what comes after it differs.
        status, _, self._graph, *_ = self._call(
            "cudaStreamGetCaptureInfo", runtime.cudaStream_t(init_value=stream)
        )
        if status != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive:
            raise AttributionError("the stream is not capturing")

    def take(self) -> list[tuple[NodeKind, str | None]]:
        """Return the nodes captured since the last call, each after those it depends on.

        Each as its kind and the name of its device function, None where it is unknown.
        """
        _, count = self._call("cudaGraphGetNodes", self._graph)
        if count == len(self._known):
            return []
        nodes, count = self._call("cudaGraphGetNodes", self._graph, count)
        new = {int(node): node for node in nodes[:count] if int(node) not in self._known}
        self._known.update(new)
        taken: list[tuple[NodeKind, str | None]] = []
        for node in self._in_order(new):
            (found,) = self._call("cudaGraphNodeGetType", node)
            kind = self._kinds.get(found, "other")
            taken.append((kind, self._name(node) if kind == "kernel" else None))
        return taken

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
