"""`ServiceConfig`: how an `AsyncEngine` admits and watches requests. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..bounded_repr import bounded_repr
from ..errors import ConfigError

__all__ = ["ServiceConfig"]

MAX_COUNT = 1 << 40
MAX_SECONDS = 1e9
MAX_WEIGHT = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Limits of an `AsyncEngine`. Every field has a default.

    Attributes:
        max_queued_requests: maximum requests that wait for a row, those being tokenised included,
            1 to 2^40. More are refused (`OverloadedError`; 503 over HTTP).
        max_queued_tokens: maximum prompt tokens of the waiting requests, 1 to 2^40.
        tenant_weights: the share of a tenant in the engine, relative to others, above 0 to 10^6.
            Tenants without an entry have weight 1.
        preparation_threads: threads that tokenise prompts and render chat templates, 1 to 64.
        max_unread_tokens: output tokens of a stream that its client may leave unread, 1 to 2^40.
            With more the request gives up its row to others, until they are read.
        send_timeout: seconds after which a stream ends whose client reads nothing while output is
            waiting, above 0 to 10^9.
        stall_seconds: while a step takes longer, the engine is not ready (`Health.ready`); above 0
            to 10^9.
        switch_interval: seconds after which Python passes the interpreter lock to a waiting thread
            (`sys.setswitchinterval`), in the whole process, above 0 to 10^9. With Python's default,
            5 ms, an event loop can delay a step by that much. None: unchanged.
        unknown_fields: what happens with fields of HTTP requests that have no effect here. `warn`
            logs each name once, `error` refuses the request, `ignore` does neither. Fields that
            would change the result are always refused, see docs/serving.md.

    Raises:
        ConfigError: a value has a wrong type or is out of range.
    """

    max_queued_requests: int = 256
    max_queued_tokens: int = 1 << 20
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    preparation_threads: int = 1
    max_unread_tokens: int = 256
    send_timeout: float = 30.0
    stall_seconds: float = 30.0
    switch_interval: float | None = None
    unknown_fields: Literal["error", "warn", "ignore"] = "warn"

    def __post_init__(self) -> None:
        self._check_integer("max_queued_requests", 1, MAX_COUNT)
        self._check_integer("max_queued_tokens", 1, MAX_COUNT)
        self._check_integer("max_unread_tokens", 1, MAX_COUNT)
        self._check_integer("preparation_threads", 1, 64)
        _check_positive("send_timeout", self.send_timeout, MAX_SECONDS)
        _check_positive("stall_seconds", self.stall_seconds, MAX_SECONDS)
        if self.switch_interval is not None:
            _check_positive("switch_interval", self.switch_interval, MAX_SECONDS)
        if self.unknown_fields not in ("error", "warn", "ignore"):
            raise _refusal("unknown_fields", self.unknown_fields, "error, warn or ignore")
        if not isinstance(self.tenant_weights, Mapping):
            raise _refusal("tenant_weights", self.tenant_weights, "a mapping of names to numbers")
        for tenant, weight in self.tenant_weights.items():
            if not isinstance(tenant, str):
                raise _refusal("a key of tenant_weights", tenant, "a string")
            _check_positive(f"tenant_weights[{bounded_repr(tenant)}]", weight, MAX_WEIGHT)

    def _check_integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _refusal(name, value, f"an integer from {low} to {high}")


def _check_positive(name: str, value: object, high: float) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not valid or not 0 < value <= high:  # type: ignore[operator]
        raise _refusal(name, value, f"a number above 0 and up to {high:g}")


def _refusal(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"ServiceConfig: {name} is {bounded_repr(value)}; allowed is {allowed}",
        field="tenant_weights" if "tenant_weights" in name else name,
    )
