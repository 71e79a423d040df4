"""Reads the SQLite file that nsys exports: ranges, calls of the CUDA API, and device activities.

The schema is that of the user guide of NVIDIA Nsight Systems ("SQLite Schema Reference"). It
differs between versions, and a table exists only where it has rows: so no table and no column is
taken for granted. Every query states its order, because nsys promises none. Standard library only.
"""

import contextlib
import re
import shlex
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from .. import ranges
from . import GraphTrace, export_command

__all__ = [
    "Activity",
    "Call",
    "Export",
    "ExportError",
    "Range",
    "in_order",
    "process_of",
    "read_export",
]

_PUSH_POP, _START_END, _DOMAIN_CREATE = 59, 60, 75
"""`eventType` in NVTX_EVENTS."""

_SIGNATURE: Final = frozenset({ranges.STEP, ranges.PLAN, ranges.LAUNCH})
"""Ranges that identify the project's domain where its creation was not recorded, because it came
before the profile began."""

_COPY_KINDS: Final = {1: "host to device", 2: "device to host", 8: "device to device"}
"""`copyKind` (CUpti_ActivityMemcpyKind)."""

ActivityKind = Literal["kernel", "memcpy", "memset", "graph"]
_ACTIVITY_TABLES: Final[dict[str, ActivityKind]] = {
    "KERNEL": "kernel",
    "MEMCPY": "memcpy",
    "MEMSET": "memset",
    "GRAPH_TRACE": "graph",
}
"""Suffix of the table -> kind."""

_FIELDS: Final = ranges.StepNumbers._fields
_NUMBERS: Final = struct.Struct(f"<{len(_FIELDS)}q")


class ExportError(ValueError):
    """A file that is no export of nsys, or that holds nothing to report."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of the project's domain.

    Attributes:
        name: its message.
        start_ns: when it began, on the clock of the trace.
        end_ns: when it ended; None where the profile ended first.
        thread: process and thread (`globalTid`).
        value: its integer payload, if it has one.
        numbers: the fields of its structured payload by name, if the export holds it.
    """

    name: str
    start_ns: int
    end_ns: int | None
    thread: int
    value: int | None = None
    numbers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the CUDA API; its activities have the same process and correlation."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    correlation: int


@dataclass(frozen=True, slots=True)
class Activity:
    """Work of the device.

    Attributes:
        kind: a kernel, a copy, a fill, or a whole CUDA graph if its nodes were not traced.
        name: of the kernel, without template arguments; or the direction of the copy.
        start_ns, end_ns: both 0 if CUPTI could not time it.
        process: that made the call (`process_of`); None where the export does not have it.
        device: its number.
        correlation: id of the call that launched it.
        node_id: of the node of a CUDA graph; None outside of graphs.
    """

    kind: ActivityKind
    name: str
    start_ns: int
    end_ns: int
    process: int | None
    device: int
    correlation: int
    node_id: int | None = None

    @property
    def is_timed(self) -> bool:
        """Whether CUPTI could time it."""
        return self.end_ns >= self.start_ns > 0


@dataclass(frozen=True, slots=True)
class Export:
    """The content of an export: ranges, calls and activities, each in the order of their begin.

    Of ranges that begin together the outer one comes first. `graph_trace` is None if no CUDA graph
    ran, or the export does not say how graphs were traced.
    """

    path: Path
    graph_trace: GraphTrace | None
    ranges: list[Range]
    calls: list[Call]
    activities: list[Activity]


def process_of(identifier: int) -> int:
    """Return the process in a `globalTid` or `globalPid`: bits 24 to 47, below them the thread.

    The bits above (hardware, virtual machine) may be set in one of the two only.
    """
    return identifier & 0xFFFFFF000000


