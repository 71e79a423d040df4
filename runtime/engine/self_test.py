"""The self-test of an engine's kernels at start, before a weight is loaded.

Steps of a small sample of the model (`sample_steps.py`) run with the native kernels and with plain
torch, over the same random weights, state and cache. On a GPU each operation is compared alone
(`gpu_self_test.py`), and a plain version replaces each one that fails. The C++ operators of a CPU
are compared by whole steps and samplers: plain torch replaces all of them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

import torch

from ..errors import KernelSelfTestError
from ..execution.sample_steps import SampleCase, SampleSteps, sample_cases, sample_config
from ..execution.step_functions import on_device
from ..kernels import Kernels, paged_attention, reference_paged_attention, select_kernels
from ..kernels.result_check import (
    Fallback,
    disagreement,
    tolerance,
    warn_of_fallbacks,
)
from ..models.config import ModelConfig
from ..resolved_config import ResolvedConfig
from .gpu_self_test import check_gpu
from .sampler_self_test import sampler_failure

__all__ = ["check_kernels"]

logger = logging.getLogger("stepgraph.runtime")

_CPU_VOCABULARY = 2_029
"""Tokens of a sample on a CPU: no multiple of the blocks of packed weights and samplers."""
_CPU_ROWS, _CPU_TOKENS, _CPU_LONGEST = (1, 16), 32, 150
"""Rows and tokens of the steps of a sample on a CPU, and tokens of its longest row."""
_CPU_ATTENTION = "C++ attention"
_STEP_TOLERANCES = 4
"""The tolerance of a step, in tolerances of an operation."""


def check_kernels(
    kernels: Kernels,
    model: ModelConfig,
    config: ResolvedConfig,
    *,
    required: bool,
    seed: int | None = None,
) -> Kernels:
    """Return `kernels`, with plain versions of the operations that fail.

    Args:
        kernels: from `select_kernels`; without native operations they are not tested.
        model: of the engine.
        config: of the engine.
        required: whether every native kernel must pass: with `kernels="native"`, with
            `batch_invariant`, and on the ranks of a tensor-parallel group on a CPU.
        seed: of the samples; the same on all ranks of a group, which run the same steps. None: a
            new one.

    Raises:
        KernelSelfTestError: a required kernel fails, or a kernel left the device unusable.
    """
    on_cuda, layers = config.device.type == "cuda", kernels.make_decode_step is not None
    # Without Triton the operation is plain torch on CUDA.
    plain = on_cuda and not layers and kernels.attention is paged_attention
    if plain or kernels.attention is reference_paged_attention:
        return kernels
    started = time.perf_counter()
    if seed is None:
        seed = int(torch.randint(1 << 30, (), generator=_fresh()))
    with torch.no_grad(), on_device(config.device):
        check = check_gpu if on_cuda or layers else _check_cpu
        checked = check(kernels, model, config, seed)
    if on_cuda:
        torch.cuda.empty_cache()  # the memory plan counts what the device has free
    logger.info("self-test of native kernels: %.2f s", time.perf_counter() - started)
    if required and checked.fallbacks:
        raise KernelSelfTestError(_refusal(checked.fallbacks, config))
    warn_of_fallbacks(checked.fallbacks)
    return checked


def _fresh() -> torch.Generator:
    """Return a generator with a new seed; torch's global generators are not used."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _refusal(fallbacks: tuple[Fallback, ...], config: ResolvedConfig) -> str:
    failed = "; ".join(f"{f.name} ({f.shape}): {f.error}" for f in fallbacks)
    if config.batch_invariant:
        return (
            f"batch_invariant=True needs the native operations, and {len(fallbacks)} of them failed"
            f" their self-test: {failed}. Use batch_invariant=False"
        )
    return (
        f"{len(fallbacks)} of the native operations failed their self-test: {failed}. Use"
        " kernels='torch', or kernels='auto', which replaces them by plain PyTorch if"
        " tensor_parallel is 1"
    )


def _check_cpu(kernels: Kernels, model: ModelConfig, config: ResolvedConfig, seed: int) -> Kernels:
    reference = dataclasses.replace(
        select_kernels(config.device, "eager", config.dtype, config.weights),
        collectives=kernels.collectives,
    )
    # Plain layers around the attention operator, and plain attention where that fails too.
    around = dataclasses.replace(
        reference,
        attention=kernels.attention,
        bounded_by_length=kernels.bounded_by_length,
        masks=kernels.masks,
        library=kernels.library,
    )
    cut = sample_config(model, layers=1, vocabulary=_CPU_VOCABULARY)
    generator = torch.Generator().manual_seed(seed)
    cases = sample_cases(
        config, kernels, generator, row_classes=_CPU_ROWS, tokens=_CPU_TOKENS, longest=_CPU_LONGEST
    )
    plain = SampleSteps(cut, config, reference, cases, seed)
    size = config.block_size
    expected = [_step_results(plain, case, case.read_blocks(size)) for case in cases]
    fallbacks: list[Fallback] = []
    for native in (kernels, around):
        steps = SampleSteps(cut, config, native, cases, seed)
        failure = _step_failure(steps, cases, expected, config)
        steps.close()
        if failure is None and native.sampler == "cpu":
            failure = sampler_failure("cpu", cut.vocab_size, config, generator)
        if failure is None:
            return dataclasses.replace(native, fallbacks=tuple(fallbacks)) if fallbacks else native
        fallbacks.append(failure)
        if failure.name == _CPU_ATTENTION:
            break
    return dataclasses.replace(reference, library=kernels.library, fallbacks=tuple(fallbacks))


def _step_results(
    steps: SampleSteps, case: SampleCase, read_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the rows in use, and the contents of the cache after the step."""
    steps.prepare(case)
    output = steps.functions.bind(dataclasses.replace(case.key, read_blocks=read_blocks))()
    return output.logits[: len(case.chunks)], steps.stored()


def _step_failure(
    steps: SampleSteps,
    cases: Sequence[SampleCase],
    expected: Sequence[tuple[torch.Tensor, torch.Tensor]],
    config: ResolvedConfig,
) -> Fallback | None:
    limit = _STEP_TOLERANCES * tolerance(config.dtype, config.storage)
    for case, (logits, stored) in zip(cases, expected, strict=True):
        try:
            found = _step_results(steps, case, case.key.read_blocks)
        except Exception as failure:  # from an operator
            error: str | None = f"{type(failure).__name__}: {failure}"
        else:
            error = disagreement(found[0], logits, limit)
            if error is None and (error := disagreement(found[1], stored, limit)):
                error = f"cache: {error}"
        if error is not None:
            name = "C++ decoder stack" if steps.model.stack is not None else _CPU_ATTENTION
            tokens = f"{case.key.phase} step of {case.key.size} tokens"
            return Fallback(name, f"{tokens}, {str(config.dtype).removeprefix('torch.')}", error)
    return None
