"""`build`: the application of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application

    from .options import ReplicaOptions

__all__ = ["build", "check_ray", "replica_bundle"]

CONSTRUCTOR_RETRIES = 2
"""Failed starts of a replica after which Serve gives a deployment up, with their error."""

OLDEST, TOO_NEW = (2, 60), (2, 61)
"""Releases of Ray Serve whose interfaces of routers and autoscaling are those used here."""

_INSTALL = 'pip install "stepgraph[ray]"'


def build(args: Mapping[str, Any]) -> Application:
    """Return an application of an ingress and replicas of an engine.

    Args:
        args: fields of `ReplicaOptions`, `model` at least.

    Raises:
        ConfigError: Ray is missing or of another version, or an argument is invalid. Nothing has
            been loaded.
    """
    check_ray()

    from ray import serve

    from ..http.output_parsers import make_output_parser
    from .engine_replica import EngineReplica
    from .ingress import Ingress
    from .options import ReplicaOptions

    options = ReplicaOptions.of(args)
    make_output_parser(options.http.tool_parser, options.http.reasoning_parser)
    bundle = replica_bundle(options)
    gpus = {"num_gpus": bundle["GPU"]} if "GPU" in bundle else {}
    kind = (
        {} if options.accelerator_type is None else {"accelerator_type": options.accelerator_type}
    )
    replica = serve.deployment(
        EngineReplica,
        name="EngineReplica",
        **_number_of_replicas(options),
        ray_actor_options={"num_cpus": bundle["CPU"], **gpus, **kind},
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=options.engine.max_num_seqs + options.service.max_queued_requests,
        graceful_shutdown_timeout_s=options.drain_seconds,
        graceful_shutdown_wait_loop_s=min(0.5, options.drain_seconds),
        health_check_period_s=options.health_seconds,
        health_check_timeout_s=max(10.0, 3 * options.health_seconds),
        max_constructor_retry_count=CONSTRUCTOR_RETRIES,
        request_router_config=_router(options),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=options.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1 << 20,
        graceful_shutdown_timeout_s=options.drain_seconds,
        graceful_shutdown_wait_loop_s=min(0.5, options.drain_seconds),
        max_constructor_retry_count=CONSTRUCTOR_RETRIES,
    )
    return ingress.bind(options, replica.bind(options))


def _number_of_replicas(options: ReplicaOptions) -> dict[str, Any]:
    if options.autoscaling is None:
        return {"num_replicas": options.replicas or 1}
    from ray.serve.config import AutoscalingConfig

    target = max(1, round(0.8 * options.engine.max_num_seqs))
    try:
        config = AutoscalingConfig(**{"target_ongoing_requests": target, **options.autoscaling})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"autoscaling: {error}") from error
    return {"autoscaling_config": config}


def _router(options: ReplicaOptions) -> dict[str, Any]:
    routing = options.routing
    config: dict[str, Any] = {"request_routing_stats_period_s": routing.report_seconds}
    if routing.policy == "prefix":
        config["request_router_class"] = f"{__package__}.prefix_router:PrefixRouter"
        config["request_router_kwargs"] = {
            "load_bound": routing.load_bound,
            "spare_requests": routing.spare_requests,
        }
    return config


def replica_bundle(options: ReplicaOptions) -> dict[str, float]:
    """Return the resources of one replica, for a placement group of one bundle.

    All ranks of a tensor-parallel engine are processes of one node, and the replica starts them
    itself. So its CPUs and GPUs are one bundle, which a node has as a whole or not at all.

    Raises:
        ConfigError: device, `tensor_parallel`, `threads`, `num_cpus` and `num_gpus` disagree.
    """
    engine, gpus = options.engine, options.num_gpus
    ranks = engine.tensor_parallel
    device = engine.device.partition(":")[0]
    problem = None
    if device == "cuda" and not gpus:
        problem = f"num_gpus is 0: give num_gpus: {ranks}"
    elif gpus and device == "cpu":
        problem = f"num_gpus is {gpus:g}: leave one of them out"
    elif gpus and engine.device.startswith("cuda:"):
        problem = "Ray chooses the GPUs: give 'cuda'"
    if problem is not None:
        raise ConfigError(f"engine.device is {engine.device!r}, but {problem}")
    if gpus and gpus != ranks and not (ranks == 1 and gpus < 1):
        share = ", or a share of one" if ranks == 1 else ""
        raise ConfigError(f"num_gpus is {gpus:g}, but tensor_parallel={ranks} needs {ranks}{share}")
    threads = engine.threads if not gpus and engine.threads and engine.threads > 0 else 1
    cpus = options.num_cpus if options.num_cpus is not None else float(threads * ranks)
    if not gpus and cpus < ranks:
        raise ConfigError(
            f"num_cpus is {cpus:g}, but tensor_parallel={ranks} needs a CPU for each rank"
        )
    bundle = {"CPU": float(cpus)}
    if gpus:
        bundle["GPU"] = float(gpus)
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
        raise ConfigError(
            f"Ray {version} is installed; supported are versions from {_text(OLDEST)} and below"
            f" {_text(TOO_NEW)}: {_INSTALL}"
        )


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
