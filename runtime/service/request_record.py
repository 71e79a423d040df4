"""`RequestRecord`: what became of a request, for metrics and traces. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import (
    DeadlineUnreachableError,
    EngineClosedError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    SendTimeoutError,
)
from ..request import FinishReason
from .request_handle import RequestHandle

if TYPE_CHECKING:
    from ..sampling_params import SamplingParams

__all__ = ["Listener", "Outcome", "Phase", "RequestRecord"]

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
    (EngineClosedError, "unavailable"),
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
