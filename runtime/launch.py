"""A step under way, and what comes back of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain, repeat
from typing import Literal, TypeAlias

import torch

from .plan import StepPlan
from .request import Request, TokenLogprobs
from .sampling import SampleOutput
from .sampling_params import MAX_LOGPROBS
from .step_functions import StepOutput

__all__ = ["HostOutputs", "Launch", "Sampled", "current_stream", "sampled_tokens", "timed_event"]

Phase = Literal["decode", "prefill"]

OUTPUT_SETS = 2
"""Steps whose outputs the host keeps: the one that it reads, and the one under way."""


Sampled: TypeAlias = tuple[Request | None, int, TokenLogprobs | None]
"""Of a lane: whom a token was sampled for (None: nobody, it means nothing), the token, and its
log-probabilities if they were asked for. Plain tuples: a step makes one for each row."""


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
    began: torch.cuda.Event | None = None
    """Recorded before the first of its parts; None where the device is the host."""

    def elapsed_ns(self) -> int | None:
        """What another processor worked on it, from `began` to `arrived`; None: there is none.

        To be asked once it has arrived, and before the launch after the next: events are few.
        """
        if self.began is None or self.arrived is None:
            return None
        return round(1e6 * float(self.began.elapsed_time(self.arrived)))


def timed_event() -> torch.cuda.Event:
    """Return an event that knows when it happened."""
    return torch.cuda.Event(enable_timing=True)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that work on a device goes to, which need not be the current device."""
    return torch.cuda.current_stream(device)


class HostOutputs:
    """Where the outputs of steps arrive on the host, in memory taken once.

    The copies stand in the stream before the next launch: captured steps share their memory, so
    any of them may overwrite the outputs of another. Two sets take turns, for while the tokens of
    a step are read the next one is under way: what a step leaves here is valid until the launch
    after the next.
    """

    def __init__(
        self,
        max_rows: int,
        prefill_rows: int,
        vocab_size: int,
        steps: int = 1,
        *,
        device: torch.device,
    ) -> None:
        """Make room for `steps` decode steps of `max_rows`, and for `prefill_rows` chunks.

        `device` is where they come from: CUDA copies them while the host goes on.
        """
        self._device = device
        pinned = device.type == "cuda"
        lanes: dict[Phase, int] = {"decode": steps * max_rows, "prefill": prefill_rows}
        best = min(MAX_LOGPROBS, vocab_size)

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, pin_memory=pinned)

        self._whole = {
            (index, phase): SampleOutput(
                tokens=empty(count, dtype=torch.int64),
                logprob=empty(count, dtype=torch.float32),
                top_logprobs=empty(count, best, dtype=torch.float32),
                top_ids=empty(count, best, dtype=torch.int64),
            )
            for index in range(OUTPUT_SETS)
            for phase, count in lanes.items()
        }
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        """Of each set: begun, and arrived."""
        if pinned:
            self._events = [(timed_event(), timed_event()) for _ in range(OUTPUT_SETS)]
        self._views: dict[tuple[int, Phase, torch.Size], SampleOutput] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all sets."""
        return sum(
            getattr(whole, field.name).nbytes
            for whole in self._whole.values()
            for field in fields(whole)
        )

    @staticmethod
    def bytes_for(max_rows: int, prefill_rows: int, vocab_size: int, steps: int = 1) -> int:
        """Bytes that a `HostOutputs` of these sizes takes."""
        lane = (8 + 4) * (1 + min(MAX_LOGPROBS, vocab_size))
        return OUTPUT_SETS * (steps * max_rows + prefill_rows) * lane

    def begin(self, number: int) -> torch.cuda.Event | None:
        """Record, before anything of step `number`, the event that its time is counted from."""
        return self._record(number, 0)

    def bring(self, number: int, phase: Phase, output: StepOutput) -> StepOutput:
        """Queue the copies of what step `number` leaves; return them as they will be.

        The logits stay where they are.
        """
        lanes = output.tokens.shape
        index = number % OUTPUT_SETS
        views = self._views.get((index, phase, lanes))
        if views is None:
            whole = self._whole[index, phase]
            views = SampleOutput(
                **{
                    f.name: getattr(whole, f.name)[: lanes.numel()].unflatten(0, lanes)
                    for f in fields(whole)
                }
            )
            self._views[index, phase, lanes] = views
        details = output.details
        if details is None:
            views.tokens.copy_(output.tokens, non_blocking=True)
            return StepOutput(views.tokens, output.logits, None)
        views.tokens.copy_(details.tokens, non_blocking=True)
        views.logprob.copy_(details.logprob, non_blocking=True)
        views.top_logprobs.copy_(details.top_logprobs, non_blocking=True)
        views.top_ids.copy_(details.top_ids, non_blocking=True)
        return StepOutput(views.tokens, output.logits, views)

    def depart(self, number: int) -> torch.cuda.Event | None:
        """Record, behind the copies of step `number`, the event that they have arrived with."""
        return self._record(number, 1)

    def _record(self, number: int, which: int) -> torch.cuda.Event | None:
        if self._events is None:
            return None
        event = self._events[number % OUTPUT_SETS][which]
        event.record(current_stream(self._device))
        return event


def sampled_tokens(launch: Launch) -> Iterable[Sampled]:
    """Return the tokens of a launch whose outputs have arrived, step by step, lane by lane."""
    parts = []
    for lanes, output in launch.parts:
        tokens, details = output.tokens.tolist(), output.details
        if launch.plan.steps == 1:
            parts.append(_of_lanes(lanes, tokens, details))
            continue
        each = repeat(None, len(tokens)) if details is None else details.unbind()
        parts += [_of_lanes(lanes, *step) for step in zip(tokens, each, strict=True)]
    return chain.from_iterable(parts)


def _of_lanes(
    lanes: Sequence[Request | None], tokens: list[int], details: SampleOutput | None
) -> Iterable[Sampled]:
    logprobs: Iterable[TokenLogprobs | None] = repeat(None)
    if details is not None:
        logprobs = _logprobs(lanes, details)
    return zip(lanes, tokens, logprobs, strict=False)  # lanes end before padding does


def _logprobs(lanes: Sequence[Request | None], details: SampleOutput) -> list[TokenLogprobs | None]:
    """Return what `SamplingParams.logprobs` asks for, lane by lane."""
    counts = [None if request is None else request.params.logprobs for request in lanes]
    found: list[TokenLogprobs | None] = [None] * len(lanes)
    asked = [lane for lane, count in enumerate(counts) if count is not None]
    if asked:  # arrays, because an element of a tensor is a tensor of its own
        tokens, logprobs = details.tokens.numpy(), details.logprob.numpy()
        top_ids, top_logprobs = details.top_ids.numpy(), details.top_logprobs.numpy()
    for lane in asked:
        ids = top_ids[lane, : counts[lane]].tolist()
        values = top_logprobs[lane, : counts[lane]].tolist()
        found[lane] = TokenLogprobs(
            token_id=int(tokens[lane]),
            logprob=float(logprobs[lane]),
            top=dict(zip(ids, values, strict=True)),
        )
    return found
