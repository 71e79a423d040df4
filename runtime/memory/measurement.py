"""Measures the memory of running steps on CUDA, and of each phase of a start.

Permanent tensors have known sizes. Activations and logits exist only within a step, so the peaks of
the largest steps are read: a prefill step for activations, and a decode step with the full sampler
for logits, which read one width of the cache. Replays of captured steps have no peak to read, so
their warm-ups are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from ...cache.memory.device_memory import resident_bytes
from ..execution.runner import Runner
from ..execution.step_key import StepKey
from ..models.transformers.decoder import DecoderModel

__all__ = ["CapturePeaks", "Phase", "StepMemory", "logged_phase", "measure_steps"]


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes that the process held on the device around a phase of the start."""

    name: str
    before: int
    after: int
    seconds: float


@contextmanager
def logged_phase(phases: list[Phase], name: str, device: torch.device) -> Iterator[None]:
    """Add memory and time of the block to `phases`. On a CPU bytes are the resident set."""
    before, began = resident_bytes(device), time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    phases.append(Phase(name, before, resident_bytes(device), seconds))


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Measured bytes of terms of the plan by name, with notes on the measurement."""

    measured: Mapping[str, int]
    notes: Mapping[str, str] = field(default_factory=dict)


class CapturePeaks:
    """CUDA memory while a library is prepared: peaks of warm-ups, and memory of all captures.

    See `PreparationWatcher`. All steps are warmed up before the first capture, so that a peak is
    one step's, and later decreases of free memory are due to captures.
    """

    def __init__(self, device: torch.device) -> None:
        """Start before the first step is prepared."""
        self._device = device
        self.peaks: dict[StepKey, int] = {}
        self.pool_bytes = 0
        """Bytes of the memory pool of the captures, with the activations of steps."""
        self.captured_bytes = 0
        """Bytes of all captures: their pool and the nodes of their graphs."""
        self._reserved, self._free = 0, 0
        self._held = self._begin()

    def warmed_up(self, key: StepKey) -> None:
        """Record the peak since the last call under `key`."""
        self.peaks[key] = self.take()

    def take(self) -> int:
        """Return the peak since the last call, without what stays allocated (workspaces)."""
        peak, held = torch.cuda.max_memory_allocated(self._device), self._held
        self._held = self._begin()
        return max(0, peak - max(held, self._held))

    def begin_captures(self) -> None:
        """Record the free memory before the first capture."""
        self._reserved, self._free = self._settled()

    def end_captures(self) -> None:
        """Compare with the free memory after the last one."""
        reserved, free = self._settled()
        self.pool_bytes = max(0, reserved - self._reserved)
        self.captured_bytes = max(0, self._free - free)

    def _begin(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(torch.cuda.memory_allocated(self._device))

    def _settled(self) -> tuple[int, int]:
        """Return bytes reserved by torch and free on the device, once it is idle."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(torch.cuda.memory_reserved(self._device)), int(free)


def measure_steps(
    runner: Runner, model: DecoderModel, captured: CapturePeaks | None = None
) -> StepMemory:
    """Measure activations, attention masks and logits of a prepared runner that is idle.

    On a CPU, only the activations that the stack of layers keeps allocated.

    Scoring of prompt tokens counts among the logits. It runs between steps and can use the memory
    of their sampling, unless that is captured. Its kernels are loaded here.

    Args:
        runner: whose steps are run.
        model: what they run.
        captured: the peaks of warm-ups, if steps are replayed.
    """
    notes: dict[str, str] = {}
    measured: dict[str, int] = {}
    if model.kernels.masks:
        notes["attention_masks"] = "not measured: they grow with the width that a step reads"
    else:
        measured["attention_masks"] = 0
    device, sizes = runner.device, runner.sizes
    if device.type != "cuda":
        notes["activations"] = notes["logits"] = "measured on CUDA only"
        if model.stack is not None:
            measured["activations"] = model.stack.workspace_bytes()
            notes["activations"] = "what the layers keep allocated"
        return StepMemory(measured, notes)
    narrow = sizes.read_blocks.sizes[0]
    prefill = sizes.key("prefill", sizes.tokens.largest, narrow, full_sampler=False)
    decode = sizes.key("decode", sizes.rows.largest, narrow, full_sampler=True)

    def peak_of(work: Callable[[], object]) -> int:
        work()  # libraries keep memory of a first run
        watch = CapturePeaks(device)
        work()
        return watch.take()

    for term, key in (("activations", prefill), ("logits", decode)):
        measured[term] = captured.peaks[key] if captured else peak_of(partial(runner.run, key))
    scoring, sampling = peak_of(runner.scorer.run_largest_slice), measured["logits"]
    measured["logits"] = scoring + sampling if captured else max(scoring, sampling)
    if captured is not None:
        pool = captured.pool_bytes
        measured["captured_graphs"] = max(0, captured.captured_bytes - pool)
        notes["captured_graphs"] = (
            f"besides a pool of {pool} bytes for activations, logits and masks"
        )
    return StepMemory(measured, notes)
