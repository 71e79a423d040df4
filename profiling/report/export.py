"""Reads what nsys exports: ranges, calls of the CUDA API, and what the device did, as typed rows.

The schema is that of the user guide of NVIDIA Nsight Systems ("SQLite Schema Reference"). It
differs between versions: `nsys_tables` looks for what there is. Standard library only.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from .. import dictionary
from .database import ExportError, Tables, open_tables
from .payload import PayloadReader

__all__ = [
    "Activity",
    "ActivityKind",
    "Call",
    "Export",
    "ExportError",
    "Range",
    "process_of",
    "read_export",
]

_EVENT_TYPES: Final = {"NvtxPushPopRange": 59, "NvtxStartEndRange": 60, "NvtxDomainCreate": 75}
"""What `eventType` means, where the export has no table of it."""

_SIGNATURE: Final = frozenset({dictionary.STEP, dictionary.PLAN, dictionary.LAUNCH})
"""Ranges by which the project's domain is known where the export does not name it."""

_COPY_KINDS: Final = {1: "host to device", 2: "device to host", 8: "device to device"}
"""`copyKind` (CUpti_ActivityMemcpyKind), those between memories of one process."""

ActivityKind = Literal["kernel", "memcpy", "memset", "graph"]


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
        process: that made the call (`process_of`); None where the export does not say.
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


def process_of(identifier: int) -> int:
    """Return the process in a `globalTid` or `globalPid`: bits 24 to 47, below them the thread.

    What is above them (hardware, virtual machine) is the same in all of an export or not filled in.
    """
    return identifier & 0xFFFFFF000000


def read_export(path: str | Path) -> Export:
    """Read the ranges of the NVTX domain, and the CUDA calls and activities of all processes.

    Raises:
        ExportError: the file is missing, damaged, no export of nsys, or has no such domain.
    """
    path = Path(path)
    with open_tables(path) as tables:
        if "StringIds" not in tables and "NVTX_EVENTS" not in tables:
            raise ExportError(f"{path} is a SQLite file, but no export of nsys")
        if "NVTX_EVENTS" not in tables:
            raise ExportError(f"{path} has no NVTX ranges: profile with -t cuda,nvtx")
        reader = _Reader(tables)
        ranges = tuple(reader.ranges())
        calls, activities = reader.calls(), tuple(reader.activities())
        return Export(path, reader.graph_trace(calls, activities), ranges, calls, activities)


