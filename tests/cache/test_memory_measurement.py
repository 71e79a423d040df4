"""Measured steps are taken apart into terms, whatever could be run in time."""

from __future__ import annotations

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

from ..rigs.fake_cuda_memory import GRAPH_NODES, FakeDevice, make_fake_device  # noqa: F401

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

    def __init__(self, seconds: float, widths: tuple[int, ...] = (8, 16, 32, 64)) -> None:
        self.now = 0.0
        self.seconds = seconds  # of the largest step
        self.ran: list[StepKey] = []
        self.device = torch.device("cpu")
        self.sizes = StepSizes(
            Buckets([1, 2, 4, 8, ROWS]), Buckets([16, 32, 64, 128, 256, TOKENS]), Buckets(widths)
        )
        self.library = SimpleNamespace(reports=list)

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
    grown = [report.bytes for report in library.reports()]
    assert sum(grown) == peaks.captured_bytes
    assert min(grown) == GRAPH_NODES
    captures = fake_device.log.index("capture")
    assert "empty cache" not in fake_device.log[captures:-1]
    assert fake_device.log[captures:-1] == ["capture", "replay"] * len(keys)
    memory = measure_steps(cast(Runner, machine), cast(Kernels, SimpleNamespace(masks=0)), peaks)
    assert memory.measured["captured_graphs"] == len(keys) * GRAPH_NODES
    assert memory.notes["captured_graphs"].startswith(f"besides a pool of {largest} bytes")
