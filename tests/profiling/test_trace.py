"""Traces of steps by torch's profiler: recorded, named, written whole or not at all."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from stepgraph.profiling import ranges
from stepgraph.profiling.collector import CollectorWatch
from stepgraph.profiling.trace import TraceError, read_trace, torch_trace
from stepgraph.profiling.trace_table import trace_operations
from stepgraph.runtime import SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def named(path, name):
    return [e for e in read_trace(path)["traceEvents"] if e["name"] == name]


def test_ranges_and_marks_are_events_with_what_they_carry(tmp_path):
    path = tmp_path / "a.json.gz"
    watch = CollectorWatch()  # an engine has one
    with torch_trace(path), ranges.span(ranges.STEP, 4):
        with ranges.step_span(ranges.REPLAY, 4, 3, 8, 3, 40, 5):
            torch.ones(2)
        ranges.mark(ranges.FALLBACK, 16)
        gc.collect()
    watch.close()
    generations = [mark["args"]["generation"] for mark in named(path, "collection")]
    assert generations.count(2) == 1  # a collection of young objects may run at any time
    (step,), (replay,), (mark,) = (named(path, n) for n in ("step", "replay", "fallback"))
    assert step["args"]["payload"] == 4
    numbers = {"step": 4, "rows": 3, "bucket": 8, "tokens": 3, "blocks_in_use": 40, "padding": 5}
    assert replay["args"] | numbers == replay["args"]
    assert (mark["ph"], mark["args"]["bucket"]) == ("i", 16)
    assert step["ts"] <= replay["ts"] <= mark["ts"] <= step["ts"] + step["dur"]
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/b.json.gz", "nowhere is not a directory"),
        ("b.json", r"the name of a trace ends in \.json\.gz"),
        ("b.json.gz", "profiler is already running"),
    ],
)
def test_a_trace_that_cannot_be_recorded_is_refused_at_once(tmp_path, name, message):
    with torch_trace(tmp_path / "a.json.gz"):
        with pytest.raises(TraceError, match=message) as raised, torch_trace(tmp_path / name):
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
    table = trace_operations(path)
    assert [row.name for row in table.layers] == [str(layer) for layer in range(layers)]
    rows = {row.name: row.launches for row in table.operations}
    assert rows["qkv_linear"] == layers
    assert not {row.name for row in table.ranges} & set(rows)


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


def test_operators_of_a_compiled_step_are_there(compiled, tmp_path):
    engine = compiled("base")
    engine.generate([[1, 2, 3]], GREEDY)
    path = tmp_path / "a.json.gz"
    with torch.compiler.set_stance("fail_on_recompile"), torch_trace(path):
        engine.generate([[1, 2, 3]], GREEDY)
    replays = named(path, "replay")
    assert len(replays) == 5
    for operator in ("stepgraph::decoder_stack", "stepgraph::accept_drafts"):
        assert len(named(path, operator)) >= len(replays), operator
    assert len(named(path, "prefill")) == 1
