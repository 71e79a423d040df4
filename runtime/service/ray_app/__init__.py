"""Replicas of an engine on Ray Serve (extra `ray`).

    serve run stepgraph.runtime.service.ray_app:build model=demo replicas=2

    HTTP proxies of Serve → Ingress ──prefix router──→ EngineReplica, one engine each

The ingress reads a request, hashes its prompt as the prefix cache of the engines does, and passes
it to a replica. A request that a replica loses before its response begins goes to another one.
Importing this file needs neither Ray nor the extra `server`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from ...arguments import Range, check_fields
from ...bounded_repr import bounded_repr
from ...config import EngineConfig
from ...errors import ConfigError
from ..http.command import ENGINE_DEFAULTS, SERVICE_DEFAULTS
from ..service_config import ServiceConfig

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = [
    "HttpOptions",
    "ReplicaOptions",
    "RoutingOptions",
    "build",
    "check_ray",
    "replica_bundle",
]

CONSTRUCTOR_RETRIES = 2
"""Failed starts of a replica after which Serve gives a deployment up, with their error."""
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
    report_seconds: Seconds = 5.0
    report_blocks: Annotated[int, Range(0, 1 << 20)] = 1 << 15
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
    tool_parser: str | None = None
    reasoning_parser: str | None = None

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
                values[name] = _made(name, kind, defaults, values[name])
        made: Self = _made("an argument", cls, {}, values)
        return made


_NESTED: tuple[tuple[str, Any, Mapping[str, Any]], ...] = (
    ("engine", EngineConfig, ENGINE_DEFAULTS),
    ("service", ServiceConfig, SERVICE_DEFAULTS),
    ("http", HttpOptions, {}),
    ("routing", RoutingOptions, {}),
)


def _made(name: str, kind: Any, defaults: Mapping[str, Any], values: Any) -> Any:
    """Return a configuration, with lists as tuples; `name` begins the message of its errors."""
    try:
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in dict(values).items()}
        return kind(**{**defaults, **plain})
    except (ConfigError, TypeError, ValueError) as error:  # also unknown names
        raise ConfigError(f"{name}: {error}") from error


def build(args: Mapping[str, Any]) -> Application:
    """Return an application of an ingress and replicas; `args` are fields of `ReplicaOptions`.

    Raises:
        ConfigError: Ray is missing or of another version, or an argument is invalid. Nothing has
            been loaded.
    """
    check_ray()

    from ray import serve
    from ray.serve.config import AutoscalingConfig

    from ..http.output_parsers import make_output_parser
    from .replica import EngineReplica, Ingress

    options = ReplicaOptions.of(args)
    make_output_parser(options.http.tool_parser, options.http.reasoning_parser)
    bundle, routing = replica_bundle(options), options.routing
    actor: dict[str, Any] = {"num_cpus": bundle["CPU"]}
    if "GPU" in bundle:
        actor["num_gpus"] = bundle["GPU"]
    if options.accelerator_type is not None:
        actor["accelerator_type"] = options.accelerator_type
    number: dict[str, Any] = {"num_replicas": options.replicas or 1}
    if options.autoscaling is not None:
        target = max(1, round(0.8 * options.engine.max_num_seqs))
        scaling = {"target_ongoing_requests": target}
        made = _made("autoscaling", AutoscalingConfig, scaling, options.autoscaling)
        number = {"autoscaling_config": made}
    router: dict[str, Any] = {"request_routing_stats_period_s": routing.report_seconds}
    if routing.policy == "prefix":
        router["request_router_class"] = f"{__package__}.prefix_router:PrefixRouter"
        router["request_router_kwargs"] = {
            "load_bound": routing.load_bound,
            "spare_requests": routing.spare_requests,
        }
    both: dict[str, Any] = {
        "graceful_shutdown_timeout_s": options.drain_seconds,
        "graceful_shutdown_wait_loop_s": min(0.5, options.drain_seconds),
        "max_constructor_retry_count": CONSTRUCTOR_RETRIES,
    }
    replica = serve.deployment(
        EngineReplica,
        name="EngineReplica",
        **number,
        **both,
        ray_actor_options=actor,
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=options.engine.max_num_seqs + options.service.max_queued_requests,
        health_check_period_s=options.health_seconds,
        health_check_timeout_s=max(10.0, 3 * options.health_seconds),
        request_router_config=router,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        **both,
        num_replicas=options.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1 << 20,
    )
    return ingress.bind(options, replica.bind(options))


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
