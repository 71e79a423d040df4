"""Options of replicas and their ingress, and the resources that a replica takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Annotated, Any, Literal, Self

from ...arguments import Range, check_fields
from ...bounded_repr import bounded_repr
from ...config import EngineConfig
from ...errors import ConfigError
from ..http.command import ENGINE_DEFAULTS, SERVICE_DEFAULTS
from ..service_config import ServiceConfig

OLDEST, TOO_NEW = (2, 60), (2, 61)
"""Releases of Ray Serve whose interfaces of routers and autoscaling are those used here."""
_INSTALL = 'pip install "stepgraph[ray]"'

Replicas = Annotated[int, Range(1, 10_000)]
Seconds = Annotated[float, Range(0, 1e6, above=True)]
Text = Annotated[str, Range(1, 1 << 16)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingOptions:
    """Which replica gets a request; see docs/replicas.md."""

    policy: Literal["prefix", "balanced"] = "prefix"
    load_bound: Annotated[float, Range(1, 1e6)] = 1.25
    spare_requests: Annotated[int, Range(0, 1 << 20)] = 4
    max_prompt_bytes: Annotated[int, Range(0, 1 << 30)] = 1 << 20

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """The HTTP service of each replica; see `stepgraph.runtime.service.app`.

    `model_names` is the model if it is empty. Without `api_keys` the variable `STEPGRAPH_API_KEY`
    of the replicas gives one.
    """

    model_names: tuple[Text, ...] = ()
    api_keys: tuple[Text, ...] = field(default=(), repr=False)
    max_body_bytes: Annotated[int, Range(1, 1 << 30)] = 4 << 20
    tool_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """The arguments of `build`, from a Serve config file or `serve run`; see docs/replicas.md."""

    model: Text
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(**ENGINE_DEFAULTS))
    service: ServiceConfig = field(default_factory=lambda: ServiceConfig(**SERVICE_DEFAULTS))
    http: HttpOptions = HttpOptions()
    routing: RoutingOptions = RoutingOptions()
    replicas: Replicas | None = None
    autoscaling: Mapping[str, Any] | None = None
    num_cpus: Annotated[float, Range(0, 1 << 20, above=True)] | None = None
    num_gpus: Annotated[float, Range(0, 1 << 10)] = 0.0
    accelerator_type: Text | None = None
    drain_seconds: Seconds = 30.0
    step_seconds: Seconds = 60.0
    health_seconds: Seconds = 2.0
    route_seconds: Seconds = 30.0
    max_attempts: Annotated[int, Range(1, 100)] = 4
    ingress_replicas: Replicas = 1

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.replicas is not None and self.autoscaling is not None:
            raise ConfigError("give replicas or autoscaling, not both", field="replicas")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options that the arguments of `build` give; texts of `serve run` are JSON."""
        values = dict(arguments)
        for name, value in arguments.items():
            if isinstance(value, str) and name not in ("model", "accelerator_type"):
                try:
                    values[name] = json.loads(value)
                except ValueError as error:
                    shown = bounded_repr(value)
                    raise ConfigError(f"{name} is {shown}, which is not JSON") from error
        for name, kind, defaults in _NESTED:
            if name in values:
                values[name] = made(name, kind, defaults, values[name])
        options: Self = made("an argument", cls, {}, values)
        return options


_NESTED: tuple[tuple[str, Any, Mapping[str, Any]], ...] = (
    ("engine", EngineConfig, ENGINE_DEFAULTS),
    ("service", ServiceConfig, SERVICE_DEFAULTS),
    ("http", HttpOptions, {}),
    ("routing", RoutingOptions, {}),
)


def made(name: str, kind: Any, defaults: Mapping[str, Any], values: Any) -> Any:
    """Return a configuration, with lists as tuples; `name` begins the message of its errors."""
    try:
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in dict(values).items()}
        return kind(**{**defaults, **plain})
    except (ConfigError, TypeError, ValueError) as error:  # also unknown names
        raise ConfigError(f"{name}: {error}") from error


def replica_bundle(options: ReplicaOptions) -> dict[str, float]:
    """Return the resources of one replica, for a placement group of one bundle.

    A replica starts the ranks of a tensor-parallel engine itself, as processes of one node. So its
    CPUs and GPUs are one bundle, which a node has as a whole or not at all.
    """
    engine, gpus, ranks = options.engine, options.num_gpus, options.engine.tensor_parallel
    threads = engine.threads if not gpus and engine.threads and engine.threads > 0 else 1
    cpus = float(threads * ranks) if options.num_cpus is None else options.num_cpus
    device, _, index = engine.device.partition(":")
    given, problem = f"engine.device is {engine.device!r}", None
    if device == "cuda" and not gpus:
        problem = f"num_gpus is 0: give num_gpus: {ranks}"
    elif gpus and device == "cpu":
        problem = f"num_gpus is {gpus:g}: leave one of them out"
    elif gpus and device == "cuda" and index:
        problem = "Ray chooses the GPUs: give 'cuda'"
    elif gpus and gpus != ranks and not (ranks == 1 and gpus < 1):
        share = ", or a share of one" if ranks == 1 else ""
        given, problem = f"num_gpus is {gpus:g}", f"tensor_parallel={ranks} needs {ranks}{share}"
    elif not gpus and cpus < ranks:
        given = f"num_cpus is {cpus:g}"
        problem = f"tensor_parallel={ranks} needs a CPU for each rank"
    if problem is not None:
        raise ConfigError(f"{given}, but {problem}")
    bundle = {"CPU": cpus}
    if gpus:
        bundle["GPU"] = gpus
    if options.accelerator_type is not None:
        bundle[f"accelerator_type:{options.accelerator_type}"] = 0.001
    return bundle


def check_ray() -> None:
    """Raise `ConfigError` unless a supported version of Ray is installed."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"replicas need Ray Serve, which is not installed: {_INSTALL}") from error
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not OLDEST <= release < TOO_NEW:
        oldest, new = (".".join(map(str, release)) for release in (OLDEST, TOO_NEW))
        raise ConfigError(
            f"Ray {version} is installed; supported are versions from {oldest} and below {new}:"
            f" {_INSTALL}"
        )
