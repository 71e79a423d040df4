"""`ReplicaOptions`: the arguments of `build`, from a Serve config file or `serve run`."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ...bounded_repr import bounded_repr
from ...config import EngineConfig
from ...errors import ConfigError
from ..http.server_flags import ENGINE_DEFAULTS, SERVICE_DEFAULTS
from ..service_config import ServiceConfig

__all__ = ["AutoscalingOptions", "HttpOptions", "ReplicaOptions", "RoutingOptions"]

MAX_REPLICAS = 10_000
MAX_SECONDS = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalingOptions:
    """When replicas are added and removed.

    The number of replicas is multiplied by the largest ratio of a mean over the replicas to its
    target, rounded up. Nothing changes while that ratio is within 10 % of 1.

    Attributes:
        min_replicas: at least so many, 1 to `max_replicas`.
        max_replicas: at most so many, 1 to 10,000.
        target_queue_seconds: wait of the oldest queued request, above 0.
        target_kv_usage: share of the cache's blocks that requests hold, above 0 to 1.
        target_row_usage: share of the rows (`max_num_seqs`) that have a request, above 0 to 1.
        upscale_delay_s: seconds that a target must be missed for before replicas are added.
        downscale_delay_s: the same, before replicas are removed.
        look_back_s: seconds over which the values are averaged, above 0.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_queue_seconds: float = 0.5
    target_kv_usage: float = 0.7
    target_row_usage: float = 0.8
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    look_back_s: float = 10.0

    def __post_init__(self) -> None:
        _check_int("autoscaling.max_replicas", self.max_replicas, 1, MAX_REPLICAS)
        _check_int("autoscaling.min_replicas", self.min_replicas, 1, self.max_replicas)
        _check_number("autoscaling.target_queue_seconds", self.target_queue_seconds, MAX_SECONDS)
        for name in ("target_kv_usage", "target_row_usage"):
            _check_number(f"autoscaling.{name}", getattr(self, name), 1)
        for name in ("upscale_delay_s", "downscale_delay_s"):
            _check_number(f"autoscaling.{name}", getattr(self, name), MAX_SECONDS, zero=True)
        _check_number("autoscaling.look_back_s", self.look_back_s, MAX_SECONDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingOptions:
    """Which replica gets a request.

    Attributes:
        policy: `prefix`: the replica that caches most blocks of the prompt, unless it is
            overloaded; `balanced`: the one with fewer requests of two random ones (Ray Serve's
            default); `round_robin`: each in turn, for comparisons.
        load_bound: a replica is overloaded if it would have more than this many times the mean of
            requests, at least 1.
        spare_requests: a replica with fewer requests is never overloaded, 0 to 2^20.
        report_seconds: seconds between a replica's reports of its cached blocks, above 0.
        report_blocks: blocks in a report, at most; 4 bytes each. 0 to 2^20; 0: no reports.
        max_prompt_bytes: larger bodies of requests are not hashed.
    """

    policy: Literal["prefix", "balanced", "round_robin"] = "prefix"
    load_bound: float = 1.25
    spare_requests: int = 4
    report_seconds: float = 5.0
    report_blocks: int = 1 << 15
    max_prompt_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        policies = typing.get_args(typing.get_type_hints(RoutingOptions)["policy"])
        if self.policy not in policies:
            raise _refusal("routing.policy", self.policy, " or ".join(policies))
        _check_number("routing.load_bound", self.load_bound, 1e6)
        if self.load_bound < 1:
            raise _refusal("routing.load_bound", self.load_bound, "a number of at least 1")
        _check_int("routing.spare_requests", self.spare_requests, 0, 1 << 20)
        _check_number("routing.report_seconds", self.report_seconds, MAX_SECONDS)
        _check_int("routing.report_blocks", self.report_blocks, 0, 1 << 20)
        _check_int("routing.max_prompt_bytes", self.max_prompt_bytes, 0, 1 << 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """The HTTP service of each replica; see `stepgraph.runtime.service.app`.

    `model_names` is the model if it is empty. Without `api_keys` the variable `STEPGRAPH_API_KEY`
    of the replicas gives one.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 4 << 20
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        for name in ("model_names", "api_keys"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(v, str) and v for v in values):
                raise ConfigError(f"http.{name} must be a list of strings that are not empty")
        _check_int("http.max_body_bytes", self.max_body_bytes, 1, 1 << 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """What `build` deploys.

    Attributes:
        model: checkpoint directory, hub id, `preset:NAME` or `demo`, on every node.
        engine: fields of `EngineConfig`.
        service: fields of `ServiceConfig`.
        http: see `HttpOptions`.
        replicas: their fixed number, 1 to 10,000; None: `autoscaling`, or one.
        autoscaling: see `AutoscalingOptions`; None: a fixed number.
        routing: see `RoutingOptions`.
        num_cpus: CPUs that Ray reserves for a replica. None: `threads` of `engine` for each rank on
            a CPU, or 1 for each rank.
        num_gpus: GPUs of a replica: `tensor_parallel` of them, or a share of one.
        accelerator_type: as Ray names it, for example `H100`; None: any.
        grows: whether the cluster adds nodes on demand. If not, a replica that fits no present node
            is refused.
        drain_seconds: time that a replica has to finish its requests when it is removed.
        step_seconds: a replica whose step takes longer is restarted, above 0.
        health_seconds: time between health checks of a replica.
        route_seconds: time until a replica has accepted a request; then it is refused (503).
        max_attempts: replicas that a request is sent to, at most, 1 to 100.
        ingress_replicas: processes that route requests, 1 to 10,000.
    """

    model: str
    engine: EngineConfig = field(default_factory=lambda: _make(EngineConfig, "", ENGINE_DEFAULTS))
    service: ServiceConfig = field(
        default_factory=lambda: _make(ServiceConfig, "", SERVICE_DEFAULTS)
    )
    http: HttpOptions = field(default_factory=HttpOptions)
    replicas: int | None = None
    autoscaling: AutoscalingOptions | None = None
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    num_cpus: float | None = None
    num_gpus: float = 0
    accelerator_type: str | None = None
    grows: bool = False
    drain_seconds: float = 30.0
    step_seconds: float = 60.0
    health_seconds: float = 2.0
    route_seconds: float = 30.0
    max_attempts: int = 4
    ingress_replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("model", "accelerator_type"):
            value = getattr(self, name)
            if (not isinstance(value, str) or not value) and (name == "model" or value is not None):
                raise _refusal(name, value, "a string that is not empty")
        if self.replicas is not None:
            _check_int("replicas", self.replicas, 1, MAX_REPLICAS)
            if self.autoscaling is not None:
                raise ConfigError("give replicas or autoscaling, not both")
        for name in ("drain_seconds", "step_seconds", "health_seconds", "route_seconds"):
            _check_number(name, getattr(self, name), MAX_SECONDS)
        if self.num_cpus is not None:
            _check_number("num_cpus", self.num_cpus, 1 << 20)
        _check_number("num_gpus", self.num_gpus, 1 << 10, zero=True)
        _check_int("max_attempts", self.max_attempts, 1, 100)
        _check_int("ingress_replicas", self.ingress_replicas, 1, MAX_REPLICAS)
        if not isinstance(self.grows, bool):
            raise _refusal("grows", self.grows, "true or false")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options that the arguments of `build` give.

        Values that `serve run` passes as text are read as JSON.

        Raises:
            ConfigError: an argument is unknown, has a wrong type or is out of range.
        """
        values = dict(arguments)
        if "model" not in values:
            raise ConfigError("give the argument model: a checkpoint, preset:NAME or demo")
        for name, kind in typing.get_type_hints(cls).items():
            if name in values:
                values[name] = _read(name, values[name], kind)
        options: Self = _make(cls, "", values)
        return options


_PARTS: Mapping[Any, Mapping[str, Any]] = {
    EngineConfig: ENGINE_DEFAULTS,
    ServiceConfig: SERVICE_DEFAULTS,
    HttpOptions: {},
    RoutingOptions: {},
    AutoscalingOptions: {},
}
"""Arguments with fields of their own, and the defaults that differ from those of the class."""


def _read(name: str, value: Any, kind: Any) -> Any:
    """Return the value of an argument, with text as JSON unless it is a text."""
    choices = typing.get_args(kind) or (kind,)
    if isinstance(value, str) and str not in choices:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name} is {bounded_repr(value)}, which is not JSON") from error
    part = next((choice for choice in choices if choice in _PARTS), None)
    if part is None or value is None:
        return value
    if not isinstance(value, Mapping):
        raise _refusal(name, value, "a mapping of fields to values")
    return _make(part, f"{name}.", {**_PARTS[part], **value})


def _make(kind: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    """Return an instance of a configuration, with its lists as tuples."""
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ConfigError(
            f"there is no argument {prefix}{bounded_repr(unknown[0])}: known are {', '.join(names)}"
        )
    plain = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    try:
        return kind(**plain)
    except ConfigError as error:
        raise ConfigError(f"{prefix.rstrip('.')}: {error}" if prefix else str(error)) from error


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refusal(name, value, f"an integer from {low} to {high}")


def _check_number(name: str, value: object, high: float, *, zero: bool = False) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not valid or not (value >= 0 if zero else value > 0) or not value <= high:  # type: ignore[operator]
        raise _refusal(name, value, f"a number {'from' if zero else 'above'} 0 to {high:g}")


def _refusal(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {bounded_repr(value)}; allowed is {allowed}")
