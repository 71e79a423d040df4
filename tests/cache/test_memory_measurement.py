"""Measured steps are taken apart into terms, whatever could be run in time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from stepgraph.graphs.buckets import Buckets
from stepgraph.graphs.library import StepLibrary
from stepgraph.graphs.steps import CapturedStep, CudaGraphCapturer, EagerStep
from stepgraph.runtime.execution.runner import Runner
from stepgraph.runtime.execution.step_key import StepKey, StepSizes
from stepgraph.runtime.kernels import Kernels
from stepgraph.runtime.memory import measurement as memory_measurement
from stepgraph.runtime.memory.measurement import CapturePeaks, measure_steps

ROWS, TOKENS, WIDE, NARROW = 16, 512, 64, 8
pytestmark = pytest.mark.usefixtures("steps_are_measured")
PER_TOKEN, MASK, GATHER, PER_ROW = 9000, 300, 5000, 700_000


def peak_of(key: StepKey) -> int:
    """Activations, masks of every token and block, the blocks gathered of a row, the sampler."""
    forward = key.size * (PER_TOKEN + MASK * key.read_blocks)
    if key.phase == "prefill":
        return forward + GATHER * key.read_blocks
    forward = key.size * (PER_TOKEN + GATHER * key.read_blocks)
    return max(forward, key.size * PER_ROW if key.full_sampler else 0)


class Machine:
    """A runner whose steps take time and memory by the book."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.seconds = seconds  # of the largest step
        self.ran: list[StepKey] = []
        self.device = torch.device("cpu")
        self.sizes = StepSizes(
            Buckets([1, 2, 4, 8, ROWS]),
            Buckets([16, 32, 64, 128, 256, TOKENS]),
            Buckets([8, 16, 32, 64]),
        )
        self.library = SimpleNamespace(steps={})

    def run(self, key: StepKey) -> None:
        self.ran.append(key)
        self.now += self.seconds * key.size * key.read_blocks / (TOKENS * WIDE)

    def peak_bytes(self, work: Callable[[], object], device: torch.device) -> int:
        work()
        return peak_of(self.ran[-1])

    def measure(self, monkeypatch: pytest.MonkeyPatch, masks: int, *, have_run: bool = True) -> Any:
        monkeypatch.setattr(memory_measurement, "peak_bytes", self.peak_bytes)
        monkeypatch.setattr(
            memory_measurement, "time", SimpleNamespace(thread_time=lambda: self.now)
        )
        kernels = cast(Kernels, SimpleNamespace(masks=masks))
        return measure_steps(cast(Runner, self), kernels, have_run=have_run)


@pytest.mark.parametrize("seconds", [0.001, 0.6])
def test_terms_of_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """What the first run of a shape leaves behind is not of the step."""
    machine, kept = Machine(seconds), 3 << 20

    def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
        before = list(machine.ran)
        work()
        key = machine.ran[-1]
        return peak_of(key) + kept * (key not in before)

    monkeypatch.setattr(machine, "peak_bytes", peak_bytes)
    memory = machine.measure(monkeypatch, masks=0, have_run=False)
    assert ("from steps of up to" in memory.notes.get("activations", "")) == (seconds > 0.1)
    by_tokens = peak_of(StepKey("prefill", TOKENS, NARROW, full_sampler=False))
    assert memory.measured["activations"] == pytest.approx(by_tokens, rel=0.02)
    assert memory.measured["logits"] == ROWS * PER_ROW
    assert machine.now < 2 * (2 * 0.06 + 0.2)


def test_steps_that_take_too_long_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(100.0)
    memory = machine.measure(monkeypatch, masks=1)
    assert machine.now < 3.0
    assert not memory.measured
    assert memory.notes.keys() == {"activations", "attention_masks", "logits"}


# Captures, on a CUDA device as its memory functions show it: an allocator with a cache and a pool.

TOTAL = 1 << 30
GRAPH_NODES = 100
"""Bytes of an instantiated graph, which no allocator counts."""


