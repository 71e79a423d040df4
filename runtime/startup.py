"""From a source and a configuration to the parts of an engine, in the order in which they can fail.

What can be known without reading weights is checked first: the configuration, the checkpoint's
headers, the memory plan. Then the weights are read, and every step is made ready.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..cache.arena import Arena
from ..cache.device_memory import available_bytes, is_shared_with_os
from ..cache.memory import MemoryPlan, ModelFootprint, Reconciliation, plan_memory
from ..cache.spec import LayerGroup, group_layers
from ..profiling import ranges
from .checkpoint import CheckpointReader
from .config import EngineConfig, ResolvedConfig
from .errors import ConfigError
from .footprint import model_footprint
from .kernels import Kernels, select_kernels
from .loading import Source, iter_weights, random_weights, resolve_source
from .models.config import ModelConfig
from .models.decoder import Decoder, attention_specs
from .runner import Runner, StepSizes
from .step_functions import StepKey
from .tokenizer import TextTokenizer, load_tokenizer

__all__ = ["EngineParts", "start"]

logger = logging.getLogger("stepgraph.runtime")

RESERVE_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Left alone: workspaces of libraries and fragmentation."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine runs over."""

    config: ResolvedConfig
    model: Decoder
    tokenizer: TextTokenizer | None
    groups: tuple[LayerGroup, ...]
    plan: MemoryPlan
    arena: Arena
    runner: Runner
    load_seconds: float
    """What reading (and packing) the weights took."""

    def reconcile(self) -> Reconciliation:
        """Set what is held now against the plan.

        Activations and logits come and go within a step and are not among the measured terms.
        """
        return self.plan.reconcile(
            {
                "weights": self.model.weight_bytes,
                "cache": self.arena.nbytes,
                "static_buffers": self.runner.nbytes,
                "captured_graphs": sum(report.bytes for report in self.runner.library.reports()),
            }
        )


def start(source: str | Path, config: EngineConfig, *, progress: bool) -> EngineParts:
    """Make the parts of an engine; see `Engine.from_pretrained` for what it raises."""
    found = resolve_source(source)
    resolved = ResolvedConfig.resolve(config, found.config)
    kernels = select_kernels(resolved.device, resolved.mode, resolved.dtype)
    groups = group_layers(attention_specs(found.config, resolved.dtype.itemsize))
    plan = plan_engine(found.config, resolved, kernels, groups)
    logger.info("memory plan\n%s", plan.format())
    began = time.perf_counter()
    with ranges.span(ranges.LOAD, plan.weights):
        model = _load(found, resolved, kernels, progress=progress)
    load_seconds = time.perf_counter() - began
    arena = Arena(groups, plan.num_blocks, config.block_size, resolved.dtype, resolved.device)
    prefill_tokens = min(config.prefill_chunk, plan.max_batch_tokens)
    runner = Runner(model, resolved, arena, prefill_tokens)
    with _preparation_bar(shown=progress) as report:
        runner.prepare(report)
    tokenizer = None if found.directory is None else load_tokenizer(found.directory)
    parts = EngineParts(resolved, model, tokenizer, groups, plan, arena, runner, load_seconds)
    logger.info("memory as measured\n%s", parts.reconcile().format())
    return parts


def plan_engine(
    model: ModelConfig,
    config: ResolvedConfig,
    kernels: Kernels,
    groups: tuple[LayerGroup, ...],
) -> MemoryPlan:
    """Size the cache; no weight is read for it.

    Raises:
        MemoryBudgetError: the budget has no room for the smallest cache.
        ConfigError: `max_model_len` was asked for, and the cache cannot hold one such sequence.
    """
    user = config.user
    steps = StepSizes.choose(config, kernels, user.prefill_chunk).keys()
    footprint = model_footprint(
        model, config, kernels, groups, captured_steps=len(steps) if config.mode == "graph" else 0
    )
    plan = _solve(footprint, config)
    capacity = (plan.num_blocks - 1) * user.block_size
    if user.max_model_len is not None and capacity < user.max_model_len:
        raise ConfigError(
            f"max_model_len={user.max_model_len}, but the cache holds {capacity} tokens:"
            " raise the memory budget, or lower max_model_len\n" + plan.format()
        )
    return plan


def _solve(footprint: ModelFootprint, config: ResolvedConfig) -> MemoryPlan:
    """Solve for blocks and batch tokens.

    Neither given, there are as many batch tokens as slots, but no more than a step can use.
    """
    user = config.user
    solve = partial(
        plan_memory,
        footprint,
        user.memory_budget(config.device),
        available_bytes=available_bytes(config.device),
        block_size=user.block_size,
        num_blocks=user.fixed_blocks,
        batch_tokens_per_block=user.block_size,
        cap_blocks=footprint.most_blocks(user.block_size)
        if is_shared_with_os(config.device)
        else None,
        reserve_bytes=RESERVE_BYTES[config.device.type],
    )
    if user.max_batch_tokens is not None:
        return solve(max_batch_tokens=user.max_batch_tokens)
    plan = solve()
    useful = user.max_rows + user.prefill_chunk
    least = user.max_rows + 1  # a step of decoding rows has to leave room for a prompt's token
    if least <= plan.max_batch_tokens <= useful:
        return plan
    return solve(max_batch_tokens=min(max(plan.max_batch_tokens, least), useful))


def _load(source: Source, config: ResolvedConfig, kernels: Kernels, *, progress: bool) -> Decoder:
    model = Decoder(source.config, kernels, config.dtype, config.device)
    if source.directory is None:
        model.store(random_weights(source.config, config.dtype, config.user.seed))
    else:
        with CheckpointReader(source.directory) as reader:
            model.store(iter_weights(reader, source.config, config.dtype, progress=progress))
    return model.eval()


@contextmanager
def _preparation_bar(*, shown: bool) -> Iterator[Callable[[int, int, StepKey], None]]:
    """Yield a progress callback for the step library, drawn on stderr if that is a terminal."""
    from rich.console import Console  # not worth the time of every import of the package
    from rich.progress import Progress

    with Progress(
        console=Console(stderr=True), disable=not (shown and sys.stderr.isatty()), transient=True
    ) as bar:
        task = bar.add_task("preparing steps", total=None)

        def report(done: int, total: int, key: StepKey) -> None:
            bar.update(task, completed=done, total=total, description=f"{key.phase} {key.size}")

        yield report