class _Reader:
    """Makes typed rows of tables."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def _event_type(self, name: str) -> int:
        for number, known in self._tables.texts("ENUM_NSYS_EVENT_TYPE", "id", "name").items():
            if known == name:
                return number
        return _EVENT_TYPES[name]

    def ranges(self) -> Iterator[Range]:
        """The ranges of the project's domain: each process has one of its own."""
        kinds = {self._event_type("NvtxPushPopRange"), self._event_type("NvtxStartEndRange")}
        domains = self._domains()
        if dictionary.DOMAIN not in domains.values():
            self._guess_domains(kinds, domains)
        ours = {number for (_, number), name in domains.items() if name == dictionary.DOMAIN}
        names = ("start", "end", "text", "textId", "globalTid", "domainId")
        payload = ("int64Value", "jsonText", "jsonTextId", "binaryData")
        order = "start, end DESC, globalTid, textId, text"
        of_ours = {"eventType": kinds, "domainId": ours}
        found = self._tables.select("NVTX_EVENTS", names + payload, order, of_ours)
        entries = ("domainId", "schemaId", "idx", "type", "name", "offset")
        payloads = PayloadReader(
            self._tables.select("NVTX_PAYLOAD_SCHEMA_ENTRIES", entries, ", ".join(entries[:3]))
        )
        text, integer = self._tables.text, self._tables.integer
        for start, end, message, text_id, thread, domain, value, json, json_id, blob in found:
            process = process_of(integer(thread, "globalTid of a range"))
            if domains.get((process, domain), domains.get((None, domain))) != dictionary.DOMAIN:
                continue
            yield Range(
                text(message, text_id),
                integer(start, "start of a range"),
                None if end is None else integer(end, "end of a range"),
                thread,
                value if isinstance(value, int) else None,
                payloads.numbers(text(json, json_id) or None, blob),
            )

    def _domains(self) -> dict[tuple[int | None, int], str]:
        """The names of domains by process and number; of all processes where none is told."""
        columns = ("globalTid", "domainId", "text", "textId")
        created = {"eventType": {self._event_type("NvtxDomainCreate")}}
        domains: dict[tuple[int | None, int], str] = {}
        for thread, domain, *text in self._tables.select("NVTX_EVENTS", columns, "start", created):
            if isinstance(domain, int):
                process = process_of(thread) if isinstance(thread, int) else None
                domains[process, domain] = self._tables.text(*text)
        return domains

    def _guess_domains(self, kinds: set[int], domains: dict[tuple[int | None, int], str]) -> None:
        """Name domains that were created before the profile began by what is in them."""
        messages: dict[tuple[int, int], set[str]] = defaultdict(set)
        columns = ("globalTid", "domainId", "text", "textId")
        of_kinds = {"eventType": kinds}
        for thread, domain, *text in self._tables.select("NVTX_EVENTS", columns, "start", of_kinds):
            # 0 is the domain of ranges without one.
            if isinstance(thread, int) and isinstance(domain, int) and domain:
                messages[process_of(thread), domain].add(self._tables.text(*text))
        guessed = [
            key
            for key, found in messages.items()
            if key not in domains and (None, key[1]) not in domains and found >= _SIGNATURE
        ]
        if not guessed:
            others = ", ".join(sorted({name for name in domains.values() if name}))
            raise ExportError(
                f"{self._tables.path} has no NVTX domain {dictionary.DOMAIN!r}"
                + (f"; its domains are: {others}" if others else "")
            )
        domains.update(dict.fromkeys(guessed, dictionary.DOMAIN))

    def calls(self) -> tuple[Call, ...]:
        columns = ("start", "end", "globalTid", "correlationId", "nameId")
        order = "start, end DESC, globalTid, correlationId"
        return tuple(
            Call(
                self._tables.text(None, name),
                self._tables.integer(start, "start of a call"),
                self._tables.integer(end, "end of a call"),
                thread,
                correlation,
            )
            for start, end, thread, correlation, name in self._tables.select(
                "CUPTI_ACTIVITY_KIND_RUNTIME", columns, order
            )
            if isinstance(thread, int) and isinstance(correlation, int)
        )

    def activities(self) -> list[Activity]:
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
                    self._tables.integer(start, f"start of a {kind}"),
                    self._tables.integer(end, f"end of a {kind}"),
                    process_of(process) if isinstance(process, int) else None,
                    self._tables.integer(device, f"device of a {kind}"),
                    correlation,
                    node if isinstance(node, int) and node else None,
                )
            )

        kernels = (*common, "shortName", "demangledName")
        for row in self._tables.select("CUPTI_ACTIVITY_KIND_KERNEL", kernels, order):
            name = self._tables.text(None, row[6]) or self._tables.text(None, row[7])
            add("kernel", name, row[:6])
        for row in self._tables.select("CUPTI_ACTIVITY_KIND_MEMCPY", (*common, "copyKind"), order):
            way = _COPY_KINDS.get(row[6])
            add("memcpy", f"copy {way}" if way else "copy", row[:6])
        for row in self._tables.select("CUPTI_ACTIVITY_KIND_MEMSET", common, order):
            add("memset", "fill", row)
        for row in self._tables.select("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", common, order):
            add("graph", "graph", row)
        found.sort(key=lambda a: (a.start_ns, a.end_ns, a.device, a.correlation, a.node_id or 0))
        return found

    def graph_trace(
        self, calls: Iterable[Call], activities: Sequence[Activity]
    ) -> Literal["graph", "node"] | None:
        """What was asked of nsys; where the export does not say, what there is."""
        settings = ("name", "value")
        for name, value in self._tables.select("META_DATA_CAPTURE", settings, "name, value"):
            if str(name).endswith("CUDA_GRAPH_TRACE_OPTIONS:MODE"):
                mode = str(value).lower()
                if mode in ("graph", "node"):
                    return "graph" if mode == "graph" else "node"
        if any(activity.kind == "graph" for activity in activities):
            return "graph"
        replays = {call.correlation for call in calls if "GraphLaunch" in call.name}
        return "node" if any(a.correlation in replays for a in activities) else None
