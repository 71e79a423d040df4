"""Times each kernel of a decode step on a CUDA device, beside what is predicted for it.

Of those that multiply by a weight of the model's dtype the library's bare product (`torch.mm`) is
timed too: without norm, activation or residual, which the kernel does on top.

A kernel is captured as a graph of many launches, one after the other over copies of its weights and
cache that together exceed the device's caches: each reads from memory, as in a step. A sample is a
replay, timed by events of the device and divided by its launches, edges between them included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...profiling.kernel_costs import DEPENDENT_EDGE_SECONDS, KernelCost, kernel_costs
from ...profiling.stats import Summary
from ..errors import ConfigError
from ..kernels.triton.linear import ROW_CLASSES
from ..models.config import ModelConfig
from ..resolved_config import ResolvedConfig
from ..tools.step_report import decoder_shape, untuned_parts

__all__ = ["measure_kernels"]

COLD_BYTES = 256 << 20
"""That lie between two reads of the same memory: several times the L2 cache of an H200 (60 MB)."""

_LEAST_LAUNCHES = 16
_REPLAYS = 50


def measure_kernels(
    model: ModelConfig,
    config: ResolvedConfig,
    device: torch.device,
    *,
    rows: int,
    context: int,
    bandwidth: float,
) -> Iterator[dict[str, Any]]:
    """Yield an entry of the benchmark's `kernels` for each kernel of a layer and for the head.

    Args:
        model: its shapes.
        config: dtype, storage of weights and cache, block size.
        device: of CUDA.
        rows: that decode.
        context: tokens of each row.
        bandwidth: bytes per second that the device reads, which predictions are made with.

    Raises:
        ConfigError: the device has no CUDA, or these kernels do not serve the model or the rows.
    """
    if device.type != "cuda":
        raise ConfigError(f"kernels are timed on CUDA devices, and {device} is none")
    if rows > ROW_CLASSES[-1]:
        raise ConfigError(f"{rows} rows are decoded by the library; at most {ROW_CLASSES[-1]} here")
    yield from _measure(model, config, device, rows, context, bandwidth, _seconds_on_cuda)


def _measure(
    model: ModelConfig,
    config: ResolvedConfig,
    device: torch.device,
    rows: int,
    context: int,
    bandwidth: float,
    seconds: Callable[[Callable[[int], object], int], list[float]],
) -> Iterator[dict[str, Any]]:
    # These need triton, which is where torch has CUDA.
    from ..kernels.triton.launch import num_multiprocessors
    from ..kernels.triton.split_attention import choose_tile
    from ..kernels.triton.splits import choose_splits
    from ..tools.kernel_cases import decode_cases

    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_dim
    tile = choose_tile(heads // kv_heads, size, size, config.kv_element_bytes)
    splits = choose_splits(rows, kv_heads, context, num_multiprocessors(device), tile.positions)
    costs: dict[str, KernelCost] = {}
    for cost in kernel_costs(
        decoder_shape(model, config),
        rows=rows,
        context=context,
        splits=splits,
        parts=untuned_parts(config, rows, num_multiprocessors(device)),
    ):
        costs.setdefault(cost.name, cost)
    smallest = min(cost.bytes for name, cost in costs.items() if name not in ("begin", "greedy"))
    copies = min(model.num_layers, -(-COLD_BYTES // smallest))
    cases = decode_cases(model, config, device, rows=rows, context=context, copies=copies)
    for case in cases:
        cost = costs[case.name]
        launches = max(copies, _LEAST_LAUNCHES)
        measured = Summary.of([1e6 * s for s in seconds(case.run, launches)])
        library = None
        if case.library is not None:
            library = statistics.median(1e6 * s for s in seconds(case.library, launches))
        predicted = 1e6 * (cost.seconds(bandwidth) + cost.edge_seconds(DEPENDENT_EDGE_SECONDS))
        yield {
            "kernel": case.name,
            "launches": cost.launches,
            "bytes": cost.bytes,
            "copies": copies,
            "predicted_us": predicted,
            "measured_us": measured.to_json(),
            "library_us": library,
            "bandwidth_fraction": cost.bytes / (1e-6 * measured.p50) / bandwidth,
        }


def _seconds_on_cuda(run: Callable[[int], object], launches: int) -> list[float]:
    """Return the seconds of a launch in each of several replays."""
    run(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(_REPLAYS)
    ]
    for _ in range(3):
        graph.replay()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1e-3 * begin.elapsed_time(end) / launches for begin, end in events]
