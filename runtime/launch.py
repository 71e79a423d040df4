"""A step under way, and what comes back of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .plan import StepPlan
from .request import Request, TokenLogprobs
from .step_functions import StepOutput

__all__ = ["Launch", "Sampled", "sampled_tokens", "to_host"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that a step sampled for a request."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Launch:
    """A step under way: who gets a token, and where the tokens will be."""

    number: int
    plan: StepPlan
    bucket: int
    """Rows of the decode step, or tokens of the prefill step where nobody decodes."""
    launched_ns: int
    """When the first of its parts was launched, on the clock of `time.perf_counter_ns`."""
    parts: tuple[tuple[Sequence[Request | None], StepOutput], ...]
    """The request of each lane (None: padding, or a chunk that does not sample) and the output,
    on the host or on its way there."""
    arrived: torch.cuda.Event | None
    """Recorded behind the copies to the host; None where the device is the host."""
    device_ns: int
    """What the launching thread itself worked as the device; 0 where that is another processor."""


def to_host(output: StepOutput) -> StepOutput:
    """Return the output on its way into pinned memory.

    The copies stand in the stream before the next launch: captured steps share their memory, so
    any of them may overwrite the outputs of another. The host memory comes from torch's cache of
    pinned memory, which gives a piece out again only after the copies into it are done.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    details = output.details
    if details is not None:
        details = type(details)(**{f.name: copy(getattr(details, f.name)) for f in fields(details)})
    return StepOutput(copy(output.tokens), output.logits, details)


def sampled_tokens(launch: Launch) -> list[Sampled]:
    """Return the tokens of a launch whose outputs have arrived, lane by lane."""
    sampled: list[Sampled] = []
    for lanes, output in launch.parts:
        tokens: list[int] = output.tokens.tolist()
        for lane, request in enumerate(lanes):
            if request is not None:
                sampled.append(Sampled(request, tokens[lane], _logprobs(request, output, lane)))
    return sampled


def _logprobs(request: Request, output: StepOutput, lane: int) -> TokenLogprobs | None:
    """Return what `SamplingParams.logprobs` asks for, of one lane."""
    count = request.params.logprobs
    if count is None:
        return None
    assert output.details is not None, "log-probabilities come from the full sampler"
    ids = output.details.top_ids[lane, :count].tolist()
    values = output.details.top_logprobs[lane, :count].tolist()
    return TokenLogprobs(
        token_id=int(output.details.tokens[lane]),
        logprob=float(output.details.logprob[lane]),
        top=dict(zip(ids, values, strict=True)),
    )
