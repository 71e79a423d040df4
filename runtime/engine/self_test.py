"""The self-test of an engine's kernels at start, before a weight is loaded.

Steps of a small sample of the model (`sample_steps.py`) run with the native kernels and with plain
torch, over the same random weights, state and cache. On a GPU each operation is compared alone
(`kernels/triton/operation_check.py`), and a plain version replaces each one that fails. The C++
operators of a CPU are compared by whole steps and samplers: plain torch replaces all of them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

import torch

from ...cache.blocks import NULL_BLOCK
from ...graphs.steps import Capture, CudaGraphCapturer, GraphCapturer
from ..config import MAX_ROWS
from ..errors import KernelSelfTestError
from ..execution.sample_steps import SampleCase, SampleSteps, sample_cases, sample_config
from ..execution.step_functions import StepOutput, on_device
from ..kernels import Kernels, paged_attention, reference_paged_attention, select_kernels
from ..kernels.choice import SamplerName
from ..kernels.ops.feedback import Feedback
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
from ..models.config import ModelConfig
from ..resolved_config import ResolvedConfig
from ..sampling.sampler import SAMPLERS, SampleOutput, Sampler, SamplingState
from ..sampling_params import SamplingParams

__all__ = ["check_kernels", "dependent_launch_failure"]

logger = logging.getLogger("stepgraph.runtime")

_ATTENTION = frozenset({"decode_attention", "prefill_attention", "paged_attention"})
"""Operations whose plain version reads all columns of a block table that it may read."""
_CPU_VOCABULARY = 2_029
"""Tokens of a sample on a CPU: not whole blocks of a packed weight, nor of the sampler."""
_CPU_ROWS, _CPU_TOKENS, _CPU_LONGEST = (1, 16), 32, 150
"""Rows and tokens of the steps of a sample on a CPU, and tokens of its longest row."""
_CPU_ATTENTION = "C++ attention"
_GPU_ROWS = (1, 2, 4, 16, 32, MAX_ROWS)
"""Classes of rows that kernels are compiled for."""
_GPU_LONGEST = 1000
"""Tokens of the longest row on a GPU: enough for several splits."""
_DEPENDENT_REPLAYS = 20
"""Replays with dependent launch: a race does not show in every replay."""
_STEP_TOLERANCES = 4
"""What the results of a step may differ by, in tolerances of an operation."""


def check_kernels(
    kernels: Kernels, model: ModelConfig, config: ResolvedConfig, *, required: bool
) -> Kernels:
    """Return the kernels that pass: `kernels`, with plain versions for what fails.

    Args:
        kernels: as `select_kernels` returns them; those without native operations pass untested.
        model: of the engine.
        config: of the engine.
        required: whether every native kernel must pass (`kernels="native"`).

    Raises:
        KernelSelfTestError: a kernel fails and is required, or left the device unusable.
    """
    on_cuda, layers = config.device.type == "cuda", kernels.make_decode_step is not None
    # Without Triton the operation is plain torch on CUDA.
    plain = on_cuda and not layers and kernels.attention is paged_attention
    if plain or kernels.attention is reference_paged_attention:
        return kernels
    started = time.perf_counter()
    seed = int(torch.randint(1 << 30, (), generator=_fresh()))
    with torch.no_grad(), on_device(config.device):
        check = _check_gpu if on_cuda or layers else _check_cpu
        checked = check(kernels, model, config, seed)
    if on_cuda:
        torch.cuda.empty_cache()  # the memory plan counts what the device has free
    logger.info("self-test of native kernels: %.2f s", time.perf_counter() - started)
    if required and checked.fallbacks:
        raise KernelSelfTestError(_refusal(checked.fallbacks))
    warn_of_fallbacks(checked.fallbacks)
    return checked


def _fresh() -> torch.Generator:
    """A generator with a new seed at each start; torch's global generators stay untouched."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _refusal(fallbacks: tuple[Fallback, ...]) -> str:
    failed = "; ".join(f"{f.name} ({f.shape}): {f.error}" for f in fallbacks)
    return (
        f"kernels='native', and {len(fallbacks)} of the native operations failed their self-test:"
        f" {failed}. Use kernels='auto', which replaces them by plain PyTorch, or kernels='torch'"
    )


def _check_gpu(kernels: Kernels, model: ModelConfig, config: ResolvedConfig, seed: int) -> Kernels:
    from ..kernels.triton.backend import gpu_kernels
    from ..kernels.triton.operation_check import OperationChecks

    size = config.block_size
    checks = OperationChecks(config.dtype, config.storage, size, config.device)
    both = _with_operations(kernels, gpu_kernels(config.weights, checks.operations))
    both = dataclasses.replace(both, attention=checks.operations.paged_attention)
    # The second layer begins with what the first has left to add, in families that norm it.
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
        mixed = _with_operations(kernels, gpu_kernels(config.weights, checks.passed()))
    if "paged_attention" in checks.failures:
        plain = paged_attention if config.device.type == "cuda" else reference_paged_attention
        mixed = dataclasses.replace(mixed, attention=plain)
    if not _ATTENTION.isdisjoint(checks.failures):
        mixed = dataclasses.replace(mixed, bounded_by_length=False, masks=1)
    if mixed.sampler == "triton":
        wrong = _sampler_failure("triton", model.vocab_size, config, generator)
        if wrong is not None:
            failed = (*failed, wrong)
            mixed = dataclasses.replace(mixed, sampler="torch")
    if config.mode == "graph" and mixed.dependent_launch and _can_depend(config.device):
        if not mixed.bounded_by_length:  # plain attention would read the whole tables
            cases = [case.narrowed(size) for case in cases]
        steps = SampleSteps(cut, config, mixed, cases, seed)
        unequal = dependent_launch_failure(steps, cases, CudaGraphCapturer(config.device))
        steps.close()
        if unequal is not None:
            failed = (*failed, unequal)
            mixed = dataclasses.replace(mixed, dependent_launch=False)
    return dataclasses.replace(mixed, fallbacks=failed) if failed else kernels


