"""Summaries of lists of times, without percentiles of too few samples; the times of one request.

Standard library only.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Final

REQUIRED_SAMPLES: Final = {50: 1, 90: 10, 99: 100}
"""Minimum number of samples of a percentile p: 100/(100 - p), so that one sample lies above it. The
median of one sample is that sample."""

_NS_PER_MS: Final = 1e6


@dataclass(frozen=True, slots=True)
class Summary:
    """The distribution of a list of samples, in the unit of the samples."""

    n: int
    mean: float
    std: float | None
    """Sample standard deviation (divided by n - 1); None for a single sample."""
    min: float
    p50: float
    p90: float | None
    """None for fewer than 10 samples."""
    p99: float | None
    """None for fewer than 100 samples."""
    max: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Summary":
        """Summarise `samples`, in any order.

        Raises:
            ValueError: no sample was given, or one is NaN or infinite.
        """
        ordered = [float(sample) for sample in samples]
        if not ordered:
            raise ValueError("cannot summarise an empty list of samples")
        # Before the sort: NaN compares false with everything and would leave the list unsorted.
        for index, sample in enumerate(ordered):
            if not math.isfinite(sample):
                raise ValueError(f"sample {index} is {sample}; every sample must be finite")
        ordered.sort()
        n = len(ordered)
        mean = math.fsum(ordered) / n
        spread = math.fsum((sample - mean) ** 2 for sample in ordered)
        return cls(
            n=n,
            mean=mean,
            std=math.sqrt(spread / (n - 1)) if n > 1 else None,
            min=ordered[0],
            p50=_interpolate(ordered, 50),
            p90=_interpolate(ordered, 90) if n >= REQUIRED_SAMPLES[90] else None,
            p99=_interpolate(ordered, 99) if n >= REQUIRED_SAMPLES[99] else None,
            max=ordered[-1],
        )

    def to_json(self) -> dict[str, float | int | None]:
        """Return the fields by name, in order; a percentile of too few samples is None."""
        return asdict(self)


def _interpolate(ordered: Sequence[float], percent: int) -> float:
    """The percentile by linear interpolation between order statistics.

    Definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), which is
    NumPy's default.
    """
    below, hundredths = divmod((len(ordered) - 1) * percent, 100)
    if hundredths == 0:
        return ordered[below]
    low, high = ordered[below], ordered[below + 1]
    return low + (high - low) * (hundredths / 100)


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Arrival of a request and the time of each of its tokens."""

    arrival_ns: int
    """When the request was added, on the clock of `time.perf_counter_ns`."""
    token_ns: Sequence[int]
    """When each output token was ready, in order; at least one."""

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return (self.token_ns[0] - self.arrival_ns) / _NS_PER_MS

    @property
    def itl_ms(self) -> list[float]:
        """The gaps between consecutive tokens; empty for a single token."""
        return [(after - before) / _NS_PER_MS for before, after in pairwise(self.token_ns)]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of some spans lasted.

    Args:
        spans: begin and end of each, in the order of their begin, in any unit of time.
    """
    total, until = 0.0, -math.inf
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
