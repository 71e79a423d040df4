"""Each kernel of a decode step on a CUDA device, measured and predicted.

For kernels that multiply by a weight of the model's dtype the library's bare product (`torch.mm`)
is timed too: without the norm, activation or residual that the kernel includes.

A kernel is captured as a graph of many launches over copies of its weights and cache that together
exceed the device's caches: each launch reads from memory, as in a step. A sample is a replay, timed
by events of the device and divided by its launches, edges between them included.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ....profiling.stats import Summary
from ...errors import ConfigError
from ...kernels.triton.linear import ROW_CLASSES
from ...loading.loader import resolve_source
from ...models.config import ModelConfig
from ...models.plan import model_plan
from ...resolved_config import ResolvedConfig
from ...tools.step_costs import DEPENDENT_EDGE_SECONDS, KernelCost, kernel_costs
from ...tools.step_report import stored_sizes, untuned_parts
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode

__all__ = ["measure_kernels", "run_kernels"]

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
    seconds: Callable[[Callable[[int], object], int], list[float]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield an entry of the benchmark's `kernels` for each kernel of a layer and for the head.

    Args:
        model: shapes.
        config: dtype, storage of weights and cache, block size.
        device: a CUDA device.
        rows: that decode.
        context: tokens of each row.
        bandwidth: of the predictions, in bytes per second.
        seconds: returns samples of the time of a launch, given the kernel by launch number and the
            number of launches; None: replays on the device.

    Raises:
        ConfigError: the device has no CUDA, or these kernels do not support the model or the rows.
    """
    if seconds is None:
        if device.type != "cuda":
            raise ConfigError(f"kernels are timed on CUDA devices, and the device is {device}")
        seconds = _seconds_on_cuda
    if rows > ROW_CLASSES[-1]:
        raise ConfigError(
            f"batch sizes above {ROW_CLASSES[-1]} use cuBLAS, which is not timed here: {rows}"
        )
    # These need triton, which CPU builds of torch lack.
    from ...kernels.triton.kernel_calls import num_multiprocessors
    from ...kernels.triton.split_attention import choose_tile
    from ...kernels.triton.splits import choose_splits
    from ...tools.kernel_cases import decode_cases

    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_dim
    tile = choose_tile(heads // kv_heads, size, size, config.kv_element_bytes)
    splits = choose_splits(rows, kv_heads, context, num_multiprocessors(device), tile.positions)
    costs: dict[str, KernelCost] = {}
    for cost in kernel_costs(
        model_plan(model),
        stored_sizes(config, model.head_dim),
        rows=rows,
        context=context,
        splits=splits,
        parts=untuned_parts(config, rows, num_multiprocessors(device)),
    ):
        costs.setdefault(cost.name, cost)
    smallest = min(cost.bytes for name, cost in costs.items() if name not in ("begin", "greedy"))
    copies = min(model.num_layers, -(-COLD_BYTES // smallest))
    cases = decode_cases(model, config, rows=rows, context=context, copies=copies)
    for case in cases:
        cost = costs[case.name]
        launches = max(copies, _LEAST_LAUNCHES)
        measured = Summary.of([1e6 * s for s in seconds(case.run, launches)])
        library = None
        if (product := case.library()) is not None:
            library = statistics.median(1e6 * s for s in seconds(product, launches))
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


def run_kernels(run: BenchmarkRun, kind: ModelKind, mode: StepMode) -> Iterator[dict[str, Any]]:
    """Yield the kernels of each point of the grid."""
    options = run.options
    model = resolve_source(kind.model, config_only=True).native
    resolved = ResolvedConfig.resolve(run.config(kind, mode), model)
    for context, rows in itertools.product(options.input_len, options.batch_size):
        run.say(f"{kind}: kernels of {rows} rows of {context} tokens")
        for entry in measure_kernels(
            model, resolved, run.device, rows=rows, context=context, bandwidth=run.bandwidth
        ):
            yield kind._asdict() | {"rows": rows, "context": context} | entry
