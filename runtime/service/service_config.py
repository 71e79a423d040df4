"""`ServiceConfig`: how an `AsyncEngine` admits and watches requests. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ..arguments import Range, check_fields
from ..errors import ConfigError

Count = Annotated[int, Range(1, 1 << 40)]
Seconds = Annotated[float, Range(0, 1e9, above=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Limits of an `AsyncEngine`. Every field has a default.

    Attributes:
        max_queued_requests: maximum requests that wait for a row, those being tokenised included.
            More are refused (`OverloadedError`; 503 over HTTP).
        max_queued_tokens: maximum prompt tokens of the waiting requests.
        tenant_weights: the share of a tenant in the engine, relative to others. Tenants without an
            entry have weight 1.
        preparation_threads: threads that tokenise prompts and render chat templates.
        max_unread_tokens: output tokens of a stream that its client may leave unread. With more the
            request gives up its row to others, until they are read.
        send_timeout: seconds after which a stream ends whose client reads nothing while output is
            waiting.
        stall_seconds: while a step takes longer, the engine is not ready (`Health.ready`).
        switch_interval: seconds after which Python passes the interpreter lock to a waiting thread
            (`sys.setswitchinterval`), in the whole process. With Python's default, 5 ms, an event
            loop can delay a step by that much. None: unchanged.
        max_stored_responses: responses of `/v1/responses` that are kept in memory, so that clients
            can read and continue them; a new one replaces the oldest. 0: none.
        max_stored_bytes: limit of what they take together, as JSON. A larger response is served,
            and not kept.
        unknown_fields: what happens with fields of HTTP requests that have no effect here. `warn`
            logs each name once, `error` refuses the request, `ignore` does neither. Fields that
            would change the result are always refused, see docs/serving.md.

    Raises:
        ConfigError: a value has a wrong type or is out of range.
    """

    max_queued_requests: Count = 256
    max_queued_tokens: Count = 1 << 20
    tenant_weights: Mapping[str, Annotated[float, Range(0, 1e6, above=True)]] = field(
        default_factory=dict
    )
    preparation_threads: Annotated[int, Range(1, 64)] = 1
    max_unread_tokens: Count = 256
    send_timeout: Seconds = 30.0
    stall_seconds: Seconds = 30.0
    switch_interval: Seconds | None = None
    max_stored_responses: Annotated[int, Range(0, 1 << 20)] = 1000
    max_stored_bytes: Annotated[int, Range(0, 1 << 40)] = 256 << 20
    unknown_fields: Literal["error", "warn", "ignore"] = "warn"

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
