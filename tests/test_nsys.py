"""The command line of an nsys session, and the window of a program in it."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import stepgraph.profiling
import torch
from stepgraph.profiling import nsys, ranges
from stepgraph.profiling.nsys import CaptureWindowError, capture_window, nsys_command

PROGRAM = ["python", "bench.py", "--mode", "graph"]


class Recorder:
    """Hears ranges, and what is done to a device."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def push(self, name: str, payload: object) -> None:
        self.events.append(f"push {name}")

    def pop(self) -> None:
        self.events.append("pop")

    def mark(self, name: str, payload: object) -> None:
        """Python's collector may run at any time."""


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with ranges.listening(recorder):
        yield recorder


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> Recorder:
    """A process that works with CUDA."""
    say = recorder.events.append
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: say("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: say("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: say("stop"))
    return recorder


@pytest.mark.parametrize("graph_trace", ["graph", "node"])
def test_the_command_for_cuda(graph_trace) -> None:
    command = nsys_command(PROGRAM, output="runs/one", graph_trace=graph_trace)
    assert shlex.join(command) == (
        "nsys profile -t cuda,nvtx -c cudaProfilerApi --capture-range-end=stop"
        f" --cuda-graph-trace={graph_trace} --sample=none --cpuctxsw=none"
        " --force-overwrite=true --export=sqlite -o runs/one python bench.py --mode graph"
    )


def test_the_command_for_a_cpu() -> None:
    assert shlex.join(nsys_command(PROGRAM, output=Path("one"), device="cpu")) == (
        "nsys profile -t nvtx -c nvtx -p window@stepgraph --capture-range-end=stop"
        " --sample=none --cpuctxsw=none"
        " --force-overwrite=true --export=sqlite -o one python bench.py --mode graph"
    )


def test_a_percent_sign_of_a_path_is_no_variable_of_nsys() -> None:
    command = nsys_command(PROGRAM, output="95%p", device="cpu")
    assert command[command.index("-o") + 1] == "95%%p"


def test_arguments_that_no_command_has() -> None:
    with pytest.raises(ValueError, match="program is empty"):
        nsys_command([], output="x")
    with pytest.raises(ValueError, match="graph_trace is 'none'"):
        nsys_command(PROGRAM, output="x", graph_trace="none")
    with pytest.raises(ValueError, match="device is 'mps'"):
        nsys_command(PROGRAM, output="x", device="mps")


def test_the_command_of_an_export() -> None:
    assert shlex.join(nsys.export_command("runs/one.nsys-rep")) == (
        "nsys export --type=sqlite --include-blobs=true --force-overwrite=true"
        " -o runs/one.sqlite runs/one.nsys-rep"
    )


def test_a_process_knows_whether_it_is_profiled(monkeypatch) -> None:
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    assert nsys.inside_nsys() is ranges.attached is False
    monkeypatch.setattr(ranges, "attached", True)
    assert nsys.inside_nsys()
    monkeypatch.setattr(ranges, "attached", False)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "4711")
    assert nsys.inside_nsys()


def test_a_window_without_cuda_is_a_range(recorder: Recorder) -> None:
    assert not torch.cuda.is_initialized()
    with capture_window():
        recorder.events.append("inside")
    assert recorder.events == ["push window", "inside", "pop"]


def test_a_window_holds_the_work_that_was_started_in_it(cuda: Recorder) -> None:
    with capture_window():
        cuda.events.append("inside")
    assert cuda.events == [
        "synchronize", "start", "push window", "inside", "synchronize", "pop", "stop",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_window_ends_on_the_way_of_an_exception(cuda: Recorder, error) -> None:
    def work() -> None:
        with capture_window():
            raise error

    for _ in range(2):  # the second: the first left nothing open
        cuda.events.clear()
        with pytest.raises(error):
            work()
        assert cuda.events[-2:] == ["pop", "stop"]


def test_a_window_that_cannot_begin_leaves_none_open(cuda: Recorder, monkeypatch) -> None:
    def fail() -> None:
        raise RuntimeError("no profiler")

    def work() -> None:
        with capture_window():
            cuda.events.append("inside")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.profiler, "start", fail)
        with pytest.raises(RuntimeError, match="no profiler"):
            work()
    assert "inside" not in cuda.events
    work()
    assert cuda.events[-2:] == ["pop", "stop"]


def test_a_window_in_a_window_is_an_error_and_the_outer_one_stays_open(cuda: Recorder) -> None:
    with capture_window():
        before = list(cuda.events)
        with pytest.raises(CaptureWindowError, match="already open"), capture_window():
            pytest.fail("it is not open")
        assert cuda.events == before
    assert cuda.events[-2:] == ["pop", "stop"]


def test_a_window_of_another_thread_is_an_error_too(recorder: Recorder) -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            with capture_window():
                pass
        except CaptureWindowError as error:
            errors.append(error)

    with capture_window():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert recorder.events == ["push window", "pop"]


def test_the_package_offers_the_window_and_loads_it_when_it_is_asked_for() -> None:
    assert stepgraph.profiling.capture_window is capture_window
    program = """
import sys
import stepgraph.profiling
assert "nvtx" not in sys.modules and "numpy" not in sys.modules
with stepgraph.profiling.capture_window():
    assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
