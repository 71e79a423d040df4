"""Measures the memory of running steps, and of each phase of a start.

Permanent tensors have known sizes. Activations, logits and masks exist only within a step, so
prepared steps are run on padding and their peak is read:

    prefill step, few and many tokens, narrow      activations grow with the tokens
    prefill step, narrow and wide                  masks grow with the positions read
    decode step of all rows, narrow and wide       gathered keys and values, where there are any
    decode step of few and all rows, full sampler  logits

A step that takes too long for a start is not run: its peak is extrapolated from two smaller ones.
Replays of captured steps have no peak to read, so their warm-ups are measured.

On a CPU this affects the whole process: for each peak the C library frees its cache
(`malloc_trim`), and the kernel's peak of the resident set (VmHWM, which `getrusage` and
`/usr/bin/time` show) is reset (`/proc/self/clear_refs`). Monitors of that peak see only what
follows the start of an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...cache.memory.device_memory import peak_bytes, resident_bytes
from ..execution.runner import Runner
from ..execution.step_key import StepKey, StepSizes
from ..kernels import Kernels

__all__ = ["CapturePeaks", "Phase", "PhaseLog", "StepMemory", "add_scoring", "measure_steps"]

_SECONDS_PER_SERIES = 0.06
"""Seconds of this thread, for each of the rows above."""

_SHARE_OF_PREPARATION = 0.02
"""Share of the seconds of preparation, for each of the rows if that is more: it is short compared
with the compilation, and allows for a busy machine."""

_LEAST_PART = 8
"""A peak is extrapolated to steps of at most this many times the size."""

_SECONDS_WITH_MASKS = 0.12
"""As `_SECONDS_PER_SERIES`, for reference kernels, whose wide steps take long."""

_LEAST_DIFFERENCE = 1 << 20
"""Smaller differences in bytes are noise of the resident set."""

_UNREADABLE = "not measured: this system does not report the peak of the resident set"


class _UnreadablePeakError(Exception):
    """The peak of a step cannot be read."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes that the process held on the device around a phase of the start."""

    name: str
    before: int
    after: int
    seconds: float


class PhaseLog:
    """The phases of a start, in order. On a CPU bytes are those of the resident set."""

    def __init__(self, device: torch.device) -> None:
        """Log the memory of `device`."""
        self._device = device
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record memory and time of the block."""
        before, began = resident_bytes(self._device), time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.phases.append(Phase(name, before, resident_bytes(self._device), seconds))


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Measured bytes of terms of the plan by name, with notes on the measurement."""

    measured: Mapping[str, int]
    notes: Mapping[str, str] = field(default_factory=dict)


class CapturePeaks:
    """CUDA memory while a library is prepared: peaks of warm-ups, and memory of all captures.

    See `PreparationWatcher`. All steps are warmed up before the first capture, so that a peak is
    that of one step, and later decreases of free memory are due to captures.
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
        """Record the peak since the last call as that of `key`.

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
        return _with_graphs(_terms(captured.peaks, runner.sizes, kernels), runner, captured)
    try:
        peaks = _watch_steps(runner, kernels, have_run)
    except _UnreadablePeakError:
        remarks = dict.fromkeys(("activations", "logits"), _UNREADABLE)
        if kernels.masks:
            return StepMemory({}, {**remarks, "attention_masks": _UNREADABLE})
        return StepMemory({"attention_masks": 0}, remarks)
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


def _watch_steps(runner: Runner, kernels: Kernels, have_run: bool) -> dict[StepKey, int]:
    """Run the steps above; return their peaks. Raises `_UnreadablePeakError`."""
    sizes = runner.sizes
    measured: dict[StepKey, tuple[int, float]] = {}
    ran: set[StepKey] = set()

    def run(key: StepKey) -> None:
        runner.run(key)
        ran.add(key)

    def series(keys: Sequence[StepKey], seconds: float) -> dict[StepKey, float]:
        known = keys if have_run else ran
        _measure_series(keys, run, runner.device, seconds, known, measured)
        return {key: measured[key][1] for key in keys if key in measured}

    narrow, wide = sizes.read_blocks.sizes[0], sizes.read_blocks.largest
    for smallest in (
        sizes.prefill_key(1, narrow, full_sampler=False),
        sizes.decode_key(1, narrow, full_sampler=True),
    ):
        run(smallest)  # one-time memory of a first run, of unprepared steps above all
    preparation = sum(report.seconds for report in runner.library.reports())
    least = _SECONDS_WITH_MASKS if kernels.masks else _SECONDS_PER_SERIES
    seconds = max(least, _SHARE_OF_PREPARATION * preparation)
    prefill = series(
        [sizes.prefill_key(n, narrow, full_sampler=False) for n in sizes.tokens], seconds
    )
    series([sizes.decode_key(n, narrow, full_sampler=True) for n in sizes.rows], seconds)
    if wide > narrow:
        widths = list(sizes.read_blocks)
        rows = sizes.rows.largest
        series([sizes.decode_key(rows, w, full_sampler=False) for w in widths], seconds)
    if wide > narrow and kernels.masks:
        # Many tokens, so that masks are large, but few enough for a wider step to fit the time.
        quick = [key.size for key, took in prefill.items() if took < seconds / 4]
        tokens = max(quick, default=sizes.tokens.sizes[0])
        series([sizes.prefill_key(tokens, w, full_sampler=False) for w in widths], seconds)
    return {key: peak for key, (peak, _) in measured.items()}


