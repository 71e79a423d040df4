"""The window of a program in an nsys session (test_profile_bench.py has its command line)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from stepgraph.profiling import ranges
from stepgraph.profiling.nsys import CaptureWindowError, capture_window

from ..rigs.listeners import Heard


class Recorder(Heard):
    """A listener that also notes what is done to a device."""

    def said(self) -> list[str]:
        return [" ".join(map(str, event[:2])) for event in self.events]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with ranges.listening(recorder):
        yield recorder


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> Recorder:
    """A process that works with CUDA."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for owner, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda.profiler, "start"),
        (torch.cuda.profiler, "stop"),
    ):
        monkeypatch.setattr(owner, name, lambda name=name: recorder.events.append((name,)))
    return recorder


def test_a_window_without_cuda_is_a_range(recorder: Recorder) -> None:
    assert not torch.cuda.is_initialized()
    with capture_window():
        recorder.events.append(("inside",))
    assert recorder.said() == ["push window", "inside", "pop"]


def test_a_window_holds_the_work_that_was_started_in_it(cuda: Recorder) -> None:
    with capture_window():
        cuda.events.append(("inside",))
    assert cuda.said() == [
        "synchronize", "start", "push window", "inside", "synchronize", "pop", "stop",
    ]  # fmt: skip


def test_a_window_ends_with_an_exception(cuda: Recorder) -> None:
    for error in (ValueError, KeyboardInterrupt):  # the first leaves nothing open
        cuda.events.clear()
        with pytest.raises(error), capture_window():
            raise error
        assert cuda.said()[-2:] == ["pop", "stop"]


def test_a_second_window_is_an_error_and_the_first_stays_open(cuda: Recorder) -> None:
    def second() -> None:
        with pytest.raises(CaptureWindowError), capture_window():
            pytest.fail("it is not open")

    with ThreadPoolExecutor() as pool, capture_window():
        before = cuda.said()
        second()
        pool.submit(second).result()
        assert cuda.said() == before
    assert cuda.said()[-2:] == ["pop", "stop"]
