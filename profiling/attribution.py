"""Names for the kernels inside a replayed graph.

A profiler sees the kernels of a replay without the layers and operations that launched them. They
are therefore recorded at capture:

    with attribution.recording() as names:
        engine = Engine.from_pretrained(...)    # captures its steps
    names.save("trace.kernels.json")            # next to the trace of a later replay

Model code opens a scope for each operation: `with operation("down"):`. At the begin and end of
every scope the new nodes of the graph under capture are assigned to the innermost scope. A
`NodeSource` lists them (`graph_nodes.py` has CUDA's). Neither torch nor CUDA is imported here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

from .kernel_matching import find_step, match
from .kernel_names import (
    OTHER,
    SUFFIX,
    KernelNames,
    NamesFileError,
    Node,
    NodeKind,
    OperationCost,
    StepIdentity,
    StepNodes,
    load,
)
from .ranges import NOTHING

__all__ = [
    "OTHER",
    "SUFFIX",
    "AttributionError",
    "CapturedNode",
    "KernelNames",
    "NamesFileError",
    "Node",
    "NodeSource",
    "OperationCost",
    "ScopeListener",
    "StepIdentity",
    "StepNodes",
    "capturing",
    "find_step",
    "listening",
    "load",
    "match",
    "operation",
    "recording",
    "scope_listener",
    "step",
]

logger = logging.getLogger("stepgraph.profiling")


class AttributionError(RuntimeError):
    """The nodes of a graph cannot be listed; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class CapturedNode:
    """A node of the graph under capture."""

    kind: NodeKind
    kernel: str | None
    """Name of its device function; None: unknown."""


class NodeSource(Protocol):
    """A graph under capture. Its errors end the attribution, never the capture."""

    reason: str | None
    """Which information about the nodes is missing, and why; None if complete."""

    def take(self) -> Sequence[CapturedNode]:
        """Return the nodes captured since the last call, each after those it depends on."""

    def tools_ids(self, graph: Any) -> Sequence[int] | None:
        """Return the id of every node taken, in order; `graph` has been instantiated."""


class ScopeListener(Protocol):
    """Receives the scopes of operations, from any thread."""

    def enter(self, name: str, layer: int | None) -> None:
        """A scope began."""

    def leave(self) -> None:
        """The innermost scope ended."""

    def abandon(self) -> None:
        """The innermost scope ended with an exception."""


_names: ContextVar[KernelNames | None] = ContextVar("stepgraph_kernel_names", default=None)
_step: ContextVar[StepIdentity | None] = ContextVar("stepgraph_captured_step", default=None)
_capture: ContextVar[ScopeListener | None] = ContextVar("stepgraph_capture", default=None)
_listeners: list[ScopeListener] = []
_changing = threading.Lock()

scope_listener: Callable[[], ScopeListener | None] = _capture.get
"""Return the listener of this thread's scopes, or None. `listening` replaces this attribute: access
it through the module (`attribution.scope_listener`)."""


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
        layer: index of the layer; None: that of the enclosing scope, if any. A scope of a whole
            layer names the nodes that no scope inside it names.
    """
    listener = scope_listener()
    return NOTHING if listener is None else _Scope(listener, name, layer)


@contextlib.contextmanager
def listening(listener: ScopeListener) -> Iterator[None]:
    """Send the scopes of all threads to a listener, except those of a recorded capture.

    A replayed graph enters no scopes, and compiled code only those around it. With several
    listeners, only the latest receives scopes.
    """
    _replace(lambda: _listeners.append(listener))
    try:
        yield
    finally:
        _replace(lambda: _listeners.remove(listener))


def _replace(change: Callable[[], None]) -> None:
    global scope_listener
    with _changing:
        change()
        if _listeners:
            latest = _listeners[-1]
            scope_listener = lambda: _capture.get() or latest  # noqa: E731  as `_capture.get` is one
        else:
            scope_listener = _capture.get


@contextlib.contextmanager
def step(identity: StepIdentity | None) -> Iterator[None]:
    """Set the identity of the step that is captured inside; None: it is not recorded."""
    token = _step.set(identity)
    try:
        yield
    finally:
        _step.reset(token)


@contextlib.contextmanager
def capturing(open_source: Callable[[], NodeSource]) -> Iterator[Tape | None]:
    """Attribute what is captured inside; the capture must have begun, and end after this.

    Yields None without a recording. Otherwise call `finish` of the tape once the graph is
    instantiated; a capture that fails leaves no record.

    Args:
        open_source: called only in a recording.
    """
    names, identity = _names.get(), _step.get()
    if names is None or identity is None:
        yield None
        return
    tape = Tape(names, identity, open_source)
    token = _capture.set(tape)
    try:
        yield tape
        tape.boundary()
    finally:
        _capture.reset(token)


class Tape:
    """The nodes of one capture."""

    def __init__(
        self,
        names: KernelNames,
        identity: StepIdentity,
        open_source: Callable[[], NodeSource],
    ) -> None:
        self._names = names
        self._identity = identity
        self._scopes: list[tuple[str, int | None]] = []
        self._nodes: list[Node] = []
        self._source: NodeSource | None = None
        try:
            self._source = open_source()
            self._explain(self._source.reason)
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
        self._nodes += [Node(layer, name, node.kind, node.kernel, None) for node in taken]

    def enter(self, name: str, layer: int | None) -> None:
        """Open a scope."""
        self.boundary()
        if layer is None and self._scopes:
            layer = self._scopes[-1][1]
        self._scopes.append((name, layer))

    def leave(self) -> None:
        """Close the innermost scope."""
        self.boundary()
        self._scopes.pop()

    def abandon(self) -> None:
        """Close the innermost scope after an exception.

        It may have ended the capture, and with it the graph: its nodes are not listed again.
        """
        self._source = None
        self._nodes.clear()
        self._scopes.pop()

    def finish(self, graph: object) -> None:
        """Add the step to the names; `graph` is instantiated."""
        if self._source is not None:
            try:
                ids = self._source.tools_ids(graph)
                if ids is not None:
                    pairs = zip(self._nodes, ids, strict=True)
                    self._nodes = [replace(node, tools_id=tools_id) for node, tools_id in pairs]
            except Exception as error:  # layers and operations are known all the same
                self._explain(f"graph node ids are not known: {type(error).__name__}: {error}")
        key = self._identity
        self._names.steps.append(
            StepNodes(
                phase=key.phase,
                size=key.size,
                read_blocks=key.read_blocks,
                full_sampler=key.full_sampler,
                steps=key.steps,
                nodes=tuple(self._nodes),
            )
        )

    def _give_up(self, error: Exception) -> None:
        """Keep no nodes of this step: a part of them would get wrong names."""
        self._source = None
        self._nodes.clear()
        kind = "" if isinstance(error, AttributionError) else f"{type(error).__name__}: "
        self._explain(f"steps have no nodes: {kind}{error}")

    def _explain(self, reason: str | None) -> None:
        before = self._names.reason
        if reason is not None and (before is None or reason not in before):
            self._names.reason = reason if before is None else f"{before}; {reason}"
            logger.warning("kernels of captured steps: %s", reason)


class _Scope:
    __slots__ = ("_layer", "_listener", "_name")

    def __init__(self, listener: ScopeListener, name: str, layer: int | None) -> None:
        self._listener = listener
        self._name = name
        self._layer = layer

    def __enter__(self) -> None:
        self._listener.enter(self._name, self._layer)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._listener.leave()
        else:
            self._listener.abandon()
