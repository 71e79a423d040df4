"""Makes the parts of an engine from a source and a configuration.

Everything that can fail without reading weights comes first: the configuration, the checkpoint's
headers, the kernels and their self-test, the memory plan. Then the weights are loaded, and every
step is prepared.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from ...cache.arena import Arena, HostArena
from ...cache.kv_cache import KVCache
from ...cache.memory.device_memory import DeviceMemory
from ...cache.memory.handler import MemoryBudgetError, MemoryPlan
from ...cache.spec import LayerGroup
from ...profiling import ranges
from ..config import EngineConfig
from ..distributed.rank_group import RankGroup
from ..distributed.torchrun import TorchrunProcess
from ..errors import StepgraphError, StepPreparationError
from ..execution.compiled_parts import compile_settings
from ..execution.follower import Follower
from ..execution.rank_commands import CommandSender
from ..execution.runner import Runner
from ..kernels import (
    Kernels,
)
from ..kernels.result_check import brief, warn
from ..loading.loader import Source
from ..loading.opened_source import OpenedSource, find_source, open_source
from ..memory.measurement import (
    CapturePeaks,
    PhaseLog,
    StepMemory,
    add_scoring,
    measure_steps,
)
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.decoder_model import DecoderModel
from ..models.rope_by_length import rope_lengths
from ..models.transformers.config import TransformersConfig
from ..models.transformers.loading import load_decoder
from ..models.transformers.scopes import add_scopes
from ..progress import progress_bar
from ..resolved_config import ResolvedConfig
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_budget import StepBudget
from ..speculation.drafter_speculator import DrafterSpeculator
from ..speculation.speculator import Speculator
from ..structured.compiler import check_installed
from .calibration import preemption_policy
from .drafter_start import FoundDrafter, find_engine_drafter
from .engine_parts import CodeCache, EngineParts
from .kernel_start import checked_kernels, planned_kernels
from .loop import StepLoop
from .memory_planning import layer_groups, plan_engine
from .rank_collectives import serve_collectives
from .rank_start import (
    agree_on_drafter,
    agree_on_plan,
    agree_on_start,
    agree_on_task,
    agree_on_weights,
    check_can_split,
    encoded_task,
    ended_by_failures,
    of_rank,
    share_of_memory,
    spawn_group,
)
from .weight_reload import reload_rank

__all__ = [
    "follow",
    "make_loop",
    "resolved_source",
    "start",
]

logger = logging.getLogger("stepgraph.runtime")

_OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
"""Messages of torch's CPU allocator, the operating system and the C++ library."""


def start(source: str | Path, config: EngineConfig, *, progress: bool) -> EngineParts:
    """Make the parts of an engine; see `Engine.from_pretrained` for what it raises.

    With `tensor_parallel`, a process that torchrun started with another rank than 0 runs its share
    until rank 0 closes its engine, and raises `SystemExit`.
    """
    began = time.perf_counter()
    if config.structured_output:
        check_installed()
    found, resolved = resolved_source(source, config)
    if config.tensor_parallel == 1:
        return start_parts(found, resolved, began=began, progress=progress)
    check_can_split(found, resolved)
    launch = TorchrunProcess.of_environment()
    if launch is None:
        group, device = spawn_group(found, resolved), 0
    else:
        launch.check(config.tensor_parallel)
        if config.threads is None and os.environ.get("OMP_NUM_THREADS") == "1":
            warn(
                "OMP_NUM_THREADS is 1, as torchrun sets it, so each rank uses one thread: give"
                " EngineConfig.threads"
            )
        group, device = RankGroup(launch.meet(), launch.rank, launch.ranks), launch.device
    with ended_by_failures(group):
        if launch is not None:
            agree_on_task(group, encoded_task(found, resolved))
        found, resolved = of_rank(found, resolved, group, device)
        if not group.rank:
            return start_parts(found, resolved, group, began=began, progress=progress)
        follow(found, resolved, group)
    group.close()
    raise SystemExit(0)


def follow(found: Source, config: ResolvedConfig, group: RankGroup) -> None:
    """Run the share of a rank above 0, until rank 0 closes its engine.

    Raises:
        RankError: the group has failed.
        Exception: as `start`.
    """
    if config.device.type == "cpu":
        torch.set_num_threads(config.threads)  # this process does nothing else
    parts = start_parts(found, config, group, began=time.perf_counter(), progress=False)
    serve = partial(_serve_ranks, parts, group)
    try:
        Follower(parts.runner, group, partial(reload_rank, parts, group), serve).follow()
    finally:
        parts.runner.close()


