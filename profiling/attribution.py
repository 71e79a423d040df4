"""Names for the kernels inside a replayed graph.

A replay shows a tool the kernels of a step, and nothing of what the host said while they were
captured. So the names are written down at the capture:

    with attribution.recording() as names:
        engine = Engine.from_pretrained(...)    # captures its steps
    names.save("trace.kernels.json")            # beside the trace of a later replay

Model code says what it launches by `with operation("down"):`. At the boundaries of these scopes the
graph under capture is asked which nodes are new: those belong to the innermost scope that was open.
What a graph is, and how it is asked, is the matter of a `NodeSource` (`graph_nodes.py` has CUDA's).

Neither torch nor CUDA is imported here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

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
from .listeners import NOTHING

__all__ = [
    "OTHER",
    "SUFFIX",
    "Annotation",
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


@dataclass(frozen=True, slots=True)
class CapturedNode:
    """A node of the graph under capture."""

    kind: NodeKind
    kernel: str | None
    """Name of its device function, where it is known."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """What a framework has written down of a node itself."""

    tools_id: int
    """In the executable graph."""
    layer: int | None
    operation: str | None
    """None: nothing but the id is known."""


class NodeSource(Protocol):
    """A graph under capture. Whatever it raises ends the attribution, never the capture."""

    reason: str | None
    """What it cannot tell of the nodes, and why; None: nothing."""

    def take(self) -> Sequence[CapturedNode]:
        """Return the nodes captured since the last call, each behind those it depends on."""

    def mark(self, name: str, layer: int | None) -> contextlib.AbstractContextManager[object]:
        """Tell the framework too that what is launched inside belongs to an operation."""

    def end(self) -> None:
        """Take notice that the capture is about to end."""

    def annotations(self, graph: object) -> Sequence[Annotation | None]:
        """Return what is known of every node taken, in order, once `graph` can be replayed."""


class ScopeListener(Protocol):
    """Somebody who hears when scopes of operations begin and end, on whatever thread."""

    def enter(
        self, name: str, layer: int | None
    ) -> contextlib.AbstractContextManager[object] | None:
        """Hear that a scope began; return what `leave` is to be given."""

    def leave(self, mark: contextlib.AbstractContextManager[object] | None) -> None:
        """Hear that the innermost scope ended."""

    def abandon(self, mark: contextlib.AbstractContextManager[object] | None) -> None:
        """Hear that the innermost scope ended with an exception."""


_names: ContextVar[KernelNames | None] = ContextVar("stepgraph_kernel_names", default=None)
_step: ContextVar[StepIdentity | None] = ContextVar("stepgraph_captured_step", default=None)
_capture: ContextVar[ScopeListener | None] = ContextVar("stepgraph_capture", default=None)
_listeners: list[ScopeListener] = []
_exchange = threading.Lock()

scope_listener: Callable[[], ScopeListener | None] = _capture.get
"""Return who hears the scopes of this thread, or None. An attribute that `listening` exchanges: use
it as such (`attribution.scope_listener`)."""


@contextlib.contextmanager
def recording() -> Iterator[KernelNames]:
    """Record, at each capture on this thread, what every node of the graph belongs to.

    Engines that are made inside capture as always and cost nothing more later on; a capture takes
    longer. Where a graph cannot be asked, steps have no nodes and `names.reason` says why.
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
    """Return a context manager around the launch of an operation; free when nobody records.

    Args:
        name: of the operation, in the words of `kernel_costs` for what is counted there.
        layer: of the model; None: that of the scope around this one, if it has one. A scope for a
            whole layer has a name of its own, for what no scope inside it names.
    """
    listener = scope_listener()
    return NOTHING if listener is None else _Scope(listener, name, layer)


@contextlib.contextmanager
def listening(listener: ScopeListener) -> Iterator[None]:
    """Let a listener hear the scopes of all threads, but for those of a capture that is recorded.

    A replayed graph runs none, and compiled code only those around it. Of several listeners the
    latest hears.
    """
    _exchange_listeners(lambda: _listeners.append(listener))
    try:
        yield
    finally:
        _exchange_listeners(lambda: _listeners.remove(listener))


def _exchange_listeners(change: Callable[[], None]) -> None:
    global scope_listener
    with _exchange:
        change()
        if _listeners:
            latest = _listeners[-1]
            scope_listener = lambda: _capture.get() or latest  # noqa: E731  as `_capture.get` is one
        else:
            scope_listener = _capture.get


