"""Which layer and operation every node of a captured step belongs to: the document beside a trace.

    {"schema_version": 1, "model": str, "device": str, "bandwidth_gb_s": float|null,
     "reason": str|null,
     "steps": [{"phase", "size", "read_blocks", "full_sampler", "steps",
                "nodes": [{"layer", "operation", "kind", "kernel", "tools_id"}, ...]}, ...],
     "costs": [{"operation", "launches", "bytes"}, ...]}

Standard library only: a trace is read where there is neither torch nor a device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, cast, get_args

from .atomic_write import WriteError, write_file

__all__ = [
    "OTHER",
    "SCHEMA_VERSION",
    "SUFFIX",
    "KernelNames",
    "NamesFileError",
    "Node",
    "NodeKind",
    "OperationCost",
    "StepIdentity",
    "StepNodes",
    "load",
]

SCHEMA_VERSION = 1

SUFFIX = ".kernels.json"
"""What the name of the file ends in, behind the name of the trace."""

OTHER = "other"
"""The operation of what was launched outside of every scope."""

NodeKind = Literal["kernel", "memcpy", "memset", "other"]
Phase = Literal["decode", "prefill"]


class NamesFileError(ValueError):
    """A file of kernel names cannot be read or written. The message names the file."""


class StepIdentity(Protocol):
    """What tells the captured steps of an engine apart; the runtime's `StepKey` has it."""

    @property
    def phase(self) -> Phase:
        """Whether one token a row is computed, or chunks of prompts."""

    @property
    def size(self) -> int:
        """The bucket: rows of a decode step, tokens of a prefill step."""

    @property
    def read_blocks(self) -> int:
        """Columns of the block tables that attention may read."""

    @property
    def full_sampler(self) -> bool:
        """Whether it samples more than the greedy token."""

    @property
    def steps(self) -> int:
        """Decode steps that one launch runs."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a captured graph."""

    layer: int | None
    """None: it is in no layer."""
    operation: str
    kind: NodeKind
    kernel: str | None
    """Name of the device function as the driver has it (C++ names mangled); None: unknown."""
    tools_id: int | None
    """What CUPTI calls the graph node id, of the executable graph; None: unknown."""

    @property
    def label(self) -> str:
        """`layer/operation`, or the operation of what is in no layer."""
        return self.operation if self.layer is None else f"{self.layer}/{self.operation}"


@dataclass(frozen=True, slots=True)
class StepNodes:
    """The nodes of one captured step, in the order in which they were captured.

    The other fields are those of `StepIdentity`.
    """

    phase: Phase
    size: int
    read_blocks: int
    full_sampler: bool
    steps: int
    nodes: tuple[Node, ...]

    @property
    def kernels(self) -> tuple[Node, ...]:
        """The nodes that are kernels: what a replay shows among the kernels of a trace."""
        return tuple(node for node in self.nodes if node.kind == "kernel")


@dataclass(frozen=True, slots=True)
class OperationCost:
    """What one launch of an operation must read, in the case that was profiled."""

    operation: str
    launches: int
    """In a step."""
    bytes: int


@dataclass(slots=True)
class KernelNames:
    """The document: filled by `attribution.recording`, completed by whoever saves it."""

    model: str = ""
    device: str = ""
    bandwidth_gb_s: float | None = None
    """Read bandwidth of the device as measured, in 10^9 bytes a second."""
    steps: list[StepNodes] = field(default_factory=list)
    """In the order of their capture."""
    costs: list[OperationCost] = field(default_factory=list)
    """May be empty."""
    reason: str | None = None
    """Why steps have no nodes, or nodes lack a part; each reason once."""

    @property
    def unattributed(self) -> int:
        """Nodes that were launched outside of every scope."""
        return sum(node.operation == OTHER for step in self.steps for node in step.nodes)

    def save(self, path: str | Path) -> None:
        """Write the document: all of it, or nothing.

        Raises:
            NamesFileError: it cannot be written there.
        """
        target = Path(path)
        text = json.dumps(
            {"schema_version": SCHEMA_VERSION, **asdict(self)}, allow_nan=False, indent=1
        )
        try:
            write_file(target, text + "\n")
        except WriteError as error:
            why = f"{target}: the kernel names cannot be written: {error.reason}"
            raise NamesFileError(why) from error


