"""The self-test of the Triton kernels: each operation alone, then dependent launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch

from ...cache.blocks import NULL_BLOCK
from ...graphs.steps import Capture, CudaGraphCapturer, GraphCapturer
from ..config import MAX_ROWS
from ..execution.sample_steps import SampleCase, SampleSteps, sample_cases, sample_config
from ..execution.step_key import StepOutput
from ..kernels import Kernels, paged_attention, reference_paged_attention
from ..kernels.ops.experts_operator import opaque_experts
from ..kernels.result_check import (
    DEPENDENT_LAUNCH,
    Fallback,
    brief,
    require_usable_device,
)
from ..kernels.triton.dependent import dependent_launch
from ..models.config import ModelConfig
from ..resolved_config import ResolvedConfig
from .sampler_self_test import sampler_failure

__all__ = ["check_gpu", "dependent_launch_failure"]

_ATTENTION = frozenset({"decode_attention", "prefill_attention", "paged_attention"})
"""Operations whose plain version reads the whole width of the block tables."""
_GPU_ROWS = (1, 2, 4, 16, 32, MAX_ROWS)
"""Classes of rows that kernels are compiled for."""
_GPU_LONGEST = 1000
"""Tokens of the longest row on a GPU: enough for several splits."""
_DEPENDENT_REPLAYS = 20
"""Replays with dependent launch: a race does not show in every replay."""


def check_gpu(kernels: Kernels, model: ModelConfig, config: ResolvedConfig, seed: int) -> Kernels:
    from ..kernels.triton.backend import gpu_kernels
    from ..kernels.triton.operation_check import OperationChecks
    from ..kernels.triton.operations import Operations

    size = config.block_size
    kernels_of = partial(gpu_kernels, config.weights, batch_invariant=kernels.batch_invariant)
    native = Operations.batch_invariant() if kernels.batch_invariant else Operations.native()
    checks = OperationChecks(config.dtype, config.storage, size, config.device, native)
    both = _with_operations(kernels, kernels_of(checks.operations))
    checked = checks.operations
    both = dataclasses.replace(both, attention=checked.paged_attention, experts=checked.mixture)
    # Two layers: in some families the second one adds the residual of the first.
    cut = sample_config(model, layers=2, vocabulary=model.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    cases = sample_cases(
        config,
        both,
        generator,
        row_classes=_GPU_ROWS,
        tokens=config.prefill_chunk,
        longest=_GPU_LONGEST,
    )
    if config.device.type == "cuda":
        _compile_ahead(SampleSteps(cut, config, kernels, cases, seed), cases)
    steps = SampleSteps(cut, config, both, cases, seed)
    for case in cases:
        checks.read_blocks, checks.tokens = case.read_blocks(size), case.tokens
        steps.prepare(case)
        steps.functions.bind(case.key)()
    steps.close()
    failed = tuple(checks.failures.values())
    mixed = kernels
    if failed:
        mixed = _with_operations(kernels, kernels_of(checks.passed()))
    if "paged_attention" in checks.failures:
        plain = paged_attention if config.device.type == "cuda" else reference_paged_attention
        mixed = dataclasses.replace(mixed, attention=plain)
    if not {"route", "experts"}.isdisjoint(checks.failures):
        mixed = dataclasses.replace(mixed, experts=opaque_experts)
    if not _ATTENTION.isdisjoint(checks.failures):
        mixed = dataclasses.replace(mixed, bounded_by_length=False, masks=1)
    if mixed.sampler == "triton":
        wrong = sampler_failure("triton", model.vocab_size, config, generator)
        if wrong is not None:
            failed = (*failed, wrong)
            mixed = dataclasses.replace(mixed, sampler="torch")
    if config.mode == "graph" and mixed.dependent_launch and _can_depend(config.device):
        if not mixed.bounded_by_length:  # plain attention reads the whole width of the tables
            cases = [case.narrowed(size) for case in cases]
        steps = SampleSteps(cut, config, mixed, cases, seed)
        unequal = dependent_launch_failure(steps, cases, CudaGraphCapturer(config.device))
        steps.close()
        if unequal is not None:
            failed = (*failed, unequal)
            mixed = dataclasses.replace(mixed, dependent_launch=False)
    return dataclasses.replace(mixed, fallbacks=failed) if failed else kernels


def _compile_ahead(steps: SampleSteps, cases: Sequence[SampleCase]) -> None:
    """Compile the kernels of the checks in parallel; failures show in the checks."""
    from ..kernels.triton.precompile import compile_kernels

    compile_kernels([(str(case.key), steps.functions.bind(case.key)) for case in cases])
    steps.close()


def _can_depend(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch_failure(
    steps: SampleSteps, cases: Sequence[SampleCase], capturer: GraphCapturer
) -> Fallback | None:
    """Capture steps with and without dependent launch and replay both from the same state.

    Return the first step whose results, row state or cache differ in a bit or whose capture fails
    with it, or None. The null block is not compared: several padding tokens write to it.

    Raises KernelSelfTestError where the capture left the device unusable.
    """
    captures: list[Capture[StepOutput]] = []
    for case in cases:
        steps.prepare(case)
        held = [steps.arena, *steps.state.tensors().values()]
        compared = [steps.arena[:, :, NULL_BLOCK + 1 :], *held[1:]]
        before = [tensor.clone() for tensor in held]
        step = steps.functions.bind(case.key)
        # Earlier captures are kept until these are made: the pool is freed with its last capture.
        replaced, captures = captures, []
        for enabled in (False, True):
            try:
                with dependent_launch(enabled):
                    capturer.warm_up(step)
                    captures.append(capturer.capture(step))
            except Exception as failure:  # of a compiler, a driver or a device
                if not enabled:
                    raise
                device, remedy = steps.arena.device, "dependent_launch=False"
                require_usable_device("dependent launch", device, failure, remedy)
                return _no_dependent_launch(case, brief(failure))
        del replaced
        expected: list[torch.Tensor] = []
        for capture in (captures[0], *[captures[1]] * _DEPENDENT_REPLAYS):
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)
            capture.replay()
            rows = len(case.chunks)
            found = [capture.output.logits[:rows], capture.output.tokens[:rows], *compared]
            found = [_bits(tensor).clone() for tensor in found]
            expected = expected or found
            if not all(map(torch.equal, found, expected)):
                error = "a captured step has different results with it"
                return _no_dependent_launch(case, error)
    return None


def _no_dependent_launch(case: SampleCase, error: str) -> Fallback:
    shape = f"{case.key.phase} step of {case.key.size} tokens"
    return Fallback(DEPENDENT_LAUNCH, shape, error)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def _with_operations(kernels: Kernels, operations: Kernels) -> Kernels:
    """Return `kernels` with other operations for their native layers, if they have any."""
    if kernels.make_stack is None:
        return kernels
    fused = kernels.make_decode_step is not None  # not where rotations depend on lengths
    return dataclasses.replace(
        kernels,
        linear=operations.linear,
        make_stack=operations.make_stack,
        make_decode_step=operations.make_decode_step if fused else None,
    )
