"""A request of an `AsyncEngine`, from its submission to its last output. Does not import torch.

    PREPARING   tokenised and checked, in a preparation thread
    QUEUED      in the admission queue
    RUNNING     in the engine: waiting for its blocks, prefilled, decoding or swapped out
    ENDED       has its last output or its error

The step thread stores the newest output; the consumer computes deltas from the positions that it
has read. However slow the consumer is, a handle holds one output and one state. A request whose
consumer reads too little is paused, and ended if that lasts (see `Dispatcher`).
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from ..arguments import MAX_PRIORITY, check_integer, check_number, check_type
from ..bounded_repr import bounded_repr
from ..errors import (
    DeadlineUnreachableError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    SendTimeoutError,
)
from ..request import AbortReason, FinishReason, Request, RequestGroup, TokenLogprobs
from ..sampling_params import SamplingParams

if TYPE_CHECKING:  # it needs torch
    from ..engine.request_output import RequestOutput

MAX_SECONDS = 1e9
MAX_TENANT_CHARS = 256


class ConsumerLoop(Protocol):
    """What wakes consumers: an event loop, or the thread of callbacks. Compared by identity."""

    def is_closed(self) -> bool: ...

    def call_soon_threadsafe(self, callback: Callable[..., Any], /, *args: Any) -> object: ...


class HandleState(enum.Enum):
    """The state of a request; see the module."""

    PREPARING = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class Delta:
    """What a completion has gained since the previous delta of its stream.

    Several steps may be joined in one delta if the consumer is slower than the engine.
    """

    request_id: str
    index: int
    """Number of the completion, from 0 to `SamplingParams.n` - 1."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One entry a token; empty unless `SamplingParams.logprobs` was given."""
    token_ns: tuple[int, ...]
    """When the host received each token, on the clock of `time.perf_counter_ns`."""
    finish_reason: FinishReason | None
    """Why the completion ended, in its last delta."""


@dataclass(slots=True, eq=False)
class RequestHandle:
    """State of one request. The step thread changes it, once it is prepared.

    Times are on the clock of `time.perf_counter_ns`.
    """

    id: str
    _: KW_ONLY
    loop: ConsumerLoop = field(init=False)  # that its consumer runs in
    waiter: asyncio.Future[None] | None = None  # of its consumer; for its loop only
    deliver: Callable[[], None] | None = None  # the consumer, if it has a callback or a future
    streams: bool = True  # whether the consumer reads more than the last output
    num_completions: int
    tenant: str
    priority: int
    submitted_ns: int
    deadline_ns: int | None
    first_token_deadline_ns: int | None
    traceparent: str | None = None
    state: HandleState = HandleState.PREPARING
    group: RequestGroup | None = None  # from the thread that prepared it
    num_prompt_tokens: int = 0  # set once it is admitted
    started_ns: int | None = None  # when it entered the engine
    num_charged: int = 0  # output tokens that its tenant's counter contains
    is_chat: bool = False  # whether its prompt is a conversation
    output: RequestOutput | None = None  # the newest
    error: BaseException | None = None  # why it was refused, or lost
    abort_reason: AbortReason | None = None  # set once it should end early
    failure: BaseException | None = None  # of its preparation, or for when the engine has ended it
    num_read: int | None = None  # output tokens; None if the consumer need not read them
    unread_ns: int | None = None  # since when output waits for its consumer
    paused: bool = False  # its row was taken because its consumer reads too little
    num_pauses: int = 0
    posted: bool = False  # it is among those that will be woken
    _read_output: RequestOutput | None = field(default=None, init=False, repr=False)
    _positions: dict[int, tuple[int, int, bool]] = field(
        default_factory=dict, init=False, repr=False
    )  # tokens and characters read of each completion, and whether it has ended

    @property
    def ended(self) -> bool:
        """Whether `output` or `error` is final."""
        return self.state is HandleState.ENDED

    def placeholder(self) -> RequestGroup:
        """Return requests without a prompt, to end a request that is not prepared."""
        return RequestGroup(
            self.id,
            [],
            [
                Request(
                    id=f"{self.id}/{index}",
                    prompt_ids=[],
                    params=SamplingParams().resolved(),
                    seed=0,
                    order=(self.priority, 0),
                    max_tokens=1,
                    stop_token_ids=frozenset(),
                    detokenizer=None,
                    arrival_ns=self.submitted_ns,
                )
                for index in range(self.num_completions)
            ],
        )

    @property
    def due_ns(self) -> int | None:
        """The deadline that it misses first; None without one."""
        due = [self.deadline_ns]
        if self.group is None or not any(r.num_output for r in self.group.requests):
            due.append(self.first_token_deadline_ns)
        return min([ns for ns in due if ns is not None], default=None)

    def read(self) -> list[Delta]:
        """Return what each completion gained since the last call. For its one consumer."""
        output = self.output
        if output is None or output is self._read_output:
            return []
        self._read_output = output
        deltas = []
        for index, completion in enumerate(output.completions):
            tokens, chars, ended = self._positions.get(index, (0, 0, False))
            reason = completion.finish_reason
            if ended or (completion.num_tokens == tokens and reason is None):
                continue
            gained = completion.delta_since(tokens, chars)
            chars += len(gained.text)
            self._positions[index] = (completion.num_tokens, chars, reason is not None)
            times = completion.token_ns_since(tokens)
            deltas.append(
                Delta(self.id, index, gained.text, gained.token_ids, gained.logprobs, times, reason)
            )
        if self.num_read is not None:
            self.num_read = sum(c.num_tokens for c in output.completions)
        self.unread_ns = None
        return deltas


