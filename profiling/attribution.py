"""Names for the kernels inside a replayed graph.

A profiler sees the kernels of a replay without the layers and operations that launched them. They
are therefore recorded at capture, as a JSON file next to a trace:

    with attribution.recording() as names:
        engine = Engine.from_pretrained(...)    # captures its steps
    names.save("trace.kernels.json")            # next to the trace of a later replay

    {"schema_version": 2, "model": str, "device": str, "bandwidth_gb_s": float|null,
     "reason": str|null,
     "steps": [{"phase", "size", "full_sampler",
                "nodes": [{"layer", "operation", "kind", "kernel"}, ...]}, ...],
     "bytes_read": {operation: int}}

Model code opens a scope for each operation: `with operation("down"):`. At the begin and end of
every scope the new nodes of the graph under capture are assigned to the innermost scope. CUDA lists
the nodes of a graph in no particular order: the nodes of a scope are sorted so that each one comes
after its dependencies. `nodes_of_replay` assigns the nodes to the kernels of a replay.

Standard library only; CUDA is imported when a capture is recorded.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from .atomic_write import write_file
from .ranges import NOTHING

logger = logging.getLogger("stepgraph.profiling")

SCHEMA_VERSION = 2
SUFFIX = ".kernels.json"
"""Suffix of the file; the part before it is the name of the trace."""
OTHER = "other"
"""Operation of nodes that were launched outside of every scope."""
NodeKind = Literal["kernel", "memcpy", "memset", "other"]


class AttributionError(RuntimeError):
    """The nodes of a graph cannot be listed; the message names what is missing."""


class NamesFileError(ValueError):
    """A file of kernel names cannot be read. The message names the file."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a captured graph."""

    layer: int | None
    """Index of the layer; None outside of the layers."""
    operation: str
    kind: NodeKind
    kernel: str | None
    """Name of the device function as the driver has it (C++ names mangled); None: unknown."""

    @property
    def label(self) -> str:
        """`layer/operation`, or only the operation outside of the layers."""
        return self.operation if self.layer is None else f"{self.layer}/{self.operation}"


@dataclass(frozen=True, slots=True)
class StepNodes:
    """The nodes of one captured step, in the order in which they were captured."""

    phase: str
    """"decode" or "prefill"."""
    size: int
    """The bucket: rows of a decode step, tokens of a prefill step."""
    full_sampler: bool
    """Whether it samples more than the greedy token."""
    nodes: tuple[Node, ...]


@dataclass(slots=True)
class KernelNames:
    """The document: `attribution.recording` fills the steps, the caller the other fields."""

    model: str = ""
    device: str = ""
    bandwidth_gb_s: float | None = None
    """Measured read bandwidth of the device in GB/s (10^9 bytes per second)."""
    steps: list[StepNodes] = field(default_factory=list)
    """In the order of their capture."""
    bytes_read: dict[str, int] = field(default_factory=dict)
    """Bytes that each operation must read in a decode step of the case that was profiled."""
    reason: str | None = None
    """Why steps have no nodes."""

    @property
    def unattributed(self) -> int:
        """Nodes that were launched outside of every scope."""
        return sum(node.operation == OTHER for step in self.steps for node in step.nodes)

    def save(self, path: str | Path) -> None:
        """Write the document: all of it, or nothing. Raises WriteError."""
        document = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        write_file(Path(path), json.dumps(document, allow_nan=False, indent=1) + "\n")