def _with_graphs(memory: StepMemory, runner: Runner, captured: CapturePeaks) -> StepMemory:
    """Add the memory of captures outside of their pool of activations."""
    held, pool = captured.captured_bytes, captured.pool_bytes
    note = f"besides a pool of {pool} bytes for activations, logits and masks"
    each = sum(report.bytes for report in runner.library.reports())
    if each != held:
        # Measured around all captures, and around each of them.
        note += f"; the captures one by one took {each} bytes of {held}"
    return StepMemory(
        {**memory.measured, "captured_graphs": max(0, held - pool)},
        {**memory.notes, "captured_graphs": note},
    )


def _measure_series(
    keys: Sequence[StepKey],
    run: Callable[[StepKey], None],
    device: torch.device,
    left: float,
    have_run: Container[StepKey],
    measured: dict[StepKey, tuple[int, float]],
) -> None:
    """Measure peak and seconds of the first step and of the largest that fit `left` seconds.

    Adds them to `measured`, whose steps are not run again. Runs that are not measured take extra
    time. `keys` ascend in size or in width, and the time of a step grows at most in proportion.
    Raises `_UnreadablePeakError`.
    """
    index = 0
    while True:
        key = keys[index]
        if key not in measured:
            if key not in have_run:
                run(key)
            began = time.thread_time()  # of this thread: other processes do not count
            peak = peak_bytes(lambda key=key: run(key), device)  # type: ignore[misc]
            if peak is None:
                raise _UnreadablePeakError
            measured[key] = peak, time.thread_time() - began
            left -= measured[key][1]
        seconds = measured[key][1]
        affordable = [
            later
            for later in range(index + 1, len(keys))
            if seconds * _extent(keys[later]) <= left * _extent(key)
        ]
        if not affordable:
            return
        index = affordable[-1]


def _extent(key: StepKey) -> int:
    return key.size * key.read_blocks


def _terms(peaks: Mapping[StepKey, int], sizes: StepSizes, kernels: Kernels) -> StepMemory:
    """Attribute the peaks of steps to terms of the plan."""
    narrow, wide = sizes.read_blocks.sizes[0], sizes.read_blocks.largest
    tokens, rows = sizes.tokens.largest, sizes.rows.largest

    def of(phase: str, full_sampler: bool) -> list[tuple[StepKey, int]]:
        kind = (phase, full_sampler, 1, 1)
        return [
            (k, p)
            for k, p in peaks.items()
            if (k.phase, k.full_sampler, k.steps, k.tokens_per_row) == kind
        ]

    measured: dict[str, int] = {}
    remarks: dict[str, str] = {}
    prefill = {k.size: p for k, p in of("prefill", False) if k.read_blocks == narrow}
    by_tokens = _Line.through(prefill, tokens)

    masks_per_block = 0.0
    size = max((k.size for k, _ in of("prefill", False) if k.read_blocks > narrow), default=0)
    widths = {k.read_blocks: p for k, p in of("prefill", False) if k.size == size}
    decode = {k.read_blocks: p for k, p in of("decode", False) if k.size == rows}
    if not kernels.masks:
        measured["attention_masks"] = 0
    elif narrow == wide:
        remarks["attention_masks"] = "part of the activations: all steps read the same width"
    elif size * max(widths, default=0) * _LEAST_PART < tokens * wide:
        remarks["attention_masks"] = "not measured: a step wide enough takes too long"
    elif widths[max(widths)] - widths[min(widths)] < _LEAST_DIFFERENCE:
        remarks["attention_masks"] = "not measured: too small to tell from noise"
    else:
        # Prefill gathers the positions of one row at a time, decode those of all rows.
        gathered = _Line.through(decode, wide).slope / rows if decode else 0.0
        slope = max(0.0, _Line.through(widths, wide).slope - gathered)
        masks_per_block = slope * tokens / size
        measured["attention_masks"] = round(masks_per_block * wide)
        if (size, max(widths)) != (tokens, wide):
            remarks["attention_masks"] = (
                f"from steps of {size} tokens that read up to {max(widths)} of {wide} blocks"
            )

    if max(prefill) * _LEAST_PART < tokens or max(decode, default=wide) * _LEAST_PART < wide:
        remarks["activations"] = "not measured: a step large enough takes too long"
    else:
        activations = by_tokens.value - masks_per_block * narrow
        if decode:
            activations = max(activations, _Line.through(decode, wide).value)
        measured["activations"] = max(0, round(activations))
        if max(prefill) < tokens:
            remarks["activations"] = f"from steps of up to {max(prefill)} of {tokens} tokens"
        elif max(decode, default=wide) < wide:
            remarks["activations"] = f"from steps that read up to {max(decode)} of {wide} blocks"

    sampled = {k.size: p for k, p in of("decode", True) if k.read_blocks == narrow}
    if max(sampled) * _LEAST_PART < rows:
        remarks["logits"] = "not measured: a step of enough rows takes too long"
    else:
        measured["logits"] = round(_Line.through(sampled, rows).value)
        if max(sampled) < rows:
            remarks["logits"] = f"from steps of up to {max(sampled)} of {rows} rows"
    return StepMemory(measured, remarks)


@dataclass(frozen=True, slots=True)
class _Line:
    """A straight line through the two largest points, evaluated at the largest step."""

    value: float
    slope: float

    @classmethod
    def through(cls, points: Mapping[int, int], at: int) -> _Line:
        """`points` are size -> bytes; a single one is extrapolated in proportion."""
        *_, (x1, y1), (x2, y2) = [(0, 0), *sorted(points.items())]
        slope = max(0.0, (y2 - y1) / (x2 - x1))
        return cls(y2 + slope * (at - x2), slope)