def resolved_source(source: str | Path, config: EngineConfig) -> tuple[Source, ResolvedConfig]:
    """Return the model, and the configuration of its engine on this machine."""
    found = find_source(source, tied=config.tie_word_embeddings, model_impl=config.model_impl)
    resolved = ResolvedConfig.resolve(config, found.config)
    if isinstance(found.config, TransformersConfig):
        found.config.check_length(resolved.max_model_len)
    return found, resolved


def start_parts(
    found: Source,
    config: ResolvedConfig,
    group: RankGroup | None = None,
    *,
    began: float,
    progress: bool,
) -> EngineParts:
    """Make the parts of an engine, or of one rank of a group: those that all ranks make."""
    with ExitStack() as open_files, _within_memory():
        return _start(found, config, group, open_files, began, progress=progress)


def _start(
    found: Source,
    resolved: ResolvedConfig,
    group: RankGroup | None,
    open_files: ExitStack,
    began: float,
    *,
    progress: bool,
) -> EngineParts:
    code_before, config = CodeCache.now(), resolved.user
    groups = layer_groups(found.config, resolved)
    found_drafter: FoundDrafter | None = None

    def memory_now() -> DeviceMemory:
        memory = DeviceMemory.of(resolved.device)
        return memory if group is None else share_of_memory(memory, group.ranks)

    def planned(
        kernels: Kernels, memory: DeviceMemory, agreed: tuple[int, int] | None = None
    ) -> MemoryPlan:
        added = None
        if found_drafter is not None:
            added = found_drafter.memory(kernels, resolved, found.config.hidden_size)
        return plan_engine(found.config, resolved, kernels, groups, memory, agreed, added)

    opened = open_source(found, open_files)
    # What does not fit is refused before weights are read, and before kernels are built and tested.
    expected, memory = planned_kernels(found.config, resolved), memory_now()
    planned(expected, memory)
    found_drafter = find_engine_drafter(found, resolved, groups)
    if found_drafter is not None:
        planned(expected, memory)
    if config.tie_word_embeddings is None:
        opened.check_head()
    log = PhaseLog(resolved.device)
    with log.phase("kernels"):
        kernels = checked_kernels(found.config, resolved, group)
    if group is not None:
        agree_on_start(group, opened, kernels)
        if found_drafter is not None:
            agree_on_drafter(group, found_drafter.config)
    memory = memory_now()  # kernels hold some of it
    plan = planned(kernels, memory)
    if group is not None:
        plan = agree_on_plan(
            group, plan, lambda blocks, tokens: planned(kernels, memory, (blocks, tokens))
        )
    logger.info("memory plan: %s", plan.summary())
    logger.debug("memory plan\n%s", plan.format())
    # No sequence outgrows the cache: block tables and reads need not be wider.
    resolved = resolved.fit_to_cache(
        max_model_len=plan.longest_request, max_batch_tokens=plan.max_batch_tokens
    )
    with log.phase("load"), ranges.span(ranges.LOAD, plan.weights):
        model = _load(opened, resolved, kernels, groups, progress=progress)
        drafter = None
        if found_drafter is not None:
            drafter = found_drafter.load(model, resolved, progress=progress)
    open_files.close()
    if group is not None:
        agree_on_weights(group, model)
    with log.phase("cache"):
        arena = Arena(
            groups,
            plan.num_blocks,
            resolved.block_size,
            resolved.dtype,
            resolved.device,
            resolved.storage,
        )
        drafting = None
        if found_drafter is not None and drafter is not None:
            drafting = found_drafter.allocate(drafter, resolved, plan.num_blocks, plan.host_blocks)
    host = None
    if plan.host_blocks:
        with log.phase("host_cache"):
            host = HostArena(arena, plan.host_blocks)
    with log.phase("static_buffers"):
        commands = CommandSender(group) if group is not None and group.rank == 0 else None
        runner = Runner(model, resolved, arena, groups, host, commands, drafting)
    compiled_kernels = None
    if resolved.device.type == "cuda" and resolved.mode != "eager" and find_spec("triton"):
        with log.phase("compile_kernels"):
            compiled_kernels = runner.steps.compile_kernels(progress=progress)
    with log.phase("prepare"):
        captured = CapturePeaks(resolved.device) if resolved.mode == "graph" else None
        compiles = resolved.compiled and (model.stack is None or kernels.sampler == "torch")
        with (
            runner.own_threads or nullcontext(),
            progress_bar("preparing steps", shown=progress) as report,
            compile_settings() if compiles else nullcontext(),
        ):
            runner.library.prepare(lambda done, total, _: report(done, total), captured)
    if group is not None:
        group.exchange(None)
    step_memory = StepMemory({})
    if group is None or group.rank == 0:  # the other ranks run the same steps as followers
        with log.phase("measure"):
            have_run = resolved.mode != "eager"
            step_memory = measure_steps(runner, kernels, captured, have_run=have_run)
            step_memory = add_scoring(step_memory, runner)
    parts = EngineParts(
        resolved,
        model,
        opened.tokenizer,
        opened.defaults_for(config.generation_config),
        groups,
        plan,
        arena,
        runner,
        step_memory,
        tuple(log.phases),
        time.perf_counter() - began,
        CodeCache.now().since(code_before),
        compiled_kernels,
        group,
    )
    logger.debug("memory as measured\n%s", parts.reconcile().format())
    if group is None or group.rank == 0:
        logger.info("started %s", parts.describe())
    return parts


