"""The memory of steps and captures, on a CUDA device as its memory functions show it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from stepgraph.graphs.buckets import Buckets
from stepgraph.graphs.steps import CudaGraphCapturer, Step, StepLibrary
from stepgraph.runtime.engine.memory import CapturePeaks, StepMemory, measure_steps
from stepgraph.runtime.execution.runner import Runner
from stepgraph.runtime.execution.step_key import StepKey, StepSizes

SIZES = StepSizes(Buckets([1, 4, 16]), Buckets([16, 64, 256]), Buckets([8, 64]), 16)


def peak_of(key: StepKey) -> int:
    """Activations of every token, the blocks gathered of a row, the logits of rows."""
    return key.size * (9000 + 5000 * key.read_blocks + 700_000 * key.full_sampler)


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
    device, stream = FakeDevice(), SimpleNamespace(wait_stream=lambda other: None, cuda_stream=0)
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


SCORING, WORKSPACE = 3_000_000, 8000


def test_captures_are_measured_one_by_one_and_all_at_once(fake_device: FakeDevice) -> None:
    """Peaks come from warm-ups; what the pool holds is not counted as that of the graphs."""
    fake_device.keep(500)
    peaks = CapturePeaks(torch.device("cuda"))
    capturer = CudaGraphCapturer("cuda")

    def step(key: StepKey) -> Step[None]:
        def fn() -> None:
            if fake_device.allocated == 500:
                fake_device.keep(WORKSPACE)
            fake_device.run(peak_of(key))

        return Step("graph", fn, str(key), capturer)

    keys = SIZES.keys()
    library = StepLibrary[StepKey, None](step, keys, lambda key: key.size, lambda key: lambda: None)
    library.prepare(peaks.prepared)
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
    memory = measure(fake_device, peaks)
    assert memory.measured["captured_graphs"] == len(keys) * GRAPH_NODES
    assert memory.notes["captured_graphs"].startswith(f"besides a pool of {largest} bytes")
    logits = peak_of(SIZES.key("decode", 16, 1, full_sampler=True))
    assert memory.measured["logits"] == logits + SCORING


def measure(device: FakeDevice, captured: CapturePeaks | None = None, masks: int = 0) -> StepMemory:
    """The memory of steps on the device, whose first run of any keeps a workspace."""
    seen: set[object] = set()

    def run(key: object, size: int) -> None:
        if key not in seen:
            seen.add(key)
            device.keep(WORKSPACE)
        device.run(size)

    runner = SimpleNamespace(
        device=torch.device("cuda"),
        sizes=SIZES,
        run=lambda key: run(key, peak_of(key)),
        score_largest_slice=lambda: run("scorer", SCORING),
    )
    model = SimpleNamespace(kernels=SimpleNamespace(masks=masks), stack=None)
    return measure_steps(cast(Runner, runner), cast(Any, model), captured)


@pytest.mark.parametrize("masks", [0, 1])
def test_largest_steps_are_measured(fake_device: FakeDevice, masks: int) -> None:
    """What the first run of a shape leaves behind is not of the step."""
    memory = measure(fake_device, masks=masks)
    expected = {
        "activations": peak_of(SIZES.key("prefill", 256, 8, full_sampler=False)),
        "logits": peak_of(SIZES.key("decode", 16, 1, full_sampler=True)),
    }
    assert memory.measured == expected | ({} if masks else {"attention_masks": 0})
    assert memory.notes.keys() == ({"attention_masks"} if masks else set())


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