def load(path: str | Path) -> KernelNames:
    """Read what `KernelNames.save` wrote.

    Raises:
        NamesFileError: there is no such file, it is no JSON (cut short, perhaps), it is something
            else than kernel names, or of another version of the schema.
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or str(error)
        raise NamesFileError(f"{source}: the kernel names cannot be read: {why}") from error
    except UnicodeDecodeError as error:
        raise NamesFileError(f"{source} is no text in UTF-8, so no file of kernel names") from error
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise NamesFileError(
            f"{source} is no complete JSON ({error}): was it cut short, or is it another file?"
        ) from error
    if not isinstance(document, dict) or "schema_version" not in document:
        raise NamesFileError(
            f"{source} holds no kernel names: it has no schema_version; such files are written"
            f" beside a trace and end in {SUFFIX}"
        )
    version = document["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise NamesFileError(
            f"{source} is of schema_version {version!r}, this reads {SCHEMA_VERSION}: record the"
            " names again with this version"
        )
    return _NamesReader(source).names(document)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


class _NamesReader:
    """Checks every field of a document on the way."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def names(self, document: Mapping[str, Any]) -> KernelNames:
        bandwidth = document.get("bandwidth_gb_s")
        if bandwidth is not None and not (_is_number(bandwidth) and bandwidth > 0):
            self._fail("bandwidth_gb_s", bandwidth, "a positive number or null")
        return KernelNames(
            model=self._text(document, "model", ""),
            device=self._text(document, "device", ""),
            bandwidth_gb_s=None if bandwidth is None else float(bandwidth),
            steps=self._list(document, "steps", "", self._step),
            costs=self._list(document, "costs", "", self._cost),
            reason=self._text_or_none(document, "reason", ""),
        )

    def _step(self, entry: Mapping[str, Any], where: str) -> StepNodes:
        return StepNodes(
            phase=cast(Phase, self._one_of(entry, "phase", where, get_args(Phase))),
            size=self._int(entry, "size", where, 1),
            read_blocks=self._int(entry, "read_blocks", where, 0),
            full_sampler=self._flag(entry, "full_sampler", where),
            steps=self._int(entry, "steps", where, 1),
            nodes=tuple(self._list(entry, "nodes", where, self._node)),
        )

    def _node(self, entry: Mapping[str, Any], where: str) -> Node:
        return Node(
            layer=self._int_or_none(entry, "layer", where),
            operation=self._text(entry, "operation", where),
            kind=cast(NodeKind, self._one_of(entry, "kind", where, get_args(NodeKind))),
            kernel=self._text_or_none(entry, "kernel", where),
            tools_id=self._int_or_none(entry, "tools_id", where),
        )

    def _cost(self, entry: Mapping[str, Any], where: str) -> OperationCost:
        return OperationCost(
            operation=self._text(entry, "operation", where),
            launches=self._int(entry, "launches", where, 1),
            bytes=self._int(entry, "bytes", where, 0),
        )

    def _list(
        self,
        entry: Mapping[str, Any],
        name: str,
        where: str,
        read: Callable[[Mapping[str, Any], str], Any],
    ) -> list[Any]:
        values = entry.get(name)
        if not isinstance(values, list):
            self._fail(where + name, values, "a list")
        found: list[Any] = []
        for index, value in enumerate(values):
            place = f"{where}{name}[{index}]"
            if not isinstance(value, dict):
                self._fail(place, value, "an object")
            found.append(read(value, place + "."))
        return found

    def _text(self, entry: Mapping[str, Any], name: str, where: str) -> str:
        value = entry.get(name)
        if not isinstance(value, str):
            self._fail(where + name, value, "text")
        return value

    def _text_or_none(self, entry: Mapping[str, Any], name: str, where: str) -> str | None:
        return None if entry.get(name) is None else self._text(entry, name, where)

    def _int(self, entry: Mapping[str, Any], name: str, where: str, least: int) -> int:
        value = entry.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self._fail(where + name, value, f"a whole number, at least {least}")
        return value

    def _int_or_none(self, entry: Mapping[str, Any], name: str, where: str) -> int | None:
        return None if entry.get(name) is None else self._int(entry, name, where, 0)

    def _flag(self, entry: Mapping[str, Any], name: str, where: str) -> bool:
        value = entry.get(name)
        if not isinstance(value, bool):
            self._fail(where + name, value, "true or false")
        return value

    def _one_of(
        self, entry: Mapping[str, Any], name: str, where: str, allowed: Sequence[str]
    ) -> str:
        value = entry.get(name)
        if not isinstance(value, str) or value not in allowed:
            self._fail(where + name, value, f"one of {', '.join(allowed)}")
        return value

    def _fail(self, place: str, value: object, wanted: str) -> NoReturn:
        raise NamesFileError(
            f"{self._source}: {place} is {_shortened(value)}; it must be {wanted}."
            " Record the names again"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shortened(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
