"""The collectives of a rank, for its device."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..distributed.rank_group import START_PATIENCE, RankGroup
from ..distributed.shared_memory_collectives import SharedMemoryCollectives
from ..errors import ConfigError
from ..kernels import Kernels
from ..kernels.ops.collectives import Collectives
from ..models.config import ModelConfig
from ..resolved_config import ResolvedConfig

__all__ = ["serve_collectives", "with_collectives"]

_START_SECONDS = 10 * START_PATIENCE
"""An operation waits so long while engines start: compilers of ranks take different times."""


def with_collectives(
    kernels: Kernels, group: RankGroup, model: ModelConfig, config: ResolvedConfig
) -> Kernels:
    """Return the kernels with the collectives of this rank; all ranks call it.

    Raises:
        KernelBuildError: the C++ operators that they need on a CPU cannot be built.
        ConfigError: the device has no collectives.
    """
    if config.device.type == "cuda":
        raise ConfigError(
            f"tensor_parallel={group.ranks} runs on CPUs only: use device='cpu', or"
            " tensor_parallel=1"
        )
    nbytes = SharedMemoryCollectives.bytes_needed(
        group.ranks,
        config.prefill_chunk,
        model.hidden_size,
        config.max_num_seqs,
        model.vocab_size,
        config.dtype,
    )
    shared = SharedMemoryCollectives(
        group.shared_memory(nbytes),
        group.rank,
        group.ranks,
        abort=group.segment.abort_word,
        timeout_seconds=_START_SECONDS,
    )
    return dataclasses.replace(kernels, collectives=shared)


def serve_collectives(collectives: Collectives | None, group: RankGroup, seconds: float) -> None:
    """Bound the waits of operations, once engines serve, and end them with the group."""
    own: Any = collectives  # what the protocol does not have
    if hasattr(own, "timeout_seconds"):
        own.timeout_seconds = seconds
    if hasattr(own, "abort") and group.watch.on_abort is None:
        group.watch.on_abort = own.abort  # kernels do not see the abort word of the group
