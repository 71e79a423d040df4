"""Makes the parts of an engine from a source and a configuration.

Everything that can fail without reading weights comes first: the configuration, the checkpoint's
headers, the kernels and their self-test, the memory plan. Then the weights are loaded, and every
step is prepared.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...cache.arena import Arena, HostArena
from ...cache.kv_cache import KVCache
from ...cache.memory.device_memory import DeviceMemory
from ...cache.memory.handler import (
    MemoryBudgetError,
    MemoryPlan,
    format_bytes,
    plan_memory,
)
from ...cache.spec import LayerGroup, group_layers
from ...profiling import ranges
from ...profiling.bandwidth import seconds_of
from ..bounded_repr import bounded_repr, bounded_text
from ..config import EngineConfig
from ..distributed.rank_group import GROUP_ENDED, Link, RankGroup
from ..errors import ConfigError, RankError, StepgraphError, StepPreparationError
from ..execution.runner import DrafterCache, Runner, follow
from ..execution.step_functions import compile_settings
from ..execution.step_key import StepKey
from ..kernels import (
    Gap,
    Kernels,
    batch_invariant_kernels,
    kernels_for,
    limit_threads,
    native_gaps,
    select_kernels,
)
from ..kernels.choice import Parts
from ..kernels.result_check import Fallback, brief, warn
from ..kernels.support import int8_input_kernels
from ..kernels.weights import INT8, MODEL
from ..loading.drafter_loading import find_drafter, has_mtp, keep_codes, load_drafter
from ..loading.loader import OpenedSource, Source, open_source, resolve_source
from ..loading.tokenizer import TextTokenizer
from ..models.config import DecoderConfig, ModelConfig, config_json_name
from ..models.decoder import Decoder, rope_lengths
from ..models.plan import plan_of
from ..models.resolved_config import ResolvedConfig
from ..models.transformers.config import TransformersConfig
from ..models.transformers.decoder import DecoderModel, TransformersDecoder, add_scopes
from ..models.transformers.loading import load_decoder, load_model, overwrite_decoder
from ..progress import progress_bar
from ..sampling_params import SamplingDefaults
from ..scheduling.scheduler import Scheduler
from ..scheduling.speculator import DrafterSpeculator, LookupSpeculator
from ..scheduling.step_budget import StepBudget
from ..scheduling.step_times import Point, StepTimes, calibrate
from ..structured.compiler import check_installed
from .loop import StepLoop
from .memory import (
    CapturePeaks,
    FoundDrafter,
    Phase,
    StatePlan,
    StepMemory,
    logged_phase,
    measure_steps,
    model_footprint,
    weight_bytes,
)
from .rank_start import (
    agree_on_plan,
    agree_on_weights,
    check_can_split,
    ended_by_failures,
    of_rank,
    spawn_group,
    with_collectives,
)
from .self_test import check_kernels

if TYPE_CHECKING:
    from ..kernels.triton.precompile import CompiledKernels

logger = logging.getLogger("stepgraph.runtime")

# Step times on this device, measured with the prepared steps of an engine without requests.

LONG_STEP = 0.005
"""Seconds of which steps are measured often where no latency budget says which are useful."""
CONTEXT = 1024
"""Positions before the tokens of steps that measure the time of attention, if the model has as
many."""


def measured_times(
    runner: Runner, groups: Sequence[LayerGroup], config: ResolvedConfig
) -> StepTimes | None:
    """Return the step times of a prepared runner without requests; None if nothing reads them."""
    target = config.user.max_itl_ms
    if target is None and config.speculation is None:
        return None
    sizes = runner.sizes

    def reach(context: int) -> int:
        if len(sizes.read_blocks) > 1:  # kernels that read the whole width of the tables
            blocks = sizes.read_blocks.fit(-(-context // sizes.block_size))
            context = (blocks or sizes.read_blocks.largest) * sizes.block_size
        return sum(len(group.layers) * group.positions_read(context) for group in groups)

    times = calibrate(
        partial(null_step_seconds, runner, config.max_model_len - 1),
        rows=sizes.rows,
        reach=reach,
        context=min(CONTEXT, config.max_model_len // 2),
        useful_seconds=LONG_STEP if target is None else target / 1e3,
        tokens=None if target is None else sizes.tokens,
        verifying=None if config.speculation is None else sizes.verifying,
        proposing=sizes.proposing,
        padded=not runner.functions.ragged,
        one_pass=runner.mixed,
    )
    runner.place_padding(0, 0, 0, 0)
    if config.speculation is not None:
        runner.place_drafts(0, 0)
    return times


def null_step_seconds(runner: Runner, last: int, point: Point) -> float:
    """Return the time of a step of the null row.

    Its positions are in the null block, which stays in a processor cache, so the measured cost of
    a context is a lower bound, which the times of served steps correct. They stop at `last`, for
    buckets that hold several prompts.
    """
    phase, size, context, tokens_per_row, drafts, full_sampler = point
    last = min(context + (size - 1 if phase == "prefill" else 0), last)
    key = runner.sizes.key(phase, size, last + 1, full_sampler, tokens_per_row, drafts=drafts)
    if phase == "prefill":
        runner.place_padding(0, context, size, last)
    else:
        runner.place_padding(last, 0, 0, 0)  # the step itself puts it back
    if tokens_per_row > 1 or drafts:
        runner.place_drafts(size, tokens_per_row - 1)
    return seconds_of(partial(runner.run, key), runner.device)


def find_engine_drafter(
    found: Source, engine: ResolvedConfig, groups: Sequence[LayerGroup]
) -> FoundDrafter | None:
    """Find the drafter of an engine, or None. Each rank of a group has the whole one.

    Raises `CheckpointError` if it is missing or damaged, `ConfigError` if it does not fit.
    """
    speculation = engine.speculation
    if speculation is None or not speculation.uses_drafter:
        return None
    if engine.model_impl != "native":
        raise ConfigError(
            f"speculation method {speculation.method!r} needs a model of a native family, not one"
            " whose layers transformers makes: use 'suffix'"
        )
    method, own, checkpoint = speculation.method, found.directory, speculation.model
    if checkpoint is None:
        if own is not None and method != "mtp":
            own /= "drafter"
        if own is None or not own.is_dir():
            raise ConfigError(
                f"speculation method {method!r} needs a model:"
                f" {own or f'a directory of {found.name}'} does not exist; give"
                f" {{'method': {method!r}, 'model': ...}}"
            )
        checkpoint = str(own)
    config = find_drafter(checkpoint, found.native.whole, method, found.directory)
    if speculation.num_speculative_tokens > config.most_drafts:
        raise ConfigError(
            f"the drafter {config.name} proposes at most {config.most_drafts} tokens: lower"
            f" num_speculative_tokens = {speculation.num_speculative_tokens} to that"
        )
    # The first layer group with full attention, or the one with the widest window.
    group = max(groups, key=lambda group: group.window or float("inf"))
    return FoundDrafter(config, config.layer_group(group.index, group.window))


def _with_codes(
    found: FoundDrafter | None, kernels: Kernels, dtype: torch.dtype
) -> FoundDrafter | None:
    return found and found._replace(config=keep_codes(found.config, kernels, dtype))


_TERM_OF_PHASE = {
    "load": "weights",
    "cache": "cache",
    "row_state": "row_state",
    "static_buffers": "static_buffers",
}
"""The phases of a start that allocate permanent memory of the device, and its term."""


def _code_cache() -> tuple[int, int]:
    """Hits and misses of torch's code cache in this process, other engines included."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counts = {} if dynamo is None else dynamo.counters["inductor"]
    return counts.get("fxgraph_cache_hit", 0), counts.get("fxgraph_cache_miss", 0)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of a started engine."""

    config: ResolvedConfig
    model: DecoderModel
    tokenizer: TextTokenizer | None
    sampling_defaults: SamplingDefaults
    """Of the model, for the fields that requests leave out."""
    groups: tuple[LayerGroup, ...]
    plan: MemoryPlan
    runner: Runner
    step_memory: StepMemory
    """Memory of running steps."""
    phases: tuple[Phase, ...]
    """Memory and time of each phase of the start: "kernels", "load", "cache", "host_cache" if there
    is one, "static_buffers", "compile_kernels" on CUDA, "prepare", "measure"."""
    start_seconds: float
    """Seconds of the start, without the calibration for `max_itl_ms`."""
    code_cache: dict[str, int]
    """Hits and misses of the code cache of `torch.compile` during the start."""
    num_parameters: int
    """Of the model, on all ranks."""
    compiled_kernels: CompiledKernels | None = None
    """Triton kernels that were compiled ahead of the steps; None where there are none."""

    def describe(self) -> str:
        """Return the model, the choices of the configuration and the times, on one line."""
        config, plan = self.config, self.plan
        phases = ", ".join(f"{phase.name} {phase.seconds:.1f} s" for phase in self.phases)
        dtype = str(config.dtype).removeprefix("torch.")
        threads = f", {config.threads} threads" if config.device.type == "cpu" else ""
        ranks = config.user.tensor_parallel
        return (
            f"{self.model.config.model_type} in {dtype} on {config.device}"
            f"{f', {ranks} ranks' if ranks > 1 else ''}, mode {config.mode},"
            f" kernels {self.model.kernels.name}{threads};"
            f" {plan.usable_blocks * plan.block_size:,} tokens of KV cache,"
            f" {config.max_model_len:,} of context, {config.user.max_num_seqs} concurrent requests;"
            f" {self.start_seconds:.1f} s ({phases})"
        )

    def reconcile(self) -> dict[str, dict[str, int | str | None]]:
        """Return each term of the plan as `planned` and `measured` bytes, with a `note`.

        `measured` is None if it was not; `note` says how it was, or why not.

        On CUDA, weights, cache and static buffers are what torch's allocator counted in their
        phases of the start; on a CPU they are the sizes of the tensors, because pages and code are
        mapped at their first use.
        """
        runner, drafter = self.runner, self.runner.drafter
        if on_cuda := self.config.device.type == "cuda":
            held = {
                _TERM_OF_PHASE[phase.name]: phase.after - phase.before
                for phase in self.phases
                if phase.name in _TERM_OF_PHASE
            }
        else:
            held = {
                "weights": self.model.weight_bytes,
                "cache": runner.arena.nbytes,
                "static_buffers": runner.nbytes,
            }
            if drafter is not None:
                held["weights"] += drafter.drafter.weight_bytes
                held["cache"] += drafter.arena.nbytes
            if (states := runner.state.memory) is not None:
                cached = self.plan.terms["snapshots"]
                held |= {"row_state": states.nbytes - cached, "snapshots": cached}
        held |= {
            "captured_graphs": 0,
            "host_cache": runner.host_cache_nbytes,
            "host_buffers": runner.host_nbytes if on_cuda else 0,
            **self.step_memory.measured,
        }
        notes = {"reserve": "left free for workspaces and fragmentation", **self.step_memory.notes}
        return {
            name: {"planned": planned, "measured": held.get(name), "note": notes.get(name)}
            for name, planned in self.plan.terms.items()
        }


def planned_kernels(model: DecoderConfig, config: ResolvedConfig) -> Kernels:
    """Return the kernels that an engine will have if their self-tests pass, for a memory plan.

    Nothing is built, loaded or tested.
    """
    kernels = select_kernels(
        config.device, config.mode, config.dtype, config.weights, config.kernels, load=False
    )
    return kernels_for(kernels, plan_of(model))


def checked_kernels(
    model: DecoderConfig, config: ResolvedConfig, group: RankGroup | None, planned: Kernels
) -> Kernels:
    """Return the kernels of an engine, with plain PyTorch for gaps and failed self-tests.

    `planned` names the weights that will be codes.
    """
    kernels = select_kernels(
        config.device, config.mode, config.dtype, config.weights, config.kernels
    )
    if kernels.library is not None:
        limit_threads(config.threads)
    if config.user.batch_invariant:
        kernels = batch_invariant_kernels(kernels)
    kernels = dataclasses.replace(
        kernels,
        dependent_launch=config.user.dependent_launch,
        codes=planned.codes,
        formats=planned.formats,
    )
    plan = plan_of(model)
    fitting = kernels_for(kernels, plan)
    gaps: tuple[Gap, ...] = ()
    if config.kernels != "torch":
        gaps = native_gaps(config.device.type, config.dtype, config.weights, plan)
    if isinstance(model, ModelConfig):
        seed = None
        if group is not None:
            fitting = with_collectives(fitting, group, model, config)
            seed = group.exchange(time.time_ns() % 2**30)[0]
        # A rank whose kernels fail would leave the sums that others wait for.
        user = config.user
        required = user.kernels == "native" or user.batch_invariant or group is not None
        kernels = check_kernels(fitting, model, config, required=required, seed=seed)
    else:
        kernels, layers = fitting, "decoder layers"
        gaps = tuple(gap for gap in gaps if gap.name != layers)
        if config.user.model_impl == "auto":
            gaps = (Gap(layers, "no native family, transformers makes them"), *gaps)
    dtype = str(config.dtype).removeprefix("torch.")
    fallbacks = [Fallback(gap.name, f"{model.model_type} in {dtype}", gap.reason) for gap in gaps]
    for fallback in fallbacks:
        warn(
            f"no native {fallback.name} for {fallback.shape}: {fallback.error}."
            " Plain PyTorch runs instead, which is slower"
        )
    return dataclasses.replace(kernels, fallbacks=(*kernels.fallbacks, *fallbacks))


def plan_engine(
    model: DecoderConfig,
    config: ResolvedConfig,
    kernels: Kernels,
    groups: tuple[LayerGroup, ...],
    memory: DeviceMemory,
    drafter: FoundDrafter | None = None,
) -> MemoryPlan:
    """Return the memory plan, which needs no weights and no device but `memory`.

    A cache sized by a share of the free memory has no more blocks than `max_num_seqs` requests of
    `max_model_len` tokens use. `num_blocks` and `memory_tokens` may exceed that, and `memory_bytes`
    on a device with memory of its own.

    Raises:
        MemoryBudgetError: the budget is too small for the weights or the smallest cache, or the
            host has too little memory for the host cache and mirrors.
        ConfigError: the cache cannot hold one sequence of the given `max_model_len`.
    """
    user = config.user
    # A share of the free memory is a limit; memory_bytes on a device with own memory an amount.
    capped = memory.shared_with_os or user.memory_bytes is None
    footprint = model_footprint(
        model, config, kernels, groups, host_shared=memory.shared_with_os, drafter=drafter
    )
    try:
        plan = plan_memory(
            footprint,
            available_bytes=memory.available,
            budget_bytes=user.budget_bytes(config.device, memory.available),
            context_tokens=user.memory_tokens,
            num_blocks=user.num_blocks,
            max_batch_tokens=user.max_batch_tokens,
            capped=capped,
        )
    except MemoryBudgetError as error:
        if error.term == "weights":
            dtype = str(config.dtype).removeprefix("torch.")
            remedies = {}
            if config.weights == MODEL:
                small = dataclasses.replace(kernels, weights=INT8)
                smaller = weight_bytes(plan_of(model), small, config.dtype)
                remedies["weight_dtype"] = f"set weight_dtype='int8' ({smaller} bytes of weights)"
            else:
                dtype += f" with {config.weights} weights"
            # Ranks on a CPU share its memory; a budget in bytes is of each rank.
            if config.device.type == "cuda" or user.memory_bytes is not None:
                remedies["tensor_parallel"] = "split the model over more ranks (tensor_parallel)"
            if (error.term_bytes or 0) < memory.available:
                name = "memory_fraction" if user.memory_bytes is None else "memory_bytes"
                remedies[name] = f"raise {name} ({memory.available} bytes are free)"
            error.field = next(iter(remedies), None)
            advice = "; ".join([*remedies.values(), "use a smaller model or a larger device"])
            error.args = (f"{error}, in {dtype}: {advice}",)
        raise
    host_cache = plan.terms["host_cache"]
    if not plan.host_shared and plan.host_total > memory.host_available:
        raise MemoryBudgetError(
            f"the host cache of {format_bytes(host_cache)} and the mirrors of static buffers "
            f"({format_bytes(plan.host_total - host_cache)}) exceed the {memory.host_available} "
            f"free bytes ({format_bytes(memory.host_available)}) of the host: lower "
            "host_cache_bytes",
            term="host_cache",
            field="host_cache_bytes",
            needed_bytes=plan.host_total,
            term_bytes=host_cache,
            limit_bytes=memory.host_available,
        )
    if user.max_model_len is not None and plan.longest_request < user.max_model_len:
        raise ConfigError(
            f"max_model_len={user.max_model_len}, but the cache holds requests of at most "
            f"{plan.longest_request} tokens: raise the memory budget, or lower max_model_len\n"
            + plan.format(),
            field="max_model_len",
        )
    return plan


# Other weights for a started engine, copied into the tensors that its steps were prepared with.
#
# A prepared step contains the shapes of the model and numbers of its config (epsilons, rotations,
# soft caps, windows). So a checkpoint can replace the weights only if its config says the same,
# except for tokens that begin and end a text.


@contextmanager
def open_replacement(
    source: str | Path, model: DecoderConfig, config: EngineConfig
) -> Iterator[OpenedSource]:
    """Open a model whose weights can replace those of a started engine.

    Raises `CheckpointError`, and `ConfigError` for a config that differs in another field.
    """
    impl = "native" if isinstance(model, ModelConfig) else "transformers"
    found = resolve_source(source, tied=config.tie_word_embeddings, model_impl=impl)
    if isinstance(model, ModelConfig):
        config_of_rank = dataclasses.replace(found.native, shard=model.shard)
        found = dataclasses.replace(found, config=config_of_rank)
    check_replaceable(found.name, model, found.config, config)
    with ExitStack() as open_files:
        opened = open_source(found, open_files, config.chat_template)
        if config.tie_word_embeddings is None:
            opened.check_head()
        yield opened


def overwriting(
    model: DecoderModel, new: OpenedSource, config: ResolvedConfig
) -> Callable[[], None]:
    """Return the function that overwrites the weights of a model from `new`.

    transformers loads all of them before. Raises `CheckpointError` if it cannot, and `ConfigError`
    for weights that are stored in other formats.
    """
    dtype, kernels = config.dtype, model.kernels
    if new.kept_codes(kernels, dtype).codes != kernels.codes:
        raise ConfigError(
            f"the weights of {new.place} cannot replace this engine's: they are stored in other"
            " formats. Start a new engine for it"
        )
    weights = new.weights(dtype, kernels, seed=config.user.seed, device=config.device)
    if isinstance(model, TransformersDecoder):
        assert isinstance(new.config, TransformersConfig)
        loaded = load_model(new.for_transformers(dtype, kernels.codes), new.config, dtype)
        return partial(overwrite_decoder, model, loaded, weights, new.config)
    return partial(_overwrite, model, weights, new.config)


def _overwrite(
    model: Decoder, weights: Iterable[tuple[str, Tensor | Parts]], config: DecoderConfig
) -> None:
    assert isinstance(config, ModelConfig)
    model.overwrite(weights)
    model.config = config


def reload_rank(parts: EngineParts, group: RankGroup, source: str) -> None:
    """Replace the weights of a rank above 0, as rank 0 does at the same time."""
    with open_replacement(source, parts.model.config, parts.config.user) as new:
        overwriting(parts.model, new, parts.config)()
    agree_on_weights(group, parts.model)


def check_replaceable(
    name: str, old: DecoderConfig, new: DecoderConfig, config: EngineConfig
) -> None:
    """Raise `ConfigError` for the first field that rules out a weights-only reload."""
    ignored = {"bos_token_id", "eos_token_ids"}  # no prepared step contains them
    if config.dtype != "auto":
        ignored.add("torch_dtype")
    if isinstance(old, TransformersConfig):
        assert isinstance(new, TransformersConfig)
        before, after = old.constants(), new.constants()
    else:
        before, after = _flat(old), _flat(new)
        if config.max_model_len is not None and config.max_model_len <= new.longest_context:
            ignored.add("max_position_embeddings")
    for field in {**before, **after}:
        if before.get(field) != after.get(field) and field not in ignored:
            raise ConfigError(
                f"the weights of {bounded_text(name)} cannot replace this engine's:"
                f" {config_json_name(field)} is {bounded_repr(after.get(field))}, and the steps"
                f" were prepared for {bounded_repr(before.get(field))}. Start a new engine for it"
            )


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a dataclass and of the dataclasses in it, by name with dots."""
    found: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= _flat(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


_OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
"""Messages of torch's CPU allocator, the operating system and the C++ library."""


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
    except (MemoryError, RuntimeError, OSError) as error:
        # torch has no error type for failures of its CPU allocator.
        known = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
        if not known and not any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        raise MemoryBudgetError(
            f"the start of the engine ran out of memory: {brief(error)}. Lower the memory budget "
            "(memory_fraction, memory_bytes, memory_tokens or num_blocks), max_num_seqs or "
            "prefill_chunk, or raise the limit of the process (RLIMIT_AS, control group)"
        ) from error


def start(source: str | Path, config: EngineConfig, *, progress: bool) -> EngineParts:
    """Make the parts of an engine; see `Engine.from_pretrained` for what it raises."""
    began = time.perf_counter()
    if config.structured_output:
        check_installed()
    with _within_memory():
        found, resolved = resolved_source(source, config)
    if config.tensor_parallel == 1:
        return start_parts(found, resolved, began=began, progress=progress)
    check_can_split(found, resolved)
    group = spawn_group(found, resolved)
    with ended_by_failures(group):
        found, resolved = of_rank(found, resolved, group)
        return start_parts(found, resolved, group, began=began, progress=progress)


def resolved_source(source: str | Path, config: EngineConfig) -> tuple[Source, ResolvedConfig]:
    """Return the model, and the configuration of its engine on this machine."""
    found = resolve_source(source, tied=config.tie_word_embeddings, model_impl=config.model_impl)
    resolved = ResolvedConfig.resolve(config, found.config)
    if (given := resolved.speculation) is not None and given.method == "auto":
        speculation = given.for_checkpoint(has_mtp(found))
        logger.info("speculation: auto is %s", speculation.method)
        resolved = dataclasses.replace(resolved, speculation=speculation)
    if isinstance(found.config, TransformersConfig):
        found.config.check_length(resolved.max_model_len)
    return found, resolved


@_within_memory()
def start_parts(
    found: Source,
    resolved: ResolvedConfig,
    group: RankGroup | None = None,
    *,
    began: float,
    progress: bool,
) -> EngineParts:
    """Make the parts of an engine, or of one rank of a group: those that all ranks make."""
    (hits, misses), config = _code_cache(), resolved.user
    groups = group_layers(plan_of(found.config).states)
    ranks = 1 if group is None else group.ranks
    found_drafter = find_engine_drafter(found, resolved, groups)

    def planned(kernels: Kernels, memory: DeviceMemory) -> MemoryPlan:
        return plan_engine(found.config, resolved, kernels, groups, memory, found_drafter)

    with ExitStack() as open_files:
        opened = open_source(found, open_files, config.chat_template)
        # What does not fit is refused before weights are read, and before kernels are built and
        # tested.
        expected = opened.kept_codes(planned_kernels(found.config, resolved), resolved.dtype)
        found_drafter = _with_codes(found_drafter, expected, resolved.dtype)
        memory = DeviceMemory.of(resolved.device).of_rank(ranks)
        planned(expected, memory)
        if config.tie_word_embeddings is None:
            opened.check_head()
        phases: list[Phase] = []
        log = partial(logged_phase, phases, device=resolved.device)
        with log("kernels"):
            kernels = checked_kernels(found.config, resolved, group, expected)
        if (kernels.pack_parts, kernels.store_parts) != (expected.pack_parts, expected.store_parts):
            # Others took the place of what failed, and may not multiply by codes.
            kernels = opened.kept_codes(kernels, resolved.dtype)
            found_drafter = _with_codes(found_drafter, kernels, resolved.dtype)
        if config.activation_dtype == "int8":
            kernels = int8_input_kernels(kernels)
        # Kernels hold some of it.
        memory = DeviceMemory.of(resolved.device).of_rank(ranks)
        plan_with = partial(planned, kernels)
        plan = plan_with(memory) if group is None else agree_on_plan(group, memory, plan_with)
        logger.info("memory plan: %s", plan.summary())
        logger.debug("memory plan\n%s", plan.format())
        # No sequence outgrows the cache: block tables and reads need not be wider.
        resolved = resolved.fit_to_cache(
            max_model_len=plan.longest_request, max_batch_tokens=plan.max_batch_tokens
        )
        with log("load"), ranges.span(ranges.LOAD, plan.terms["weights"]):
            model = _load(opened, resolved, kernels, groups, progress=progress)
            drafter = None
            if found_drafter is not None:
                assert isinstance(model, Decoder), "others were refused"
                drafter = load_drafter(
                    *(found_drafter.config, model, model.kernels, found_drafter.layers),
                    seed=config.seed,
                    progress=progress,
                )
    if group is not None:
        agree_on_weights(group, model)
    with log("cache"):
        layout = config.block_size, resolved.dtype, resolved.device, resolved.storage
        arena = Arena(groups, plan.num_blocks, *layout)
        drafting = None
        if found_drafter is not None and drafter is not None:
            own = Arena([found_drafter.layers], plan.num_blocks, *layout)
            own.tensor.zero_()  # what the drafter has not computed reads as zeros
            own_host = HostArena(own, plan.host_blocks) if plan.host_blocks else None
            drafting = DrafterCache(drafter, own, own_host, found_drafter.layers.index)
    host = None
    if plan.host_blocks:
        with log("host_cache"):
            host = HostArena(arena, plan.host_blocks)
    state_plan, states = StatePlan.of(plan_of(found.config), resolved), None
    if state_plan is not None:
        with log("row_state"):
            states = state_plan.memory(resolved)
    with log("static_buffers"):
        runner = Runner(model, resolved, arena, groups, host, group, drafting, states)
    compiled_kernels = None
    if resolved.device.type == "cuda" and resolved.mode != "eager" and find_spec("triton"):
        with log("compile_kernels"):
            compiled_kernels = runner.compile_kernels(progress=progress)
    with log("prepare"):
        captured = CapturePeaks(resolved.device) if resolved.mode == "graph" else None

        def prepared(done: int, total: int, key: StepKey) -> None:
            report(done, total)
            if captured is not None:
                captured.prepared(done, total, key)

        compiles = resolved.compiled and (model.stack is None or kernels.sampler == "torch")
        with (
            runner.own_threads,
            progress_bar("preparing steps", shown=progress) as report,
            compile_settings() if compiles else nullcontext(),
        ):
            runner.library.prepare(prepared)
    if group is not None:
        group.exchange(None)
    step_memory = StepMemory({})
    if group is None or group.rank == 0:  # the other ranks run the same steps as followers
        with log("measure"):
            step_memory = measure_steps(runner, model, captured)
    all_hits, all_misses = _code_cache()
    parts = EngineParts(
        resolved,
        model,
        opened.tokenizer,
        opened.defaults_for(config.generation_config),
        groups,
        plan,
        runner,
        step_memory,
        tuple(phases),
        time.perf_counter() - began,
        {"hits": all_hits - hits, "misses": all_misses - misses},
        sum(math.prod(parameter.shape) for parameter in plan_of(found.config).parameters()),
        compiled_kernels,
    )
    if group is None or group.rank == 0:
        logger.info("started %s", parts.describe())
    return parts


def make_loop(parts: EngineParts) -> StepLoop:
    """Return the loop over the parts of an engine, with an empty cache and no requests.

    Steps are run and timed for a latency budget, and for speculation.
    """
    times = measured_times(parts.runner, parts.groups, parts.config)
    config = parts.config
    step_budget, speculator = None, None
    if times is not None and config.user.max_itl_ms is not None:
        step_budget = StepBudget(config.user.max_itl_ms, times)
    if times is not None and config.speculation is not None:
        kind = DrafterSpeculator if config.speculation.uses_drafter else LookupSpeculator
        speculator = kind(config.speculation, times, is_async_device=config.is_async_device)
    states = StatePlan.of(plan_of(parts.model.config), config)
    cache = KVCache(
        parts.groups,
        parts.plan.num_blocks,
        config.user.block_size,
        chunk=config.prefill_chunk,
        host_blocks=parts.plan.host_blocks,
        row_pools=None if states is None else states.pools,
    )
    scheduler = Scheduler(
        cache,
        max_num_seqs=config.user.max_num_seqs,
        max_batch_tokens=parts.plan.max_batch_tokens,
        prefill_chunk=config.prefill_chunk,
        max_prefill_rows=config.max_prefill_rows,
        step_budget=step_budget,
        rope_lengths=rope_lengths(parts.model.config),
    )
    if parts.runner.group is not None:
        parts.runner.limit_waits(config.user.rank_timeout)
    return StepLoop(
        scheduler,
        parts.runner,
        in_flight=int(config.is_async_device),
        times=times,
        step_budget=step_budget,
        speculator=speculator,
    )


def _load(
    source: OpenedSource,
    config: ResolvedConfig,
    kernels: Kernels,
    groups: tuple[LayerGroup, ...],
    *,
    progress: bool,
) -> DecoderModel:
    layout = kernels, config.dtype, config.device, groups, config.storage
    sizes, seed = (config.dtype, kernels), config.user.seed
    weights = source.weights(*sizes, seed=seed, device=config.device, progress=progress)
    if not isinstance(source.config, ModelConfig):
        assert isinstance(source.config, TransformersConfig)
        others = source.for_transformers(config.dtype, kernels.codes)
        loaded = load_decoder(others, source.config, *layout, weights)
        if not config.compiled:  # compiled code has one scope
            add_scopes(loaded.model, source.config.probe)
        return loaded
    model = Decoder(source.config, *layout)
    model.store(weights)
    return model.eval()


_LOOK_SECONDS = 0.5


def main(arguments: list[str]) -> None:
    """Join the group of a parent process, as a rank above 0, and follow it.

    `arguments` are the descriptors of the link to rank 0, rank and number of ranks. It ends when
    rank 0 closes its engine, or with status 1 when the group fails or rank 0 has died.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: rank 0 decides
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    connection, pipe, rank, ranks = map(int, arguments)
    group = RankGroup(rank, ranks, [Link(Connection(connection), pipe)])
    try:
        found, resolved = of_rank(*resolved_source(*group.exchange(None)[0]), group)
        if resolved.device.type == "cpu":
            torch.set_num_threads(resolved.threads)  # this process does nothing else
        parts = start_parts(found, resolved, group, began=time.perf_counter(), progress=False)
        try:
            follow(parts.runner, partial(reload_rank, parts, group))
        finally:
            parts.runner.close()
    except BaseException as error:
        if not isinstance(error, RankError):
            traceback.print_exc()
        group.report(error)
        _exit(GROUP_ENDED)
    _exit(0)


def _end_with(parent: int) -> None:
    """End this process once its parent, rank 0, has ended, also while an operation waits."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    _exit(GROUP_ENDED)


def _exit(status: int) -> None:
    """End this process at once, whatever its threads and the device do."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the pipe is closed: rank 0 has died
        pass
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
