"""Traces as torch's profiler writes them, made by hand: calls of the host, work of the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from stepgraph.profiling.kernel_names import KernelNames, Node, OperationCost, StepNodes
from stepgraph.profiling.trace import Recorded, event_name

HOST, THREAD, DEVICE, STREAM = 4711, 4711, 0, 7

KERNELS = {
    "norm_linear": "norm_linear_kernel",
    "decode_attention": "void stepgraph::attention<64, 16>(float*)",
    "down": "down_kernel",
}
"""Operations of a layer -> functions on the device."""


def nodes_of(layers: int, *, ids_from: int | None = None) -> tuple[Node, ...]:
    """A step of `begin`, three operations a layer, and a copy of the tokens."""
    numbers = itertools.count(ids_from) if ids_from is not None else itertools.repeat(None)
    nodes = [Node(None, "begin", "kernel", "begin_kernel", next(numbers))]
    for layer in range(layers):
        nodes += [
            Node(layer, operation, "kernel", kernel, next(numbers))
            for operation, kernel in KERNELS.items()
        ]
    return (*nodes, Node(None, "greedy", "memcpy", None, next(numbers)))


def names_of(*steps: StepNodes, **said: Any) -> KernelNames:
    costs = [OperationCost("down", 2, 4000)]
    return KernelNames(
        **{"model": "tiny", "device": "cuda", "costs": costs, **said, "steps": [*steps]}
    )


def step_nodes(nodes: Sequence[Node], size: int = 4, phase: Any = "decode") -> StepNodes:
    return StepNodes(phase, size, False, tuple(nodes))


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

    def operator(self, name: str, ts: float, dur: float) -> None:
        self._host("cpu_op", name, ts, dur, THREAD)

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
        node_id: int | None = None,
        tid: int = STREAM,
    ) -> None:
        args: dict[str, Any] = {"device": DEVICE, "stream": tid}
        if correlation is not None:
            args["correlation"] = correlation
        if node_id is not None:
            args["graph node id"] = node_id
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
        *,
        bucket: int = 4,
        leave_out: Sequence[int] = (),
        with_ids: bool = False,
        streams: Sequence[int] = (STREAM,),
        phase: str = "replay",
    ) -> None:
        """One turn of the engine of 100 µs, whose replay takes 10 µs for each of its nodes."""
        self.range("step", ts, 100, payload=step)
        self.range("launch", ts + 10, 30, payload=bucket)
        numbers = {"step": step, "rows": bucket - 1, "bucket": bucket, "tokens": bucket - 1}
        self.range(phase, ts + 12, 20, **numbers, blocks_in_use=5, padding=1)
        correlation = self.call("cudaGraphLaunch", ts + 15)
        for index, node in enumerate(nodes):
            if index in leave_out:
                continue
            kernel = node.kind == "kernel"
            self.work(
                correlation,
                (node.kernel or "?") if kernel else "Memcpy DtoD (Device -> Device)",
                ts + 20 + 10 * index,
                10,
                cat="kernel" if kernel else "gpu_memcpy",
                node_id=node.tools_id if with_ids else None,
                tid=streams[index % len(streams)],
            )

    def _host(self, cat: str, name: str, ts: float, dur: float, tid: int, **args: int) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": tid, "ts": ts, "dur": dur}
        self.events.append({**event, "args": {"External id": len(self.events), **args}})
