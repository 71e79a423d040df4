"""Engines that are started side by side: whether they fit, and how much memory each may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...cache.memory.device_memory import DeviceMemory
from ...cache.memory.handler import MemoryBudgetError
from ...cache.memory.memory_plan import MemoryPlan
from ..config import DEFAULT_MEMORY_FRACTION, EngineConfig
from ..engine.startup import layer_groups, plan_engine
from ..errors import ConfigError
from ..kernels import select_kernels
from ..loading.loader import resolve_source
from ..resolved_config import ResolvedConfig

__all__ = ["share_memory"]


def share_memory(
    model: str, configs: Sequence[EngineConfig], device: torch.device, fraction: float | None
) -> list[EngineConfig]:
    """Return the configurations of engines that share the device's memory in equal parts.

    The parts are bytes of what is free before the first of them is started: a fraction would be one
    of what the others left. Plans are made without reading a weight.

    Args:
        model: as `Engine.from_pretrained`.
        configs: of the engines, on `device`.
        device: what they are started on.
        fraction: of the free memory, for all of them together; None: what one engine takes.

    Raises:
        MemoryBudgetError: they do not fit together. Says which one does not fit its part.
    """
    if fraction is None:
        fraction = DEFAULT_MEMORY_FRACTION[device.type]
    memory = DeviceMemory.of(device)
    # Never 0, which is no amount of memory; a byte is too few as well, and the plan says so.
    part = max(1, int(fraction * memory.available) // len(configs))
    shared = [
        dataclasses.replace(config, memory_fraction=None, memory_bytes=part) for config in configs
    ]
    total = host = 0
    for config in shared:
        plan = _plan(model, config, memory)
        total += plan.total
        host += 0 if plan.host_shared else plan.host_total
    if total > memory.available or host > memory.host_available:
        raise MemoryBudgetError(
            f"together they take {total} bytes of {memory.available} on the device, and {host} of"
            f" {memory.host_available} on the host"
        )
    return shared


def _plan(model: str, config: EngineConfig, memory: DeviceMemory) -> MemoryPlan:
    source = resolve_source(model, config_only=True).config
    resolved = ResolvedConfig.resolve(config, source)
    kernels = select_kernels(
        resolved.device, resolved.mode, resolved.dtype, resolved.weights, resolved.kernels
    )
    try:
        return plan_engine(source, resolved, kernels, layer_groups(source, resolved), memory)
    except ConfigError as error:  # the cache of this part holds no sequence that is long enough
        raise MemoryBudgetError(str(error)) from error
