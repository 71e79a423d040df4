"""The self-test of an engine's kernels at start, before a weight is loaded.

Steps of a small sample of the model (`sample_steps.py`) run with the patterns of a table, fastest
first, over the same random weights, state and cache. The first pattern whose logits and cache agree
with plain torch is used; plain torch takes the place of all that fail. The sampler, and on a GPU
dependent launch, are tested alone.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import NamedTuple

import torch

from ...cache.blocks import NULL_BLOCK
from ...graphs.steps import Capture, CudaGraphCapturer
from ..config import MAX_ROWS
from ..errors import KernelSelfTestError
from ..execution.sample_steps import SampleCase, SampleSteps, sample_config
from ..execution.step_functions import on_device
from ..execution.step_key import StepKey, StepOutput, StepSizes
from ..kernels import (
    Kernels,
    opaque_experts,
    paged_attention,
    reference_paged_attention,
    select_kernels,
)
from ..kernels.choice import SamplerName
from ..kernels.ops.batch import Feedback
from ..kernels.result_check import (
    DEPENDENT_LAUNCH,
    Fallback,
    brief,
    disagreement,
    require_usable_device,
    tolerance,
    warn_of_fallbacks,
)
from ..kernels.triton.dependent import dependent_launch
from ..kernels.triton.filled_memory import FilledMemory, poison
from ..models.config import ModelConfig
from ..models.resolved_config import ResolvedConfig
from ..sampling.samplers import SAMPLERS
from ..sampling.sampling_state import SamplingState
from ..sampling_params import SamplingParams

logger = logging.getLogger("stepgraph.runtime")


class _Sample(NamedTuple):
    """What is tested on a kind of device."""

    layers: str  # name of the pattern for all layers
    attention: str  # name of the pattern for attention, with plain layers around it
    num_layers: int
    vocabulary: int  # tokens at most
    rows: tuple[int, ...]  # classes of rows that kernels are compiled for, by their limits
    tokens: int  # of a prefill step at most
    longest: int  # tokens of the longest row


_CPU = _Sample(
    layers="C++ decoder stack",
    attention="C++ attention",
    num_layers=1,
    vocabulary=2_029,  # not a multiple of the blocks of packed weights and samplers
    rows=(1, 16),
    tokens=32,
    longest=150,
)
_GPU = _Sample(
    layers="Triton layers",
    attention="Triton attention",
    num_layers=2,  # in some families the second one adds the residual of the first
    vocabulary=1 << 30,
    rows=(1, 2, 4, 16, 32, MAX_ROWS),
    tokens=512,
    longest=1000,  # several splits
)
_SHORT = 100
"""Maximum cached tokens of each row except the longest."""
_SAMPLES = 2
"""A sample that fails is followed by another one, which decides: where a norm follows a sum whose
terms cancel, one in a hundred of correct kernels has rounding errors beyond the tolerance."""
_STEP_TOLERANCES = 4
"""The tolerance of a step, in tolerances of an operation."""
_DEPENDENT_REPLAYS = 20
"""Replays with dependent launch: a race does not show in every replay."""


def check_kernels(
    kernels: Kernels,
    model: ModelConfig,
    config: ResolvedConfig,
    *,
    required: bool,
    seed: int | None = None,
) -> Kernels:
    """Return `kernels`, or those that take the place of what fails.

    Kernels without native operations are not tested. With `kernels="native"`, `batch_invariant` or
    a tensor-parallel group they are `required`. `seed` of the samples is the same on all ranks of a
    group, which run the same steps. Raises `KernelSelfTestError` if a required kernel fails, or a
    kernel left the device unusable.
    """
    on_cuda, layers = config.device.type == "cuda", kernels.make_decode_step is not None
    # Without Triton the operation is plain torch on CUDA.
    plain = on_cuda and not layers and kernels.attention is paged_attention
    if plain or kernels.attention is reference_paged_attention:
        return kernels
    started = time.perf_counter()
    # torch's global generators are not used. Ranks run the same samples, so none repeats one.
    drawn = [random.SystemRandom().randrange(1 << 30) for _ in range(_SAMPLES)]
    sample = _GPU if on_cuda or kernels.name == "triton" else _CPU
    failed: list[Fallback] = []

    def fails(fallback: Fallback | None) -> bool:
        if fallback is not None:
            failed.append(fallback)
        return fallback is not None

    with torch.no_grad(), on_device(config.device):
        for own in drawn if seed is None else [seed]:
            failed.clear()
            passed = _passing(sample, kernels, model, config, own, fails)
            if not failed:
                break
    if failed and required:
        raise KernelSelfTestError(_refusal(failed, config))
    if on_cuda:
        torch.cuda.empty_cache()  # the memory plan counts what the device has free
    logger.info("self-test of native kernels: %.2f s", time.perf_counter() - started)
    warn_of_fallbacks(failed)
    return dataclasses.replace(passed, fallbacks=tuple(failed)) if failed else passed


def _passing(
    sample: _Sample,
    kernels: Kernels,
    model: ModelConfig,
    config: ResolvedConfig,
    seed: int,
    fails: Callable[[Fallback | None], bool],
) -> Kernels:
    """Return the first pattern that passes, with the sampler and the launches that pass."""
    device, on_cuda = config.device, config.device.type == "cuda"
    reference = dataclasses.replace(
        select_kernels(device, "eager", config.dtype, config.weights),
        collectives=kernels.collectives,
        codes=kernels.codes,
        formats=kernels.formats,
    )
    if on_cuda:  # torch.compile does not look into this operation
        reference = dataclasses.replace(reference, experts=opaque_experts)
    around = dataclasses.replace(
        reference.with_state_of(kernels),
        library=kernels.library,
        dependent_launch=kernels.dependent_launch,
    )
    patterns = [(sample.layers, kernels), (sample.attention, around)]
    if kernels.make_stack is None:
        patterns = [(sample.attention, kernels)]
    cut = sample_config(model, layers=sample.num_layers, vocabulary=sample.vocabulary)
    generator = torch.Generator().manual_seed(seed)
    cases = _sample_cases(sample, config, kernels, generator)
    with closing(SampleSteps(cut, config, reference, cases, seed)) as plain:
        size = config.user.block_size
        expected = [_step_results(plain, case, case.read_blocks(size)) for case in cases]
    for name, passed in patterns:
        with closing(SampleSteps(cut, config, passed, cases, seed)) as steps:
            if on_cuda:  # in parallel; failures show in the steps
                from ..kernels.triton.precompile import compile_kernels

                compile_kernels([(str(case.key), steps.functions.bind(case.key)) for case in cases])
            if not fails(_step_failure(name, steps, cases, expected, config)):
                break
    else:
        passed = dataclasses.replace(reference, library=kernels.library)
        if on_cuda:
            passed = dataclasses.replace(passed, attention=paged_attention)
    if passed.sampler != "torch" and fails(
        sampler_failure(passed.sampler, cut.vocab_size, config, generator)
    ):
        passed = dataclasses.replace(passed, sampler="torch")
    depends = on_cuda and config.mode == "graph" and passed.dependent_launch
    if depends and torch.cuda.get_device_capability(device) >= (9, 0):
        with closing(SampleSteps(cut, config, passed, cases, seed)) as steps:
            if fails(dependent_launch_failure(steps, cases, CudaGraphCapturer(device))):
                passed = dataclasses.replace(passed, dependent_launch=False)
    return passed


def _sample_cases(
    sample: _Sample, config: ResolvedConfig, kernels: Kernels, generator: torch.Generator
) -> list[SampleCase]:
    """Return the steps to run: decode steps of the largest bucket of each class of rows (none of
    larger buckets), and prefill steps of the smallest and the largest bucket of a sample."""
    sizes = StepSizes.choose(config, kernels)
    width, limit = sizes.read_blocks.largest, config.max_model_len
    fitting = (next((c for c in sample.rows if rows <= c), None) for rows in sizes.rows)
    by_class = dict(zip(fitting, sizes.rows, strict=True))
    by_class.pop(None, None)

    def below(bound: int) -> int:
        return int(torch.randint(max(1, min(bound, limit)), (), generator=generator))

    cases = []
    for rows in by_class.values():
        used = rows - 1 if rows > 4 else rows
        starts = [min(limit, sample.longest) - 1, 0, *(below(_SHORT) for _ in range(used))][:used]
        chunks = tuple((start, 1) for start in starts)
        cases.append(SampleCase(StepKey("decode", rows, width, False), chunks))
    most_rows, most_tokens = config.max_prefill_rows, min(sample.tokens, config.prefill_chunk)
    prefills = [sizes.tokens.sizes[0], *(size for size in sizes.tokens if size <= most_tokens)]
    for size in dict.fromkeys((prefills[0], prefills[-1])):
        used = size - size // 8
        counts = [used] if most_rows == 1 or size < 8 else [used // 2, used - used // 2]
        counts = [min(count, limit) for count in counts]
        starts = [below(min(_SHORT, limit - count + 1)) for count in counts]
        chunks = tuple(zip(starts, counts, strict=True))
        cases.append(SampleCase(StepKey("prefill", size, width, False), chunks))
    return cases


def _refusal(fallbacks: Sequence[Fallback], config: ResolvedConfig) -> str:
    failed = "; ".join(f"{f.name} ({f.shape}): {f.error}" for f in fallbacks)
    if config.user.batch_invariant:
        return (
            "batch_invariant=True needs the native operations, which failed their self-test:"
            f" {failed}. Use batch_invariant=False"
        )
    return (
        f"native operations failed their self-test: {failed}. Use kernels='torch', or"
        " kernels='auto', which replaces them by plain PyTorch if tensor_parallel is 1"
    )


def _step_results(
    steps: SampleSteps, case: SampleCase, read_blocks: int
) -> dict[str, torch.Tensor]:
    """Return what a step computes for the rows in use, and what it leaves in the cache."""
    steps.prepare(case)
    output = steps.functions.bind(case.key._replace(read_blocks=read_blocks))()
    return {
        "logits": output.logits[: len(case.chunks)],
        "cache": steps.stored(),
        "positions": steps.state.positions[: steps.state.null_row].clone(),
    }


def _step_failure(
    name: str,
    steps: SampleSteps,
    cases: Sequence[SampleCase],
    expected: Sequence[dict[str, torch.Tensor]],
    config: ResolvedConfig,
) -> Fallback | None:
    """Return how the first step that differs does; memory that it allocates holds NaN first."""
    filled = FilledMemory(poison) if steps.model.kernels.name == "triton" else nullcontext()
    limit = _STEP_TOLERANCES * tolerance(config.dtype, config.storage)
    for case, right in zip(cases, expected, strict=True):
        try:
            with filled:
                found = _step_results(steps, case, case.key.read_blocks)
            errors = {k: disagreement(found[k], right[k], limit) for k in right}
            error = next((f"{name}: {text}" for name, text in errors.items() if text), None)
        except Exception as failure:  # from an operator, a compiler or a device
            require_usable_device(name, config.device, failure)
            error = brief(failure)
        if error is not None:
            shape = f"{_step_name(case)}, {str(config.dtype).removeprefix('torch.')}"
            return Fallback(name, shape, error)
    return None


def _step_name(case: SampleCase) -> str:
    return f"{case.key.phase} step of {case.key.size} tokens"


def dependent_launch_failure(
    steps: SampleSteps, cases: Sequence[SampleCase], capturer: CudaGraphCapturer
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
        blocks = [view[:, :, NULL_BLOCK + 1 :] for view in steps.views]
        compared = [*blocks, *held[1:]]
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
                return Fallback(DEPENDENT_LAUNCH, _step_name(case), brief(failure))
        del replaced
        expected: list[torch.Tensor] = []
        for capture in (captures[0], *[captures[1]] * _DEPENDENT_REPLAYS):
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)
            capture.replay()
            rows = len(case.chunks)
            found = [capture.output.logits[:rows], capture.output.tokens[:rows], *compared]
            # As bytes, so that NaN equals NaN.
            found = [tensor.contiguous().view(torch.uint8).clone() for tensor in found]
            expected = expected or found
            if not all(map(torch.equal, found, expected)):
                error = "a captured step has different results with it"
                return Fallback(DEPENDENT_LAUNCH, _step_name(case), error)
    return None


def sampler_failure(
    name: SamplerName, vocab_size: int, config: ResolvedConfig, generator: torch.Generator
) -> Fallback | None:
    """Compare greedy and random draws of a few rows with the plain sampler's.

    Raises KernelSelfTestError where the sampler left the device unusable.
    """
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=20, logit_bias={3: 4.0}),
        SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=1.3, repetition_penalty=1.2, presence_penalty=0.5),
    )
    title, device = {"cpu": "C++ sampler", "triton": "Triton sampler"}[name], config.device
    rows_B = torch.arange(len(params), device=device)
    positions_B = torch.randint(100, (len(params),), generator=generator).to(device)
    logits_BV = 3 * torch.randn(len(params), vocab_size, generator=generator)
    logits_BV = logits_BV.to(device, config.dtype)
    shape = f"logits {list(logits_BV.shape)} {str(logits_BV.dtype).removeprefix('torch.')}"
    drawn = []
    for sampler in (SAMPLERS[name], SAMPLERS["torch"]):
        state = SamplingState.allocate(len(params), vocab_size, device)
        for row, wanted in enumerate(params):
            parameters = state.row_parameters(
                wanted, seed=row, prompt_ids=[1, 2], output_ids=[2], stop_token_ids=[]
            )
            state.store_row(row, parameters)
        try:
            if sampler.stores:  # as steps draw: with token feedback into row state
                state_2R = torch.zeros(2, len(params) + 1, dtype=torch.int64, device=device)
                feed = Feedback(rows_B, positions_B - 1, *state_2R)
                greedy = sampler.greedy(logits_BV, None, feed)
                full = sampler.full(logits_BV, state, rows_B, feed.positions, None, None, feed)
            else:
                greedy = sampler.greedy(logits_BV)
                full = sampler.full(logits_BV, state, rows_B, positions_B)
            drawn.append((greedy, full, state.token_counts))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as failure:  # a compiler and a device raise anything
            require_usable_device(f"{title} ({shape})", device, failure)
            return Fallback(title, shape, brief(failure))
    (greedy, full, counts), (plain_greedy, plain, plain_counts) = drawn
    error = disagreement(greedy, plain_greedy, 0.0)
    # One draw may be so close to a boundary that the rounding of sums decides it.
    differ = int((full.tokens != plain.tokens).sum())
    if error is None and (differ > 1 or int((counts != plain_counts).sum()) > 2 * differ):
        error = "drawn tokens differ" if differ > 1 else "token counts differ"
    if error is None:
        error = disagreement(full.top_logprobs, plain.top_logprobs, tolerance(torch.float32))
    return None if error is None else Fallback(title, shape, error)
