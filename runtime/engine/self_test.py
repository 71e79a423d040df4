"""The self-test of an engine's kernels at start, before a weight is loaded.

Steps of a small sample of the model (`sample_steps.py`) run with the patterns of a table, fastest
first, over the same random weights, state and cache. The first pattern whose logits and cache agree
with plain torch is used; plain torch takes the place of all that fail. The sampler, and on a GPU
dependent launch, are tested alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...cache.blocks import NULL_BLOCK
from ...graphs.steps import Capture, CudaGraphCapturer, GraphCapturer
from ..config import MAX_ROWS
from ..errors import KernelSelfTestError
from ..execution.sample_steps import SampleCase, SampleSteps, sample_cases, sample_config
from ..execution.step_functions import on_device
from ..execution.step_key import StepOutput
from ..kernels import (
    Kernels,
    opaque_experts,
    paged_attention,
    reference_paged_attention,
    select_kernels,
)
from ..kernels.choice import SamplerName
from ..kernels.ops.batch import Feedback
from ..kernels.ops.token_masks import MASK_BITS, LaneMasks, mask_logits
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
from ..sampling.sample_output import SampleOutput
from ..sampling.samplers import SAMPLERS, Sampler
from ..sampling.sampling_state import SamplingState
from ..sampling_params import SamplingParams

__all__ = ["check_kernels", "dependent_launch_failure", "sampler_failure"]

logger = logging.getLogger("stepgraph.runtime")


class _Sample(NamedTuple):
    """What is tested on a kind of device."""

    layers: str
    """Name of the pattern for all layers."""
    attention: str
    """Name of the pattern for attention, with plain layers around it."""
    num_layers: int
    vocabulary: int
    """Tokens at most."""
    rows: tuple[int, ...]
    """Classes of rows that kernels are compiled for."""
    tokens: int
    """Of a prefill step at most."""
    longest: int
    """Tokens of the longest row."""


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
_STEP_TOLERANCES = 4
"""The tolerance of a step, in tolerances of an operation."""
_DEPENDENT_REPLAYS = 20
"""Replays with dependent launch: a race does not show in every replay."""
_EVERY_OTHER = 0x55555555
"""A word of a mask that allows the even tokens."""


def check_kernels(
    kernels: Kernels,
    model: ModelConfig,
    config: ResolvedConfig,
    *,
    required: bool,
    seed: int | None = None,
) -> Kernels:
    """Return `kernels`, or those that take the place of what fails.

    Args:
        kernels: from `select_kernels`; without native operations they are not tested.
        model: of the engine.
        config: of the engine.
        required: whether every native kernel must pass: with `kernels="native"`, with
            `batch_invariant`, and on the ranks of a tensor-parallel group.
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
    if seed is None:  # torch's global generators are not used
        generator = torch.Generator()
        generator.seed()
        seed = int(torch.randint(1 << 30, (), generator=generator))
    sample = _GPU if on_cuda or kernels.name == "triton" else _CPU
    with torch.no_grad(), on_device(config.device):
        checked = _checked(sample, kernels, model, config, seed, required)
    if on_cuda:
        torch.cuda.empty_cache()  # the memory plan counts what the device has free
    logger.info("self-test of native kernels: %.2f s", time.perf_counter() - started)
    warn_of_fallbacks(checked.fallbacks)
    return checked


def _checked(
    sample: _Sample,
    kernels: Kernels,
    model: ModelConfig,
    config: ResolvedConfig,
    seed: int,
    required: bool,
) -> Kernels:
    device, on_cuda = config.device, config.device.type == "cuda"
    failed: list[Fallback] = []

    def fail(fallback: Fallback) -> None:
        failed.append(fallback)
        if required:
            raise KernelSelfTestError(_refusal(failed, config))

    reference = dataclasses.replace(
        select_kernels(device, "eager", config.dtype, config.weights),
        collectives=kernels.collectives,
    )
    if on_cuda:  # torch.compile does not look into this operation
        reference = dataclasses.replace(reference, experts=opaque_experts)
    cut = sample_config(model, layers=sample.num_layers, vocabulary=sample.vocabulary)
    generator = torch.Generator().manual_seed(seed)
    cases = sample_cases(
        config,
        kernels,
        generator,
        row_classes=sample.rows,
        tokens=min(sample.tokens, config.prefill_chunk),
        longest=sample.longest,
    )
    plain = SampleSteps(cut, config, reference, cases, seed)
    size = config.block_size
    expected = [_step_results(plain, case, case.read_blocks(size)) for case in cases]
    plain.close()
    passed: Kernels | None = None
    for name, pattern in _patterns(sample, kernels, reference):
        steps = SampleSteps(cut, config, pattern, cases, seed)
        if on_cuda:  # in parallel; failures show in the steps
            from ..kernels.triton.precompile import compile_kernels

            compile_kernels([(str(case.key), steps.functions.bind(case.key)) for case in cases])
        failure = _step_failure(name, steps, cases, expected, config)
        steps.close()
        if failure is None:
            passed = pattern
            break
        fail(failure)
    if passed is None:
        passed = dataclasses.replace(reference, library=kernels.library)
        if on_cuda:
            passed = dataclasses.replace(passed, attention=paged_attention)
    if passed.sampler != "torch":
        wrong = sampler_failure(passed.sampler, cut.vocab_size, config, generator)
        if wrong is not None:
            fail(wrong)
            passed = dataclasses.replace(passed, sampler="torch")
    depends = on_cuda and config.mode == "graph" and passed.dependent_launch
    if depends and torch.cuda.get_device_capability(device) >= (9, 0):
        steps = SampleSteps(cut, config, passed, cases, seed)
        unequal = dependent_launch_failure(steps, cases, CudaGraphCapturer(device))
        steps.close()
        if unequal is not None:
            fail(unequal)
            passed = dataclasses.replace(passed, dependent_launch=False)
    return dataclasses.replace(passed, fallbacks=tuple(failed)) if failed else passed


