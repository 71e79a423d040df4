"""Measures what a preemption costs on this device: a block copied, a token computed again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

from .preemption import PreemptionPolicy
from .runner import Runner

__all__ = ["preemption_policy"]

REPETITIONS = 5
COPIED_BLOCKS = 8


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