def load(path: str | Path) -> KernelNames:
    """Read what `KernelNames.save` wrote.

    Raises:
        NamesFileError: the file cannot be read, or does not hold kernel names of this version.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        version = document.pop("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {version!r}, not {SCHEMA_VERSION}")
        steps = [
            StepNodes(**step | {"nodes": tuple(Node(**node) for node in step["nodes"])})
            for step in document.pop("steps")
        ]
        return KernelNames(**document, steps=steps)
    except OSError as error:
        why = error.strerror or str(error)
        raise NamesFileError(f"{path}: the kernel names cannot be read: {why}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NamesFileError(
            f"{path} is not a file of kernel names ({error}); such files are written next to a"
            f" trace and end in {SUFFIX}: record the names again"
        ) from error


# Captures ----------------------------------------------------------------------------------------


StepIdentity = tuple[str, int, bool]
"""Phase, size and full sampler of a captured step, as in `StepNodes`."""


class ScopeListener(Protocol):
    """Receives the scopes of operations, from any thread; `failed`: one ended by an exception."""

    def enter(self, name: str, layer: int | None) -> None: ...
    def leave(self, *, failed: bool) -> None: ...


_names: ContextVar[KernelNames | None] = ContextVar("stepgraph_kernel_names", default=None)
capture_listener: ContextVar[ScopeListener | None] = ContextVar("stepgraph_capture", default=None)
"""Of the capture on this thread, if its kernels are recorded."""
scope_listener: ScopeListener | None = None
"""Of all threads; see `listening`."""


@contextlib.contextmanager
def recording() -> Iterator[KernelNames]:
    """Record, at each capture on this thread, which operation every node of the graph belongs to.

    Captures take longer, replays do not. If nodes cannot be listed, `names.reason` says why.
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
        name: of the operation, as in `KernelNames.bytes_read`.
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
def capturing(
    identity: StepIdentity | None, open_source: Callable[[], CudaGraphNodes]
) -> Iterator[None]:
    """Attribute what is captured inside; the capture must have begun, and end after this.

    Does nothing without a recording. A body that raises leaves no record.

    Args:
        identity: of the step that is captured; None: it is not recorded.
        open_source: called only in a recording.
    """
    names = _names.get()
    if names is None or identity is None:
        yield
        return
    tape = _Tape(names, open_source)
    token = capture_listener.set(tape)
    try:
        yield
        tape.boundary()
    finally:
        capture_listener.reset(token)
    names.steps.append(StepNodes(*identity, tuple(tape.nodes)))


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
        self.boundary()
        if layer is None and self._scopes:
            layer = self._scopes[-1][1]
        self._scopes.append((name, layer))

    def leave(self, *, failed: bool) -> None:
        if failed:  # the exception may have ended the capture, and with it the graph
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
    """The graph under capture, by the signatures of cuda-bindings 12.8 to 13.x.

    Its errors end the attribution, never the capture.
    """

    def __init__(self, runtime: Any, driver: Any, stream: int) -> None:
        """Find the graph that a stream captures, with the modules of `cuda.bindings`.

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
        """Return kind and kernel of the nodes captured since the last call, in order."""
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


# Replays -----------------------------------------------------------------------------------------


class DeviceWork(NamedTuple):
    """A kernel, a copy or a fill of a replay."""

    kind: str
    """"kernel", "memcpy" or "memset"."""
    name: str
    """Of the kernel, mangled or not."""


def nodes_of_replay(
    names: KernelNames, work: Sequence[DeviceWork], bucket: int | None = None
) -> list[Node | None] | None:
    """Return the node of each piece of work of a replay.

    They are matched by order: a replay in one stream runs its nodes in capture order. A replay
    that lacks kernels is not matched: as layers have equal kernels, any alignment would be a guess.

    Args:
        names: of all captured steps.
        work: of one replay, in the order in which it ran.
        bucket: of the launch; None: any.

    Returns:
        None if no captured step matches. Work is None where its node is not certain: a node is
        never given to a kernel of another name.
    """
    best: list[Node | None] | None = None
    most = 0
    for step in names.steps:
        if bucket is None or step.size == bucket:
            matched = _match(step.nodes, work)
            count = sum(node is not None for node in matched)
            if count > most:
                best, most = matched, count
    return best


def _match(nodes: Sequence[Node], work: Sequence[DeviceWork]) -> list[Node | None]:
    """Return the node of each piece of work; None where that is not certain."""
    of_kind: dict[str, list[Node]] = {}
    for node in nodes:
        of_kind.setdefault(node.kind, []).append(node)
    left = {}
    for kind in {one.kind for one in work}:
        own, known = [one for one in work if one.kind == kind], of_kind.get(kind, [])
        equal = len(own) == len(known) and all(map(_agree, known, own))
        left[kind] = iter(known if equal else [None] * len(own))
    return [next(left[one.kind]) for one in work]


def _agree(node: Node, work: DeviceWork) -> bool:
    """Whether both, of one kind, may be of one function; an unknown name of a node may be any."""
    if work.kind != "kernel" or node.kernel is None or node.kernel == work.name:
        return True
    names = sorted((node.kernel, work.name), key=lambda name: not name.startswith("_Z"))
    mangled, shown = names[0], function_name(names[1])
    if mangled.startswith("_Z"):
        # Identifiers follow their lengths (Itanium C++ ABI, "Mangling").
        return f"{len(shown)}{shown}" in mangled
    return function_name(mangled) == shown


def function_name(name: str) -> str:
    """Return the name of a function without namespaces, template arguments and parameters.

    The driver has the mangled name of a C++ kernel, a trace the mangled, the full or the short one.

    >>> function_name("void at::native::(anonymous namespace)::fill<int, 4>(int*, int)")
    'fill'
    """
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", name)
    return re.split(r"[<(]", plain, maxsplit=1)[0].rpartition("::")[2].rpartition(" ")[2]
