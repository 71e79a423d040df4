"""Memory of engines in a benchmark: equal shares of a device, and blocks for given requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...cache.memory.device_memory import DeviceMemory
from ...cache.memory.handler import MemoryBudgetError, MemoryPlan
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
    """Return the configurations of engines that share the device's memory equally.

    Each share is in bytes of what is free before the first engine starts: a fraction would apply
    to what the others left. The ranks of one on a CPU divide its share. Plans are made without
    reading a weight.

    Args:
        model: as `Engine.from_pretrained`.
        configs: of the engines, on `device`.
        device: of the engines.
        fraction: of the free memory, for all of them together; None: the default of one engine.

    Raises:
        MemoryBudgetError: they do not fit together. Names the one that does not fit its share.
    """
    if fraction is None:
        fraction = DEFAULT_MEMORY_FRACTION[device.type]
    memory = DeviceMemory.of(device)
    # At least 1 byte: 0 is not a valid budget, and the plan reports that a byte is too few.
    share = max(1, int(fraction * memory.available) // len(configs))
    ranks = [config.tensor_parallel if memory.shared_with_os else 1 for config in configs]
    shared = [
        dataclasses.replace(config, memory_fraction=None, memory_bytes=max(1, share // n))
        for config, n in zip(configs, ranks, strict=True)
    ]
    plans = [(_plan(model, config, memory), n) for config, n in zip(shared, ranks, strict=True)]
    total = sum(n * plan.total for plan, n in plans)
    host = sum(n * plan.host_total for plan, n in plans if not plan.host_shared)
    if total > memory.available or host > memory.host_available:
        raise MemoryBudgetError(
            f"together they take {total} bytes of {memory.available} on the device, and {host} of"
            f" {memory.host_available} on the host"
        )
    return shared


def _plan(model: str, config: EngineConfig, memory: DeviceMemory) -> MemoryPlan:
    source = resolve_source(model, config_only=True, model_impl=config.model_impl).config
    resolved = ResolvedConfig.resolve(config, source)
    kernels = select_kernels(
        resolved.device, resolved.mode, resolved.dtype, resolved.weights, resolved.kernels
    )
    try:
        return plan_engine(source, resolved, kernels, layer_groups(source, resolved), memory)
    except ConfigError as error:  # the cache of this share cannot hold the longest sequence
        raise MemoryBudgetError(str(error)) from error
