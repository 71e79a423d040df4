"""Traces as torch's profiler writes them, made by hand: calls of the host, work of the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from stepgraph.profiling.kernel_names import KernelNames, Node, StepNodes
from stepgraph.profiling.trace import Recorded, event_name

HOST, THREAD, DEVICE, STREAM = 4711, 4711, 0, 7

KERNELS = {
    "norm_linear": "norm_linear_kernel",
    "decode_attention": "void stepgraph::attention<64, 16>(float*)",
    "down": "down_kernel",
}
"""Operations of a layer -> functions on the device."""


def nodes_of(layers: int) -> tuple[Node, ...]:
    """A step of `begin`, three operations a layer, and a copy of the tokens."""
    nodes = [Node(None, "begin", "kernel", "begin_kernel")]
    for layer in range(layers):
        nodes += [Node(layer, name, "kernel", kernel) for name, kernel in KERNELS.items()]
    return (*nodes, Node(None, "greedy", "memcpy", None))


def names_of(nodes: Sequence[Node]) -> KernelNames:
    """The names of one captured step of four rows."""
    return KernelNames(steps=[StepNodes("decode", 4, False, tuple(nodes))])


class KinetoTrace:
    """Grows event by event; times in microseconds, those of the device follow each other."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.log: dict[int, Recorded] = {}
        self.correlation = itertools.count(1)

    @property
    def document(self) -> dict[str, Any]:
        return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": self.events}

    def range(self, name: str, ts: float, dur: float, tid: int = THREAD, **payload: int) -> None:
        index = len(self.log)
        self.log[index] = Recorded(name, payload)
        self._host("user_annotation", event_name(index), ts, dur, tid)

    def call(self, name: str, ts: float, tid: int = THREAD) -> int:
        correlation = next(self.correlation)
        self._host("cuda_runtime", name, ts, 2.0, tid, correlation=correlation)
        return correlation

    def work(
        self,
        correlation: int | None,
        name: str,
        ts: float,
        dur: float,
        *,
        cat: str = "kernel",
        tid: int = STREAM,
    ) -> None:
        args: dict[str, Any] = {"device": DEVICE, "stream": tid}
        if correlation is not None:
            args["correlation"] = correlation
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": DEVICE, "tid": tid, "ts": ts, "dur": dur}
            | {"args": args}
        )
        if correlation is not None:
            flow = {"cat": "ac2g", "name": "ac2g", "id": correlation, "pid": DEVICE, "tid": tid}
            self.events.append({"ph": "f", **flow, "ts": ts, "bp": "e"})

    def turn(
        self,
        step: int,
        ts: float,
        nodes: Sequence[Node],
        streams: Sequence[int] = (STREAM,),
    ) -> None:
        """One turn of the engine of 100 µs, whose replay takes 10 µs for each of its nodes."""
        self.range("step", ts, 100, payload=step)
        self.range("launch", ts + 10, 30, payload=4)
        numbers = {"step": step, "rows": 3, "bucket": 4, "tokens": 3}
        self.range("replay", ts + 12, 20, **numbers, blocks_in_use=5, padding=1)
        correlation = self.call("cudaGraphLaunch", ts + 15)
        for index, node in enumerate(nodes):
            kernel = node.kind == "kernel"
            self.work(
                correlation,
                (node.kernel or "?") if kernel else "Memcpy DtoD (Device -> Device)",
                ts + 20 + 10 * index,
                10,
                cat="kernel" if kernel else "gpu_memcpy",
                tid=streams[index % len(streams)],
            )

    def _host(self, cat: str, name: str, ts: float, dur: float, tid: int, **args: int) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": tid, "ts": ts, "dur": dur}
        self.events.append({**event, "args": {"External id": len(self.events), **args}})