def read_export(path: str | Path) -> Export:
    """Read the ranges of the project's domain, and the CUDA calls and activities of all processes.

    Raises:
        ExportError: the file is missing, damaged, no export of nsys, or has no such domain.
    """
    path = Path(path)
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        command = shlex.join(export_command(path))
        raise ExportError(f"{path} is a report of nsys, not its export; export it first: {command}")
    try:
        empty = not path.open("rb").read(1)
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from error
    if empty:
        raise ExportError(f"{path} is empty; an export of nsys is a SQLite file")
    try:
        uri = path.absolute().as_uri() + "?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            reader = _ExportReader(connection, path)
            ranges, calls, activities = reader.ranges(), reader.calls(), reader.activities()
            return Export(path, reader.graph_trace(calls, activities), ranges, calls, activities)
    # A damaged schema may be quoted in the message of an error, which then is no UTF-8.
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} is damaged, or no SQLite file: {error}") from error


class _ExportReader:
    """Runs the queries."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        rows = connection.execute(
            "SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c"
            " WHERE t.type = 'table' ORDER BY t.name"
        )
        self._columns: dict[str, set[str]] = defaultdict(set)
        for table, column in rows:
            self._columns[table].add(column)
        if not self._columns.keys() & {"StringIds", "NVTX_EVENTS"}:
            raise ExportError(f"{path} is a SQLite file, but no export of nsys")
        if "NVTX_EVENTS" not in self._columns:
            raise ExportError(f"{path} has no NVTX ranges: profile with -t cuda,nvtx")
        self._strings = dict(self._select("StringIds", ("id", "value"), ("id",)))

    def _select(
        self, table: str, columns: Sequence[str], order: Sequence[str], where: str = "TRUE"
    ) -> Iterator[tuple[Any, ...]]:
        """Rows of a table, None in the place of columns that it does not have.

        `order` names columns, the most significant first, a descending one with a minus sign.
        """
        known = self._columns.get(table)
        if known is None:
            return iter(())
        wanted = ", ".join(f'"{name}"' if name in known else "NULL" for name in columns)
        keys = [(name.lstrip("-"), " DESC" if name[0] == "-" else "") for name in order]
        by = ", ".join(f'"{name}"{way}' for name, way in keys if name in known)
        sql = f'SELECT {wanted} FROM "{table}" WHERE {where} ORDER BY {by}'
        return self._connection.execute(sql)

    def _text(self, text: Any, text_id: Any = None) -> str:
        """A message: registered ones are ids of strings, others are in the row."""
        return str(self._strings.get(text_id, "" if text is None else text))

    def _int(self, value: Any, column: str) -> int:
        if not isinstance(value, int):
            raise ExportError(f"{self._path} is damaged: {column} is {value!r}, no whole number")
        return value

    def ranges(self) -> list[Range]:
        domains = self._domains()
        columns = (
            *("start", "end", "text", "textId", "globalTid", "domainId", "int64Value"),
            *("jsonText", "jsonTextId", "binaryData"),
        )
        order = ("start", "-end", "globalTid", "textId", "text")
        kinds = f'"eventType" IN ({_PUSH_POP}, {_START_END})'
        rows = self._select("NVTX_EVENTS", columns, order, kinds)
        return [
            Range(
                self._text(text, text_id),
                self._int(start, "start of a range"),
                None if end is None else self._int(end, "end of a range"),
                thread,
                value if isinstance(value, int) else None,
                self._numbers(*payload),
            )
            for start, end, text, text_id, thread, domain, value, *payload in rows
            if isinstance(thread, int) and (process_of(thread), domain) in domains
        ]

    def _domains(self) -> set[tuple[int, int]]:
        """The project's domain in each process: process and domain id."""
        columns = ("globalTid", "domainId", "text", "textId", "eventType")
        named: dict[tuple[int, int], str] = {}
        messages: dict[tuple[int, int], set[str]] = defaultdict(set)
        for thread, domain, text, text_id, kind in self._select("NVTX_EVENTS", columns, ["start"]):
            if not isinstance(thread, int) or not isinstance(domain, int):
                continue
            key = process_of(thread), domain
            if kind == _DOMAIN_CREATE:
                named[key] = self._text(text, text_id)
            elif domain:  # 0 is the domain of ranges without one
                messages[key].add(self._text(text, text_id))
        ours = {key for key, name in named.items() if name == ranges.DOMAIN}
        if not ours:
            ours = {k for k, found in messages.items() if k not in named and found >= _SIGNATURE}
        if not ours:
            others = ", ".join(sorted({name for name in named.values() if name}))
            raise ExportError(
                f"{self._path} has no NVTX domain {ranges.DOMAIN!r}"
                + (f"; its domains are: {others}" if others else "")
            )
        return ours

    def _numbers(self, text: Any, text_id: Any, binary: Any) -> dict[str, int]:
        """The step numbers in a structured payload: JSON, or bytes.

        Bytes (`nsys export --include-blobs=true`) are a header followed by the struct.
        """
        if isinstance(binary, bytes) and len(binary) >= _NUMBERS.size:
            values = _NUMBERS.unpack_from(binary, len(binary) - _NUMBERS.size)
            return dict(zip(_FIELDS, values, strict=True))
        pairs = re.findall(
            rf'"({"|".join(_FIELDS)})": *(-?\d{{1,19}})\b', self._text(text, text_id)
        )
        return {name: int(value) for name, value in pairs}

    def calls(self) -> list[Call]:
        columns = ("nameId", "start", "end", "globalTid", "correlationId")
        order = ("start", "-end", "globalTid", "correlationId")
        return [
            Call(
                self._text(None, name),
                self._int(start, "start of a call"),
                self._int(end, "end of a call"),
                thread,
                correlation,
            )
            for name, start, end, thread, correlation in self._select(
                "CUPTI_ACTIVITY_KIND_RUNTIME", columns, order
            )
            if isinstance(thread, int) and isinstance(correlation, int)
        ]

    def activities(self) -> list[Activity]:
        columns = (
            *("start", "end", "deviceId", "globalPid", "correlationId", "graphNodeId"),
            *("shortName", "demangledName", "copyKind"),
        )
        order = ("start", "end", "deviceId", "correlationId", "graphNodeId")
        found = []
        for table, kind in _ACTIVITY_TABLES.items():
            for start, end, device, process, correlation, node, short, full, way in self._select(
                f"CUPTI_ACTIVITY_KIND_{table}", columns, order
            ):
                if not isinstance(correlation, int):
                    continue  # of no call: a page fault that moved managed memory
                copied = f"copy {_COPY_KINDS[way]}" if way in _COPY_KINDS else "copy"
                kernel = self._text(None, short) or self._text(None, full)
                names = {"kernel": kernel, "memcpy": copied, "memset": "fill", "graph": "graph"}
                found.append(
                    Activity(
                        kind,
                        names[kind],
                        self._int(start, f"start of a {kind}"),
                        self._int(end, f"end of a {kind}"),
                        process_of(process) if isinstance(process, int) else None,
                        self._int(device, f"device of a {kind}"),
                        correlation,
                        node if isinstance(node, int) and node else None,
                    )
                )
        return in_order(found)

    def graph_trace(
        self, calls: Sequence[Call], activities: Sequence[Activity]
    ) -> GraphTrace | None:
        """Return how graphs were traced, from the settings in the export or from the activities."""
        settings = ("name", "value")
        for name, value in self._select("META_DATA_CAPTURE", settings, settings):
            mode = str(value).lower()
            if str(name).endswith("CUDA_GRAPH_TRACE_OPTIONS:MODE") and mode in ("graph", "node"):
                return "graph" if mode == "graph" else "node"
        if any(activity.kind == "graph" for activity in activities):
            return "graph"
        replays = {call.correlation for call in calls if "GraphLaunch" in call.name}
        return "node" if any(a.correlation in replays for a in activities) else None


def in_order(activities: Sequence[Activity]) -> list[Activity]:
    """Return activities in the order of their begin."""
    return sorted(activities, key=lambda a: (a.start_ns, a.end_ns, a.node_id or 0, a.name))
