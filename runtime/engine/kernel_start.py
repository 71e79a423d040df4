"""Selects the kernels of an engine, and replaces those that this machine cannot run."""

from __future__ import annotations

import dataclasses
import time

from ..distributed.rank_group import RankGroup
from ..kernels import (
    Gap,
    Kernels,
    batch_invariant_kernels,
    kernels_for,
    limit_threads,
    native_gaps,
    select_kernels,
)
from ..kernels.result_check import Fallback, warn
from ..models.config import ModelConfig
from ..models.decoder_model import DecoderConfig
from ..models.plan import plan_of
from ..resolved_config import ResolvedConfig
from .rank_collectives import with_collectives
from .self_test import check_kernels

__all__ = ["checked_kernels", "planned_kernels"]

_LAYERS_GAP = "decoder layers"


def planned_kernels(model: DecoderConfig, config: ResolvedConfig) -> Kernels:
    """Return the kernels that an engine will have if their self-tests pass, for a memory plan.

    Nothing is built, loaded or tested.
    """
    kernels = select_kernels(
        config.device, config.mode, config.dtype, config.weights, config.kernels, load=False
    )
    return kernels_for(kernels, plan_of(model))


def checked_kernels(
    model: DecoderConfig, config: ResolvedConfig, group: RankGroup | None
) -> Kernels:
    """Return the kernels of an engine, with plain PyTorch for gaps and failed self-tests."""
    kernels = select_kernels(
        config.device, config.mode, config.dtype, config.weights, config.kernels
    )
    if kernels.library is not None:
        limit_threads(config.threads)
    if config.batch_invariant:
        kernels = batch_invariant_kernels(kernels)
    kernels = dataclasses.replace(kernels, dependent_launch=config.dependent_launch)
    plan = plan_of(model)
    replaced: Fallback | None = None
    fitting = kernels_for(kernels, plan)
    gaps = native_gaps(config.device.type, config.dtype, config.weights, plan)
    if config.kernels == "torch":  # has native attention at most
        gaps = tuple(gap for gap in gaps if gap.name == "attention" and fitting is not kernels)
    if isinstance(model, ModelConfig):
        seed = None
        if group is not None:
            fitting, replaced = with_collectives(fitting, group, model, config)
            group.watch.collectives = fitting.collectives
            seed = group.exchange(time.time_ns() % 2**30)[0]
        # A rank whose C++ operators fail would leave the sums that others wait for.
        on_cpu_ranks = group is not None and config.device.type == "cpu"
        required = config.user.kernels == "native" or config.batch_invariant or on_cpu_ranks
        kernels = check_kernels(fitting, model, config, required=required, seed=seed)
    else:
        kernels, gaps = fitting, tuple(gap for gap in gaps if gap.name != _LAYERS_GAP)
        if config.user.model_impl == "auto":
            gaps = (Gap(_LAYERS_GAP, "no native family, transformers makes them"), *gaps)
    if replaced is not None:
        warn(f"NCCL replaces the collective kernels of {replaced.shape}: {replaced.error}")
    dtype = str(config.dtype).removeprefix("torch.")
    fallbacks = [Fallback(gap.name, f"{model.model_type} in {dtype}", gap.reason) for gap in gaps]
    for fallback in fallbacks:
        warn(
            f"no native {fallback.name} for {fallback.shape}: {fallback.error}."
            " Plain PyTorch runs instead, which is slower"
        )
    if replaced is not None:
        fallbacks.insert(0, replaced)
    return dataclasses.replace(kernels, fallbacks=(*kernels.fallbacks, *fallbacks))
