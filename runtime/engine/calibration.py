"""Measures costs on this device, with the prepared steps of an engine without requests.

Preemption costs the copy of a block or the recomputation of a token. If chunks are sized by time,
every step is measured too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from ...cache.spec import LayerGroup
from ..execution.runner import Runner
from ..execution.step_key import StepKey
from ..resolved_config import ResolvedConfig
from ..scheduling.preemption import PreemptionPolicy
from ..scheduling.step_budget import StepBudget
from ..scheduling.step_costs import calibrate
from ..speculation.drafter_speculator import DrafterSpeculator
from ..speculation.speculator import Speculator
from ..speculation.verify_costs import BatchCosts, VerifyCosts

__all__ = ["calibrated_speculator", "calibrated_step_budget", "preemption_policy"]

REPETITIONS = 5
COPIED_BLOCKS = 8
LONG_STEP = 0.01
"""Seconds of a step that is measured twice only."""
CONTEXT = 1024
"""Positions before the tokens of steps that measure the time of attention, if the model has so
many."""


def preemption_policy(
    runner: Runner, choice: Literal["auto", "swap", "recompute"]
) -> PreemptionPolicy:
    """Return the policy of a prepared runner; `recompute` if it has no host arena.

    Only `auto` measures: it runs the largest prefill step on padding, and copies unused blocks to
    the host and back.
    """
    host = runner.host_arena
    if host is None:
        return PreemptionPolicy("recompute")
    if choice != "auto":
        return PreemptionPolicy(choice)
    # Block i and host block i - 1, so that the null block is not copied.
    count = min(COPIED_BLOCKS, host.num_blocks, runner.num_blocks - 1)
    outward = [(i + 1, i) for i in range(count)]
    inward = [(i, i + 1) for i in range(count)]

    def copy() -> None:
        runner.blocks.copy("to_host", outward)
        runner.blocks.copy("from_host", inward)

    widest = runner.sizes.read_blocks.largest
    key = runner.sizes.prefill_key(runner.sizes.tokens.largest, widest, False)

    def prefill() -> None:
        runner.run(key)

    return PreemptionPolicy(
        "auto",
        block_seconds=_median_seconds(copy, runner.device) / (2 * count),
        token_seconds=_median_seconds(prefill, runner.device) / key.size,
    )


def calibrated_step_budget(
    runner: Runner, groups: Sequence[LayerGroup], config: ResolvedConfig
) -> StepBudget | None:
    """Return the time budget of a prepared runner without requests; None without `max_itl_ms`."""
    if config.max_itl_ms is None:
        return None
    began = time.perf_counter()
    read_blocks, block_size = runner.sizes.read_blocks, runner.block_size

    def reach(context: int) -> int:
        if len(read_blocks) > 1:  # kernels that read the whole width of the tables
            blocks = read_blocks.fit(-(-context // block_size)) or read_blocks.largest
            context = blocks * block_size
        return sum(group.positions_read(context) for group in groups)

    steps = _NullSteps(runner, config.max_model_len)
    costs = calibrate(
        steps.seconds,
        rows=runner.sizes.rows,
        tokens=runner.sizes.tokens,
        reach=reach,
        context=min(CONTEXT, config.max_model_len // 2),
        useful_seconds=config.max_itl_ms / 1e3,
    )
    steps.clean()
    return StepBudget(config.max_itl_ms, costs, calibration_seconds=time.perf_counter() - began)


def calibrated_speculator(
    runner: Runner, config: ResolvedConfig
) -> Speculator | DrafterSpeculator | None:
    """Return the speculator of a prepared runner without requests; None without speculation.

    Decode and verify steps are run on padding, in interleaved rounds, of which the fastest counts.
    Steps that take long run twice. The full sampler is measured in decode steps, and takes as long
    for each token of a verify step. Where a drafter proposes, verify steps do so too.
    """
    if config.speculation is None:
        return None
    began = time.perf_counter()
    sizes, blocks = runner.sizes, runner.sizes.read_blocks.sizes[0]
    functions = runner.steps.functions
    keys: dict[tuple[int, int, str], StepKey] = {}
    """By rows, tokens per row, and what sets the step apart."""
    for rows in sizes.rows:
        keys[rows, 1, "greedy"] = sizes.decode_key(rows, blocks, False)
        keys[rows, 1, "full"] = sizes.decode_key(rows, blocks, True)
        for n in sizes.verifying(rows):
            keys[rows, n, "greedy"] = sizes.decode_key(
                rows, blocks, False, tokens_per_row=n, drafts=sizes.proposing(rows)
            )
        if drafts := sizes.proposing(rows):
            keys[rows, 1, "proposes"] = sizes.decode_key(rows, blocks, False, drafts=drafts)
    fastest = dict.fromkeys(keys, float("inf"))
    for repetition in range(REPETITIONS):
        for point, key in keys.items():
            if repetition < 2 or fastest[point] < LONG_STEP:
                rows, n, _ = point
                runner.place_drafts(rows, n - 1)
                seconds = _seconds(partial(runner.run, key), runner.device)
                fastest[point] = min(fastest[point], seconds)
    runner.place_drafts(0, 0)
    greedy = {(rows, n): value for (rows, n, kind), value in fastest.items() if kind == "greedy"}
    extra = {rows: fastest[rows, 1, "full"] - greedy[rows, 1] for rows in sizes.rows}
    sampled = {(rows, n): value + n * max(extra[rows], 0.0) for (rows, n), value in greedy.items()}
    padded = not functions.ragged
    costs = BatchCosts(
        VerifyCosts(sizes.rows, greedy, padded=padded),
        VerifyCosts(sizes.rows, sampled, padded=padded),
    )
    if not config.speculation.uses_drafter:
        return Speculator(
            config.speculation,
            sizes.verifying,
            costs,
            is_async_device=config.is_async_device,
            calibration_seconds=time.perf_counter() - began,
        )

    def proposing(rows: int) -> float:
        size = sizes.rows.fit(rows) or sizes.rows.largest
        return fastest[size, 1, "proposes"] / greedy[size, 1]

    return DrafterSpeculator(
        config.speculation,
        sizes.verifying,
        costs,
        proposing,
        is_async_device=config.is_async_device,
        calibration_seconds=time.perf_counter() - began,
    )


class _NullSteps:
    """Runs steps of the null row at any position; all its positions are in the null block.

    That block stays in a processor cache, so the measured cost of a context is a lower bound, which
    the times of served steps correct.
    """

    def __init__(self, runner: Runner, max_model_len: int) -> None:
        self._runner = runner
        self._last = max_model_len - 1

    def seconds(self, phase: Literal["decode", "prefill"], size: int, context: int) -> float:
        """Return the time of a step of a bucket whose tokens follow `context` positions.

        Positions stop at the last one of a sequence, for buckets that hold several prompts.
        """
        runner, sizes = self._runner, self._runner.sizes
        last = min(context + (size - 1 if phase == "prefill" else 0), self._last)
        blocks = last // runner.block_size + 1
        if phase == "decode":
            key = sizes.decode_key(size, blocks, False)
            runner.place_padding(last, 0, 0, 0)  # the step itself puts it back
        else:
            key = sizes.prefill_key(size, blocks, False)
            runner.place_padding(0, context, size, last)
        return _seconds(partial(runner.run, key), runner.device)

    def clean(self) -> None:
        """Reset the inputs."""
        self._runner.place_padding(0, 0, 0, 0)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the device time of one call."""
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
