"""Names of ranges and operations in a trace that torch wrote."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgraph.profiling.trace_events import (
    DEVICE_CATEGORIES,
    Recorded,
    annotate,
    event_name,
)

from ..rigs.kineto_traces import DEVICE, STREAM, KinetoTrace, names_of, nodes_of, step_nodes


def work(trace):
    """What the device did, in order."""
    found = [event for event in trace.events if event.get("cat") in DEVICE_CATEGORIES]
    return sorted(found, key=lambda event: event["ts"])


def labels(nodes):
    return [node.label for node in nodes]


def test_ranges_carry_their_names_and_payloads():
    trace = KinetoTrace()
    trace.turn(7, 1000, nodes_of(1))
    trace.mark("collection", 1050, generation=2, microseconds=31, collected=0)
    annotate(trace.document, trace.log)
    ranges = [event for event in trace.events if event.get("cat") == "user_annotation"]
    assert [event["name"] for event in ranges] == ["step", "launch", "replay", "collection"]
    step, _, replay, mark = ranges
    assert step["args"]["payload"] == 7
    assert replay["args"] | {"step": 7, "rows": 3, "bucket": 4, "padding": 1} == replay["args"]
    assert mark["ph"] == "i"
    assert "dur" not in mark
    assert mark["args"]["microseconds"] == 31
    assert "stepgraph #" not in json.dumps(trace.document)


def test_copies_of_ranges_on_the_device_s_rows_are_named_too():
    trace = KinetoTrace()
    trace.log = {0: Recorded("step", {"payload": 3}), 1: Recorded("fallback", {}, True)}
    event = {"ph": "X", "cat": "gpu_user_annotation", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}
    trace.events += [{**event, "name": event_name(0)}, {**event, "name": event_name(1)}]
    annotate(trace.document, trace.log)
    assert [event["name"] for event in trace.events] == ["step"]


@pytest.mark.parametrize("ids_from", [None, 500])
@pytest.mark.parametrize("streams", [(STREAM,), (STREAM, 20, 21)])
def test_work_of_a_replayed_graph_is_named_by_layer_and_operation(ids_from, streams):
    nodes = nodes_of(3, ids_from=ids_from)
    trace = KinetoTrace()
    for step in range(3):
        trace.turn(step, 1000 + 300 * step, nodes, with_ids=ids_from is not None, streams=streams)
    original = [event["name"] for event in work(trace)]
    annotate(trace.document, trace.log, names_of(step_nodes(nodes)))
    found = work(trace)
    assert [event["name"] for event in found] == 3 * labels(nodes)
    assert [event["args"]["kernel"] for event in found] == original
    assert [event["args"]["step"] for event in found] == [i for i in range(3) for _ in nodes]
    for event, node in zip(found, 3 * nodes, strict=True):
        assert event["args"]["operation"] == node.operation
        assert event["args"].get("layer") == node.layer
        assert (event["args"]["rows"], event["args"]["bucket"]) == (3, 4)


def test_the_step_of_a_replay_is_found_by_bucket():
    nodes = nodes_of(2)
    renamed = [  # of the same kernels, so that nothing but the bucket tells them apart
        step_nodes(nodes, size=4),
        step_nodes([replace_operation(node, "other") for node in nodes], size=8),
    ]
    trace = KinetoTrace()
    trace.turn(0, 0, nodes, bucket=8)
    trace.turn(1, 400, nodes, bucket=4)
    annotate(trace.document, trace.log, names_of(*renamed))
    found = [event["args"]["operation"] for event in work(trace)]
    assert set(found[: len(nodes)]) == {"other"}
    assert "down" in found[len(nodes) :]


def replace_operation(node, operation):
    return type(node)(node.layer, operation, node.kind, node.kernel, node.tools_id)


def test_missing_ids_and_missing_kernels_leave_kernels_their_own_names():
    nodes = nodes_of(2, ids_from=100)
    trace = KinetoTrace()
    trace.turn(0, 0, nodes, leave_out=[3], with_ids=True)
    events = work(trace)
    del events[1]["args"]["graph node id"]
    events[4]["args"]["graph node id"] = 0
    original = [event["name"] for event in events]
    annotate(trace.document, trace.log, names_of(step_nodes(nodes)))
    expected = labels([node for index, node in enumerate(nodes) if index != 3])
    expected[1], expected[4] = original[1], original[4]
    assert [event["name"] for event in work(trace)] == expected
    assert "kernel" not in events[1]["args"]


def test_work_outside_of_graphs_and_of_unknown_calls_keeps_its_name():
    trace = KinetoTrace()
    nodes = nodes_of(1)
    trace.range("step", 0, 50, payload=9)
    trace.range("copy", 5, 10, payload=64)
    trace.work(trace.call("cudaMemcpyAsync", 6), "Memcpy HtoD", 20, 3, cat="gpu_memcpy")
    trace.work(trace.call("cudaLaunchKernel", 30, tid=99), "elsewhere", 40, 3)
    trace.work(12345, "no call", 60, 3)
    trace.work(None, "no correlation", 70, 3)
    annotate(trace.document, trace.log, names_of(step_nodes(nodes)))
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


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 30), st.sampled_from([7, 8])), max_size=30
    )
)
def test_no_two_events_of_a_row_overlap(spans):
    trace = KinetoTrace()
    for ts, dur, tid in spans:
        trace.work(None, "kernel", ts, dur, tid=tid)
    before = sorted((e["ts"], e["dur"]) for e in work(trace))
    annotate(trace.document)
    assert sorted((e["ts"], e["dur"]) for e in work(trace)) == before
    rows = {}
    for event in work(trace):
        assert rows.get(event["tid"], 0) <= event["ts"] or event["dur"] == 0
        rows[event["tid"]] = max(rows.get(event["tid"], 0), event["ts"] + event["dur"])


def test_a_trace_without_ranges_of_ours_stays_as_it_is():
    foreign = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0.5, "dur": 1, "args": {}}
    document = {"traceEvents": [foreign, {"ph": "M", "name": "process_name", "pid": 1, "args": {}}]}
    before = copy.deepcopy(document)
    annotate(document)
    assert document == before
