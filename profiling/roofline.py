"""Bytes and floating-point operations of a decode step, and its fraction of the roofline.

Decode is memory-bound: at any batch size, a step reads every weight once and the keys and values of
every row's context. These bytes divided by the read bandwidth of the device are the floor of the
step. It omits smaller terms: activations, the keys and values that a step writes, sampling.

Standard library only.
"""

from dataclasses import dataclass


def step_flops(
    weights_per_step: int, rows: int, positions: int, heads: int, key_dim: int, value_dim: int
) -> int:
    """Return the floating-point operations of a decode step.

    A multiply and an add a weight and row, and as many for q·k and for p·v of each query head and
    position: rows * (2 * weights + 2 * positions * heads * (key_dim + value_dim)).

    Args:
        weights_per_step: number of weights that a row is multiplied with.
        rows: rows that decode, without padding.
        positions: tokens that each row attends to, summed over the layers.
        heads: query heads a layer.
        key_dim: elements of a head's key.
        value_dim: elements of a head's value.
    """
    return rows * (2 * weights_per_step + 2 * positions * heads * (key_dim + value_dim))


def floor_seconds(bytes_per_step: int, bandwidth_bytes_per_s: float) -> float:
    """Return the seconds that reading `bytes_per_step` takes at least.

    Raises:
        ValueError: the bytes are negative or the bandwidth is not positive.
    """
    if not (bytes_per_step >= 0 and bandwidth_bytes_per_s > 0):  # NaN fails too
        raise ValueError(f"reading {bytes_per_step} bytes at {bandwidth_bytes_per_s} bytes/s")
    return bytes_per_step / bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Roofline:
    """The limit of one decode step on one device.

    Attributes:
        bytes_per_step: bytes that the step must read: the weights, and the cache of every row.
        flops_per_step: floating-point operations of the step (`step_flops`).
        bandwidth_bytes_per_s: measured read bandwidth of the device.
    """

    bytes_per_step: int
    flops_per_step: int
    bandwidth_bytes_per_s: float

    @property
    def floor_seconds(self) -> float:
        """The shortest time of the step in seconds."""
        return floor_seconds(self.bytes_per_step, self.bandwidth_bytes_per_s)

    def fraction(self, measured_seconds: float) -> float:
        """Return floor / measured time: 1.0 is the limit.

        Above 1.0 the step did not read memory as the floor assumes: the model fits into a cache.
        """
        return self.floor_seconds / measured_seconds

    def to_json(self, measured_seconds: float) -> dict[str, float | int]:
        """Return the floor, and the fraction that a measured step reached, for the JSON."""
        return {
            "bytes_per_step": self.bytes_per_step,
            "bandwidth_gb_s": self.bandwidth_bytes_per_s / 1e9,
            "floor_ms": self.floor_seconds * 1e3,
            "fraction": self.fraction(measured_seconds),
        }
