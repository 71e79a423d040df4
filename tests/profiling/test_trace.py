"""Traces of steps by torch's profiler: recorded, named, summed, written whole or not at all."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from stepgraph.profiling import ranges
from stepgraph.profiling.atomic_write import WriteError
from stepgraph.profiling.attribution import KernelNames, Node, StepNodes
from stepgraph.profiling.report import Report, read_report
from stepgraph.profiling.trace import (
    DEVICE_CATEGORIES,
    TraceError,
    annotate,
    event_name,
    read_trace,
    torch_trace,
)

from ..rigs.engine_rig import greedy


def named(path, name):
    return [e for e in read_trace(path)["traceEvents"] if e["name"] == name]


def test_ranges_of_every_thread_are_events_with_what_they_carry(tmp_path):
    path = tmp_path / "a.json.gz"
    both = threading.Barrier(2)

    def work(number):
        with ranges.span(ranges.STEP, number):
            both.wait()
            with ranges.step_span(ranges.REPLAY, number, 3, 8, 3, 40, 5):
                both.wait()
                torch.ones(2)

    with torch_trace(path), ThreadPoolExecutor(1) as pool:
        pool.submit(work, 1)
        work(2)
    steps, replays = (sorted(named(path, n), key=lambda e: e["tid"]) for n in ("step", "replay"))
    assert {step["args"]["payload"] for step in steps} == {1, 2}
    for step, replay in zip(steps, replays, strict=True):
        numbers = {"rows": 3, "bucket": 8, "tokens": 3, "blocks_in_use": 40, "padding": 5}
        numbers["step"] = step["args"]["payload"]
        assert replay["args"] | numbers == replay["args"]
        assert step["ts"] <= replay["ts"] <= step["ts"] + step["dur"]
    assert len(named(path, "aten::ones")) == 2


@pytest.mark.parametrize("name", ["nowhere/b.json.gz", "b.json", "b.json.gz"])
def test_a_trace_that_cannot_be_recorded_is_refused_at_once(tmp_path, name):
    with torch_trace(tmp_path / "a.json.gz"):
        with pytest.raises((TraceError, WriteError)) as raised, torch_trace(tmp_path / name):
            pytest.fail("it is refused before anything runs")
        with ranges.span(ranges.STEP, 1):
            pass
    assert "\n" not in str(raised.value)
    assert len(named(tmp_path / "a.json.gz", "step")) == 1, "the first trace goes on"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json.gz"]


def test_an_error_inside_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(b"before")
    with pytest.raises(KeyError), torch_trace(path):
        raise KeyError
    assert path.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json.gz"]
    with torch_trace(path):  # the profiler has ended
        pass


def test_scopes_of_operations_are_rows_of_an_eager_step(open_engine, tmp_path):
    """As in a service: the thread that runs the engine was there before the trace."""
    engine = open_engine("micro")
    path, begin, ended = tmp_path / "a.json.gz", threading.Event(), threading.Event()

    def serve():
        begin.wait(30)
        engine.generate([[1, 2]], greedy(6))
        ended.set()

    thread = threading.Thread(target=serve)
    thread.start()
    with torch_trace(path):
        begin.set()
        assert ended.wait(30)
    thread.join()
    layers = engine.model_config.num_layers
    for layer in range(layers):
        found = named(path, f"{layer}/qkv_linear")
        assert len(found) == 6  # a prefill and five decode steps
        assert {event["args"]["layer"] for event in found} == {layer}
    assert len(named(path, "head")) == len(named(path, "step")) == 6
    report = read_report(path)
    rows = {row.name: row for row in report.operations if row.phase == "decode"}
    assert (rows["qkv_linear"].activities, rows["qkv_linear"].us.n) == (layers, 5)
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    assert [step.phase for step in report.steps] == ["prefill", *["decode"] * 5]


HOST, THREAD, DEVICE, STREAM = 4711, 4711, 0, 7
NODES = (
    Node(None, "begin", "kernel", "begin_kernel"),
    *(
        Node(layer, operation, "kernel", kernel)
        for layer in range(3)
        for operation, kernel in (
            ("norm_linear", "norm_linear_kernel"),
            ("decode_attention", "void stepgraph::attention<64, 16>(float*)"),
            ("down", "down_kernel"),
        )
    ),
    Node(None, "greedy", "memcpy", None),
)
NAMES = KernelNames(steps=[StepNodes("decode", 4, False, NODES)])


class KinetoTrace:
    """A trace as torch's profiler writes it, made event by event; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = itertools.count(1)

    @property
    def document(self) -> dict[str, Any]:
        return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": self.events}

    def report(self, folder: Path) -> Report:
        """Read it as a file."""
        path = folder / "x.json"
        path.write_text(json.dumps(self.document))
        return read_report(path)

    def range(self, name: str, ts: float, dur: float, **payload: int) -> None:
        self._add("user_annotation", event_name(name, payload), HOST, THREAD, ts, dur)

    def call(self, name: str, ts: float, tid: int = THREAD) -> int:
        correlation = next(self.correlation)
        self._add("cuda_runtime", name, HOST, tid, ts, 2.0, correlation=correlation)
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
        if correlation is None:
            self._add(cat, name, DEVICE, tid, ts, dur)
            return
        self._add(cat, name, DEVICE, tid, ts, dur, correlation=correlation)

    def _add(
        self, cat: str, name: str, pid: int, tid: int, ts: float, dur: float, **args: int
    ) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
        self.events.append({**event, "args": {"External id": len(self.events), **args}})


