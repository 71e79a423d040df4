"""Measures what things cost on this device, on prepared steps that nobody uses yet.

What a preemption costs, a block copied or a token computed again; and, where chunks are chosen by
time, what every step takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ...cache.spec import LayerGroup
from ..execution.runner import Runner
from ..scheduling.preemption import PreemptionPolicy
from ..scheduling.step_budget import StepBudget
from ..scheduling.step_costs import calibrate

__all__ = ["calibrated_step_budget", "preemption_policy"]

REPETITIONS = 5
COPIED_BLOCKS = 8
CONTEXT = 1024
"""Positions before the tokens of the steps that show what attention takes, if the model has so
many."""


def preemption_policy(
    runner: Runner, choice: Literal["auto", "swap", "recompute"]
) -> PreemptionPolicy:
    """Return what a prepared runner does with preempted requests; without a host arena recompute.

    Only `auto` has to measure. It runs the largest prefill step on padding, and copies blocks that
    nobody holds yet to the host and back.
    """
    host = runner.host_arena
    if host is None:
        return PreemptionPolicy("recompute")
    if choice != "auto":
        return PreemptionPolicy(choice)
    # Block i and host block i - 1: the null block is left alone.
    count = min(COPIED_BLOCKS, host.num_blocks, runner.num_blocks - 1)
    outward = [(i + 1, i) for i in range(count)]
    inward = [(i, i + 1) for i in range(count)]

    def copy() -> None:
        host.swap_out(outward)
        host.swap_in(inward)

    widest = runner.sizes.read_blocks.largest
    key = runner.sizes.prefill_key(runner.sizes.tokens.largest, widest, False)

    def prefill() -> None:
        runner.library.launch(key)

    return PreemptionPolicy(
        "auto",
        block_seconds=_median_seconds(copy, runner.device) / (2 * count),
        token_seconds=_median_seconds(prefill, runner.device) / key.size,
    )


def calibrated_step_budget(
    runner: Runner, groups: Sequence[LayerGroup], max_itl_ms: float, max_model_len: int
) -> StepBudget:
    """Return a budget over the prepared steps of a runner that has served nothing yet."""
    began = time.perf_counter()
    read_blocks, block_size = runner.sizes.read_blocks, runner.block_size

    def reach(context: int) -> int:
        if len(read_blocks) > 1:  # kernels that read as far as the step's tables are wide
            blocks = read_blocks.fit(-(-context // block_size)) or read_blocks.largest
            context = blocks * block_size
        return sum(group.positions_read(context) for group in groups)

    steps = _NullSteps(runner, max_model_len)
    costs = calibrate(
        steps.seconds,
        rows=runner.sizes.rows,
        tokens=runner.sizes.tokens,
        reach=reach,
        context=min(CONTEXT, max_model_len // 2),
        useful_seconds=max_itl_ms / 1e3,
    )
    steps.clean()
    return StepBudget(max_itl_ms, costs, calibration_seconds=time.perf_counter() - began)


class _NullSteps:
    """Runs steps of the null row, whose tokens may stand anywhere: it has the null block alone.

    All its positions are read from that one block, which a cache of the processor holds. So what
    they show of a context's cost is the least it can be, which the steps served then correct.
    """

    def __init__(self, runner: Runner, max_model_len: int) -> None:
        self._runner = runner
        self._inputs = runner.inputs.device
        self._last = max_model_len - 1

    def seconds(self, phase: Literal["decode", "prefill"], size: int, context: int) -> float:
        """Return what a step of a bucket takes whose tokens have `context` positions before.

        A bucket larger than the longest sequence, made for several prompts, ends with tokens of
        the last position.
        """
        runner, sizes = self._runner, self._runner.sizes
        last = min(context + (size - 1 if phase == "prefill" else 0), self._last)
        blocks = last // runner.block_size + 1
        if phase == "decode":
            key = sizes.decode_key(size, blocks, False)
            runner.state.positions[runner.null_row] = last  # the step itself puts it back
        else:
            key = sizes.prefill_key(size, blocks, False)
            positions = torch.arange(context, context + size, device=runner.device)
            self._inputs.positions[:size] = positions.clamp(max=last)
        step = runner.library.lookup(key)
        return _seconds(step.launch, runner.device)

    def clean(self) -> None:
        """Leave the inputs as they were."""
        self._inputs.positions.zero_()
        self._runner.state.positions[self._runner.null_row] = 0


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the device's time for one piece of work."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _median_seconds(work: Callable[[], None], device: torch.device) -> float:
    seconds = []
    for _ in range(REPETITIONS):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