def _compile_ahead(steps: SampleSteps, cases: Sequence[SampleCase]) -> None:
    """Compile the kernels of the checks in parallel; what fails here fails in its check too."""
    from ..kernels.triton.precompile import compile_kernels

    compile_kernels([(str(case.key), steps.functions.bind(case.key)) for case in cases])
    steps.close()


def _can_depend(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch_failure(
    steps: SampleSteps, cases: Sequence[SampleCase], capturer: GraphCapturer
) -> Fallback | None:
    """Capture steps with and without dependent launch and replay both from the same state.

    Return the first step whose results, row state or cache differ in a bit, or whose capture with
    it fails, or None.
    What padding leaves in the null block does not count: several tokens write it.

    Raises KernelSelfTestError where the capture left the device unusable.
    """
    captures: list[Capture[StepOutput]] = []
    for case in cases:
        steps.prepare(case)
        held = [steps.arena, *steps.state.tensors().values()]
        compared = [steps.arena[:, :, NULL_BLOCK + 1 :], *held[1:]]
        before = [tensor.clone() for tensor in held]
        step = steps.functions.bind(case.key)
        # The captures before live until these are made: their pool ends with the last of them.
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
            lanes = len(case.chunks)
            found = [capture.output.logits[:lanes], capture.output.tokens[:lanes], *compared]
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
    """The bytes of a tensor, of which NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def _with_operations(kernels: Kernels, operations: Kernels) -> Kernels:
    """The kernels with those operations, where they have native layers."""
    if kernels.make_decode_step is None:
        return kernels
    return dataclasses.replace(
        kernels,
        linear=operations.linear,
        make_stack=operations.make_stack,
        make_decode_step=operations.make_decode_step,
    )


def _check_cpu(kernels: Kernels, model: ModelConfig, config: ResolvedConfig, seed: int) -> Kernels:
    reference = select_kernels(config.device, "eager", config.dtype, config.weights)
    # Plain layers around the attention operator, and plain attention where that fails too.
    around = dataclasses.replace(
        reference,
        attention=kernels.attention,
        bounded_by_length=True,
        masks=0,
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
            failure = _sampler_failure("cpu", cut.vocab_size, config, generator)
        if failure is None:
            return dataclasses.replace(native, fallbacks=tuple(fallbacks)) if fallbacks else native
        fallbacks.append(failure)
        if failure.name == _CPU_ATTENTION:
            break
    return dataclasses.replace(reference, library=kernels.library, fallbacks=tuple(fallbacks))


def _step_results(
    steps: SampleSteps, case: SampleCase, read_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the lanes in use, and what the cache holds after the step."""
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
        except Exception as failure:  # an operator refuses what it does not take
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


def _sampler_failure(
    name: SamplerName, vocab_size: int, config: ResolvedConfig, generator: torch.Generator
) -> Fallback | None:
    """Compare greedy and random draws of a few rows with those of the plain sampler.

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
            state.write_row(
                row, wanted, seed=row, prompt_ids=[1, 2], output_ids=[2], stop_token_ids=[]
            )
        try:
            drawn.append(_drawn(sampler, logits_BV, state, rows_B, positions_B))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as failure:  # a compiler and a device raise anything
            require_usable_device(f"{title} ({_sizes(logits_BV)})", device, failure)
            return Fallback(title, _sizes(logits_BV), brief(failure))
    (greedy, full), (plain_greedy, plain) = drawn
    error = disagreement(greedy, plain_greedy, 0.0)
    # One draw may lie so close to a boundary that sums in another order decide it.
    if error is None and int((full.tokens != plain.tokens).sum()) > 1:
        error = "drawn tokens differ"
    if error is None:
        error = disagreement(full.top_logprobs, plain.top_logprobs, tolerance(torch.float32))
    return None if error is None else Fallback(title, _sizes(logits_BV), error)


def _drawn(
    sampler: Sampler,
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
) -> tuple[torch.Tensor, SampleOutput]:
    """Draw as steps do: tokens go into row state where the sampler writes them itself."""
    if sampler.greedy_step is None or sampler.full_step is None:
        return sampler.greedy(logits_BV), sampler.full(logits_BV, state, rows_B, positions_B)
    newest_R, positions_R = torch.zeros(2, len(rows_B) + 1, dtype=torch.int64, device=rows_B.device)
    feed = Feedback(rows_B, positions_B - 1, newest_R, positions_R)
    return sampler.greedy_step(logits_BV, feed), sampler.full_step(logits_BV, state, feed)


def _sizes(logits_BV: torch.Tensor) -> str:
    return f"logits {list(logits_BV.shape)} {str(logits_BV.dtype).removeprefix('torch.')}"