def wake(handles: Iterable[RequestHandle]) -> None:
    """Wake the consumers of requests that have news. Their event loop calls it."""
    for handle in handles:
        handle.posted = False  # first: what follows is posted again
        if handle.deliver is not None:
            handle.deliver()
        elif handle.waiter is not None and not handle.waiter.done():
            handle.waiter.set_result(None)


class RequestOptions(TypedDict, total=False):
    """Options of a request, all of them with defaults."""

    request_id: str | None
    """Unique among the unfinished requests; None for a new one."""
    priority: int
    """Requests of smaller priority are served first; 0 by default."""
    deadline: float | None
    """Seconds from the call until the last token."""
    first_token_deadline: float | None
    """Seconds from the call until the first token."""
    cache_salt: str | None
    """See `Engine.add_request`."""
    tenant: str | None
    """Tenants share the engine fairly; None takes `cache_salt`."""
    traceparent: str | None
    """Parent of the request's span: a `traceparent` header (W3C Trace Context); see `tracing`."""


_NAMES = frozenset(RequestOptions.__annotations__)


def make_handle(
    request_id: str, params: SamplingParams | None, options: RequestOptions, now_ns: int
) -> RequestHandle:
    """Return the handle of a request, with the given id unless the options have one."""
    given: Mapping[str, Any] = options
    if unknown := sorted(given.keys() - _NAMES):
        raise RequestError(
            f"unknown option {bounded_repr(unknown[0])}: the options are {sorted(_NAMES)}",
            field=unknown[0],
        )
    priority = options.get("priority", 0)
    check_integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    given_id = check_type("request_id", options.get("request_id"), str | None, "a string")
    if given_id == "":
        raise RequestError("request_id must not be empty", field="request_id")
    traceparent = options.get("traceparent")
    check_type("traceparent", traceparent, str | None, "a string")

    due = {
        name: now_ns + nanoseconds(name, seconds)
        for name in ("deadline", "first_token_deadline")
        if (seconds := given.get(name)) is not None
    }
    name = "cache_salt" if options.get("tenant") is None else "tenant"
    tenant = check_type(name, given.get(name), str | None, "a string") or ""
    if len(tenant) > MAX_TENANT_CHARS:
        raise RequestError(
            f"{name} has {len(tenant)} characters; allowed are {MAX_TENANT_CHARS}", field=name
        )
    return RequestHandle(
        given_id or request_id,
        num_completions=params.n if isinstance(params, SamplingParams) else 1,
        tenant=tenant,
        priority=priority,
        submitted_ns=now_ns,
        deadline_ns=due.get("deadline"),
        first_token_deadline_ns=due.get("first_token_deadline"),
        traceparent=traceparent,
    )


def nanoseconds(name: str, seconds: float, least: float = 1e-9) -> int:
    """Return seconds, from `least` to 10^9, in nanoseconds; raise `RequestError` for others."""
    return int(1e9 * check_number(name, seconds, least, MAX_SECONDS))


