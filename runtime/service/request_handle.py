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
from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

from ..arguments import MAX_PRIORITY, check_integer, check_number, check_type
from ..bounded_repr import bounded_repr
from ..errors import RequestError
from ..request import AbortReason, FinishReason, Request, RequestGroup, TokenLogprobs
from ..sampling_params import SamplingParams

if TYPE_CHECKING:  # it needs torch
    from ..engine.request_output import RequestOutput

__all__ = [
    *("Delta", "HandleState", "LoopMailbox"),
    *("RequestHandle", "RequestOptions", "make_handle", "nanoseconds"),
]


MAX_SECONDS = 1e9
MAX_TENANT_CHARS = 256


class HandleState(enum.Enum):
    """The state of a request; see the module."""

    PREPARING = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class LoopMailbox:
    """The requests whose consumers are tasks of one event loop.

    Any thread may call `post` and `flush`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, at_once: bool = False) -> None:
        """Wake consumers of a loop: at a `flush`, or `at_once`."""
        self._loop = loop
        self._at_once = at_once
        self._news: deque[RequestHandle] = deque()
        self._scheduled = False
        self._waiters: dict[RequestHandle, asyncio.Future[None]] = {}

    @property
    def closed(self) -> bool:
        """Whether the event loop is closed: its streams cannot be read any more."""
        return self._loop.is_closed()

    def post(self, handle: RequestHandle) -> None:
        """Note that a request has news."""
        if not handle.posted:
            handle.posted = True
            self._news.append(handle)
            if self._at_once:
                self.flush()

    def flush(self, *, again: bool = False) -> None:
        """Wake the consumers that have news, unless a wake-up is scheduled already.

        `again` schedules one in any case.
        """
        if self._news and (again or not self._scheduled):
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                if not self.closed:
                    raise
                self._news.clear()

    def news(self, handle: RequestHandle) -> asyncio.Future[None]:
        """Return a future that is done once a request has news, at the latest when it ends.

        One task at a time may await a request.
        """
        waiter = self._waiters[handle] = self._loop.create_future()
        return waiter

    def _deliver(self) -> None:
        self._scheduled = False  # first: what is posted from now on schedules again
        while self._news:
            handle = self._news.popleft()
            handle.posted = False
            waiter = self._waiters.pop(handle, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


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
    mailbox: LoopMailbox = field(init=False)
    """Wakes its consumer."""
    streams: bool = True
    """Whether the consumer reads more than the last output."""
    num_completions: int
    """`SamplingParams.n`."""
    tenant: str
    priority: int
    submitted_ns: int
    deadline_ns: int | None
    first_token_deadline_ns: int | None
    traceparent: str | None = None
    state: HandleState = HandleState.PREPARING
    group: RequestGroup | None = None
    """Its requests, from the thread that prepared it."""
    num_prompt_tokens: int = 0
    """Set once it is admitted."""
    started_ns: int | None = None
    """When it entered the engine."""
    num_charged: int = 0
    """Output tokens that its tenant's counter contains."""
    is_chat: bool = False
    """Whether its prompt is a conversation."""
    output: RequestOutput | None = None
    """The newest output."""
    error: BaseException | None = None
    """Why it was refused, or lost."""
    abort_reason: AbortReason | None = None
    """Set once it should end early."""
    failure: BaseException | None = None
    """The error to end with: of its preparation, or once the engine has ended it."""
    num_read: int | None = None
    """Output tokens that its consumer has read; None if it need not read them."""
    unread_ns: int | None = None
    """Since when output waits for its consumer; None if it has read all."""
    paused: bool = False
    """Whether its row was taken because its consumer reads too little."""
    num_pauses: int = 0
    posted: bool = False
    """Whether its mailbox has news of it that the consumer has not seen."""
    _read_output: RequestOutput | None = field(default=None, init=False, repr=False)
    """The output that its consumer has read last."""
    _positions: dict[int, tuple[int, int, bool]] = field(
        default_factory=dict, init=False, repr=False
    )
    """Tokens and characters read of each completion, and whether it has ended."""

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
        """Return what each completion gained since the last call; an empty list for nothing.

        For its one consumer.
        """
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
    """Return the handle of a new request.

    Args:
        request_id: its id, unless the options have one.
        params: of the caller, not checked yet.
        options: of the caller.
        now_ns: the time of the call.

    Raises:
        RequestError: an option is unknown or invalid.
    """
    if not options.keys() <= _NAMES:
        unknown = sorted(options.keys() - _NAMES)
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

    def due(name: Literal["deadline", "first_token_deadline"]) -> int | None:
        seconds = options.get(name)
        return None if seconds is None else now_ns + nanoseconds(name, seconds)

    return RequestHandle(
        given_id or request_id,
        num_completions=params.n if isinstance(params, SamplingParams) else 1,
        tenant=_tenant(options),
        priority=priority,
        submitted_ns=now_ns,
        deadline_ns=due("deadline"),
        first_token_deadline_ns=due("first_token_deadline"),
        traceparent=traceparent,
    )


def nanoseconds(name: str, seconds: float, least: float = 1e-9) -> int:
    """Return a duration in nanoseconds.

    Raises:
        RequestError: it is not a number of seconds from `least` to 10^9.
    """
    return int(1e9 * check_number(name, seconds, least, MAX_SECONDS))


def _tenant(options: RequestOptions) -> str:
    name, tenant = "tenant", options.get("tenant")
    if tenant is None:
        name, tenant = "cache_salt", options.get("cache_salt")
    tenant = check_type(name, tenant, str | None, "a string") or ""
    if len(tenant) > MAX_TENANT_CHARS:
        raise RequestError(
            f"{name} has {len(tenant)} characters; allowed are {MAX_TENANT_CHARS}", field=name
        )
    return tenant
