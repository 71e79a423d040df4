"""The layer and operation of every node of a captured step, as a JSON file next to a trace.

    {"schema_version": 1, "model": str, "device": str, "bandwidth_gb_s": float|null,
     "reason": str|null,
     "steps": [{"phase", "size", "full_sampler",
                "nodes": [{"layer", "operation", "kind", "kernel"}, ...]}, ...],
     "costs": [{"operation", "launches", "bytes"}, ...]}

`nodes_of_replay` assigns the nodes to the kernels of a replay. Standard library only: reading a
trace needs neither torch nor a device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from .atomic_write import write_file

__all__ = [
    "OTHER",
    "SCHEMA_VERSION",
    "SUFFIX",
    "DeviceWork",
    "KernelNames",
    "NamesFileError",
    "Node",
    "NodeKind",
    "OperationCost",
    "StepNodes",
    "load",
    "nodes_of_replay",
]

SCHEMA_VERSION = 1

SUFFIX = ".kernels.json"
"""Suffix of the file; the part before it is the name of the trace."""

OTHER = "other"
"""Operation of nodes that were launched outside of every scope."""

NodeKind = Literal["kernel", "memcpy", "memset", "other"]


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
    """Why steps have no nodes."""

    @property
    def unattributed(self) -> int:
        """Nodes that were launched outside of every scope."""
        return sum(node.operation == OTHER for step in self.steps for node in step.nodes)

    def save(self, path: str | Path) -> None:
        """Write the document: all of it, or nothing.

        Raises:
            WriteError: it cannot be written there.
        """
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
        costs = [OperationCost(**cost) for cost in document.pop("costs")]
        return KernelNames(**document, steps=steps, costs=costs)
    except OSError as error:
        why = error.strerror or str(error)
        raise NamesFileError(f"{path}: the kernel names cannot be read: {why}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NamesFileError(
            f"{path} is not a file of kernel names ({error}); such files are written next to a"
            f" trace and end in {SUFFIX}: record the names again"
        ) from error


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

    They are matched by order: a replay in one stream runs its nodes in capture order. All layers
    have the same kernel names, so a replay that lacks kernels is not matched: any alignment would
    be a guess.

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
