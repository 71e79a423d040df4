"""The contents of `Engine.stats`: counters and sizes, as plain numbers and strings."""

from __future__ import annotations

import operator
from dataclasses import asdict
from itertools import zip_longest
from typing import Any, NamedTuple

from ..kernels import instruction_sets
from .loop import StepLoop
from .startup import EngineParts


class EngineGauges(NamedTuple):
    """The present state of an engine."""

    rows: int  # `EngineConfig.max_num_seqs`
    running: int  # completions that have a row
    waiting: int  # completions that wait for one
    usable_blocks: int  # blocks that requests can hold
    held_blocks: int  # blocks that requests hold
    block_size: int  # tokens of a block
    kernel_fallbacks: int  # operations that run on slower kernels than the configured ones
    held_snapshots: int = 0  # snapshots of recurrent state that requests hold
    cached_snapshots: int = 0  # those that later requests can begin from, held or not

    @property
    def free_rows(self) -> int:
        """Rows that no completion has or waits for; negative if more wait than are free."""
        return self.rows - self.running - self.waiting

    @classmethod
    def of(cls, parts: EngineParts, loop: StepLoop) -> EngineGauges:
        """Read the state of a loop, which may run steps meanwhile."""
        scheduler, cache = loop.scheduler, loop.scheduler.cache
        snapshots = None if cache.states is None else cache.states.snapshots
        return cls(
            rows=scheduler.max_num_seqs,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + loop.num_posted,
            usable_blocks=cache.usable_blocks,
            held_blocks=cache.num_held_blocks,
            block_size=cache.block_size,
            kernel_fallbacks=len(parts.model.kernels.fallbacks),
            held_snapshots=0 if snapshots is None else snapshots.num_held,
            cached_snapshots=0 if snapshots is None else snapshots.num_published,
        )


class EngineCounters(NamedTuple):
    """Counts since the start of an engine. None of them decreases."""

    steps: int = 0  # launched
    fallbacks: int = 0  # launches without a prepared step
    output_tokens: int = 0
    prompt_tokens: int = 0  # of the completions that were admitted
    cached_tokens: int = 0  # of them, those found in the cache
    preemptions: int = 0
    evicted_blocks: int = 0  # cached blocks that were allocated again
    evicted_snapshots: int = 0  # likewise, of recurrent state
    drafted_tokens: int = 0  # drafts that steps verified
    accepted_tokens: int = 0  # of them, those accepted
    accepted_by_position: tuple[int, ...] = ()
    """Of them, by their number in the draft of a row, the first one first."""
    collections: int = 0  # runs of Python's garbage collector
    collected_ns: int = 0

    @classmethod
    def of(cls, loop: StepLoop) -> EngineCounters:
        """Read the counters of a loop, which may run steps meanwhile."""
        cache, speculator = loop.scheduler.cache, loop.speculator
        drafts = {} if speculator is None else speculator.counts
        return cls(
            steps=loop.num_steps,
            fallbacks=loop.runner.library.misses,
            output_tokens=loop.counts["output_tokens"],
            prompt_tokens=cache.counts["queried_tokens"],
            cached_tokens=cache.counts["hit_tokens"],
            preemptions=loop.counts["preemptions"],
            evicted_blocks=cache.pool.num_evictions,
            evicted_snapshots=0 if cache.states is None else cache.states.snapshots.num_evictions,
            drafted_tokens=drafts.get("drafted", 0),
            accepted_tokens=drafts.get("accepted", 0),
            accepted_by_position=() if speculator is None else speculator.accepted_by_position,
            collections=loop.collector.collections,
            collected_ns=loop.collector.total_ns,
        )

    def plus(self, other: EngineCounters) -> EngineCounters:
        """Return the sums of the counters of two engines."""
        positions = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        total = EngineCounters._make(map(operator.add, self, other))
        return total._replace(accepted_by_position=tuple(map(sum, positions)))