def work(trace):
    """What the device did, in order."""
    found = [event for event in trace.events if event.get("cat") in DEVICE_CATEGORIES]
    return sorted(found, key=lambda event: event["ts"])


@pytest.mark.parametrize("streams", [(STREAM,), (STREAM, 20, 21)])
def test_work_of_a_replayed_graph_is_named_by_layer_and_operation(streams, tmp_path):
    trace = KinetoTrace()
    for step in range(3):
        ts = 1000 + 300 * step
        trace.range("step", ts, 100, payload=step)
        trace.range("replay", ts + 12, 20, step=step, rows=3, bucket=4, tokens=3, padding=1)
        correlation = trace.call("cudaGraphLaunch", ts + 15)
        for index, node in enumerate(NODES):
            kernel, tid = node.kernel or "Memcpy DtoD", streams[index % len(streams)]
            cat = "kernel" if node.kind == "kernel" else "gpu_memcpy"
            trace.work(correlation, kernel, ts + 20 + 10 * index, 10, cat=cat, tid=tid)
    original = [event["name"] for event in work(trace)]
    annotate(trace.document, NAMES)
    found = work(trace)
    assert [event["name"] for event in found] == 3 * [node.label for node in NODES]
    assert [event["args"]["kernel"] for event in found] == original
    assert [event["args"]["step"] for event in found] == [i for i in range(3) for _ in NODES]
    for event, node in zip(found, 3 * NODES, strict=True):
        assert event["args"]["operation"] == node.operation
        assert event["args"].get("layer") == node.layer
        assert (event["args"]["rows"], event["args"]["bucket"]) == (3, 4)
    report = trace.report(tmp_path)
    assert report.graph_trace == "node"
    assert report.idle == {"decode": 0}
    assert [step.device_us for step in report.steps] == [10 * len(NODES)] * 3
    found = {(row.name, row.activities, row.us.p50) for row in report.operations}
    assert found == {
        *((name, 3, 30) for name in ("norm_linear", "decode_attention", "down")),
        *((name, 1, 10) for name in ("begin", "greedy")),
    }


def test_work_outside_of_graphs_and_of_unknown_calls_keeps_its_name():
    trace = KinetoTrace()
    trace.range("step", 0, 50, payload=9)
    trace.range("copy", 5, 10, payload=64)
    trace.work(trace.call("cudaMemcpyAsync", 6), "Memcpy HtoD", 20, 3, cat="gpu_memcpy")
    trace.work(trace.call("cudaLaunchKernel", 30, tid=99), "elsewhere", 40, 3)
    trace.work(12345, "no call", 60, 3)
    trace.work(None, "no correlation", 70, 3)
    annotate(trace.document, NAMES)
    copy_, elsewhere, lost, alone = work(trace)
    assert copy_["name"] == "Memcpy HtoD"
    assert copy_["args"]["step"] == 9
    for event in (elsewhere, lost, alone):
        assert "step" not in event["args"]
        assert "operation" not in event["args"]


def test_kernels_that_are_launched_one_by_one_have_the_scope_of_their_launch():
    trace = KinetoTrace()
    trace.range("step", 0, 100, payload=2)
    trace.range("replay", 5, 90, step=2, rows=1, bucket=1)
    trace.range("1/layer", 10, 60, operation="layer", layer=1)
    trace.range("1/down", 20, 20, operation="down", layer=1)
    trace.work(trace.call("cudaLaunchKernel", 25), "gemm", 30, 5)
    trace.work(trace.call("cudaLaunchKernel", 50), "add", 55, 5)
    trace.work(trace.call("cudaLaunchKernel", 80), "last", 85, 5)
    trace.work(trace.call("cudaGraphLaunch", 26), "in a graph", 95, 5)
    annotate(trace.document)
    inner, outer, outside, replayed = work(trace)
    assert [e["name"] for e in (inner, outer)] == ["1/down", "1/layer"]
    assert (inner["args"]["layer"], inner["args"]["operation"]) == (1, "down")
    assert (inner["args"]["kernel"], inner["args"]["step"]) == ("gemm", 2)
    assert (outside["name"], replayed["name"]) == ("last", "in a graph")


def test_traces_that_cannot_be_read(tmp_path) -> None:
    whole = gzip.compress(json.dumps({"traceEvents": []}).encode(), mtime=0)
    path = tmp_path / "foreign.json.gz"
    for content in (b"", b"[" * 100_000, b"{}", whole[:30], b"\x1f\x8b\x08nothing"):
        path.write_bytes(content)
        with pytest.raises(TraceError):
            read_trace(path)
    with pytest.raises(TraceError):
        read_report(tmp_path / "nothing.json.gz")
