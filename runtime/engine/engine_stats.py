"""The contents of `Engine.stats`: counters and sizes, as plain numbers and strings."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...cache.encoder_outputs import EncoderOutputCache
from ..scheduling.step_budget import StepBudget
from .engine_parts import EngineParts
from .loop import StepLoop

__all__ = ["engine_stats"]


def engine_stats(
    parts: EngineParts,
    loop: StepLoop,
    encoded: EncoderOutputCache,
    step_budget: StepBudget | None,
    *,
    max_model_len: int,
    healthy: bool,
) -> dict[str, Any]:
    """Return the statistics of an engine; see `Engine.stats`."""
    library, scheduler = parts.runner.library, loop.scheduler
    library_file = parts.model.kernels.library
    counters, reports, cache = library.stats(), library.reports(), scheduler.cache
    collectives = parts.model.kernels.collectives
    return {
        "healthy": healthy,
        "device": str(parts.config.device),
        "model_impl": parts.config.model_impl,
        "mode": parts.config.mode,
        "kernels": parts.model.kernels.name,
        "threads": None if library_file is None else parts.config.threads,
        "tensor_parallel": parts.config.user.tensor_parallel,
        "collectives": None if collectives is None else type(collectives).__name__,
        "collectives_choice": parts.model.kernels.collectives_report,
        "kernel_fallbacks": [asdict(fallback) for fallback in parts.model.kernels.fallbacks],
        "max_model_len": max_model_len,
        "steps": loop.num_steps,
        "waiting": scheduler.num_waiting + loop.num_posted,
        "running": scheduler.num_running,
        **loop.counts,
        "blocks": {
            "size": cache.block_size,
            "usable": cache.usable_blocks,
            "free": cache.num_free_blocks,
            "cached": cache.num_cached_blocks,
            "evicted": cache.num_evictions,
            "host": cache.host.num_blocks,
            "host_free": cache.host.num_free,
        },
        "cache": dict(cache.counts),
        "encoder_cache": {
            "bytes": encoded.num_bytes,
            "hits": encoded.hits,
            "misses": encoded.misses,
            "evictions": encoded.evictions,
        },
        "prepared": {
            "steps": counters.steps,
            "seconds": sum(report.seconds for report in reports),
            "bytes": sum(report.bytes for report in reports),
        },
        "load_seconds": parts.load_seconds,
        "start": {
            "seconds": parts.start_seconds,
            "phases": {phase.name: phase.seconds for phase in parts.phases},
            "kernels_built": None if library_file is None else library_file.built,
            "code_cache": asdict(parts.code_cache),
            "compiled_kernels": None
            if parts.compiled_kernels is None
            else asdict(parts.compiled_kernels),
        },
        "collector": {
            "collections": loop.collector.collections,
            "seconds": loop.collector.total_ns / 1e9,
        },
        "step_budget": None if step_budget is None else step_budget.stats(),
        "speculation": None if loop.speculator is None else loop.speculator.stats(),
        "fallbacks": counters.misses,
        "padding": counters.padding_fraction,
        "memory": {
            term.name: {"planned": term.planned, "measured": term.measured, "note": term.note}
            for term in parts.reconcile().terms
        },
        "memory_phases": [asdict(phase) for phase in parts.phases],
    }
