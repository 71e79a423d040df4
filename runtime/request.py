"""Requests: the shared types of the runtime. Read this file first, then `engine.py`.

A user's request has `n` completions of one prompt, and each completion is a `Request`. A `Request`
is host state only: its tokens, how many of them have keys and values in the cache, and its row. A
row is the index of a running request in the decode batch and in the state on the device.

    prompt_ids            output_ids
    [p0 p1 p2 p3 p4]      [o0 o1 o2]        known on the host (committed)
     <-- num_computed = 7 -------->         keys and values written by launched steps
                                   num_pending = 1 more token was sampled by a step whose
                                   result the host has not read yet

Only the engine changes a `Request` (see `Engine.step`); scheduler and runner read it.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..cache.blocks import PrefixHashes
from .detokenizer import IncrementalDetokenizer
from .logprobs import PromptLogprobs, TokenLogprobs
from .rope_lengths import UNLIMITED
from .sampling_params import SamplingParams

if TYPE_CHECKING:  # the scheduler reads this file, and needs neither torch nor numpy
    from .errors import StructuredOutputError
    from .mask_words import MaskWords
    from .prompt_embeds import EmbeddedSpan

__all__ = [
    "AbortReason",
    "FinishReason",
    "OutputMatcher",
    "Request",
    "RequestGroup",
    "RequestStatus",
    "TokenLogprobs",
]

AbortReason = Literal["abort", "deadline"]

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
"""`stop`: an end-of-sequence or stop token, or a stop string. `length`: `max_tokens` or the
longest sequence the engine can hold. `abort`: `Engine.abort`. `deadline`: a deadline of
`AsyncEngine` passed. `error`: see `RequestOutput.error`;
the tokens before it are valid.
"""


class RequestStatus(enum.Enum):
    """The state of a request. A preemption moves it from `RUNNING` back to `WAITING`."""

    WAITING = enum.auto()
    """Has no row and no blocks (except in the host cache): new, or preempted."""
    RUNNING = enum.auto()
    """Has a row and the blocks of its tokens."""
    FINISHED = enum.auto()


TOKENS_AT_A_TIME = 1024
"""Maximum output tokens for which a request allocates memory at once."""

_FINISHED = RequestStatus.FINISHED


class OutputMatcher(Protocol):
    """The grammar of one completion, which `structured/matcher.py` implements."""

    overrun: float
    """Seconds that the masks of steps took too long because of it, which `TokenMasks` counts."""

    def fill(
        self, request: Request, masks: Sequence[MaskWords], drafts: Sequence[int] = ()
    ) -> tuple[StructuredOutputError | Literal["complete"] | None, int]:
        """Write which tokens may follow the output of the request, and each of its drafts.

        Returns why the request ends before its next token, if it does, and the number of drafts
        after which its output may continue.
        """

    def drafts(self, request: Request, guess: Sequence[int]) -> tuple[Sequence[int], int]:
        """Return drafts after the output of the request, and how many of them must come."""


def _no_integers() -> array[int]:
    return array("q")


@dataclass(slots=True, eq=False)
class Request:
    """One completion. Compared by identity; `id` is unique within the engine."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    """Seed of the request's random numbers, which do not depend on the batch."""
    order: tuple[int, int]
    """(priority, arrival number): smaller is served first and preempted last."""
    max_tokens: int
    """Output tokens after which it ends with `length`: `params.max_tokens`, or fewer if a sequence
    cannot be as long. At least 1: a token is sampled, and dropped if `params.max_tokens` is 0."""
    stop_token_ids: frozenset[int]
    """Tokens that end it, end-of-sequence tokens included unless `params.ignore_eos`."""
    detokenizer: IncrementalDetokenizer | None
    arrival_ns: int
    """When it was added, on the clock of `time.perf_counter_ns`."""
    prefix_hashes: PrefixHashes | None = None
    """Hashes of its blocks so far; None if it shares no blocks by content."""
    embeds: tuple[EmbeddedSpan, ...] = ()
    """Embeddings in the place of tokens of the prompt, by position."""
    rope_length: int = 0
    """Tokens before this position have the rotary parameters of a sequence of this length: the
    prompt's, or a larger one if the sequence was computed again (see `rope_lengths.py`)."""
    outgrown_at: int = field(default=UNLIMITED, init=False)
    """The position whose token requires that all others are recomputed; set by the scheduler."""
    siblings: list[Request] = field(default_factory=list, repr=False)
    """The other completions of the same prompt, until this one ends."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of its prompt, if it is the completion that computes them."""
    matcher: OutputMatcher | None = None
    """The grammar that its output follows; None without one."""
    salt: str | None = None
    """`cache_salt`: it shares nothing with requests of another salt."""

    num_output: int = field(default=0, init=False)
    """Output tokens known on the host."""
    _output_ids: array[int] = field(default_factory=_no_integers, init=False, repr=False)
    _token_ns: array[int] = field(default_factory=_no_integers, init=False, repr=False)
    """Both have unused room after `num_output` elements."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    row: int | None = None
    num_computed: int = 0
    """Tokens whose keys and values launched steps have computed, at most: a verify step counts as
    if all of its drafts were accepted, until it is committed."""
    num_unsure: int = 0
    """Of them, those that depend on drafts of launched steps; 0 without verify steps."""
    num_pending: int = 0
    """Tokens that launched steps have sampled and that the host does not know yet, at most."""
    decoding: bool = False
    """Whether a launched step has sampled from its last known token, so that the device holds the
    next one. False while its prompt, or after a preemption its whole sequence, is prefilled."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    """Tokens found in the cache at its first admission; None before."""
    num_reported_tokens: int = 0
    num_reported_chars: int = 0
    """Tokens and characters in outputs so far: the next `delta` begins there."""
    drafter: Any = field(default=None, init=False, repr=False)
    """Its tokens as the proposer of drafts sees them (`RequestDrafter`); None until it first
    decodes with one."""
    proposed: Any = field(default=None, init=False, repr=False)
    """What a drafter on the device has proposed last, in committed steps (`RowDrafts`); or None."""
    num_drafts: int = field(default=0, init=False)
    """Drafts that the last launched step proposes for it; its row keeps them on the device."""
    paused: bool = False
    """Whether it gets no row until it is resumed (see `Engine.pause`)."""
    may_fork: bool = True
    """Whether it may share the blocks of a sibling; not after copies for that failed."""

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and committed output."""
        return len(self.prompt_ids) + self.num_output

    @property
    def least_computed(self) -> int:
        """A lower bound of the tokens whose keys and values launched steps compute.

        Blocks are freed and shared by this bound, and allocated by `num_computed`.
        """
        return self.num_computed - self.num_unsure

    def launched(self, count: int) -> None:
        """Count a launched verify step of `count` tokens: the newest one and drafts."""
        self.num_computed += count
        self.num_unsure += count - 1
        self.num_pending += count

    def advanced(self, count: int, accepted: int) -> None:
        """Correct the counts after a verify step of `count` tokens, of which `accepted` remain.

        The tokens themselves are appended one by one. A request that was preempted meanwhile has no
        computed tokens to subtract.
        """
        self.num_pending -= count - accepted
        if self.row is not None:
            self.num_unsure -= count - 1
            self.num_computed -= count - accepted

    @property
    def num_unsampled(self) -> int:
        """Tokens that further launches may sample, at least."""
        return self.max_tokens - self.num_output - self.num_pending

    @property
    def reached_max_tokens(self) -> bool:
        """Whether launched steps sample the last of its tokens."""
        return self.num_unsampled <= 0

    @property
    def output_ids(self) -> list[int]:
        """The output tokens known on the host. A copy."""
        return self._output_ids[: self.num_output].tolist()

    def output_slice(self, start: int, stop: int) -> tuple[int, ...]:
        """Return output tokens `start` to `stop` - 1, which are known."""
        return tuple(self._output_ids[start:stop])

    @property
    def token_ns(self) -> list[int]:
        """When each output token reached the host. A copy."""
        return self._token_ns[: self.num_output].tolist()

    def token_ns_slice(self, start: int, stop: int) -> tuple[int, ...]:
        """Return when output tokens `start` to `stop` - 1 reached the host."""
        return tuple(self._token_ns[start:stop])

    def append_token(self, token_id: int, at_ns: int) -> None:
        """Append an output token, which reached the host at `at_ns`."""
        count = self.num_output
        if count == len(self._output_ids):
            memory = bytes(8 * max(1, min(self.max_tokens - count, TOKENS_AT_A_TIME)))
            self._output_ids.frombytes(memory)
            self._token_ns.frombytes(memory)
        self._output_ids[count] = token_id
        self._token_ns[count] = at_ns
        self.num_output = count + 1

    def release_buffers(self) -> None:
        """Free data that only the engine needs, because outputs can keep a request alive."""
        del self._output_ids[self.num_output :]
        del self._token_ns[self.num_output :]
        self.embeds = ()
        self.drafter = None
        self.proposed = None
        self.prefix_hashes = None
        self.matcher = None

    def replace_last_token(self, token_id: int) -> None:
        """Replace the newest token."""
        self._output_ids[self.num_output - 1] = token_id

    @property
    def reusable_tokens(self) -> int | None:
        """Tokens whose keys and values it may take from others; None: all.

        The positions after them are computed for their log-probabilities.
        """
        return None if self.prompt_logprobs is None else self.prompt_logprobs.reusable_tokens

    def unscored(self, start: int, stop: int) -> range:
        """Return the positions `start` to `stop` - 1 whose prompt log-probabilities are missing."""
        if self.prompt_logprobs is None:
            return range(0)
        return self.prompt_logprobs.unscored(start, stop)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the known tokens at positions `start` to `stop` - 1. A copy."""
        return list(self._slice(start, stop))

    def _slice(self, start: int, stop: int) -> Sequence[int]:
        """Return `tokens`, without a conversion if all of them are output."""
        split = len(self.prompt_ids)
        if stop <= split:
            return self.prompt_ids[start:stop]
        output = self._output_ids[max(start - split, 0) : min(stop - split, self.num_output)]
        if start >= split:
            return output
        return self.prompt_ids[start:split] + output.tolist()

    def hashes_of(self, num_tokens: int) -> PrefixHashes | None:
        """Return the block hashes of at least the first `num_tokens` tokens, which are known."""
        if self.prefix_hashes is not None:
            contents = self.contents if self.embeds else None
            self.prefix_hashes.extend(self._slice, num_tokens, contents)
        return self.prefix_hashes

    def contents(self, start: int, stop: int) -> bytes:
        """Return bytes that identify the embeddings at positions `start` to `stop` - 1."""
        return b"".join(
            span.content.key + (start - span.position).to_bytes(8, "little", signed=True)
            for span in self.embeds
            if span.position < stop and start < span.stop
        )


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A user's request: `params.n` completions of one prompt."""

    id: str
    prompt_ids: list[int]
    requests: list[Request]
    deliver: Callable[[Any], object] | None = None
    """Takes its last `RequestOutput`; None: `step` returns all of its outputs."""
    abort_posted: bool = False
    """Whether the next step ends it."""

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(request.status is _FINISHED for request in self.requests)

    def end(self, reason: AbortReason) -> None:
        """End the completions of a group that was never queued."""
        for request in self.requests:
            assert request.status is RequestStatus.WAITING
            request.status = _FINISHED
            request.finish_reason = reason
            request.siblings = []
