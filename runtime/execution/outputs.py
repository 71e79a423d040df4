"""A step under way, and what comes back of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal, NamedTuple, TypeAlias

import torch

from ..request import LOWEST_LOGPROB, Request, TokenLogprobs
from ..sampling.sample_output import SampleOutput
from ..sampling_params import MAX_LOGPROBS
from ..scheduling.plan import StepPlan
from .step_functions import StepOutput

__all__ = [
    "HostOutputs",
    "LaunchedStep",
    "OutputEvents",
    "Sampled",
    "current_stream",
    "sampled_tokens",
    "timed_event",
]

Phase = Literal["decode", "prefill"]

OUTPUT_SETS = 2
"""Steps whose outputs the host keeps: the one that it reads, and the one under way."""


Sampled: TypeAlias = tuple[Request | None, int, TokenLogprobs | None]
"""Of a lane: whom a token was sampled for (None: nobody, it means nothing), the token or
`NON_FINITE`, and its log-probabilities if they were asked for. Plain tuples: a step makes one for
each row."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step under way: the requests that get a token, and where the tokens will be."""

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
    advanced: Sequence[int] | None = None
    """Tokens that each row of `plan.decode` has advanced by, known when the outputs have arrived;
    None: as many as were planned."""
    began: torch.cuda.Event | None = None
    """Recorded before the first of its parts; None where the device is the host, or where the
    time of the device is not asked for."""

    def elapsed_ns(self) -> int | None:
        """Nanoseconds that another processor worked on it, from `began` to `arrived`, or None.

        Valid once the outputs have arrived, and until the launch after the next reuses the events.
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
    """Where the outputs of steps arrive on the host, in memory taken once: one copy a launch.

    The copies stand in the stream before the next launch: captured steps share their memory, so
    any of them may overwrite the outputs of another. Two sets take turns, for while the tokens of
    a step are read the next one is under way: what a step leaves here is valid until the launch
    after the next.
    """

    timed = False
    """Whether later steps are timed: with two timed events each, instead of one without timing."""

    def __init__(
        self,
        max_num_seqs: int,
        prefill_rows: int,
        vocab_size: int,
        steps: int = 1,
        *,
        device: torch.device,
    ) -> None:
        """Make room for `steps` decode steps of `max_num_seqs`, and for `prefill_rows` chunks.

        `device` is where they come from: CUDA copies them while the host goes on.
        """
        self._device = device
        self._is_cuda = device.type == "cuda"
        sizes = self._sizes(max_num_seqs, prefill_rows, vocab_size, steps)
        self._sets: list[dict[Phase, torch.Tensor]] = [
            {
                phase: torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)
                for phase, size in sizes.items()
            }
            for _ in range(OUTPUT_SETS)
        ]
        self._events: list[OutputEvents] | None = None
        if self._is_cuda:
            self._events = [
                OutputEvents(timed_event(), timed_event(), torch.cuda.Event())
                for _ in range(OUTPUT_SETS)
            ]
        self._views: dict[tuple[int, Phase, torch.Size, bool], _HostViews] = {}

    @staticmethod
    def _sizes(
        max_num_seqs: int, prefill_rows: int, vocab_size: int, steps: int
    ) -> dict[Phase, int]:
        """Bytes of a set, of all its steps."""
        best = min(MAX_LOGPROBS, vocab_size)
        return {
            "decode": steps * SampleOutput.packed_bytes(max_num_seqs, best),
            "prefill": SampleOutput.packed_bytes(prefill_rows, best),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all sets."""
        return sum(whole.nbytes for phases in self._sets for whole in phases.values())

    @staticmethod
    def bytes_for(max_num_seqs: int, prefill_rows: int, vocab_size: int, steps: int = 1) -> int:
        """Bytes that a `HostOutputs` of these sizes takes."""
        sizes = HostOutputs._sizes(max_num_seqs, prefill_rows, vocab_size, steps)
        return OUTPUT_SETS * sum(sizes.values())

    def begin(self, number: int) -> torch.cuda.Event | None:
        """Record, before anything of step `number`, the event that its time is counted from.

        Returns None where the steps are not `timed`.
        """
        if self._events is None or not self.timed:
            return None
        return self._record(self._events[number % OUTPUT_SETS].began)

    def copy_async(self, number: int, phase: Phase, output: StepOutput) -> StepOutput:
        """Queue the copy of the outputs of step `number`; return the host's views of them.

        Details that are not packed take four copies. The logits are not copied.
        """
        details = output.details
        index = number % OUTPUT_SETS
        key = (index, phase, output.tokens.shape, details is not None)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = _HostViews.of(self._sets[index][phase], output)
        if details is None or views.details is None:
            views.tokens.copy_(output.tokens, non_blocking=True)
        elif details.packed is not None and views.details.packed is not None:
            views.details.packed.copy_(details.packed, non_blocking=True)
        else:
            views.details.copy_(details)
        return StepOutput(views.tokens, output.logits, views.details)

    def record_event(self, number: int, began: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Record the event of step `number` after its copies, and return it.

        `began` is what `begin` returned for the step; None: the step is not timed.
        """
        if self._events is None:
            return None
        events = self._events[number % OUTPUT_SETS]
        return self._record(events.arrived if began is None else events.timed_arrived)

    def _record(self, event: torch.cuda.Event) -> torch.cuda.Event:
        event.record(current_stream(self._device))
        return event


class OutputEvents(NamedTuple):
    """Of the steps that use one set of outputs."""

    began: torch.cuda.Event
    """With timing, like the next one."""
    timed_arrived: torch.cuda.Event
    arrived: torch.cuda.Event
    """Without timing."""


class _HostViews(NamedTuple):
    """A set's memory as the output of a step."""

    tokens: torch.Tensor
    details: SampleOutput | None

    @classmethod
    def of(cls, whole: torch.Tensor, output: StepOutput) -> _HostViews:
        shape = output.tokens.shape
        if output.details is None:
            tokens = whole[: shape.numel() * 8].view(torch.int64).unflatten(0, shape)
            return cls(tokens, None)
        lanes, tops = output.details.top_ids.shape[-2:]
        steps, size = shape[:-1], SampleOutput.packed_bytes(lanes, tops)
        packed = whole[: steps.numel() * size].view(*steps, size)
        details = SampleOutput.unpack(packed, lanes, tops)
        return cls(details.tokens, details)


def sampled_tokens(launched: LaunchedStep) -> Iterable[Sampled]:
    """Return the tokens of a step whose outputs have arrived, step by step, lane by lane."""
    parts = []
    for lanes, output in launched.parts:
        tokens, details = output.tokens.tolist(), output.details
        if launched.plan.steps == launched.plan.tokens_per_row == 1:
            parts.append(_of_lanes(lanes, tokens, details))
            continue
        each = repeat(None, len(tokens)) if details is None else details.unbind()
        for index, step in enumerate(zip(tokens, each, strict=True)):
            kept = lanes
            if launched.advanced is not None:  # the tokens after a rejected draft mean nothing
                row_counts = zip(lanes, launched.advanced, strict=True)
                kept = [request if index < count else None for request, count in row_counts]
            parts.append(_of_lanes(kept, *step))
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
            logprob=max(float(logprobs[lane]), LOWEST_LOGPROB),
            top={i: value for i, value in zip(ids, values, strict=True) if value > -math.inf},
        )
    return found
