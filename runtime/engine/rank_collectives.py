"""The collectives of a rank, for its device."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from ..distributed.rank_group import START_PATIENCE, RankGroup
from ..distributed.shared_memory_collectives import SharedMemoryCollectives
from ..errors import KernelSelfTestError
from ..execution.step_parts import on_device
from ..kernels import Kernels
from ..kernels.ops.collectives import Collectives
from ..kernels.result_check import Fallback
from ..kernels.triton.peer_slots import slot_bytes_for
from ..models.config import ModelConfig
from ..models.plan import plan_of
from ..resolved_config import ResolvedConfig
from .collectives_self_test import CollectiveCases

__all__ = ["serve_collectives", "with_collectives"]

_START_SECONDS = 10 * START_PATIENCE
"""An operation waits so long while engines start: compilers of ranks take different times."""

_MEASURED_ROWS = (1, 8, 32)
"""Rows of decode steps whose sums are tested and timed on CUDA; prefill chunks are too."""


def with_collectives(
    kernels: Kernels, group: RankGroup, model: ModelConfig, config: ResolvedConfig
) -> tuple[Kernels, Fallback | None]:
    """Return the kernels with the collectives of this rank; with a fallback where NCCL replaces
    the collective kernels. All ranks call it.

    Raises:
        KernelBuildError: the C++ operators that they need on a CPU cannot be built.
        KernelSelfTestError: no collectives work on these CUDA devices.
    """
    if config.device.type == "cuda":
        return _on_cuda(kernels, group, model, config)
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
    return dataclasses.replace(kernels, collectives=shared), None


def _on_cuda(
    kernels: Kernels, group: RankGroup, model: ModelConfig, config: ResolvedConfig
) -> tuple[Kernels, Fallback | None]:
    from .cuda_collectives import choose_collectives  # imports torch.distributed

    shard = plan_of(model).shard
    assert shard is not None, "ranks have parts of a model"
    cases = CollectiveCases(
        tokens=tuple(sorted({*_MEASURED_ROWS, config.prefill_chunk})),
        hidden_size=model.hidden_size,
        vocab_sizes=shard.vocab_sizes,
        dtype=config.dtype,
        device=config.device,
        seed=group.exchange(time.time_ns() % 2**30)[0],
    )
    slot_bytes = slot_bytes_for(
        group.ranks, config.prefill_chunk, model.hidden_size, model.vocab_size, config.dtype
    )
    ends_by_itself = group.watch.on_abort is not None
    with on_device(config.device):
        chosen = choose_collectives(group, cases, slot_bytes, _START_SECONDS)
        torch.cuda.empty_cache()  # the memory plan counts what the device has free
    if not ends_by_itself:
        group.watch.on_abort = getattr(chosen.collectives, "abort", None)
    fallback = chosen.fallback
    if fallback is not None and config.user.kernels == "native":
        raise KernelSelfTestError(
            f"kernels='native', and NCCL would replace the collective kernels: {fallback.error}."
            " Use kernels='auto'"
        )
    kernels = dataclasses.replace(
        kernels, collectives=chosen.collectives, collectives_report=chosen.report
    )
    return kernels, fallback


def serve_collectives(collectives: Collectives | None, group: RankGroup, seconds: float) -> None:
    """Bound the waits of operations, once engines serve, and end them with the group."""
    own: Any = collectives  # what the protocol does not have
    if hasattr(own, "timeout_seconds"):
        own.timeout_seconds = seconds
    if hasattr(own, "abort") and group.watch.on_abort is None:
        group.watch.on_abort = own.abort  # kernels do not see the abort word of the group
