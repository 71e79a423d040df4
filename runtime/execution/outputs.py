"""A step in flight, its outputs on the host, and the scores of prompt tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Literal, TypeAlias

import torch

from ..kernels.ops.draws import largest
from ..kernels.ops.operation import per_token
from ..kernels.triton.dependent import dependent_launch
from ..logprobs import LOWEST_LOGPROB, Float32Array, Int64Array, TokenLogprobs
from ..models.config import DecoderConfig
from ..models.drafters.drafter import Drafts
from ..models.resolved_config import ResolvedConfig
from ..models.transformers.decoder import DecoderModel
from ..request import Request
from ..sampling.reference_sampler import SampleOutput
from ..sampling_params import MAX_LOGPROBS
from ..scheduling.plan import Proposed, StepPlan
from .inputs import PrefillChunk
from .step_functions import on_device
from .step_key import PlannedPart, StepKey, StepOutput
from .token_masks import GrammarEnd

Phase = Literal["decode", "prefill", "sample", "scores"]

OUTPUT_SETS = 2
"""Output buffers on the host: one for the step that is read, one for the step in flight."""


Sampled: TypeAlias = tuple[Request | None, int, TokenLogprobs | None]
"""Output of a lane: its request (None for padding), the token or `NON_FINITE`, and the requested
log-probabilities. A plain tuple, because a step creates one per row."""

Score: TypeAlias = tuple[Request, range, Float32Array, Int64Array, Float32Array]
"""Request, scored positions, log-probabilities `[n]`, top tokens `[n, k]` and theirs `[n, k]`."""


@dataclass(slots=True)
class LaunchedStep:
    """A step in flight: the requests that get tokens, and the buffers of these tokens."""

    number: int
    plan: StepPlan
    bucket: int
    """Rows of the decode step; tokens of the prefill step where that is the only one."""
    parts: list[tuple[Sequence[Request | None], StepOutput]] = field(default_factory=list)
    """Request of each lane (None: padding, or a chunk that does not sample), and the output, which
    is on the host or being copied to it."""
    arrived: torch.cuda.Event | None = None
    """Event after the copies to the host; None on a CPU."""
    device_ns: int = 0
    """Time that the launching thread ran the step itself; 0 for an asynchronous device."""
    advanced: list[int] | None = None
    """Tokens that each row of `plan.decode` advanced by, once they are read; None: as many as
    planned."""
    began: torch.cuda.Event | None = None
    """Event before the first part; None on a CPU, or without device timing. The launch after the
    next reuses both events."""
    scores: StepOutput | None = None
    """As `PromptScorer.launch` returns, on the host or being copied to it."""
    unfinished: list[tuple[StepKey, PlannedPart]] | None = None
    """The rest of the launch, which needs token masks; `Runner.finish` runs it."""
    masked: bool = False
    """Whether the step has token masks."""
    ends: Sequence[GrammarEnd] = ()
    """Requests that end before the tokens of this step."""


class HostOutputs:
    """Preallocated host buffers for step outputs, with one copy per launch.

    The copies are issued on the stream before the next launch, because captured steps share memory
    and can overwrite each other's outputs. Two buffer sets alternate: the host reads one while the
    next step fills the other. The outputs of a step are valid until the launch after the next.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Allocate buffers of these `sizes`.

        `device` is the source of the outputs. Copies from CUDA are asynchronous.
        """
        self._device, on_cuda = device, device.type == "cuda"
        self._sets: list[dict[str, torch.Tensor]] = [
            {
                phase: torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
                for phase, size in sizes.items()
            }
            for _ in range(OUTPUT_SETS)
        ]
        self._events: list[tuple[torch.cuda.Event, ...]] = []
        """Of each set: start and end of a timed step, and end of one without timing."""
        if on_cuda:
            self._events = [
                tuple(torch.cuda.Event(enable_timing=timed) for timed in (True, True, False))
                for _ in range(OUTPUT_SETS)
            ]
        self._views: dict[tuple[object, ...], StepOutput] = {}

    @staticmethod
    def sizes(config: ResolvedConfig, vocab_size: int) -> dict[str, int]:
        """Bytes of one set by phase."""
        best = min(MAX_LOGPROBS, vocab_size)
        rows, chunks = config.user.max_num_seqs, config.max_prefill_rows
        drafts = config.proposed_drafts
        verified = max(config.tokens_per_row, default=1)
        return {
            "decode": verified * SampleOutput.packed_bytes(rows, best)
            + _draft_bytes(rows, drafts)
            + (8 * rows if config.tokens_per_row else 0),
            "prefill": SampleOutput.packed_bytes(chunks, best) + _draft_bytes(chunks, drafts),
            "scores": SampleOutput.packed_bytes(config.prefill_chunk, best),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all sets."""
        return sum(whole.nbytes for phases in self._sets for whole in phases.values())

    def begin(self, number: int) -> torch.cuda.Event | None:
        """Record and return the start event of step `number`; None without events."""
        return self._record(self._events[number % OUTPUT_SETS][0]) if self._events else None

    def copy_async(self, number: int, phase: Phase, output: StepOutput) -> StepOutput:
        """Issue the copy of the outputs of step `number`; return the views of them on the host.

        The logits are not copied.
        """
        details, drafts, index = output.details, output.drafts, number % OUTPUT_SETS
        shapes = output.tokens.shape, None if drafts is None else drafts.token_ids.shape
        key = index, phase, shapes, details is None, output.accepted is None
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = _host_views(self._sets[index][phase], output)
        if details is None:
            views.tokens.copy_(output.tokens, non_blocking=True)
        else:
            assert views.details is not None
            assert views.details.packed is not None
            views.details.packed.copy_(details.pack(), non_blocking=True)
        if output.accepted is not None and views.accepted is not None:
            views.accepted.copy_(output.accepted, non_blocking=True)
        if drafts is not None and views.drafts is not None:
            for there, here in zip(views.drafts, drafts, strict=True):
                there.copy_(here, non_blocking=True)
        return StepOutput(views.tokens, output.logits, views.details, views.drafts, views.accepted)

    def record_event(self, number: int, began: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Record and return the end event of step `number`, after its copies.

        `began` is the result of `begin` for the step; None: the step is not timed.
        """
        if not self._events:
            return None
        _, timed, untimed = self._events[number % OUTPUT_SETS]
        return self._record(untimed if began is None else timed)

    def _record(self, event: torch.cuda.Event) -> torch.cuda.Event:
        event.record(torch.cuda.current_stream(self._device))  # it need not be the current device
        return event


def _draft_bytes(rows: int, drafts: int) -> int:
    return 8 * rows * drafts + _aligned(4 * rows * drafts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _host_views(memory: torch.Tensor, output: StepOutput) -> StepOutput:
    """Return views of the memory of a set, for an output of these shapes."""
    begin = 0

    def like(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal begin
        view = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        begin += _aligned(tensor.nbytes)
        return view

    details, drafts, accepted = output.details, output.drafts, output.accepted
    if details is None:
        tokens = like(output.tokens)
    else:
        details = SampleOutput.unpack(like(details.pack()), *details.top_ids.shape[-2:])
        tokens = details.tokens
    return StepOutput(
        tokens,
        output.logits,
        details,
        None if drafts is None else Drafts(*map(like, drafts)),
        None if accepted is None else like(accepted),
    )


@torch.inference_mode()
def report_token_ids(lanes: Sequence[Request | None], output: StepOutput) -> None:
    """Replace the most probable tokens of lanes with `logprob_token_ids` by those tokens.

    On the device, before the copy of the outputs. The step samples one token of each row.
    """
    details = output.details
    for lane, request in enumerate(lanes):
        if request is None or not request.params.logprob_token_ids:
            continue
        assert details is not None, "the full sampler reports log-probabilities"
        logits_V, count = output.logits[lane], len(request.params.logprob_token_ids)
        ids = torch.tensor(request.params.logprob_token_ids, device=logits_V.device)
        sampled = details.tokens[lane].clamp(min=0)
        log_mass = logits_V[sampled].float() - details.logprob[lane]
        details.top_ids[lane, :count] = ids
        details.top_logprobs[lane, :count] = logits_V[ids].float() - log_mass


def proposed_drafts(launched: LaunchedStep) -> Iterator[Proposed]:
    """Yield what the drafter proposed for rows that decode, and for prompts that have ended."""
    plan, stops_of_parts = launched.plan, []
    if plan.proposes:
        stops_of_parts.append((launched.parts[0], plan.draft_stops))
    if plan.prompt_drafts and plan.prefill:
        stops_of_parts.append((launched.parts[-1], [chunk.draft_stop for chunk in plan.prefill]))
    for (lanes, output), stops in stops_of_parts:
        assert output.drafts is not None, "the step proposes"
        tokens, probabilities = (each.tolist() for each in output.drafts)
        # Lanes end before padding does.
        for request, stop, *own in zip(lanes, stops, tokens, probabilities, strict=False):
            if request is not None:
                yield Proposed(request, stop, *own)


def sampled_tokens(launched: LaunchedStep) -> Iterable[Sampled]:
    """Return the tokens of a launch whose outputs have arrived, by step, then by lane."""
    found: list[Iterable[Sampled]] = []
    for lanes, output in launched.parts:
        tokens, details = output.tokens.tolist(), output.details
        if output.accepted is None:
            # Lanes end before padding does.
            logprobs = repeat(None) if details is None else _logprobs(lanes, details)
            found.append(zip(lanes, tokens, logprobs, strict=False))
            continue
        counts = output.accepted.tolist()
        for index, own in enumerate(tokens):
            # Tokens after a rejected draft are invalid.
            kept = [r if index < n else None for r, n in zip(lanes, counts, strict=False)]
            logprobs = repeat(None) if details is None else _logprobs(kept, details.at(index))
            found.append(zip(kept, own, logprobs, strict=False))
    return chain.from_iterable(found)


def _logprobs(
    lanes: Sequence[Request | None], details: SampleOutput
) -> Iterable[TokenLogprobs | None]:
    """Return the log-probabilities that `SamplingParams.logprobs` requests, by lane."""
    counts = [
        None
        if request is None
        else len(request.params.logprob_token_ids) or request.params.logprobs
        for request in lanes
    ]
    found: list[TokenLogprobs | None] = [None] * len(lanes)
    asked = [lane for lane, count in enumerate(counts) if count is not None]
    if asked:  # arrays, because indexing a tensor creates a tensor
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


# Scores of prompt tokens: log-probabilities after a prefill step, from its hidden states.
#
# Prefill steps, captured or not, copy their final hidden states to a buffer. For requests with
# `prompt_logprobs` the scorer reads that buffer after the step, on the same stream, and computes
# logits of a few positions at a time, so that memory is bounded:
#
#     hidden states [M, hidden_size] -> slice of tokens -> logits -> log-softmax
#     -> next token, top k
#
# Steps without such requests launch nothing of this. The scorer itself is never captured.

MOST_SLICE_TOKENS = 64
LEAST_SLICE_TOKENS = 16


def slice_tokens(max_num_seqs: int) -> int:
    """Return the positions whose logits exist at a time.

    As many as rows, because their logits then take no more memory than sampling. Not fewer than 16,
    since every slice reads the whole head, and not more than 64, which gains little.
    """
    return min(max(max_num_seqs, LEAST_SLICE_TOKENS), MOST_SLICE_TOKENS)


class PromptScorer:
    """Hidden states of the last prefill step, and the scores computed from them."""

    def __init__(self, model: DecoderModel, next_ids: torch.Tensor, *, max_num_seqs: int) -> None:
        """Allocate buffers for prefill steps of up to M tokens; `next_ids`: see `StepInputs`."""
        self._model, self._next_ids = model, next_ids
        most = len(next_ids)
        self.hidden, self.scores = self.allocate(most, model.config, model.dtype, model.device)
        """`[M + 1, hidden_size]`: the first rows are written by prefill steps. The last one never
        is: without it torch compiles a step that writes all rows separately.

        Lane t scores what follows token t of the step, NaN without a distribution. Undefined in
        lanes without a score, and in columns that no request needs."""
        self.slice_tokens = min(slice_tokens(max_num_seqs), most)
        """Positions whose logits exist at a time."""
        # One shape on CUDA, so that no kernel is compiled while requests wait.
        self._pads = model.device.type == "cuda"

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        assert self.scores.packed is not None
        return self.hidden.nbytes + self.scores.packed.nbytes

    @staticmethod
    def allocate(
        tokens: int, model: DecoderConfig, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, SampleOutput]:
        """Allocate hidden states and scores of prefill steps of up to this number of tokens."""
        best = min(MAX_LOGPROBS, model.vocab_size)
        size = SampleOutput.packed_bytes(tokens, best)
        packed = torch.zeros(size, dtype=torch.uint8, device=device)
        hidden = torch.zeros(tokens + 1, model.hidden_size, dtype=dtype, device=device)
        return hidden, SampleOutput.unpack(packed, tokens, best)

    def launch(self, chunks: Sequence[PrefillChunk], offset: int) -> StepOutput | None:
        """Score the chunks of the prefill step that was launched last, if any has scored positions.

        `offset`: tokens of decoding rows, which come first in the step.
        Returns without waiting for the device. The output has the tokens of the step as lanes, and
        their hidden states in the place of logits. It is valid until the next launch.
        """
        starts: list[int] = []
        covered = num_top = 0
        for chunk in chunks:
            first, offset = offset - chunk.start, offset + len(chunk.token_ids)
            if not chunk.scored:
                continue
            num_top = max(num_top, chunk.num_top)
            stop = first + chunk.scored.stop
            for start in range(max(covered, first + chunk.scored.start), stop, self.slice_tokens):
                starts.append(min(start, len(self._next_ids) - self.slice_tokens))
                covered = start + self.slice_tokens
        if not starts:
            return None
        self.run(starts, len(self._next_ids) if self._pads else stop, num_top)
        return StepOutput(self.scores.tokens, self.hidden, self.scores)

    def run(self, starts: Sequence[int], stop: int, num_top: int) -> None:
        """Score slices of the tokens up to `stop`, with `num_top` most probable tokens each."""
        with (
            on_device(self.hidden.device),
            dependent_launch(self._model.kernels.dependent_launch),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            for start in starts:
                self._score(slice(start, min(start + self.slice_tokens, stop)), num_top)

    def _score(self, part: slice, num_top: int) -> None:
        scores, next_ids_B = self.scores, self._next_ids[part]
        logits_BV = self._model.logits(self.hidden[part]).float()
        log_mass = per_token(self._model.kernels, lambda x_BV: x_BV.logsumexp(-1))
        log_mass_B = log_mass(logits_BV)
        own_B = logits_BV.gather(1, next_ids_B[:, None])[:, 0] - log_mass_B
        scores.tokens[part] = next_ids_B
        scores.logprob[part] = torch.where(log_mass_B.isfinite(), own_B, float("nan"))
        k = min(num_top, scores.top_ids.shape[1])
        if k:
            top_logits_BK, top_ids_BK = largest(logits_BV, k)
            scores.top_logprobs[part, :k] = top_logits_BK - log_mass_B[:, None]
            scores.top_ids[part, :k] = top_ids_BK


def prompt_scores(launched: LaunchedStep) -> Iterator[Score]:
    """Yield the scores of each chunk that has any, once they have arrived. Copy what must last."""
    if launched.scores is None:
        return
    details = launched.scores.details
    offset = len(launched.parts[-1][0]) - len(launched.plan.prefill)  # rows that decode come first
    assert details is not None, "scores are log-probabilities"
    logprobs = details.logprob.numpy()
    ids, tops = details.top_ids.numpy(), details.top_logprobs.numpy()
    for chunk in launched.plan.prefill:
        scored, first = chunk.scored, offset - chunk.start
        offset += chunk.count
        if scored:
            own = slice(first + scored.start, first + scored.stop)
            yield chunk.request, scored, logprobs[own], ids[own], tops[own]