def _weights(parts: EngineParts) -> str:
    """Return how the weights of linear layers are stored: a dtype, or the bits of codes."""
    if formats := parts.model.kernels.formats:
        return f"int{max(form.levels.bits for form in formats)}"
    stored = str(parts.config.weights)
    return str(parts.config.dtype).removeprefix("torch.") if stored == "model" else stored


def _instruction_sets(parts: EngineParts) -> dict[str, str]:
    """Return the instruction set of each kind of product that the C++ operators compute."""
    kernels, kinds = parts.model.kernels, ["attention"]
    if kernels.library is None:
        return {}
    if kernels.pack_parts is not None:
        kinds += ["weights"] * (kernels.weights.dtype is None)
        if kernels.codes or kernels.weights.dtype is not None:
            kinds.append("codes")
            kinds += ["int8 inputs"] * (parts.config.user.activation_dtype == "int8")
    found = instruction_sets(parts.config.dtype)
    return {kind: found[kind] for kind in sorted(kinds, reverse=True)}


def engine_stats(parts: EngineParts, loop: StepLoop, *, healthy: bool) -> dict[str, Any]:
    """Return the statistics of an engine; see `Engine.stats`."""
    library, scheduler = parts.runner.library, loop.scheduler
    library_file = parts.model.kernels.library
    steps, cache = library.steps.values(), scheduler.cache
    collectives = parts.model.kernels.collectives
    seconds = {phase.name: phase.seconds for phase in parts.phases}
    snapshots = None if cache.states is None else cache.states.snapshots
    return {
        "healthy": healthy,
        "device": str(parts.config.device),
        "model": {
            "type": parts.model.config.model_type,
            "parameters": parts.num_parameters,
            "weights": _weights(parts),
        },
        "model_impl": parts.config.model_impl,
        "mode": parts.config.mode,
        "kernels": parts.model.kernels.name,
        "instruction_sets": _instruction_sets(parts),
        "threads": None if library_file is None else parts.config.threads,
        "tensor_parallel": parts.config.user.tensor_parallel,
        "collectives": None if collectives is None else type(collectives).__name__,
        "kernel_fallbacks": [asdict(fallback) for fallback in parts.model.kernels.fallbacks],
        "max_model_len": parts.config.max_model_len,
        "steps": loop.num_steps,
        "waiting": scheduler.num_waiting + loop.num_posted,
        "running": scheduler.num_running,
        **loop.counts,
        "blocks": {
            "size": cache.block_size,
            "usable": cache.usable_blocks,
            "free": cache.pool.num_free,
            "cached": cache.pool.num_published,
            "evicted": cache.pool.num_evictions,
            "host": cache.host.num_blocks,
            "host_free": cache.host.num_free,
        },
        "snapshots": None
        if snapshots is None
        else {
            "usable": snapshots.num_blocks - 1,
            "free": snapshots.num_free,
            "cached": snapshots.num_published,
            "evicted": snapshots.num_evictions,
        },
        "cache": dict(cache.counts),
        "prepared": {
            "steps": len(steps),
            "seconds": sum(step.seconds for step in steps),
            "bytes": sum(step.bytes for step in steps),
        },
        "load_seconds": seconds.get("load", 0.0),
        "start": {
            "seconds": parts.start_seconds,
            "phases": seconds,
            "kernels_built": None if library_file is None else library_file.built,
            "code_cache": parts.code_cache,
            "compiled_kernels": None
            if parts.compiled_kernels is None
            else asdict(parts.compiled_kernels),
        },
        "collector": {
            "collections": loop.collector.collections,
            "seconds": loop.collector.total_ns / 1e9,
        },
        "step_budget": None if loop.step_budget is None else loop.step_budget.stats(),
        "speculation": None if loop.speculator is None else loop.speculator.stats(),
        "fallbacks": library.misses,
        "padding": library.padding_fraction,
        "memory": parts.reconcile(),
        "memory_phases": [asdict(phase) for phase in parts.phases],
    }
