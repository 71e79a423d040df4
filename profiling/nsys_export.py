"""Reads what nsys exports: ranges, calls of the CUDA API, and what the device did, as typed rows.

The schema is that of the user guide of NVIDIA Nsight Systems ("SQLite Schema Reference"). It
differs between versions, and tables are only there where there is something in them; so tables and
columns are looked for, none is taken for granted, and every query says its order, because that of
the rows is not promised. The file is opened for reading only. Standard library only.
"""

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from .nsys_payload import PayloadReader

__all__ = ["Activity", "ActivityKind", "Call", "Export", "ExportError", "Range", "read_export"]

_EVENT_TYPES: Final = {"NvtxPushPopRange": 59, "NvtxStartEndRange": 60, "NvtxDomainCreate": 75}
"""What `eventType` means, where the export has no table of it."""

_COPY_KINDS: Final = {1: "host to device", 2: "device to host", 8: "device to device"}
"""`copyKind` (CUpti_ActivityMemcpyKind), those between memories of one process."""

_REPORT_SUFFIXES: Final = (".nsys-rep", ".qdrep", ".qdstrm")
_MAGIC: Final = b"SQLite format 3\0"

ActivityKind = Literal["kernel", "memcpy", "memset", "graph"]


class ExportError(ValueError):
    """A file that is no export of nsys, or one that holds nothing to report."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of the domain.

    Attributes:
        name: its message.
        start_ns: when it began, on the clock of the trace.
        end_ns: when it ended; None where the profile ended first.
        thread: the thread that ran it, process included (`globalTid`).
        value: its integer payload, if it has one.
        numbers: the fields of its structured payload, if the export holds it.
    """

    name: str
    start_ns: int
    end_ns: int | None
    thread: int
    value: int | None = None
    numbers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the CUDA API: when, on which thread, and the id that its activities carry."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    correlation: int


@dataclass(frozen=True, slots=True)
class Activity:
    """What the device did for a call.

    Attributes:
        kind: a kernel, a copy, a fill, or a whole CUDA graph where its nodes were not traced.
        name: of the kernel, without template arguments; or what was copied where.
        start_ns, end_ns: when; both 0 where the tool could not tell.
        process: that made the call (`globalPid`); None where the export does not say.
        device: the number of the device.
        correlation: of the call.
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


@dataclass(frozen=True, slots=True)
class Export:
    """What a report needs of an export.

    Attributes:
        path: the file.
        graph_trace: how CUDA graphs were traced: "graph", "node", or None where none ran or the
            export does not tell.
        ranges: of the domain, in the order of their begin, an outer one before an inner one.
        calls: of the CUDA API, in the order of their begin.
        activities: in the order of their begin.
    """

    path: Path
    graph_trace: Literal["graph", "node"] | None
    ranges: tuple[Range, ...]
    calls: tuple[Call, ...]
    activities: tuple[Activity, ...]


def process_of(thread: int) -> int:
    """Return the `globalPid` of a `globalTid`: the lowest 24 bits are the thread's own."""
    return thread & ~0xFFFFFF


def read_export(path: str | Path, domain: str) -> Export:
    """Read the ranges of an NVTX domain, and the CUDA calls and activities of all processes.

    Raises:
        ExportError: the file is missing, damaged, no export of nsys, or has no such domain.
    """
    path = Path(path)
    _require_database(path)
    try:
        connection = sqlite3.connect(path.absolute().as_uri() + "?mode=ro&immutable=1", uri=True)
        try:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            return _Tables(connection, path).read(domain)
        finally:
            connection.close()
    except (sqlite3.Error, OverflowError) as error:
        raise ExportError(f"{path} is damaged: {error}") from error