@contextlib.contextmanager
def step(identity: StepIdentity | None) -> Iterator[None]:
    """Say which step is captured inside; None: one that nobody asks about."""
    token = _step.set(identity)
    try:
        yield
    finally:
        _step.reset(token)


@contextlib.contextmanager
def capturing(open_source: Callable[[], NodeSource]) -> Iterator[Tape | None]:
    """Attribute what is captured inside; the capture must have begun, and end after this.

    Yields None where nobody records. Otherwise `finish` of the tape is due once the graph can be
    replayed; if the capture fails, nothing of it is kept.

    Args:
        open_source: called only if somebody records.
    """
    names, identity = _names.get(), _step.get()
    if names is None or identity is None:
        yield None
        return
    tape = Tape(names, identity, open_source)
    token = _capture.set(tape)
    try:
        yield tape
        tape.end()
    finally:
        _capture.reset(token)


class Tape:
    """The nodes of one capture as they come."""

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
            self._told(self._source.reason)
        except Exception as error:  # names are never worth a capture
            self._give_up(error)

    def boundary(self) -> None:
        """Give what was captured since the last boundary to the innermost scope."""
        if self._source is None:
            return
        name, layer = self._scopes[-1] if self._scopes else (OTHER, None)
        try:
            taken = self._source.take()
        except Exception as error:
            self._give_up(error)
            return
        self._nodes += [Node(layer, name, node.kind, node.kernel, None) for node in taken]

    def enter(
        self, name: str, layer: int | None
    ) -> contextlib.AbstractContextManager[object] | None:
        """Open a scope; return what marks it in the framework, entered."""
        self.boundary()
        if layer is None and self._scopes:
            layer = self._scopes[-1][1]
        self._scopes.append((name, layer))
        if self._source is None:
            return None
        try:
            mark = self._source.mark(name, layer)
            mark.__enter__()
        except Exception as error:
            self._give_up(error)
            return None
        return mark

    def abandon(self, mark: contextlib.AbstractContextManager[object] | None) -> None:
        """Close the innermost scope on the way of an exception.

        What failed may have ended the capture, and with it the graph: nothing is asked any more.
        """
        self._source = None
        self._nodes.clear()
        self._scopes.pop()

    def leave(self, mark: contextlib.AbstractContextManager[object] | None) -> None:
        """Close the innermost scope."""
        self.boundary()
        self._scopes.pop()
        if mark is not None:
            try:
                mark.__exit__(None, None, None)
            except Exception as error:
                self._give_up(error)

    def end(self) -> None:
        """Take what is left; due before the capture ends."""
        self.boundary()
        if self._source is not None:
            try:
                self._source.end()
            except Exception as error:
                self._give_up(error)

    def finish(self, graph: object) -> None:
        """Add the step to the names; `graph` is what can be replayed now."""
        if self._source is not None:
            try:
                annotations = self._source.annotations(graph)
                self._nodes = [
                    _annotated(node, annotation)
                    for node, annotation in zip(self._nodes, annotations, strict=True)
                ]
            except Exception as error:  # what the boundaries told stays
                self._told(f"graph node ids are not known: {type(error).__name__}: {error}")
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
        """Keep no nodes of this step: a part of them would be given wrong names."""
        self._source = None
        self._nodes.clear()
        kind = "" if isinstance(error, AttributionError) else f"{type(error).__name__}: "
        self._told(f"steps have no nodes: {kind}{error}")

    def _told(self, reason: str | None) -> None:
        before = self._names.reason
        if reason is not None and (before is None or reason not in before):
            self._names.reason = reason if before is None else f"{before}; {reason}"
            logger.warning("kernels of captured steps: %s", reason)


class AttributionError(RuntimeError):
    """A graph cannot be asked for its nodes. The message says what is missing."""


class _Scope:
    __slots__ = ("_layer", "_listener", "_mark", "_name")

    def __init__(self, listener: ScopeListener, name: str, layer: int | None) -> None:
        self._listener = listener
        self._name = name
        self._layer = layer
        self._mark: contextlib.AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        self._mark = self._listener.enter(self._name, self._layer)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._listener.leave(self._mark)
        else:
            self._listener.abandon(self._mark)


def _annotated(node: Node, annotation: Annotation | None) -> Node:
    """The node with what the framework says of it, which knows more than the boundaries."""
    if annotation is None:
        return node
    if annotation.operation is None:
        return replace(node, tools_id=annotation.tools_id)
    return replace(
        node,
        layer=annotation.layer,
        operation=annotation.operation,
        tools_id=annotation.tools_id,
    )
