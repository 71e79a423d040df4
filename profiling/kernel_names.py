"""The layer and operation of every node of a captured step, as a JSON file next to a trace.

    {"schema_version": 1, "model": str, "device": str, "bandwidth_gb_s": float|null,
     "reason": str|null,
     "steps": [{"phase", "size", "read_blocks", "full_sampler", "steps",
                "nodes": [{"layer", "operation", "kind", "kernel", "tools_id"}, ...]}, ...],
     "costs": [{"operation", "launches", "bytes"}, ...]}

Standard library only: reading a trace needs neither torch nor a device.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Protocol, get_args, get_origin, get_type_hints

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
"""Suffix of the file; the part before it is the name of the trace."""

OTHER = "other"
"""Operation of nodes that were launched outside of every scope."""

NodeKind = Literal["kernel", "memcpy", "memset", "other"]
Phase = Literal["decode", "prefill"]


class NamesFileError(ValueError):
    """A file of kernel names cannot be read or written. The message names the file."""


class StepIdentity(Protocol):
    """Identifies a captured step of an engine; the runtime's `StepKey` implements it."""

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
    """Index of the layer; None outside of the layers."""
    operation: str
    kind: NodeKind
    kernel: str | None
    """Name of the device function as the driver has it (C++ names mangled); None: unknown."""
    tools_id: int | None
    """CUPTI's graph node id in the executable graph; None: unknown."""

    @property
    def label(self) -> str:
        """`layer/operation`, or only the operation outside of the layers."""
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
        """The kernel nodes: a replay appears in a trace as these kernels."""
        return tuple(node for node in self.nodes if node.kind == "kernel")


@dataclass(frozen=True, slots=True)
class OperationCost:
    """The bytes that an operation must read, in the case that was profiled."""

    operation: str
    launches: int
    """Launches per step."""
    bytes: int
    """Bytes per launch."""


@dataclass(slots=True)
class KernelNames:
    """The document: `attribution.recording` fills the steps, the caller the other fields."""

    model: str = ""
    device: str = ""
    bandwidth_gb_s: float | None = None
    """Measured read bandwidth of the device in GB/s (10^9 bytes per second)."""
    steps: list[StepNodes] = field(default_factory=list)
    """In the order of their capture."""
    costs: list[OperationCost] = field(default_factory=list)
    """May be empty."""
    reason: str | None = None
    """Why steps have no nodes, or nodes no id or name; each reason once."""

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
        NamesFileError: the file cannot be read, is no complete JSON, holds something else than
            kernel names, or has another schema version.
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
            f" next to a trace and end in {SUFFIX}"
        )
    version = document["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise NamesFileError(
            f"{source} is of schema_version {version!r}, this reads {SCHEMA_VERSION}: record the"
            " names again with this version"
        )
    try:
        names: KernelNames = _read(KernelNames, document, "")
    except _WrongFieldError as error:
        raise NamesFileError(f"{source}: {error}. Record the names again") from error
    return names


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


class _WrongFieldError(Exception):
    """A field of a document has another type or value than it must have."""

    def __init__(self, place: str, value: object, wanted: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        super().__init__(f"{place} is {shown}; it must be {wanted}")


def _read(kind: Any, value: Any, place: str) -> Any:
    """Return a JSON value as a type of this module; `_WrongFieldError` names the first other one.

    Args:
        kind: a dataclass, a Literal, a union, a list or tuple of one type, or a plain type.
        value: from the document.
        place: of the value in the document, such as `steps[0].size`; empty for the document.
    """
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise _WrongFieldError(place, value, "an object")
        where, types = f"{place}." if place else "", get_type_hints(kind)
        return kind(**{n: _read(types[n], value.get(n), where + n) for n in types})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _WrongFieldError(place, value, "a list")
        return origin(_read(arguments[0], entry, f"{place}[{i}]") for i, entry in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise _WrongFieldError(place, value, f"one of {', '.join(arguments)}")
        return value
    if origin is UnionType:
        return None if value is None else _read(arguments[0], value, place)
    if kind is float:
        if type(value) not in (int, float) or not value > 0:
            raise _WrongFieldError(place, value, "a positive number or null")
        return float(value)
    least = 1 if place.rpartition(".")[2] in ("size", "steps", "launches") else 0
    if type(value) is not kind or (kind is int and value < least):
        wanted = {int: f"a whole number, at least {least}", str: "text", bool: "true or false"}
        raise _WrongFieldError(place, value, wanted[kind])
    return value