def _patterns(
    sample: _Sample, kernels: Kernels, reference: Kernels
) -> Iterator[tuple[str, Kernels]]:
    """Yield the patterns to try, each with its name, fastest first."""
    if kernels.make_stack is None:
        yield sample.attention, kernels
        return
    yield sample.layers, kernels
    around = dataclasses.replace(
        reference,
        attention=kernels.attention,
        bounded_by_length=kernels.bounded_by_length,
        masks=kernels.masks,
        library=kernels.library,
        dependent_launch=kernels.dependent_launch,
    )
    yield sample.attention, around


def _refusal(fallbacks: Sequence[Fallback], config: ResolvedConfig) -> str:
    failed = "; ".join(f"{f.name} ({f.shape}): {f.error}" for f in fallbacks)
    if config.batch_invariant:
        return (
            "batch_invariant=True needs the native operations, which failed their self-test:"
            f" {failed}. Use batch_invariant=False"
        )
    return (
        f"native operations failed their self-test: {failed}. Use kernels='torch', or"
        " kernels='auto', which replaces them by plain PyTorch if tensor_parallel is 1"
    )


class _Results(NamedTuple):
    logits: torch.Tensor
    """Of the rows in use."""
    tokens: torch.Tensor
    cache: torch.Tensor
    positions: torch.Tensor
    """Of all rows, after the step."""


def _step_results(steps: SampleSteps, case: SampleCase, read_blocks: int) -> _Results:
    steps.prepare(case)
    output = steps.functions.bind(dataclasses.replace(case.key, read_blocks=read_blocks))()
    rows = len(case.chunks)
    return _Results(
        output.logits[:rows],
        output.tokens[:rows],
        steps.stored(),
        steps.state.positions[: steps.state.null_row].clone(),
    )


def _step_failure(
    name: str,
    steps: SampleSteps,
    cases: Sequence[SampleCase],
    expected: Sequence[_Results],
    config: ResolvedConfig,
) -> Fallback | None:
    """Return how the first step that differs does; memory that it allocates holds NaN first."""
    kernels = steps.model.kernels
    for case, right in zip(cases, expected, strict=True):
        try:
            with FilledMemory(poison) if kernels.name == "triton" else contextlib.nullcontext():
                found = _step_results(steps, case, case.key.read_blocks)
            error = _difference(found, right, config)
        except Exception as failure:  # from an operator, a compiler or a device
            require_usable_device(name, config.device, failure)
            error = brief(failure)
        if error is not None:
            shape = f"{_step_name(case)}, {str(config.dtype).removeprefix('torch.')}"
            return Fallback(name, shape, error)
    return None


def _difference(found: _Results, right: _Results, config: ResolvedConfig) -> str | None:
    limit = _STEP_TOLERANCES * tolerance(config.dtype, config.storage)
    for place, own, expected, most in (
        ("", found.logits, right.logits, limit),
        ("cache: ", found.cache, right.cache, limit),
        ("positions: ", found.positions, right.positions, 0.0),
    ):
        if error := disagreement(own, expected, most):
            return place + error
    return None


