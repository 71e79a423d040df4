"""The least time of a decode step, and the fraction of it that a measured step reached.

Decode is memory-bound: at any batch size, a step reads every weight once and the keys and values of
every row's context. These bytes divided by the read bandwidth of the device are the floor of the
step. It omits smaller terms: activations, the keys and values that a step writes, sampling.

Standard library only.
"""


def roofline_json(
    bytes_per_step: int, bandwidth_bytes_per_s: float, measured_seconds: float
) -> dict[str, float]:
    """Return the limit of a decode step, and the fraction that a measured one reached.

    The fraction is floor / measured time: 1.0 is the limit. Above it the step did not read memory
    as the floor assumes: the model fits into a cache.

    Args:
        bytes_per_step: bytes that the step must read: the weights, and the cache of every row.
        bandwidth_bytes_per_s: measured read bandwidth of the device.
        measured_seconds: of the step.
    """
    floor = bytes_per_step / bandwidth_bytes_per_s
    return {
        "bytes_per_step": bytes_per_step,
        "bandwidth_gb_s": bandwidth_bytes_per_s / 1e9,
        "floor_ms": floor * 1e3,
        "fraction": floor / measured_seconds,
    }
