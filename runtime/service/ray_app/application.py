"""`build`: the application of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .options import ReplicaOptions
from .ray_version import check_ray
from .resources import checked_bundle

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["build"]

CONSTRUCTOR_RETRIES = 2
"""Failed starts of a replica after which Serve gives a deployment up, with their error."""


ROUND_ROBIN = "ray.serve.experimental.round_robin_router:RoundRobinRouter"


def build(args: Mapping[str, Any]) -> Application:
    """Return an application of an ingress and replicas of an engine.

    Args:
        args: fields of `ReplicaOptions`, `model` at least.

    Raises:
        ConfigError: Ray is missing or of another version; an argument is invalid; the model cannot
            be split over `tensor_parallel` ranks; or no node has the resources of a replica.
            Nothing has been loaded.
    """
    check_ray()
    options = ReplicaOptions.of(args)

    from ray import serve

    from ..http.output_parsers import make_output_parser
    from .engine_replica import EngineReplica
    from .ingress import Ingress

    make_output_parser(options.http.tool_parser, options.http.reasoning_parser)
    bundle = checked_bundle(options)
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
    scaling = options.autoscaling
    if scaling is None:
        return {"num_replicas": options.replicas or 1}
    policy = {
        "policy_function": f"{__package__}.autoscaling:LoadPolicy",
        "policy_kwargs": {
            "queue_seconds": scaling.target_queue_seconds,
            "kv_usage": scaling.target_kv_usage,
            "row_usage": scaling.target_row_usage,
        },
    }
    config = {
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "look_back_period_s": scaling.look_back_s,
        "policy": policy,
    }
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
    elif routing.policy == "round_robin":
        config["request_router_class"] = ROUND_ROBIN
    return config
