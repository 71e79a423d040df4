"""The CPUs and GPUs of a replica: whether its model can use them, and a node has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CheckpointError, ConfigError
from .options import ReplicaOptions

__all__ = ["check_nodes", "check_ranks_of_model", "checked_bundle", "replica_bundle"]


def checked_bundle(options: ReplicaOptions) -> dict[str, float]:
    """Return `replica_bundle`, for a model and a cluster that allow it.

    Raises:
        ConfigError: as the other functions of this file.
    """
    import ray

    bundle = replica_bundle(options)
    check_ranks_of_model(options)
    if ray.is_initialized() and not options.grows:
        check_nodes(bundle, ray.nodes())
    return bundle


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
    if device == "cuda" and not gpus:
        raise ConfigError(
            f"engine.device is {engine.device!r}, but num_gpus is 0: give num_gpus: {ranks}"
        )
    if gpus and device == "cpu":
        raise ConfigError(
            f"engine.device is 'cpu', but num_gpus is {gpus:g}: leave one of them out"
        )
    if gpus and engine.device.startswith("cuda:"):
        raise ConfigError(
            f"engine.device is {engine.device!r}, but Ray chooses the GPUs: give 'cuda'"
        )
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


def check_ranks_of_model(options: ReplicaOptions) -> None:
    """Raise `ConfigError` if the model cannot be split over the ranks of a replica.

    Only its config is read. A model that this machine does not have is left to the replicas.
    """
    engine = options.engine
    if engine.tensor_parallel == 1:
        return
    from ...loading.loader import resolve_source  # imports torch
    from ...models.plan import plan_of
    from ...models.sharding import check_ranks

    try:
        found = resolve_source(options.model, config_only=True, model_impl=engine.model_impl)
    except CheckpointError:
        return
    check_ranks(plan_of(found.config), engine.tensor_parallel)


def check_nodes(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` if no node is large enough for a replica.

    Args:
        bundle: the resources of a replica.
        nodes: as `ray.nodes` returns them.
    """
    sizes = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(size.get(k, 0) >= v for k, v in bundle.items()) for size in sizes):
        return
    largest = {name: max((size.get(name, 0) for size in sizes), default=0) for name in bundle}
    raise ConfigError(
        f"no node of the cluster has {_text(bundle)} for a replica; the most of each on a node is"
        f" {_text(largest)}: change num_cpus, num_gpus or tensor_parallel, or set grows: true if"
        " the cluster adds such nodes"
    )


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
