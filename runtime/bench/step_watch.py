"""The roofline of decode steps, and how far an engine runs ahead."""

from __future__ import annotations

from collections.abc import Sequence

from ...profiling.roofline import Roofline, step_flops
from ..engine.engine import Engine
from ..models.layout import weights_per_step
from ..models.plan import plan_of

__all__ = ["decode_roofline", "steps_in_flight"]


def steps_in_flight(engine: Engine) -> int:
    """Return how many launched steps are in flight when `step` returns."""
    return int(engine.config.is_async_device)


def decode_roofline(engine: Engine, contexts: Sequence[int], bandwidth: float) -> Roofline:
    """Return the roofline of a decode step.

    Bytes are those of the weights and the cache as this engine stores them. The ranks of a CPU
    share its bandwidth, so the bytes of all count; elsewhere those of one rank.

    Args:
        engine: that runs the steps.
        contexts: tokens that each row attends to, the newest included.
        bandwidth: bytes per second that the device reads, measured.
    """
    config = engine.model_config
    attend = plan_of(config).layers[0].attend
    kv_bytes = sum(map(engine.kv_bytes_read, contexts))
    flops = step_flops(weights_per_step(config), len(contexts), 0, 0, 0, 0) + step_flops(
        0,
        1,
        sum(map(engine.positions_read, contexts)),
        attend.heads,
        attend.head_dim,
        attend.value_dim,
    )
    shared = engine.config.user.tensor_parallel if engine.config.device.type == "cpu" else 1
    return Roofline(
        shared * (engine.weight_bytes_read(len(contexts)) + kv_bytes),
        shared * flops,
        bandwidth,
    )
