"""Measures the memory of running steps, and of each phase of a start.

Permanent tensors have known sizes. Activations and logits exist only within a step, so prepared
steps that read one width of the cache are run on padding and their peak is read:

    prefill steps of few and many tokens           activations grow with the tokens
    decode steps of few and all rows, full sampler logits

A step that takes too long for a start is not run: its peak is extrapolated from two smaller ones.
Replays of captured steps have no peak to read, so their warm-ups are measured.

On a CPU this affects the whole process: for each peak the C library frees its cache
(`malloc_trim`), and the kernel's peak of the resident set (VmHWM, which `getrusage` and
`/usr/bin/time` show) is reset (`/proc/self/clear_refs`). Monitors of that peak see only what
follows the start of an engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...cache.memory.device_memory import peak_bytes, resident_bytes
from ..execution.runner import Runner
from ..execution.step_key import StepKey, StepSizes
from ..kernels import Kernels

__all__ = ["CapturePeaks", "Phase", "StepMemory", "add_scoring", "logged_phase", "measure_steps"]

_SECONDS_PER_SERIES = 0.06
"""Seconds of this thread, for each of the rows above."""

_SHARE_OF_PREPARATION = 0.02
"""Share of the seconds of preparation, for each of the rows if that is more: it is short compared
with the compilation, and allows for a busy machine."""

_LEAST_PART = 8
"""A peak is extrapolated to steps of at most this many times the size."""

_UNREADABLE = "not measured: this system does not report the peak of the resident set"


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
        """Record the peak since the last call under `key`.

        Memory that stays allocated (workspaces of libraries) is not counted for the step.
        """
        peak, held = torch.cuda.max_memory_allocated(self._device), self._held
        self._held = self._begin()
        self.peaks[key] = max(0, peak - max(held, self._held))

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
    runner: Runner,
    kernels: Kernels,
    captured: CapturePeaks | None = None,
    *,
    have_run: bool = True,
) -> StepMemory:
    """Measure activations, attention masks and logits of a prepared runner that is idle.

    Args:
        runner: whose steps are run.
        kernels: what they run.
        captured: the peaks of warm-ups, if steps are replayed.
        have_run: whether every step ran during preparation. If not, each runs once before it is
            measured: what libraries keep per shape after a first run (code, plans, workspaces)
            takes megabytes that do not belong to the step and must not be extrapolated.
    """
    if captured is not None:
        return _with_graphs(_terms(captured.peaks, runner.sizes, kernels), captured)
    peaks = _watch_steps(runner, have_run)
    if peaks is None:
        return StepMemory({}, dict.fromkeys(("activations", "logits"), _UNREADABLE))
    return _terms(peaks, runner.sizes, kernels)


def add_scoring(memory: StepMemory, runner: Runner) -> StepMemory:
    """Return the measured terms with the memory of scoring prompt tokens among the logits.

    Scoring runs between steps. It can use the memory of their sampling, unless that is captured.
    Its kernels are compiled and loaded here.
    """
    runner.scorer.run_largest_slice()
    peak = peak_bytes(runner.scorer.run_largest_slice, runner.device)
    logits = memory.measured.get("logits")
    if peak is None or logits is None:
        return memory
    logits = logits + peak if runner.captures else max(logits, peak)
    return StepMemory({**memory.measured, "logits": logits}, memory.notes)


def _watch_steps(runner: Runner, have_run: bool) -> dict[StepKey, int] | None:
    """Run the steps above; return their peaks, None if one cannot be read."""
    sizes, narrow = runner.sizes, runner.sizes.read_blocks.sizes[0]
    preparation = sum(step.seconds for step in runner.library.steps.values())
    seconds = max(_SECONDS_PER_SERIES, _SHARE_OF_PREPARATION * preparation)
    peaks: dict[StepKey, int] = {}
    for keys in (
        [sizes.key("prefill", n, narrow, full_sampler=False) for n in sizes.tokens],
        [sizes.key("decode", n, narrow, full_sampler=True) for n in sizes.rows],
    ):
        runner.run(keys[0])  # one-time memory of a first run, of unprepared steps above all
        measured = _measure_series(runner, keys, seconds, have_run)
        if measured is None:
            return None
        peaks |= measured
    return peaks


def _with_graphs(memory: StepMemory, captured: CapturePeaks) -> StepMemory:
    """Add the memory of captures outside of their pool of activations."""
    held, pool = captured.captured_bytes, captured.pool_bytes
    note = f"besides a pool of {pool} bytes for activations, logits and masks"
    return StepMemory(
        {**memory.measured, "captured_graphs": max(0, held - pool)},
        {**memory.notes, "captured_graphs": note},
    )


def _measure_series(
    runner: Runner, keys: Sequence[StepKey], left: float, have_run: bool
) -> dict[StepKey, int] | None:
    """Measure the peak of the first step and of the largest that fit `left` seconds.

    Runs that are not measured take extra time. `keys` ascend in size, and the time of a step grows
    at most in proportion. Returns None if a peak cannot be read.
    """
    peaks: dict[StepKey, int] = {}
    index: int | None = 0
    while index is not None:
        key = keys[index]
        if peaks and not have_run:
            runner.run(key)
        began = time.thread_time()  # of this thread: other processes do not count
        peak = peak_bytes(lambda key=key: runner.run(key), runner.device)  # type: ignore[misc]
        if peak is None:
            return None
        seconds = time.thread_time() - began
        peaks[key] = peak
        left -= seconds
        larger = range(index + 1, len(keys))
        affordable = [i for i in larger if seconds * keys[i].size <= left * key.size]
        index = max(affordable, default=None)
    return peaks


def _terms(peaks: Mapping[StepKey, int], sizes: StepSizes, kernels: Kernels) -> StepMemory:
    """Attribute the peaks of steps to terms of the plan."""
    narrow = sizes.read_blocks.sizes[0]

    def points(phase: str, full_sampler: bool) -> dict[int, int]:
        kind = (phase, full_sampler, 1, narrow)
        return {
            k.size: peak
            for k, peak in peaks.items()
            if (k.phase, k.full_sampler, k.tokens_per_row, k.read_blocks) == kind
        }

    measured: dict[str, int] = {}
    notes: dict[str, str] = {}
    if kernels.masks:
        notes["attention_masks"] = "not measured: they grow with the width that a step reads"
    else:
        measured["attention_masks"] = 0
    for term, found, largest, unit in (
        ("activations", points("prefill", False), sizes.tokens.largest, "tokens"),
        ("logits", points("decode", True), sizes.rows.largest, "rows"),
    ):
        size = max(found)
        if size * _LEAST_PART < largest:
            notes[term] = "not measured: a step large enough takes too long"
            continue
        measured[term] = _extrapolated(found, largest)
        if size < largest:
            notes[term] = f"from steps of up to {size} of {largest} {unit}"
    return StepMemory(measured, notes)


def _extrapolated(points: Mapping[int, int], at: int) -> int:
    """Evaluate the line through the two largest of `points` (size -> bytes) and the origin."""
    *_, (x1, y1), (x2, y2) = [(0, 0), *sorted(points.items())]
    return round(y2 + max(0.0, (y2 - y1) / (x2 - x1)) * (at - x2))