Outcome = (
    FinishReason
    | Literal[
        "overloaded", "deadline_unreachable", "unavailable", "invalid", "send_timeout", "failed"
    ]
)
"""The finish reason of a request with an output. Of one without: `overloaded`
(`OverloadedError`), `deadline_unreachable` (`DeadlineUnreachableError`), `unavailable` (the engine
started, drained, slept or closed), `invalid` (`RequestError`), `send_timeout`
(`SendTimeoutError`) or `failed` (any other error).
"""

Phase = Literal["queue", "prefill", "decode"]

_OUTCOMES: tuple[tuple[type[BaseException], Outcome], ...] = (
    (DeadlineUnreachableError, "deadline_unreachable"),
    (OverloadedError, "overloaded"),
    (EngineUnavailableError, "unavailable"),
    (RequestError, "invalid"),
    (SendTimeoutError, "send_timeout"),
)
_EARLY: tuple[FinishReason, ...] = ("error", "deadline", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that has ended. Times are on the clock of `time.perf_counter_ns`."""

    request_id: str
    tenant: str
    priority: int
    is_chat: bool
    """Whether its prompt was a conversation."""
    traceparent: str | None
    """See `RequestOptions`."""
    params: SamplingParams | None
    """How its tokens were chosen; None if it was refused before it was prepared."""
    outcome: Outcome
    error: BaseException | None
    """Why it was refused, lost, or ended with `error`."""
    finish_reasons: tuple[FinishReason | None, ...]
    """Of each completion, None for one that was lost; empty if it did not enter the engine."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Of all completions."""
    num_cached_tokens: int
    """Prompt tokens that were found in the cache."""
    num_preemptions: int
    submitted_ns: int
    started_ns: int | None
    """When it entered the engine; None if it did not."""
    ended_ns: int
    """When the last output or the error was final."""
    token_ns: tuple[tuple[int, ...], ...]
    """When the host received each token, of each completion."""

    @classmethod
    def of(cls, handle: RequestHandle, ended_ns: int) -> RequestRecord:
        """Return the record of a request that has ended."""
        group, output, error = handle.group, handle.output, handle.error
        completions = () if output is None else output.completions
        reasons = tuple(completion.finish_reason for completion in completions)
        outcome: Outcome = reasons[0] or "error" if reasons else "error"
        if error is None:
            outcome = next((reason for reason in _EARLY if reason in reasons), outcome)
            error = None if output is None else output.error
        else:
            outcome = next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "failed")
        return cls(
            request_id=handle.id,
            tenant=handle.tenant,
            priority=handle.priority,
            is_chat=handle.is_chat,
            traceparent=handle.traceparent,
            params=None if group is None else group.requests[0].params,
            outcome=outcome,
            error=error,
            finish_reasons=reasons,
            num_prompt_tokens=0 if group is None else len(group.prompt_ids),
            num_output_tokens=sum(completion.num_tokens for completion in completions),
            num_cached_tokens=0 if output is None else output.cached_tokens,
            num_preemptions=0 if output is None else output.num_preemptions,
            submitted_ns=handle.submitted_ns,
            started_ns=handle.started_ns,
            ended_ns=ended_ns,
            token_ns=tuple(completion.token_ns_since(0) for completion in completions),
        )

    @property
    def first_token_ns(self) -> int | None:
        """When the host received its first token; None without tokens."""
        return min((times[0] for times in self.token_ns if times), default=None)

    @property
    def last_token_ns(self) -> int | None:
        """When the host received its last token; None without tokens."""
        return max((times[-1] for times in self.token_ns if times), default=None)

    @property
    def seconds(self) -> dict[str, float]:
        """Durations: `e2e`; `queue` once it entered the engine; with tokens the others too."""
        submitted, started, first = self.submitted_ns, self.started_ns, self.first_token_ns
        times = {"e2e": (submitted, self.ended_ns)}
        if started is not None:
            times["queue"] = (submitted, started)
            if first is not None and (last := self.last_token_ns) is not None:
                times |= {"first_token": (submitted, first), "prefill": (started, first)}
                times |= {"decode": (first, last), "inference": (started, last)}
        return {name: (end - begin) / 1e9 for name, (begin, end) in times.items()}

    @property
    def phase(self) -> Phase:
        """Where it ended."""
        if self.started_ns is None:
            return "queue"
        return "prefill" if self.first_token_ns is None else "decode"


Listener = Callable[[RequestRecord], None]
