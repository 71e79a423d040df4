"""bench.py --profile from its command line to what it writes, on the demo model."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys

import pytest
from stepgraph.__main__ import main
from stepgraph.profiling import attribution, ranges
from stepgraph.profiling.trace import read_trace
from stepgraph.runtime import EngineConfig
from stepgraph.runtime.bench import benchmark_run, options

from ..profiling.test_ranges import Heard
from ..rigs.bench_rig import run_bench
from ..rigs.fake_graphs import make_fake_graphs  # noqa: F401

CASE = "--mode eager --device cpu --input-len 8 --output-len 10 --num-warmup 0"


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--device cuda", "-t cuda,nvtx -c cudaProfilerApi --cuda-graph-trace=graph"),
        ("--device cuda:1 --graph-trace node", "-t cuda,nvtx --cuda-graph-trace=node"),
        ("--device cpu", "-t nvtx -c nvtx -p window@stepgraph"),
    ],
)
def test_commands_of_nsys_are_printed(flags, what, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = f"--profile nsys --profile-steps 7 --profile-output 'a b' {flags}"
    assert main(["bench", *shlex.split(arguments)]) == 0
    profile, export, report = map(shlex.split, capsys.readouterr().out.splitlines())
    assert profile[1:3] == ["nsys", "profile"]
    assert set(what.split()) <= set(profile)
    again = [sys.executable, "-m", "stepgraph", "bench", *shlex.split(arguments)]
    assert profile[-len(again) - 2 :] == ["-o", "a b", *again]
    assert export[-3:] == ["-o", "a b.sqlite", "a b.nsys-rep"]
    assert report == ["stepgraph", "report", "a b.sqlite"]
    assert list(tmp_path.iterdir()) == []


def test_inside_nsys_the_window_is_around_the_steps(monkeypatch, tmp_path):
    """What the child does; the window ends where the trace of torch does, see below."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    heard = Heard()
    with ranges.listening(heard):
        assert run_bench(monkeypatch, f"--profile nsys --profile-steps 3 {CASE}") == 0
    # The prefill, which makes the first token, and steps 0 and 1 are before it.
    names = [name for name in heard.names("push") if name in ("window", "step")]
    assert names[:7] == [*["step"] * 3, "window", *["step"] * 3]
    assert names.count("window") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["stepgraph-profile.kernels.json"]


def test_a_trace_has_the_steps_of_the_window(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = f"--profile torch --profile-steps 4 --profile-output demo {CASE}"
    assert run_bench(monkeypatch, f"{arguments} --output-json out.json") == 0
    assert sorted(os.listdir()) == ["demo.trace.json.gz", "out.json"]
    events = read_trace(tmp_path / "demo.trace.json.gz")["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    numbers = [event["args"]["payload"] for event in ranges if event["name"] == "step"]
    # Step 0 prefills; the device is the host, so each turn returns what it launched.
    assert numbers == [3, 4, 5, 6]
    replays = [event["args"] for event in ranges if event["name"] == "replay"]
    assert [args["step"] for args in replays] == numbers
    assert {(args["rows"], args["bucket"], args["padding"]) for args in replays} == {(1, 1, 0)}
    assert {"plan", "launch", "commit"} <= {event["name"] for event in ranges}
    assert not {"prefill", "warmup", "capture", "load"} & {event["name"] for event in ranges}
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert case["profiled"] is True
    assert case["step_ms"]["n"] == 9
    told = case["profile"]
    assert [row["step"] for row in told["steps"]] == numbers
    assert sum(entry["share"] for entry in told["operations"]) == pytest.approx(1)
    text = capsys.readouterr().out
    assert "trace of steps 2:6: demo.trace.json.gz" in text
    assert " | operation " in text


@pytest.mark.usefixtures("fake_graphs")
def test_names_are_recorded_while_an_engine_captures(monkeypatch, tmp_path):
    """The fastest mode is graph, whose captures hold the operations of eager mode."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark_run, "modes_of", lambda device: ("graph",))
    plain = functools.partial(EngineConfig, compile=False)
    monkeypatch.setattr(options, "EngineConfig", plain)
    sizes = "--device cpu --input-len 4 --output-len 3 --prefill-chunk 8 --num-warmup 0"
    assert run_bench(monkeypatch, f"--profile torch --profile-steps 1 {sizes}") == 0
    names = attribution.load(tmp_path / "stepgraph-profile.kernels.json")
    assert (names.model, names.bandwidth_gb_s, names.unattributed) == ("demo", 30.0, 0)
    (decode,) = [s for s in names.steps if s.phase == "decode" and not s.full_sampler]
    assert {node.layer for node in decode.nodes} == {None, 0, 1, 2, 3, 4, 5}
