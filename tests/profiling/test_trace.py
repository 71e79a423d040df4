"""Traces of steps by torch's profiler: recorded, named, summed, written whole or not at all."""

from __future__ import annotations

import gzip
import json
import threading

import pytest
import torch
from stepgraph.profiling import ranges
from stepgraph.profiling.atomic_write import WriteError
from stepgraph.profiling.trace import (
    DEVICE_CATEGORIES,
    TraceError,
    annotate,
    read_trace,
    torch_trace,
    trace_operations,
)
from stepgraph.runtime import SamplingParams

from ..rigs.kineto_traces import DEVICE, STREAM, KinetoTrace, names_of, nodes_of

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def named(path, name):
    return [e for e in read_trace(path)["traceEvents"] if e["name"] == name]


def test_ranges_are_events_with_what_they_carry(tmp_path):
    path = tmp_path / "a.json.gz"
    with (
        torch_trace(path),
        ranges.span(ranges.STEP, 4),
        ranges.step_span(ranges.REPLAY, 4, 3, 8, 3, 40, 5),
    ):
        torch.ones(2)
    (step,), (replay,) = (named(path, name) for name in ("step", "replay"))
    assert step["args"]["payload"] == 4
    numbers = {"step": 4, "rows": 3, "bucket": 8, "tokens": 3, "blocks_in_use": 40, "padding": 5}
    assert replay["args"] | numbers == replay["args"]
    assert step["ts"] <= replay["ts"] <= step["ts"] + step["dur"]
    assert len(named(path, "aten::ones")) == 1


def test_threads_have_their_own_ranges(tmp_path):
    path = tmp_path / "a.json.gz"
    both = threading.Barrier(2)

    def work(number):
        with ranges.span(ranges.STEP, number):
            both.wait()
            with ranges.span(ranges.PLAN, number):
                both.wait()

    with torch_trace(path):
        thread = threading.Thread(target=work, args=(1,))
        thread.start()
        work(2)
        thread.join()
    for name in ("step", "plan"):
        assert sorted(event["args"]["payload"] for event in named(path, name)) == [1, 2]


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
    engine = open_engine("base")
    engine.generate([[1, 2, 3]], GREEDY)
    path = tmp_path / "a.json.gz"
    with torch_trace(path):
        engine.generate([[1, 2, 3]], GREEDY)
    layers = engine.model_config.num_layers
    for layer in range(layers):
        found = named(path, f"{layer}/qkv_linear")
        assert len(found) == 6  # a prefill and five decode steps
        assert {event["args"]["layer"] for event in found} == {layer}
    assert len(named(path, "head")) == 6
    found = trace_operations(path)
    rows = {row.name: row for row in found.operations}
    assert rows["qkv_linear"].launches == layers
    assert sum(row.us for row in rows.values()) == pytest.approx(found.step_us)


def test_scopes_of_an_engine_in_another_thread_are_there(open_engine, tmp_path):
    """As in a service: the thread that runs the engine was there before the trace."""
    engine = open_engine("micro")
    path, begin, ended = tmp_path / "a.json.gz", threading.Event(), threading.Event()

    def serve():
        begin.wait(30)
        engine.generate([[1, 2]], GREEDY)
        ended.set()

    thread = threading.Thread(target=serve)
    thread.start()
    with torch_trace(path):
        begin.set()
        assert ended.wait(30)
    thread.join()
    assert len(named(path, "head")) == len(named(path, "step")) == 6
    assert "qkv_linear" in {row.name for row in trace_operations(path).operations}


def work(trace):
    """What the device did, in order."""
    found = [event for event in trace.events if event.get("cat") in DEVICE_CATEGORIES]
    return sorted(found, key=lambda event: event["ts"])


def labels(nodes):
    return [node.label for node in nodes]


@pytest.mark.parametrize("streams", [(STREAM,), (STREAM, 20, 21)])
def test_work_of_a_replayed_graph_is_named_by_layer_and_operation(streams):
    nodes = nodes_of(3)
    trace = KinetoTrace()
    for step in range(3):
        trace.turn(step, 1000 + 300 * step, nodes, streams)
    original = [event["name"] for event in work(trace)]
    annotate(trace.document, trace.log, names_of(nodes))
    found = work(trace)
    assert [event["name"] for event in found] == 3 * labels(nodes)
    assert [event["args"]["kernel"] for event in found] == original
    assert [event["args"]["step"] for event in found] == [i for i in range(3) for _ in nodes]
    for event, node in zip(found, 3 * nodes, strict=True):
        assert event["args"]["operation"] == node.operation
        assert event["args"].get("layer") == node.layer
        assert (event["args"]["rows"], event["args"]["bucket"]) == (3, 4)