def _require_database(path: Path) -> None:
    """Raise ExportError if `path` is no complete SQLite file."""
    if path.suffix in _REPORT_SUFFIXES:
        from .nsys import export_command  # here: it looks for a tool when it is imported

        command = " ".join(export_command(path))
        raise ExportError(f"{path} is a report of nsys, not its export; export it first: {command}")
    try:
        with path.open("rb") as stream:
            header = stream.read(100)
        size = path.stat().st_size
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from error
    if not header.startswith(_MAGIC):
        what = "is empty" if not header else "is no SQLite file"
        raise ExportError(f"{path} {what}; an export of nsys is one (nsys export --type=sqlite)")
    if len(header) == 100:
        # The file format of SQLite, section 1.3: page size at 16 (1 means 65,536), pages at 28,
        # which are valid where the change counters at 24 and 92 agree.
        page_size, changes, pages = struct.unpack_from(">H6xII", header, 16)
        valid = changes == struct.unpack_from(">I", header, 92)[0]
        expected = pages * (65536 if page_size == 1 else page_size)
        if valid and size < expected:
            raise ExportError(f"{path} is truncated: {size:,} of {expected:,} bytes are there")


class _Tables:
    """The tables of an open export."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        tables = self._query("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._columns: dict[str, frozenset[str]] = {}
        for (table,) in tables:
            quoted = str(table).replace('"', '""')
            rows = self._query(f'PRAGMA table_info("{quoted}")')
            self._columns[str(table)] = frozenset(str(row[1]) for row in rows)

    def read(self, domain: str) -> Export:
        """Read everything."""
        if "StringIds" not in self._columns and "NVTX_EVENTS" not in self._columns:
            raise ExportError(f"{self._path} is a SQLite file, but no export of nsys")
        self._strings = self._texts("StringIds", "id", "value")
        ranges = tuple(self._ranges(domain))
        activities = tuple(self._activities())
        return Export(self._path, self._graph_trace(activities), ranges, self._calls(), activities)

    def _query(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()

    def _select(self, table: str, columns: Sequence[str], order: str) -> Iterator[tuple[Any, ...]]:
        """The rows of a table in an order, None in the place of columns that it does not have."""
        there = self._columns.get(table)
        if there is None:
            return iter(())
        wanted = ", ".join(f'"{name}"' if name in there else "NULL" for name in columns)
        keys = ", ".join(f'"{name}" {way}'.rstrip() for name, way in _order(order) if name in there)
        sql = f'SELECT {wanted} FROM "{table}"' + (f" ORDER BY {keys}" if keys else "")
        return iter(self._query(sql))

    def _texts(self, table: str, key: str, value: str) -> dict[int, str]:
        rows = self._select(table, (key, value), key)
        return {number: str(text) for number, text in rows if isinstance(number, int)}

    def _integer(self, value: Any, column: str) -> int:
        """A number of a column that needs one."""
        if not isinstance(value, int):
            raise ExportError(f"{self._path} is damaged: {column} is {value!r}, no whole number")
        return value

    def _text(self, text: Any, text_id: Any) -> str:
        """A message: registered ones are ids of strings, others stand in the row."""
        found = self._strings.get(text_id) if text_id is not None else None
        return found if found is not None else str(text) if text is not None else ""

    def _event_type(self, name: str) -> int:
        for number, known in self._texts("ENUM_NSYS_EVENT_TYPE", "id", "name").items():
            if known == name:
                return number
        return _EVENT_TYPES[name]

    def _ranges(self, domain: str) -> Iterator[Range]:
        """The ranges of every domain of that name: each process has one of its own."""
        if "NVTX_EVENTS" not in self._columns:
            raise ExportError(f"{self._path} has no NVTX ranges: profile with -t cuda,nvtx")
        names = ("start", "end", "eventType", "text", "textId", "globalTid", "domainId")
        payload = ("int64Value", "jsonText", "jsonTextId", "binaryData")
        rows = list(
            self._select("NVTX_EVENTS", names + payload, "start, end DESC, globalTid, textId, text")
        )
        created = self._event_type("NvtxDomainCreate")
        domains: dict[tuple[int | None, Any], str] = {}
        for _, _, kind, text, text_id, thread, domain_id, *_ in rows:
            if kind == created:
                process = process_of(thread) if isinstance(thread, int) else None
                domains[process, domain_id] = self._text(text, text_id)
        if domain not in domains.values():
            found = sorted({name for name in domains.values() if name})
            others = f"; its domains are: {', '.join(found)}" if found else ""
            raise ExportError(f"{self._path} has no NVTX domain {domain!r}{others}")
        kinds = {self._event_type("NvtxPushPopRange"), self._event_type("NvtxStartEndRange")}
        payloads = PayloadReader(
            self._select(
                "NVTX_PAYLOAD_SCHEMA_ENTRIES",
                ("domainId", "schemaId", "idx", "type", "name", "offset"),
                "domainId, schemaId, idx",
            )
        )
        for start, end, kind, text, text_id, thread, domain_id, value, *rest in rows:
            if kind not in kinds:
                continue
            thread = self._integer(thread, "globalTid of a range")
            name = domains.get((process_of(thread), domain_id), domains.get((None, domain_id)))
            if name != domain:
                continue
            json_text, json_id, binary = rest
            json_text = self._text(json_text, json_id) or None
            yield Range(
                self._text(text, text_id),
                self._integer(start, "start of a range"),
                None if end is None else self._integer(end, "end of a range"),
                thread,
                value if isinstance(value, int) else None,
                payloads.numbers(json_text, binary),
            )

    def _calls(self) -> tuple[Call, ...]:
        columns = ("start", "end", "globalTid", "correlationId", "nameId")
        order = "start, end DESC, globalTid, correlationId"
        return tuple(
            Call(
                self._text(None, name),
                self._integer(start, "start of a call"),
                self._integer(end, "end of a call"),
                thread,
                correlation,
            )
            for start, end, thread, correlation, name in self._select(
                "CUPTI_ACTIVITY_KIND_RUNTIME", columns, order
            )
            if isinstance(thread, int) and isinstance(correlation, int)
        )

    def _activities(self) -> list[Activity]:
        common = ("start", "end", "deviceId", "globalPid", "correlationId", "graphNodeId")
        order = "start, end, deviceId, correlationId, graphNodeId"
        found: list[Activity] = []

        def add(kind: ActivityKind, name: str, row: Sequence[Any]) -> None:
            start, end, device, process, correlation, node = row
            if not isinstance(correlation, int):
                return  # of no call: a page fault that moved managed memory
            found.append(
                Activity(
                    kind,
                    name,
                    self._integer(start, f"start of a {kind}"),
                    self._integer(end, f"end of a {kind}"),
                    process if isinstance(process, int) else None,
                    self._integer(device, f"device of a {kind}"),
                    correlation,
                    node if isinstance(node, int) and node else None,
                )
            )

        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        for *row, short, demangled in self._select(
            table, (*common, "shortName", "demangledName"), order
        ):
            add("kernel", self._text(None, short) or self._text(None, demangled), row)
        for *row, copy_kind in self._select(
            "CUPTI_ACTIVITY_KIND_MEMCPY", (*common, "copyKind"), order
        ):
            way = _COPY_KINDS.get(copy_kind)
            add("memcpy", f"copy {way}" if way else "copy", row)
        for row in self._select("CUPTI_ACTIVITY_KIND_MEMSET", common, order):
            add("memset", "fill", row)
        for row in self._select("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", common, order):
            add("graph", "graph", row)
        found.sort(key=lambda a: (a.start_ns, a.end_ns, a.device, a.correlation, a.node_id or 0))
        return found

    def _graph_trace(self, activities: Sequence[Activity]) -> Literal["graph", "node"] | None:
        """What was asked of nsys; where the export does not say, what there is."""
        for name, value in self._select("META_DATA_CAPTURE", ("name", "value"), "name, value"):
            if str(name).endswith("CUDA_GRAPH_TRACE_OPTIONS:MODE"):
                mode = str(value).lower()
                if mode in ("graph", "node"):
                    return "graph" if mode == "graph" else "node"
        if any(activity.kind == "graph" for activity in activities):
            return "graph"
        return "node" if any(a.node_id is not None for a in activities) else None


def _order(order: str) -> Iterator[tuple[str, str]]:
    """The columns of an order, and the way of each."""
    for key in order.split(", "):
        name, _, way = key.partition(" ")
        yield name, way