def _step_name(case: SampleCase) -> str:
    return f"{case.key.phase} step of {case.key.size} tokens"


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
            found = [_bits(tensor).clone() for tensor in found]
            expected = expected or found
            if not all(map(torch.equal, found, expected)):
                error = "a captured step has different results with it"
                return Fallback(DEPENDENT_LAUNCH, _step_name(case), error)
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def sampler_failure(
    name: SamplerName, vocab_size: int, config: ResolvedConfig, generator: torch.Generator
) -> Fallback | None:
    """Compare greedy and random draws of a few rows with the plain sampler's.

    With speculation it also compares draws of a verify step, and with structured output draws
    with token masks.

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
    drawn = []
    for sampler in (SAMPLERS[name], SAMPLERS["torch"]):
        state = SamplingState.allocate(len(params), vocab_size, device)
        for row, wanted in enumerate(params):
            parameters = state.row_parameters(
                wanted, seed=row, prompt_ids=[1, 2], output_ids=[2], stop_token_ids=[]
            )
            state.store_row(row, parameters)
        try:
            drawn.append(_drawn(sampler, logits_BV, state, rows_B, positions_B, config))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as failure:  # a compiler and a device raise anything
            require_usable_device(f"{title} ({_sizes(logits_BV)})", device, failure)
            return Fallback(title, _sizes(logits_BV), brief(failure))
    error = None
    for (greedy, full, counts), (plain_greedy, plain, plain_counts) in zip(*drawn, strict=True):
        error = error or disagreement(greedy, plain_greedy, 0.0)
        # One draw may be so close to a boundary that the rounding of sums decides it.
        differ = int((full.tokens != plain.tokens).sum())
        if error is None and (differ > 1 or int((counts != plain_counts).sum()) > 2 * differ):
            error = "drawn tokens differ" if differ > 1 else "token counts differ"
        if error is None:
            error = disagreement(full.top_logprobs, plain.top_logprobs, tolerance(torch.float32))
    return None if error is None else Fallback(title, _sizes(logits_BV), error)


_Drawn = tuple[torch.Tensor, SampleOutput, torch.Tensor]
"""Greedy tokens, drawn ones, and the token counts of all rows afterwards."""


def _drawn(
    sampler: Sampler,
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    config: ResolvedConfig,
) -> list[_Drawn]:
    """Draw as steps do: with token feedback into row state if the sampler has it."""
    counts_RV, masks = state.token_counts.clone(), None
    drawn = [_drawn_tokens(sampler, logits_BV, state, rows_B, positions_B, None)]
    if config.structured_output:
        words = -(-logits_BV.shape[1] // MASK_BITS)
        bits_NW = torch.full((2, words), -1, dtype=torch.int32, device=rows_B.device)
        bits_NW[0] = _EVERY_OTHER
        masks = LaneMasks(bits_NW, rows_B % 2)
        state.token_counts.copy_(counts_RV)
        drawn.append(_drawn_tokens(sampler, logits_BV, state, rows_B, positions_B, masks))
    if config.speculation is not None:
        own = _for_sampler(sampler, logits_BV, masks)
        state.token_counts.copy_(counts_RV)
        # Two tokens of two rows, of which the last one has penalties. What follows a wrong draft is
        # arbitrary, so only the first of them are compared, and what the row counts.
        token_ids_BN = logits_BV[::2].argmax(-1, keepdim=True).expand(-1, 2).contiguous()
        rows_T = rows_B[2:].repeat_interleave(2)
        output = sampler.drafted(own[0], state, rows_T, positions_B, token_ids_BN, *own[1:])
        first = output.at(torch.arange(0, len(rows_T), 2, device=rows_T.device))
        drawn.append((sampler.greedy(*own), first, state.token_counts.clone()))
    return drawn


def _drawn_tokens(
    sampler: Sampler,
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    masks: LaneMasks | None,
) -> _Drawn:
    logits_BV, *own = _for_sampler(sampler, logits_BV, masks)
    if sampler.greedy_step is None or sampler.full_step is None:
        greedy = sampler.greedy(logits_BV, *own)
        full = sampler.full(logits_BV, state, rows_B, positions_B, *own)
        return greedy, full, state.token_counts.clone()
    newest_R, positions_R = torch.zeros(2, len(rows_B) + 1, dtype=torch.int64, device=rows_B.device)
    feed = Feedback(rows_B, positions_B - 1, newest_R, positions_R)
    greedy = sampler.greedy_step(logits_BV, feed, *own)
    full = sampler.full_step(logits_BV, state, feed, *own)
    return greedy, full, state.token_counts.clone()


def _for_sampler(
    sampler: Sampler, logits_BV: torch.Tensor, masks: LaneMasks | None
) -> tuple[torch.Tensor, *tuple[LaneMasks, ...]]:
    """Return the arguments of a sampler for masked logits: masks, if it applies them."""
    if masks is None:
        return (logits_BV,)
    return (logits_BV, masks) if sampler.takes_masks else (mask_logits(logits_BV, masks),)


def _sizes(logits_BV: torch.Tensor) -> str:
    return f"logits {list(logits_BV.shape)} {str(logits_BV.dtype).removeprefix('torch.')}"
