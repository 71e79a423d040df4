"""The nouns of the runtime. Read this file first, then `engine.py`.

A user's request asks for `n` completions of one prompt; each completion is decoded as a `Request`
of its own. A `Request` is host state only: which tokens it has, how far its keys and values are
in the cache, which row of the decode batch it holds.

    prompt_ids            output_ids
    [p0 p1 p2 p3 p4]      [o0 o1 o2]        known on the host (committed)
     <-- num_computed = 7 -------->         keys and values written by launched steps
                                   num_pending = 1 more token was sampled by a step whose
                                   result the host has not read yet

Only the engine changes a `Request` (see `Engine.step`); the scheduler and the runner read it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..cache.prefix import PrefixHashes
from ..profiling.stats import RequestTiming
from .sampling_params import SamplingParams
from .tokenizer import IncrementalDetokenizer

if TYPE_CHECKING:  # it needs torch, and the scheduler reads this file
    from .prompt_embeds import EmbeddedSpan

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "Request",
    "RequestGroup",
    "RequestOutput",
    "RequestStatus",
    "TokenLogprobs",
]

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: an end-of-sequence or stop token, or a stop string. `length`: `max_tokens` or the
longest sequence the engine can hold. `abort`: `Engine.abort`. `error`: see `RequestOutput.error`.
"""


class RequestStatus(enum.Enum):
    """Where a request is. It moves between `WAITING` and `RUNNING` whenever it is preempted."""

    WAITING = enum.auto()
    """Holds no row and no blocks (but perhaps some on the host): new, or preempted."""
    RUNNING = enum.auto()
    """Holds a row and the blocks of its tokens."""
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, under the model's unprocessed distribution."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """The `SamplingParams.logprobs` most probable tokens, most probable first."""


@dataclass(slots=True, eq=False)
class Request:
    """One completion on its way. Identity is the object; `id` is unique within the engine."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    """Seeds the request's own stream of random numbers; never depends on the batch."""
    order: tuple[int, int]
    """(priority, arrival number): smaller is served first and preempted last."""
    max_tokens: int
    """Output tokens after which it ends with `length`; `params.max_tokens` within what fits."""
    stop_token_ids: frozenset[int]
    """Tokens that end it, end-of-sequence tokens included unless `params.ignore_eos`."""
    detokenizer: IncrementalDetokenizer | None
    arrival_ns: int
    """When it was added, on the clock of `time.perf_counter_ns`."""
    prefix_hashes: PrefixHashes | None = None
    """Of its blocks, as far as they have been asked for; None if it shares no blocks by content."""
    embeds: tuple[EmbeddedSpan, ...] = ()
    """What stands in the place of tokens of the prompt, by position."""
    siblings: list[Request] = field(default_factory=list, repr=False)
    """The other completions of the same prompt, until this one ends."""

    output_ids: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    """When each output token reached the host."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    row: int | None = None
    num_computed: int = 0
    num_pending: int = 0
    decoding: bool = False
    """Whether a launched step has sampled from its last known token, so that the device holds the
    next one. False while its prompt, or after a preemption its whole sequence, is prefilled."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    """Tokens that it found computed when it was first admitted; None before."""
    may_fork: bool = True
    """Whether it may go on from what a sibling has computed; not after copies for that failed."""

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: the prompt's and the committed output's."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def reached_max_tokens(self) -> bool:
        """Whether the launched steps have sampled all the tokens it may have."""
        return len(self.output_ids) + self.num_pending >= self.max_tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the known tokens at positions `start` to `stop` - 1."""
        split = len(self.prompt_ids)
        head = self.prompt_ids[start:stop]
        return head + self.output_ids[max(start - split, 0) : max(stop - split, 0)]

    def hashes_of(self, num_tokens: int) -> PrefixHashes | None:
        """Return the block hashes of at least the first `num_tokens` tokens, which are known."""
        if self.prefix_hashes is not None:
            contents = self.contents if self.embeds else None
            self.prefix_hashes.extend(self.tokens, num_tokens, contents)
        return self.prefix_hashes

    def contents(self, start: int, stop: int) -> bytes:
        """Return what tells apart the embeddings at positions `start` to `stop` - 1."""
        return b"".join(
            span.content.key + (start - span.position).to_bytes(8, "little", signed=True)
            for span in self.embeds
            if span.position < stop and start < span.stop
        )


@dataclass(slots=True, eq=False)
class RequestGroup:
    """What a user asked for: `params.n` completions of one prompt."""

    id: str
    prompt_ids: list[int]
    requests: list[Request]

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(r.status is RequestStatus.FINISHED for r in self.requests)


class CompletionOutput:
    """One completion as it stood when the output was made; later steps do not change it."""

    __slots__ = ("_num_tokens", "_request", "finish_reason", "text")

    def __init__(self, request: Request) -> None:
        self.finish_reason: FinishReason | None = request.finish_reason
        self.text: str = "" if request.detokenizer is None else request.detokenizer.text
        self._request = request  # its lists only grow: a length is a snapshot of them
        self._num_tokens = len(request.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """The output tokens, the one that ended it included."""
        return self._request.output_ids[: self._num_tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One entry a token; empty unless `SamplingParams.logprobs` was given."""
        return self._request.logprobs[: self._num_tokens]

    @property
    def timing(self) -> RequestTiming | None:
        """Arrival and token times; None before the first token."""
        times = self._request.token_ns[: self._num_tokens]
        return RequestTiming(self._request.arrival_ns, times) if times else None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(text={self.text!r}, token_ids={self.token_ids},"
            f" finish_reason={self.finish_reason!r})"
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request has produced so far. `text`, `token_ids` … are those of completion 0."""

    request_id: str
    prompt_token_ids: list[int]
    completions: tuple[CompletionOutput, ...]
    finished: bool
    num_preemptions: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that completion 0 did not compute: the cache had them already."""
    error: Exception | None = None
    """Why it ended with `finish_reason` `error`."""

    @property
    def text(self) -> str:
        """The text of completion 0 (empty for a checkpoint without a tokenizer)."""
        return self.completions[0].text if self.completions else ""

    @property
    def token_ids(self) -> list[int]:
        """The output tokens of completion 0."""
        return self.completions[0].token_ids if self.completions else []

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of completion 0."""
        return self.completions[0].logprobs if self.completions else []

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why completion 0 ended; None while it goes on."""
        return self.completions[0].finish_reason if self.completions else "error"

    @property
    def timing(self) -> RequestTiming | None:
        """Arrival and token times of completion 0; None before its first token."""
        return self.completions[0].timing if self.completions else None

    @classmethod
    def of(cls, group: RequestGroup) -> RequestOutput:
        """Return the present state of a group of requests."""
        return cls(
            request_id=group.id,
            prompt_token_ids=list(group.prompt_ids),  # ours may be prefilled again
            completions=tuple(CompletionOutput(request) for request in group.requests),
            finished=group.finished,
            num_preemptions=sum(request.num_preemptions for request in group.requests),
            cached_tokens=group.requests[0].num_cached_tokens or 0,
            error=next((r.error for r in group.requests if r.error is not None), None),
        )