def make_loop(
    parts: EngineParts,
    step_budget: StepBudget | None,
    speculator: Speculator | DrafterSpeculator | None = None,
) -> StepLoop:
    """Return the loop over the parts of an engine, with an empty cache and no requests."""
    config, host = parts.config, parts.runner.host_arena
    cache = KVCache(
        parts.groups,
        parts.plan.num_blocks,
        config.block_size,
        chunk=config.prefill_chunk,
        host_blocks=0 if host is None else host.num_blocks,
    )
    scheduler = Scheduler(
        cache,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=parts.plan.max_batch_tokens,
        prefill_chunk=config.prefill_chunk,
        max_prefill_rows=config.max_prefill_rows,
        preemption=preemption_policy(parts.runner, config.preemption),
        step_budget=step_budget,
        steps_per_launch=config.steps_per_launch,
        rope_lengths=rope_lengths(parts.model.config),
    )
    if parts.runner.commands is not None and parts.group is not None:
        timeout = config.user.rank_timeout
        parts.runner.commands.serve(timeout)
        _serve_ranks(parts, parts.group, timeout)
    return StepLoop(
        scheduler,
        parts.runner,
        in_flight=int(config.is_async_device),
        step_budget=step_budget,
        speculator=speculator,
        group=parts.group,
    )


def _serve_ranks(parts: EngineParts, group: RankGroup, timeout: float) -> None:
    """Bound the waits for other ranks, once all of them only run steps."""
    group.serve(timeout)
    serve_collectives(parts.model.kernels.collectives, group, timeout)


def _load(
    source: OpenedSource,
    config: ResolvedConfig,
    kernels: Kernels,
    groups: tuple[LayerGroup, ...],
    *,
    progress: bool,
) -> DecoderModel:
    if not isinstance(source.config, ModelConfig):
        assert source.reader is not None
        assert isinstance(source.config, TransformersConfig)
        loaded = load_decoder(
            source.reader.directory,
            source.config,
            kernels,
            config.dtype,
            config.device,
            groups,
            config.storage,
        )
        if not config.compiled:  # compiled code has one scope
            add_scopes(loaded.model, source.config.probe)
        return loaded
    model = Decoder(source.config, kernels, config.dtype, config.device, groups, config.storage)
    weights = source.weights(
        config.dtype, seed=config.seed, device=config.device, progress=progress
    )
    model.store(weights)
    return model.eval()


@contextmanager
def _within_memory() -> Iterator[None]:
    """Convert failed allocations to `MemoryBudgetError`.

    Memory can run out although the plan fits: other processes allocate meanwhile, and some limits
    cannot be read.
    """
    try:
        yield
    except (StepgraphError, StepPreparationError):
        raise
    except (MemoryError, torch.cuda.OutOfMemoryError) as error:
        failure: Exception = error
    except (RuntimeError, OSError) as error:
        # torch has no error type for failures of its CPU allocator.
        if not any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        failure = error
    else:
        return
    raise MemoryBudgetError(
        f"the start of the engine ran out of memory: {brief(failure)}. Lower the memory budget "
        "(memory_fraction, memory_bytes, memory_tokens or num_blocks), max_num_seqs or "
        "prefill_chunk, or raise the limit of the process (RLIMIT_AS, control group)"
    ) from failure