def test_work_outside_of_graphs_and_of_unknown_calls_keeps_its_name():
    trace = KinetoTrace()
    nodes = nodes_of(1)
    trace.range("step", 0, 50, payload=9)
    trace.range("copy", 5, 10, payload=64)
    trace.work(trace.call("cudaMemcpyAsync", 6), "Memcpy HtoD", 20, 3, cat="gpu_memcpy")
    trace.work(trace.call("cudaLaunchKernel", 30, tid=99), "elsewhere", 40, 3)
    trace.work(12345, "no call", 60, 3)
    trace.work(None, "no correlation", 70, 3)
    annotate(trace.document, trace.log, names_of(nodes))
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
    annotate(trace.document, trace.log)
    inner, outer, outside, replayed = work(trace)
    assert [e["name"] for e in (inner, outer)] == ["1/down", "1/layer"]
    assert (inner["args"]["layer"], inner["args"]["operation"]) == (1, "down")
    assert (inner["args"]["kernel"], inner["args"]["step"]) == ("gemm", 2)
    assert (outside["name"], replayed["name"]) == ("last", "in a graph")


def test_work_that_overlaps_gets_a_row_of_its_own():
    trace = KinetoTrace()
    correlation = trace.call("cudaGraphLaunch", 0)
    for ts, dur in ((10, 10), (18, 10), (27, 10), (40, 5)):
        trace.work(correlation, "kernel", ts, dur)
    annotate(trace.document)
    first, added, *others = [event["tid"] for event in work(trace)]
    assert added != STREAM
    assert {first, *others} == {STREAM}
    (named,) = [e for e in trace.events if e["name"] == "thread_name"]
    assert (named["pid"], named["tid"]) == (DEVICE, added)
    assert named["args"]["name"] == f"stream {STREAM}, overlapping"


def test_operations_of_device_work() -> None:
    nodes = nodes_of(2)
    trace = KinetoTrace()
    for step in range(4):
        trace.turn(step, 1000 * step, nodes)
    annotate(trace.document, trace.log, names_of(nodes))
    found = trace_operations(trace.document)
    assert (found.device, found.steps) == (True, 4)
    assert found.step_us == pytest.approx(80)  # eight nodes, one after the other
    assert found.gap_us == 0
    assert set(found.operations) == {
        *((name, 2, 20) for name in ("norm_linear", "decode_attention", "down")),
        *((name, 1, 10) for name in ("begin", "greedy")),
    }
    assert "| down             |      20.0 | 25.0% |               2 |" in found.markdown()


def test_operations_that_overlap_and_gaps_between_them() -> None:
    trace = KinetoTrace()
    trace.range("step", 0, 100, payload=0)
    correlation = trace.call("cudaLaunchKernel", 5)
    for ts, dur in ((10, 10), (15, 10), (35, 5)):
        trace.work(correlation, "kernel", ts, dur)
    annotate(trace.document, trace.log)
    found = trace_operations(trace.document).to_json()
    assert (found["steps"], found["step_us"], found["gap_us"]) == (1, 30, 10)
    assert found["operations"] == [{"name": "(no operation)", "launches": 3, "us": 25}]


def test_operations_of_the_host_are_without_those_inside_them() -> None:
    trace = KinetoTrace()
    for step, ts in enumerate((0, 200)):
        trace.range("step", ts, 100, payload=step)
        trace.range("plan", ts, 5, payload=step)
        trace.range("0/attention", ts + 10, 50, operation="attention", layer=0)
        trace.range("0/down", ts + 20, 30, operation="down", layer=0)
        trace.range("1/down", ts + 70, 10, operation="down", layer=1)
    trace.range("head", 120, 20, operation="head")  # between two steps
    annotate(trace.document, trace.log)
    found = trace_operations(trace.document)
    assert (found.device, found.steps, found.step_us, found.gap_us) == (False, 2, 100, None)
    assert found.operations == [
        ("down", 2, 40),
        ("(step)", 1, 35),
        ("attention", 1, 20),
        ("(plan)", 1, 5),
    ]


def test_traces_that_cannot_be_read(tmp_path) -> None:
    whole = gzip.compress(json.dumps({"traceEvents": []}).encode(), mtime=0)
    path = tmp_path / "foreign.json.gz"
    for content in (b"", b"[" * 100_000, b"{}", whole[:30], b"\x1f\x8b\x08nothing"):
        path.write_bytes(content)
        with pytest.raises(TraceError):
            read_trace(path)
    with pytest.raises(TraceError):
        trace_operations(tmp_path / "nothing")
