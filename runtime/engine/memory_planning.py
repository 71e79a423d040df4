"""The memory plan of an engine, from its model and configuration: needs no weights."""

from __future__ import annotations

import dataclasses
import math

from ...cache.memory.device_memory import DeviceMemory
from ...cache.memory.handler import MemoryBudget, MemoryBudgetError, MemoryPlan, plan_memory
from ...cache.memory.memory_plan import format_bytes
from ...cache.spec import LayerGroup, group_layers
from ..errors import ConfigError
from ..kernels import Kernels
from ..memory.footprint import DrafterBytes, model_footprint, weight_bytes
from ..models.decoder import attention_specs
from ..models.decoder_model import DecoderConfig
from ..models.plan import plan_of
from ..resolved_config import ResolvedConfig

__all__ = ["RESERVE_BYTES", "layer_groups", "plan_engine"]

RESERVE_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes to leave free, for workspaces of libraries and fragmentation."""


def layer_groups(model: DecoderConfig, config: ResolvedConfig) -> tuple[LayerGroup, ...]:
    """Return the layer groups of a model for the cache of a configuration."""
    return group_layers(attention_specs(model, config.kv_element_bytes, config.kv_scale_bytes))


def plan_engine(
    model: DecoderConfig,
    config: ResolvedConfig,
    kernels: Kernels,
    groups: tuple[LayerGroup, ...],
    memory: DeviceMemory,
    agreed: tuple[int, int] | None = None,
    drafter: DrafterBytes | None = None,
) -> MemoryPlan:
    """Return the memory plan, which needs no weights and no device but `memory`.

    `agreed` fixes blocks and batch tokens: those of the rank with the least memory. `drafter`: the
    memory of a drafter, if there is one.

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
    budget, fixed, tokens = (
        (user.memory_budget(config.device), user.fixed_blocks, user.max_batch_tokens)
        if agreed is None
        else (MemoryBudget(num_blocks=agreed[0]), None, agreed[1])
    )
    try:
        plan = plan_memory(
            footprint,
            budget,
            available_bytes=memory.available,
            num_blocks=fixed,
            max_batch_tokens=tokens,
            # As many batch tokens as slots; the plan caps them at what a step can use.
            batch_tokens_per_block=config.block_size,
            cap_blocks=footprint.most_blocks if capped else None,
            reserve_bytes=RESERVE_BYTES[config.device.type],
        )
    except MemoryBudgetError as error:
        if error.term != "weights":
            raise
        raise _weights_too_large(error, model, config, kernels, memory) from None
    if not plan.host_shared and plan.host_total > memory.host_available:
        raise MemoryBudgetError(
            f"the host cache of {format_bytes(plan.host_cache)} and the mirrors of static buffers "
            f"({format_bytes(plan.host_buffers)}) exceed the {memory.host_available} free bytes "
            f"({format_bytes(memory.host_available)}) of the host: lower host_cache_bytes",
            term="host_cache",
            field="host_cache_bytes",
            needed_bytes=plan.host_total,
            term_bytes=plan.host_cache,
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


def _weights_too_large(
    error: MemoryBudgetError,
    model: DecoderConfig,
    config: ResolvedConfig,
    kernels: Kernels,
    memory: DeviceMemory,
) -> MemoryBudgetError:
    """Return the error for weights that exceed the memory, with what can make them smaller."""
    assert error.limit_bytes is not None
    assert error.term_bytes is not None
    remedies, field = [], None
    if config.weights == "model":
        smaller = weight_bytes(
            plan_of(model), dataclasses.replace(kernels, weights="int8"), config.dtype
        )
        remedies.append(f"set weight_dtype='int8' ({smaller} bytes of weights)")
        field = "weight_dtype"
    user = config.user
    # Ranks on a CPU share its memory; a budget in bytes is of each rank.
    if config.device.type == "cuda" or user.memory_bytes is not None:
        ranks = user.tensor_parallel * math.ceil(error.term_bytes / error.limit_bytes)
        remedies.append(f"split the model over {ranks} ranks or more with tensor_parallel")
        field = field or "tensor_parallel"
    if error.term_bytes < memory.available and error.limit_bytes < memory.available:
        name = "memory_fraction" if user.memory_bytes is None else "memory_bytes"
        remedies.append(f"raise {name} ({memory.available} bytes are free)")
        field = field or name
    remedies.append("use a smaller model or a device with more memory")
    return MemoryBudgetError(
        f"{error}, in {str(config.dtype).removeprefix('torch.')}"
        f"{'' if config.weights == 'model' else f' with {config.weights} weights'}:"
        f" {'; '.join(remedies)}",
        term=error.term,
        field=field,
        needed_bytes=error.needed_bytes,
        term_bytes=error.term_bytes,
        limit_bytes=error.limit_bytes,
    )
