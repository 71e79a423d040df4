"""Times products on a device, by configuration, for the tuner.

A product is timed as it runs in a step: captured in a CUDA graph, one launch after the other with
dependent launch between them, over weights that are not in the L2 cache. For that there are copies
of the weight, read in turn, that are together larger than the cache. Configurations are timed
interleaved, so that disturbances affect all of them, and compared by their medians. Inputs are
random, and a configuration with a wrong result is rejected.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from triton.errors import TritonError

from ..kernels.triton.linear import LinearConfig
from ..kernels.triton.precompile import compile_kernels
from ..kernels.triton.tuning import Tuned
from .linear_problems import Problem, TimedOperands

__all__ = ["Timer", "time_on_device", "tune"]

logger = logging.getLogger("stepgraph.runtime")

ROUNDS = 15
"""Times that each configuration is timed."""

LEAST_LAUNCHES = 24
"""Of a kernel in a graph: the time of starting the graph is shared by so many."""

CACHES = 2
"""Sizes of the L2 cache that the copies of a weight fill at least."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""||out - reference|| / ||reference|| that a configuration may have."""


Configs = Sequence[LinearConfig]

Timer = Callable[[Problem, Configs], Sequence[float | None]]
"""Seconds of one launch with each configuration; None for one that cannot run."""


def tune(problem: Problem, timer: Timer, multiprocessors: int) -> Tuned | None:
    """Return the fastest configuration, or None if not one can run."""
    configs = problem.configs(multiprocessors)
    seconds = timer(problem, configs)
    timed = [(s, i) for i, s in enumerate(seconds) if s is not None]
    if not timed:
        return None
    best, index = min(timed)
    default = best if seconds[0] is None else seconds[0]
    return Tuned(configs[index], best * 1e6, default * 1e6)


def time_on_device(problem: Problem, configs: Configs, device: torch.device) -> list[float | None]:
    """Return the median seconds of a launch on a CUDA device: a `Timer`."""
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, -(-CACHES * cache_bytes // problem.weight_bytes))
    launches = -(-LEAST_LAUNCHES // copies) * copies
    with torch.cuda.device(device):
        operands = problem.operands(device, copies)
        # In parallel; what does not compile is found again when it is launched.
        compile_kernels([(str(config), partial(operands.run, 0, config)) for config in configs])
        graphs = [_captured(problem, operands, config, launches) for config in configs]
        seconds: list[list[float]] = [[] for _ in configs]
        for _ in range(ROUNDS):
            for graph, measured in zip(graphs, seconds, strict=True):
                if graph is not None:
                    measured.append(_replay_seconds(graph) / launches)
    return [statistics.median(measured) if measured else None for measured in seconds]


def _captured(
    problem: Problem, operands: TimedOperands, config: LinearConfig, launches: int
) -> torch.cuda.CUDAGraph | None:
    """A graph of that many launches, replayed once; None if it does not run or is wrong.

    Raises RuntimeError if it left the device in a state in which nothing runs.
    """
    operands.poison()
    try:
        operands.run(0, config)
        off = operands.error()
    except (TritonError, RuntimeError) as error:  # more registers or memory than there are, ...
        torch.cuda.synchronize()  # raises if the device is out of order
        logger.warning("%s cannot run with %s: %s", problem.title, config, error)
        return None
    if not off <= TOLERANCE[problem.dtype]:  # NaN fails too
        logger.warning("%s is wrong with %s: off by %g", problem.title, config, off)
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for number in range(launches):
                operands.run(number, config)
    except RuntimeError as error:
        torch.cuda.synchronize()
        logger.warning("%s cannot be captured with %s: %s", problem.title, config, error)
        return None
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
