"""Replicas of an engine on Ray Serve (extra `ray`).

    serve run stepgraph.runtime.service.ray_app:build model=demo replicas=2

    HTTP proxies of Serve → Ingress ──prefix router──→ EngineReplica, one engine each

The ingress reads a request, hashes its prompt in chunks, and passes it to the replica that got most
of them before. A request that a replica loses before its response begins goes to another one.
Importing this file needs neither Ray nor the extra `server`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .options import ReplicaOptions, check_ray, made, replica_bundle

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["ReplicaOptions", "build", "check_ray", "replica_bundle"]

CONSTRUCTOR_RETRIES = 2
"""Failed starts of a replica after which Serve gives a deployment up, with their error."""


def build(args: Mapping[str, Any]) -> Application:
    """Return an application of an ingress and replicas; `args` are fields of `ReplicaOptions`.

    Raises:
        ConfigError: Ray is missing or of another version, or an argument is invalid. Nothing has
            been loaded.
    """
    check_ray()

    from ray import serve
    from ray.serve.config import AutoscalingConfig

    from ..http.output_parsers import chosen_parsers
    from .replica import EngineReplica, Ingress

    options = ReplicaOptions.of(args)
    chosen_parsers(None, options.http.tool_parser, options.http.reasoning_parser)
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
        config = made("autoscaling", AutoscalingConfig, scaling, options.autoscaling)
        number = {"autoscaling_config": config}
    router: dict[str, Any] = {}
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
