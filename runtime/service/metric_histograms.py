"""Histograms of requests and steps, filled many values at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...profiling.timeline import RECORD_FIELDS, Timeline
from .metric_definitions import METRICS
from .request_record import RequestRecord

__all__ = ["Counted", "Histogram", "Observations"]

_REQUEST_COUNTERS: Final = (
    *("request_success", "requests_cancelled", "deadlines_missed"),
    *("requests_shed", "requests_invalid", "requests_failed", "send_timeouts"),
)


class Counted(NamedTuple):
    """The values of a histogram at one moment."""

    buckets: list[tuple[str, float]]
    """Each upper bound, as Prometheus writes it, and the count of values up to it."""
    sum: float


class Histogram:
    """Counts of values by bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Start empty; `bounds` are the upper bounds of all buckets but the last, ascending."""
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value, in the unit of the bounds."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: NDArray[Any]) -> None:
        """Count many values."""
        buckets, counts = np.unique(np.searchsorted(self._bounds, values), return_counts=True)
        for bucket, count in zip(buckets.tolist(), counts.tolist(), strict=True):
            self._counts[bucket] += count
        self.sum += float(values.sum())

    def counted(self) -> Counted:
        """Return the present counts."""
        names = [*map(str, self._bounds), "+Inf"]
        return Counted(list(zip(names, accumulate(self._counts), strict=True)), self.sum)


class Observations:
    """The counters of requests, and all histograms. For one thread at a time."""

    def __init__(self) -> None:
        """Start at zero."""
        self.counters: dict[str, dict[str, float]] = {
            metric.name: dict.fromkeys(metric.series, 0.0)
            for metric in METRICS
            if metric.name in _REQUEST_COUNTERS
        }
        """Name → value of its label, empty without a label → count."""
        self.histograms: dict[str, dict[str, Histogram]] = {
            metric.name: {value: Histogram(metric.bounds) for value in metric.series}
            for metric in METRICS
            if metric.kind == "histogram"
        }
        """Name → value of its label, empty without a label → histogram."""
        self._timeline: Timeline | None = None
        self._num_steps = 0

    def count_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        counters, outcome = self.counters, record.outcome
        if outcome in ("overloaded", "deadline_unreachable", "unavailable"):
            counters["requests_shed"][outcome] += 1
        elif outcome == "send_timeout":
            counters["send_timeouts"][""] += 1
        elif outcome in ("invalid", "failed"):
            counters[f"requests_{outcome}"][""] += 1
        else:
            counters["request_success"][outcome] += 1
            self._observe("request_prompt_tokens", record.num_prompt_tokens)
            self._observe("request_generation_tokens", record.num_output_tokens)
            if outcome == "abort":
                counters["requests_cancelled"][record.phase] += 1
            else:
                latency = (record.ended_ns - record.submitted_ns) / 1e9
                self._observe("e2e_request_latency_seconds", latency)
        if outcome == "deadline":
            counters["deadlines_missed"][record.phase] += 1
        self._count_times(record)

    def count_steps(self, timeline: Timeline | None) -> None:
        """Count the steps since the last call, and all kept steps of a new timeline."""
        if timeline is not self._timeline:
            self._timeline, self._num_steps = timeline, 0
        if timeline is None:
            return
        self._num_steps, copied = timeline.copy_since(self._num_steps)
        steps = np.frombuffer(copied, np.int64).reshape(-1, len(RECORD_FIELDS))
        column = {name: steps[:, number] for number, name in enumerate(RECORD_FIELDS)}
        taken_ns = column["plan_ns"] + column["launch_ns"] + column["commit_ns"] + column["wait_ns"]
        if not timeline.is_async_device:
            taken_ns += np.maximum(column["device_ns"], 0)
        seconds = taken_ns / 1e9
        prefills = column["prefill_tokens"] > 0
        for kind, chosen in (("decode", ~prefills), ("prefill", prefills)):
            self.histograms["step_time_seconds"][kind].observe_all(seconds[chosen])
            self.histograms["step_bucket_size"][kind].observe_all(column["bucket"][chosen])

    def _count_times(self, record: RequestRecord) -> None:
        submitted, started, first = record.submitted_ns, record.started_ns, record.first_token_ns
        if started is None:
            return
        self._observe("request_queue_time_seconds", (started - submitted) / 1e9)
        last = record.last_token_ns
        if first is None or last is None:
            return
        self._observe("time_to_first_token_seconds", (first - submitted) / 1e9)
        self._observe("request_prefill_time_seconds", (first - started) / 1e9)
        self._observe("request_decode_time_seconds", (last - first) / 1e9)
        self._observe("request_inference_time_seconds", (last - started) / 1e9)
        latencies = [np.diff(times) / 1e9 for times in record.token_ns if len(times) > 1]
        if latencies:
            joined = np.concatenate(latencies)
            self.histograms["inter_token_latency_seconds"][""].observe_all(joined)
            self._observe("request_time_per_output_token_seconds", float(joined.mean()))

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name][""].observe(value)
