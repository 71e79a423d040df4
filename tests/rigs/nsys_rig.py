"""Plays steps of an engine on a device and writes them as an export of nsys, knowing the truth.

The schema is in the user guide of NVIDIA Nsight Systems ("SQLite Schema Reference"); `Variant` says
which of its versions.
"""

from __future__ import annotations

import random
import sqlite3
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

PUSH_POP = 59


@dataclass(frozen=True)
class Variant:
    """A version of the schema, and what was asked of nsys."""

    registered: bool = True
    """Messages are ids of strings."""
    payload: bool = True
    graph_trace: Literal["graph", "node"] | None = "graph"
    """None: the steps run without graphs."""


NEW = Variant()
OLD = Variant(False, False, "node")


@dataclass(frozen=True)
class Launch:
    """What a step runs on the device."""

    phase: Literal["decode", "prefill"]
    rows: int
    bucket: int
    tokens: int
    kernels: Sequence[tuple[str, int]]
    """Names and durations in ns."""
    idle_ns: int = 0
    """Between one kernel and the next."""


@dataclass
class Profile:
    """An export in the making. Times are ns on one clock, which the host and the device share."""

    variant: Variant = NEW
    pid: int = 4711
    tid: int = 4711
    now: int = 1_000_000
    truth: list[SimpleNamespace] = field(default_factory=list)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    device_free: int = 0
    last_end: int | None = None
    correlation: int = 100
    strings: dict[str, int] = field(default_factory=dict)

    @property
    def process(self) -> int:
        return self.pid << 24

    @property
    def thread(self) -> int:
        return self.process | self.tid

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def add(self, table: str, **row: Any) -> None:
        self.rows.setdefault(table, []).append(row)

    def event(
        self,
        kind: int,
        text: str,
        start: int,
        end: int | None,
        value: int | None = None,
        numbers: Sequence[int] | None = None,
        domain_id: int = 3,
    ) -> None:
        row: dict[str, Any] = {"start": start, "end": end, "eventType": kind}
        row |= {"globalTid": self.thread, "domainId": domain_id, "int64Value": value}
        if self.variant.registered:
            row["textId"] = self.string(text)
        else:
            row["text"] = text
        if numbers is not None and self.variant.payload:
            body = struct.pack(f"<{len(numbers)}q", *numbers)
            row["binaryData"] = struct.pack("<4Q", domain_id, 900, len(body), 32) + body
        self.add("NVTX_EVENTS", **row)

    def range(self, text: str, start: int, end: int | None, value: int | None = 0, **more) -> None:
        self.event(PUSH_POP, text, start, end, value, **more)

    def call(self, name: str, ns: int) -> int:
        """A call of the host, now; returns its id."""
        self.correlation += 1
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=self.now,
            end=self.now + ns,
            globalTid=self.thread,
            correlationId=self.correlation,
            nameId=self.string(name),
        )
        self.now += ns
        return self.correlation

    def activity(self, kind: str, start: int, end: int, call: int, **more: Any) -> None:
        row = {"start": start, "end": end, "correlationId": call, "globalPid": self.process}
        self.add(f"CUPTI_ACTIVITY_KIND_{kind}", **row, **more)

    def copy(self, ns: int, kind: int) -> tuple[int, int]:
        """A copy that the host queues now; returns when it runs."""
        call = self.call("cudaMemcpyAsync_v3020", 2_000)
        start = max(self.device_free, self.now)
        self.activity("MEMCPY", start, start + ns, call, copyKind=kind)
        self.device_free = start + ns
        return start, start + ns

    def run(self, launch: Launch) -> int:
        """The kernels of a launch; returns their calls."""
        graph = self.variant.graph_trace
        call = self.call("cudaGraphLaunch_v10000", 5_000) if graph is not None else 0
        begin = at = max(self.device_free, self.now)
        for i, (name, ns) in enumerate(launch.kernels):
            if graph is None:
                call = self.call("cudaLaunchKernel_v7000", 3_000)
                at = max(at, self.now)
                begin = at if i == 0 else begin
            if graph != "graph":
                ids = {"shortName": self.string(name)}
                ids["demangledName"] = self.string(f"void {name}<float>(float*)")
                self.activity("KERNEL", at, at + ns, call, **ids)
            at += ns
            end = at
            at += launch.idle_ns
        if graph == "graph":
            self.activity("GRAPH_TRACE", begin, end, call)
        self.device_free = end
        return len(launch.kernels) if graph is None else 1

    def step(
        self,
        number: int,
        launches: Sequence[Launch],
        *,
        commit_ns: int = 6_000,
        wait_ns: int = 0,
        pause_ns: int = 1_000,
        commits: int | None = None,
    ) -> SimpleNamespace:
        """A turn: plan, launch, commit of an earlier step. Returns what a report must say of it."""
        self.now += pause_ns
        began = self.now
        self.range("plan", self.now, self.now + 4_000, number)
        self.now += 4_000
        launch_began = self.now
        first, _ = self.copy(1_500, 1)
        calls = 0
        for launch in launches:
            range_began = self.now
            calls += self.run(launch)
            padding = launch.bucket - launch.tokens
            numbers = (number, launch.rows, launch.bucket, launch.tokens, 40 + number, padding)
            name = "replay" if launch.phase == "decode" else "prefill"
            value = None if self.variant.payload else launch.rows
            self.range(name, range_began, self.now, value, numbers=numbers)
        _, last = self.copy(1_000, 2)
        self.range("launch", launch_began, self.now, launches[0].bucket)
        launched = self.now
        if commits is not None:
            self.now += 1_000
            if wait_ns:
                self.call("cudaEventSynchronize_v3020", wait_ns)
            self.now += commit_ns - 1_000
            self.range("commit", launched, self.now, commits)
        self.range("step", began, self.now, number)
        truth = SimpleNamespace(
            step=number,
            phase="+".join(launch.phase for launch in launches),
            rows=sum(launch.rows for launch in launches),
            bucket=launches[0].bucket,
            tokens=sum(launch.tokens for launch in launches),
            padding=sum(launch.bucket - launch.tokens for launch in launches),
            host_ns=self.now - began - (wait_ns if commits is not None else 0),
            wait_ns=wait_ns if commits is not None else 0,
            commit_ns=self.now - launched,
            device_ns=last - first,
            gap_ns=None if self.last_end is None else first - self.last_end,
            step_ns=None if self.last_end is None else last - self.last_end,
            launches=calls,
        )
        self.last_end = last
        self.truth.append(truth)
        return truth

    def write(self, path: Path, seed: int = 0, others: Sequence[Profile] = ()) -> Path:
        """Write the rows of this and other profiles in a random order.

        A table, and a column, exists only where a row has it.
        """
        tables: dict[str, list[dict[str, Any]]] = {}
        for profile in (self, *others):
            for table, rows in profile.rows.items():
                tables.setdefault(table, []).extend(rows)
        tables["StringIds"] = [{"id": i, "value": text} for text, i in self.strings.items()]
        shuffle = random.Random(seed).shuffle
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA synchronous=OFF")
            for table, rows in tables.items():
                shuffle(rows)
                columns = dict.fromkeys(column for row in rows for column in row)
                names = ", ".join(f'"{column}"' for column in columns)
                connection.execute(f"CREATE TABLE {table} ({names})")
                connection.executemany(
                    f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})",
                    [[row.get(column) for column in columns] for row in rows],
                )
        connection.close()
        return path
