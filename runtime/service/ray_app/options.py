"""`ReplicaOptions`: the arguments of `build`, from a Serve config file or `serve run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import msgspec
from msgspec import Meta

from ...bounded_repr import bounded_repr
from ...config import EngineConfig
from ...errors import ConfigError
from ..http.command import ENGINE_DEFAULTS, SERVICE_DEFAULTS
from ..service_config import ServiceConfig

__all__ = ["HttpOptions", "ReplicaOptions", "RoutingOptions"]

MAX_SECONDS = 1e6

Replicas = Annotated[int, Meta(ge=1, le=10_000)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
Text = Annotated[str, Meta(min_length=1)]
if TYPE_CHECKING:
    Engine: TypeAlias = EngineConfig
    Service: TypeAlias = ServiceConfig
else:  # they check themselves; msgspec cannot read their types
    Engine = Service = Any


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options whose types and limits `msgspec` checks."""


class RoutingOptions(_Options, frozen=True, kw_only=True):
    """Which replica gets a request."""

    policy: Literal["prefix", "balanced"] = "prefix"
    """`prefix`: the replica that caches most blocks of the prompt, unless it is overloaded;
    `balanced`: the one with fewer requests of two random ones (Ray Serve's default)."""
    load_bound: Annotated[float, Meta(ge=1, le=1e6)] = 1.25
    """A replica is overloaded if it would have more than this many times the mean of requests."""
    spare_requests: Annotated[int, Meta(ge=0, le=1 << 20)] = 4
    """A replica with fewer requests is never overloaded."""
    report_seconds: Seconds = 5.0
    """Seconds between a replica's reports of its cached blocks."""
    report_blocks: Annotated[int, Meta(ge=0, le=1 << 20)] = 1 << 15
    """Blocks in a report, at most; 4 bytes each. 0: no reports."""
    max_prompt_bytes: Annotated[int, Meta(ge=0, le=1 << 30)] = 1 << 20
    """Larger bodies of requests are not hashed."""


class HttpOptions(_Options, frozen=True, kw_only=True):
    """The HTTP service of each replica; see `stepgraph.runtime.service.app`.

    `model_names` is the model if it is empty. Without `api_keys` the variable `STEPGRAPH_API_KEY`
    of the replicas gives one.
    """

    model_names: tuple[Text, ...] = ()
    api_keys: tuple[Text, ...] = ()
    max_body_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 4 << 20
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def __repr__(self) -> str:
        return f"HttpOptions(model_names={self.model_names})"  # without the keys


class ReplicaOptions(_Options, frozen=True, kw_only=True):
    """What `build` deploys."""

    model: Text
    """Checkpoint directory, hub id, `preset:NAME` or `demo`, on every node."""
    engine: Engine = msgspec.field(default_factory=lambda: EngineConfig(**ENGINE_DEFAULTS))
    service: Service = msgspec.field(default_factory=lambda: ServiceConfig(**SERVICE_DEFAULTS))
    http: HttpOptions = HttpOptions()
    replicas: Replicas | None = None
    """Their fixed number; None: `autoscaling`, or one."""
    autoscaling: dict[str, Any] | None = None
    """Ray Serve's `AutoscalingConfig`; `target_ongoing_requests` is by default 80 % of
    `max_num_seqs`. None: a fixed number."""
    routing: RoutingOptions = RoutingOptions()
    num_cpus: Annotated[float, Meta(gt=0, le=1 << 20)] | None = None
    """CPUs that Ray reserves for a replica. None: `threads` of `engine` for each rank on a CPU, or
    1 for each rank."""
    num_gpus: Annotated[float, Meta(ge=0, le=1 << 10)] = 0
    """GPUs of a replica: `tensor_parallel` of them, or a share of one."""
    accelerator_type: Text | None = None
    """As Ray names it, for example `H100`; None: any."""
    drain_seconds: Seconds = 30.0
    """Time that a replica has to finish its requests when it is removed."""
    step_seconds: Seconds = 60.0
    """A replica whose step takes longer is restarted."""
    health_seconds: Seconds = 2.0
    """Time between health checks of a replica."""
    route_seconds: Seconds = 30.0
    """Time until a replica has accepted a request; then it is refused (503)."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 4
    """Replicas that a request is sent to, at most."""
    ingress_replicas: Replicas = 1
    """Processes that route requests."""

    def __post_init__(self) -> None:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("give replicas or autoscaling, not both")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options that the arguments of `build` give.

        Values that `serve run` passes as text are read as JSON.

        Raises:
            ConfigError: an argument is unknown, has a wrong type or is out of range.
        """
        values = {
            name: value if name in ("model", "accelerator_type") else _read(name, value)
            for name, value in arguments.items()
        }
        for name, kind, defaults in (
            ("engine", EngineConfig, ENGINE_DEFAULTS),
            ("service", ServiceConfig, SERVICE_DEFAULTS),
        ):
            if name in values:
                values[name] = _config(name, kind, defaults, values[name])
        try:
            return msgspec.convert(values, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"an argument is invalid: {error}") from error


def _read(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{name} is {bounded_repr(value)}, which is not JSON") from error


def _config(name: str, kind: Any, defaults: Mapping[str, Any], values: Any) -> Any:
    """Return the configuration of an engine or its service, with lists as tuples."""
    try:
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in dict(values).items()}
        return kind(**{**defaults, **plain})
    except (ConfigError, TypeError, ValueError) as error:  # also unknown names
        raise ConfigError(f"{name}: {error}") from error
