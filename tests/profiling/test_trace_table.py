"""Where the time of the steps of a trace went."""

import gzip
import json

import pytest
from stepgraph.profiling.trace_events import TraceError, annotate
from stepgraph.profiling.trace_table import read_trace, trace_operations

from ..rigs.kineto_traces import KinetoTrace, names_of, nodes_of, step_nodes

BANDWIDTH = 1.0  # GB/s: a kilobyte takes a microsecond


def replays(steps=4, layers=2):
    """Replays of `begin`, three operations a layer and a copy; each of them takes 10 µs."""
    nodes = nodes_of(layers)
    trace = KinetoTrace()
    for step in range(steps):
        trace.turn(step, 1000 * step, nodes)
    names = names_of(step_nodes(nodes), bandwidth_gb_s=BANDWIDTH)
    annotate(trace.document, trace.log, names)
    costs = [{"operation": "down", "launches": 2, "bytes": 4000}]
    said = {"model": "tiny", "bandwidth_gb_s": BANDWIDTH, "costs": costs}
    return trace.document | {"stepgraph": said}


def by_name(rows):
    return {row.name: row for row in rows}


def test_device_time_is_told_by_operation_and_by_layer():
    found = trace_operations(replays())
    assert (found.model, found.device, found.steps) == ("tiny", True, 4)
    assert found.to_json()["kernels"] == [
        {"name": "norm_linear_kernel", "launches": 2, "us": 20},
        {"name": "void stepgraph::attention<64, 16>(float*)", "launches": 2, "us": 20},
        {"name": "down_kernel", "launches": 2, "us": 20},
        {"name": "begin_kernel", "launches": 1, "us": 10},
        {"name": "memcpy", "launches": 1, "us": 10},
    ]
    assert found.step_us == pytest.approx(80)  # eight nodes, one behind the other
    operations = by_name(found.operations)
    for name in ("norm_linear", "decode_attention", "down"):
        row = operations[name]
        assert (row.us, row.share, row.launches) == (20, 0.25, 2)
    assert (operations["begin"].us, operations["greedy"].us) == (10, 10)
    assert operations["(idle)"].us == 0
    # 8,000 bytes at 1 GB/s are 8 µs, of 20.
    assert operations["down"].fraction == pytest.approx(0.4)
    assert operations["begin"].fraction is None
    assert [(row.name, row.us, row.launches) for row in found.layers] == [
        ("0", 30, 3),
        ("1", 30, 3),
    ]
    ranges = by_name(found.ranges)
    assert (ranges["step"].us, ranges["replay"].us, ranges["replay"].share) == (100, 20, 0.2)
    text = found.markdown()
    assert text.startswith("tiny: 4 steps of 80.0 µs on the device\n\n| operation ")
    assert "| down             |      20.0 | 25.0% |               2 |      40% |" in text
    assert "| 1     |      30.0 | 37.5% |               3 |" in text


def test_gaps_between_kernels_are_idle_and_overlaps_are_not_counted_twice():
    trace = KinetoTrace()
    trace.range("step", 0, 100, payload=0)
    correlation = trace.call("cudaLaunchKernel", 5)
    for ts, dur in ((10, 10), (15, 10), (35, 5)):
        trace.work(correlation, "kernel", ts, dur)
    annotate(trace.document, trace.log)
    found = trace_operations(trace.document)
    rows = by_name(found.operations)
    assert found.step_us == 30
    assert (rows["(no operation)"].us, rows["(idle)"].us) == (25, 10)
    told = found.to_json()
    assert (told["steps"], told["step_us"], told["gap_us"]) == (1, 30, 10)
    assert told["operations"] == [{"name": "(no operation)", "launches": 3, "us": 25}]


def test_scopes_are_told_without_those_inside_them():
    trace = KinetoTrace()
    for step, ts in enumerate((0, 200)):
        trace.range("step", ts, 100, payload=step)
        trace.range("0/attention", ts + 10, 50, operation="attention", layer=0)
        trace.range("0/down", ts + 20, 30, operation="down", layer=0)
        trace.range("1/down", ts + 70, 10, operation="down", layer=1)
    trace.range("head", 120, 20, operation="head")  # between two steps
    annotate(trace.document, trace.log)
    found = trace_operations(trace.document)
    assert (found.device, found.steps, found.step_us) == (False, 2, 100)
    assert [(row.name, row.us, row.launches) for row in found.operations] == [
        ("down", 40, 2),
        ("attention", 20, 1),
        ("(outside of operations)", 40, 0),
    ]
    assert [(row.name, row.us) for row in found.layers] == [("0", 50), ("1", 10)]


def test_a_trace_without_steps_or_their_work_is_an_error():
    with pytest.raises(TraceError, match="no range `step`"):
        trace_operations({"traceEvents": []})
    trace = KinetoTrace()
    trace.range("step", 0, 10, payload=0)
    trace.work(None, "kernel", 20, 5)
    annotate(trace.document, trace.log)
    with pytest.raises(TraceError, match="belongs to a step"):
        trace_operations(trace.document)


def test_files_that_are_no_traces_are_one_clear_line(tmp_path):
    whole = gzip.compress(json.dumps(replays()).encode(), mtime=0)
    path = tmp_path / "foreign.json.gz"
    for content in (b"", b"[" * 100_000, b"{}", whole[:200], b"\x1f\x8b\x08nothing"):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="it is no trace") as raised:
            read_trace(path)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(TraceError, match=r"cannot read .*nothing: No such file"):
        trace_operations(tmp_path / "nothing")