class FakeDevice:
    """Memory that is free, allocated, kept by the allocator, and reserved by the pool of graphs."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocated = 0
        self.kept = 0  # free blocks of the allocator
        self.pool = 0
        self.nodes = 0
        self.peak = 0
        self.capturing = False

    @property
    def free(self) -> int:
        return TOTAL - self.allocated - self.kept - self.pool - self.nodes

    def run(self, size: int) -> None:
        """A step that needs scratch memory."""
        if self.capturing:
            self.pool = max(self.pool, size)
            return
        self.kept = max(self.kept, size)
        self.peak = max(self.peak, self.allocated + size)

    def keep(self, size: int) -> None:
        """A library takes memory for good."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def empty_cache(self) -> None:
        assert not self.capturing
        self.log.append("empty cache")
        self.kept = 0

    def reset_peak(self, _: object) -> None:
        self.peak = self.allocated


class FakeCudaGraph:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert pool == "pool"
        assert capture_error_mode == "thread_local"
        self._device.log.append("capture")
        self._device.capturing = True

    def capture_end(self) -> None:
        self._device.capturing = False
        self._device.nodes += GRAPH_NODES

    def replay(self) -> None:
        self._device.log.append("replay")


@pytest.fixture(name="fake_device")
def make_fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device, stream = FakeDevice(), SimpleNamespace(wait_stream=lambda other: None)
    functions: dict[str, Any] = {
        "Stream": lambda _: stream,
        "current_stream": lambda *_: stream,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": lambda: FakeCudaGraph(device),
        "synchronize": lambda _: None,
        "empty_cache": device.empty_cache,
        "mem_get_info": lambda _: (device.free, TOTAL),
        "memory_allocated": lambda _: device.allocated,
        "memory_reserved": lambda _: device.allocated + device.kept + device.pool,
        "max_memory_allocated": lambda _: device.peak,
        "reset_peak_memory_stats": device.reset_peak,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return device


def test_captures_are_measured_one_by_one_and_all_at_once(fake_device: FakeDevice) -> None:
    """Peaks come from warm-ups; what the pool holds is not counted as that of the graphs."""
    machine, workspace = Machine(0.01), 8000
    fake_device.keep(500)
    peaks = CapturePeaks(torch.device("cuda"))
    capturer = CudaGraphCapturer("cuda")

    def step(key: StepKey) -> CapturedStep[None]:
        def fn() -> None:
            if fake_device.allocated == 500:
                fake_device.keep(workspace)
            fake_device.run(peak_of(key))

        return CapturedStep(fn, str(key), capturer)

    keys = machine.sizes.keys()
    library = StepLibrary[StepKey, None](
        step, keys, lambda key: key.size, lambda key: EagerStep(lambda: None, str(key))
    )
    library.prepare(watcher=peaks)
    assert peaks.peaks == {key: peak_of(key) for key in keys}
    largest = max(map(peak_of, keys))
    assert peaks.pool_bytes == largest
    assert peaks.captured_bytes == largest + len(keys) * GRAPH_NODES
    grown = [step.bytes for step in library.steps.values()]
    assert sum(grown) == peaks.captured_bytes
    assert min(grown) == GRAPH_NODES
    captures = fake_device.log.index("capture")
    assert "empty cache" not in fake_device.log[captures:-1]
    assert fake_device.log[captures:-1] == ["capture", "replay"] * len(keys)
    memory = measure_steps(cast(Runner, machine), cast(Kernels, SimpleNamespace(masks=0)), peaks)
    assert memory.measured["captured_graphs"] == len(keys) * GRAPH_NODES
    assert memory.notes["captured_graphs"].startswith(f"besides a pool of {largest} bytes")


def test_a_capture_that_fails_says_what_failed(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(graph: FakeCudaGraph) -> None:
        raise RuntimeError("the capture was invalidated")

    def step() -> None:
        raise ValueError("no such shape")

    monkeypatch.setattr(FakeCudaGraph, "capture_end", end)
    with pytest.raises(ValueError, match="no such shape"):
        CudaGraphCapturer("cuda").capture(step)
