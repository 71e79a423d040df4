"""When requests arrive: seeded, independent of how fast the service answers.

Standard library only.
"""

from __future__ import annotations

import random

__all__ = ["ARRIVALS", "arrival_times"]

ARRIVALS = ("poisson", "burst")
BURST = 8
"""Requests that arrive together in `burst`."""


def arrival_times(kind: str, rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrivals of a Poisson process, in seconds from the start, in order.

    Args:
        kind: `poisson`, or `burst`: each event is `BURST` requests at once, at the same mean rate.
        rate: mean requests per second, above 0.
        seconds: length of the run; at least one event arrives, at its begin if no other does.
        seed: equal arguments give equal arrivals.
    """
    size = BURST if kind == "burst" else 1
    generator = random.Random(f"{kind} {rate!r} {seed}")
    times: list[float] = []
    now = generator.expovariate(rate / size)
    while now < seconds:
        times += [now] * size
        now += generator.expovariate(rate / size)
    return times or [0.0] * size
