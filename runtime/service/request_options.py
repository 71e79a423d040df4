"""Options of a request of an `AsyncEngine`, and their checks."""

from __future__ import annotations

from typing import TypedDict

from ..arguments import MAX_PRIORITY, check_integer
from ..bounded_repr import bounded_repr
from ..errors import RequestError
from ..sampling_params import SamplingParams
from .request_handle import Mailbox, RequestHandle

__all__ = ["RequestOptions", "make_handle", "nanoseconds"]

MAX_SECONDS = 1e9
MAX_TENANT_CHARS = 256


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
    request_id: str,
    mailbox: Mailbox,
    params: SamplingParams | None,
    options: RequestOptions,
    *,
    streams: bool,
    now_ns: int,
) -> RequestHandle:
    """Return the handle of a new request.

    Args:
        request_id: its id, unless the options have one.
        mailbox: wakes its consumer.
        params: of the caller, not checked yet.
        options: of the caller.
        streams: whether the consumer reads more than the last output.
        now_ns: the time of the call.

    Raises:
        RequestError: an option is unknown or invalid.
    """
    if not options.keys() <= _NAMES:
        unknown = sorted(options.keys() - _NAMES)
        raise RequestError(
            f"unknown option {bounded_repr(unknown[0])}: the options are {sorted(_NAMES)}"
        )
    priority = options.get("priority", 0)
    check_integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    given_id = options.get("request_id")
    if given_id is not None and (not isinstance(given_id, str) or not given_id):
        raise RequestError(
            f"request_id must be a non-empty string, not {bounded_repr(given_id)}",
            field="request_id",
        )
    traceparent = options.get("traceparent")
    if traceparent is not None and not isinstance(traceparent, str):
        raise RequestError(
            f"traceparent must be a string, not {bounded_repr(traceparent)}", field="traceparent"
        )
    handle = RequestHandle(
        given_id or request_id,
        mailbox,
        streams=streams,
        num_completions=params.n if isinstance(params, SamplingParams) else 1,
        tenant=_tenant(options),
        priority=priority,
        submitted_ns=now_ns,
        deadline_ns=_due("deadline", options.get("deadline"), now_ns),
        first_token_deadline_ns=_due(
            "first_token_deadline", options.get("first_token_deadline"), now_ns
        ),
    )
    handle.traceparent = traceparent
    return handle


def nanoseconds(name: str, seconds: float, *, zero: bool = False) -> int:
    """Return a duration in nanoseconds.

    Raises:
        RequestError: it is not a number of seconds above 0 (from 0 with `zero`) to 10^9.
    """
    valid = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not valid or not 0 <= seconds <= MAX_SECONDS or (not seconds and not zero):
        raise RequestError(
            f"{name} must be a number of seconds {'from' if zero else 'above'} 0 and up to"
            f" {MAX_SECONDS:g}, not {bounded_repr(seconds)}",
            field=name,
        )
    return int(seconds * 1e9)


def _due(name: str, seconds: float | None, now_ns: int) -> int | None:
    """Return when a deadline is, on the clock of `now_ns`."""
    return None if seconds is None else now_ns + nanoseconds(name, seconds)


def _tenant(options: RequestOptions) -> str:
    name = "cache_salt" if options.get("tenant") is None else "tenant"
    tenant = options.get(name)
    if tenant is None:
        return ""
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_CHARS:
        raise RequestError(
            f"{name} must be a string of at most {MAX_TENANT_CHARS} characters,"
            f" not {bounded_repr(tenant)}",
            field=name,
        )
    return tenant
