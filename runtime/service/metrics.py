"""`EngineMetrics`: the metrics of an `AsyncEngine` for Prometheus (extra `server`).

The step thread does nothing for them. Gauges and counters are read when they are scraped, times of
steps are taken from the engine's timeline then, and requests are counted by a listener.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from ...profiling.timeline import Timeline
from ..engine.engine_stats import EngineGauges
from .async_engine import AsyncEngine
from .health import Phase, ServiceSnapshot
from .request_handle import Outcome, RequestRecord
from .step_reader import StepReader

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.core import Metric as Family
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'metrics need prometheus-client: pip install "stepgraph[server]"', name=error.name
    ) from error

PREFIX: Final = "stepgraph:"
VLLM_PREFIX: Final = "vllm:"

_LONG = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_LONG)
"""Buckets of times that requests take."""
TOKEN_SECONDS: Final = (
    *(1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
"""Buckets of times between tokens, and of steps."""
TOKENS: Final = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
SIZES: Final = tuple(float(1 << e) for e in range(14))


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of an `AsyncEngine`."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    """Without prefix, and without the `_total` of a counter."""
    help: str
    source: str = ""
    """Where a `ServiceSnapshot` has its only value; nanoseconds become seconds, None 0."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label → its values; empty for values that depend on the engine."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
    vllm: bool = False
    """Whether vLLM has a metric of this name and meaning."""

    @property
    def series(self) -> tuple[str, ...]:
        """The values of its only label, each of which has a series; of no label: empty."""
        return next(iter(self.labels.values()), ("",))


_gauge, _counter = partial(Metric, "gauge"), partial(Metric, "counter")
_times = partial(Metric, "histogram", bounds=SECONDS, vllm=True)
_histogram = partial(Metric, "histogram")
_ENDED = {"phase": ("queue", "prefill", "decode")}
_REASONS = {"finished_reason": ("stop", "length", "abort", "deadline", "error")}
_SHED: tuple[Outcome, ...] = ("overloaded", "deadline_unreachable", "unavailable")
_KIND = {"kind": ("decode", "prefill")}

METRICS: Final = (
    _gauge("num_requests_running", "Completions that have a row.", "gauges.running", vllm=True),
    _gauge(
        "num_requests_waiting",
        "Requests that wait for a row, those being tokenised included.",
        vllm=True,
    ),
    _gauge("num_prompt_tokens_waiting", "Prompt tokens of the queued requests.", "queued_tokens"),
    _gauge("kv_cache_usage_perc", "Blocks that requests hold, 0 to 1.", vllm=True),
    _gauge(
        "cache_config_info",
        "1, with the size of the KV cache as labels.",
        labels={"block_size": (), "num_gpu_blocks": ()},
        vllm=True,
    ),
    _gauge(
        "engine_phase",
        "1 for the present phase, 0 for the others.",
        labels={"phase": tuple(phase.value for phase in Phase)},
    ),
    _gauge("engine_ready", "1 if new requests are served, as `health().ready`.", "health.ready"),
    _gauge(
        "step_age_seconds",
        "Time since the last step, while work is due; 0 without work.",
        "health.step_age",
    ),
    _gauge(
        "kernel_fallbacks",
        "Operations that run on slower kernels than configured.",
        "gauges.kernel_fallbacks",
    ),
    _gauge("snapshots_held", "Snapshots of recurrent state in requests.", "gauges.held_snapshots"),
    _gauge("snapshots_cached", "Those that requests can begin from.", "gauges.cached_snapshots"),
    *(
        _counter(name, text, f"counters.{source}", vllm=True)
        for name, text, source in (
            ("prompt_tokens", "Prompt tokens of admitted completions.", "prompt_tokens"),
            ("prompt_tokens_cached", "Of them, those found in the cache.", "cached_tokens"),
            ("generation_tokens", "Output tokens.", "output_tokens"),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prompt_tokens"),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", "cached_tokens"),
            ("num_preemptions", "Preemptions of completions.", "preemptions"),
            ("spec_decode_num_draft_tokens", "Drafts that steps verified.", "drafted_tokens"),
            ("spec_decode_num_accepted_tokens", "Of them, those accepted.", "accepted_tokens"),
        )
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Of them, by their number in the draft of a row, from 0.",
        labels={"position": ()},
        vllm=True,
    ),
    *(
        _counter(name, text, f"counters.{source}")
        for name, text, source in (
            ("evicted_blocks", "Cached blocks that were allocated again.", "evicted_blocks"),
            ("evicted_snapshots", "Cached snapshots that were overwritten.", "evicted_snapshots"),
            ("steps", "Launched steps.", "steps"),
            ("step_fallbacks", "Launches without a prepared step.", "fallbacks"),
            ("gc_collections", "Runs of Python's garbage collector.", "collections"),
            ("gc_seconds", "Time of Python's garbage collector.", "collected_ns"),
        )
    ),
    _counter("request_success", "Requests that ended with an output.", labels=_REASONS, vllm=True),
    _counter("requests_cancelled", "Aborted requests, by where they were.", labels=_ENDED),
    _counter("deadlines_missed", "Requests that ended with `deadline`.", labels=_ENDED),
    _counter("requests_shed", "Requests refused for now.", labels={"reason": _SHED}),
    _counter("requests_invalid", "Requests that can never be served."),
    _counter("send_timeouts", "Streams that ended because their client did not read."),
    _counter("requests_failed", "Requests lost to a failure of the engine."),
    _times("time_to_first_token_seconds", "From submission to the first token."),
    _times("inter_token_latency_seconds", "Between two tokens.", bounds=TOKEN_SECONDS),
    _times(
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a request.",
        bounds=TOKEN_SECONDS,
    ),
    _times("e2e_request_latency_seconds", "From submission to the end, unless aborted."),
    _times("request_queue_time_seconds", "From submission to the entry into the engine."),
    _times("request_prefill_time_seconds", "From that entry to the first token."),
    _times("request_decode_time_seconds", "From the first to the last token."),
    _times("request_inference_time_seconds", "Prefill and decode time."),
    _times("request_prompt_tokens", "Prompt tokens of a request with an output.", bounds=TOKENS),
    _times("request_generation_tokens", "Its output tokens.", bounds=TOKENS),
    _histogram(
        "step_time_seconds", "Launches, from plan to commit.", labels=_KIND, bounds=TOKEN_SECONDS
    ),
    _histogram(
        "step_bucket_size",
        "Buckets of the launches, in rows or tokens.",
        labels=_KIND,
        bounds=SIZES,
    ),
)


_UNANSWERED: Mapping[Outcome, tuple[str, str]] = {
    **{outcome: ("requests_shed", outcome) for outcome in _SHED},
    "send_timeout": ("send_timeouts", ""),
    "invalid": ("requests_invalid", ""),
    "failed": ("requests_failed", ""),
}
"""The counter of requests without an output, and its label."""
_EARLY: Mapping[Outcome, str] = {"abort": "requests_cancelled", "deadline": "deadlines_missed"}
"""The counter, by phase, of requests that ended early."""
_TIMES: Mapping[str, str] = {
    "first_token": "time_to_first_token_seconds",
    "e2e": "e2e_request_latency_seconds",
    **{
        name: f"request_{name}_time_seconds" for name in ("queue", "prefill", "decode", "inference")
    },
}
"""The histogram of each of `RequestRecord.seconds`."""

_Counted = tuple[list[tuple[str, float]], float]
"""A histogram at one moment: each upper bound with the count of values up to it; and their sum."""


class _Histogram:
    """Counts of values by bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Start empty; `bounds` are the upper bounds of all buckets but the last, ascending."""
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, values: ArrayLike) -> None:
        """Count a value or several, in the unit of the bounds."""
        np.add.at(self._counts, self._bounds.searchsorted(values), 1)
        self._sum += float(np.sum(values))

    def counted(self) -> _Counted:
        """Return the present counts."""
        names = [*map(str, self._bounds.tolist()), "+Inf"]
        return list(zip(names, self._counts.cumsum().tolist(), strict=True)), self._sum


PAUSE_SECONDS = 1e-5
"""Pause between two metrics of a scrape, in which the step thread can take Python's lock."""

_Series = Mapping[tuple[str, ...], float | _Counted]
"""Values of the labels → value."""

_FAMILIES: Mapping[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}
_NO_ENGINE = EngineGauges._make([0] * len(EngineGauges._fields))


class EngineMetrics(Collector):
    """The metrics of one engine. Any thread may scrape them, several at once too."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        model_name: str | None = None,
        vllm_names: bool = False,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Count the requests of an engine from now on.

        Args:
            engine: need not have started.
            model_name: value of a label `model_name` of all metrics; None for no such label.
            vllm_names: whether to add vLLM's names for the metrics that vLLM has.
            registry: where to register; None for a new one. The global registry is not used.
        """
        self.registry = CollectorRegistry() if registry is None else registry
        """Where the metrics are registered."""
        self._engine = engine
        self._model = {} if model_name is None else {"model_name": model_name}
        self._vllm_names = vllm_names
        self._counts = Counter[tuple[str, str]]()
        """Ended requests, by the name of a counter and its label, empty without one."""
        self._histograms = {
            (metric.name, label): _Histogram(metric.bounds)
            for metric in METRICS
            if metric.kind == "histogram"
            for label in metric.series
        }
        self._steps = StepReader()
        self._lock = threading.Lock()
        engine.add_listener(self._count_request)
        self.registry.register(self)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the registry's metrics and their content type, for an `Accept` header.

        It takes milliseconds, with pauses: call it outside of an event loop's thread.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type

    def describe(self) -> Iterator[Family]:
        """Return all metrics without values."""
        for metric in METRICS:
            yield from self._families(metric, {})

    def collect(self) -> Iterator[Family]:
        """Return the present values."""
        with self._lock:
            snapshot = self._engine.snapshot()
            self._count_steps(snapshot.timeline)
            snapshot = snapshot._replace(gauges=snapshot.gauges or _NO_ENGINE)
            series = _computed(snapshot)
            for metric in METRICS:
                if metric.source:
                    value = attrgetter(metric.source)(snapshot) or 0
                    is_time = metric.source.endswith("_ns")
                    series[metric.name] = {(): value / 1e9 if is_time else float(value)}
                elif metric.name not in series:
                    counted = metric.kind == "histogram" and self._histograms
                    series[metric.name] = {
                        (label,) if label else (): (
                            counted[metric.name, label].counted()
                            if counted
                            else self._counts[metric.name, label]
                        )
                        for label in metric.series
                    }
        for metric in METRICS:
            for family in self._families(metric, series[metric.name]):
                yield family
                time.sleep(PAUSE_SECONDS)

    def _count_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        outcome, seconds = record.outcome, record.seconds
        with self._lock:
            if outcome in _UNANSWERED:
                self._counts[_UNANSWERED[outcome]] += 1
            else:
                self._counts["request_success", outcome] += 1
                self._observe("request_prompt_tokens", record.num_prompt_tokens)
                self._observe("request_generation_tokens", record.num_output_tokens)
            if outcome in _EARLY:
                self._counts[_EARLY[outcome], record.phase] += 1
            if outcome == "abort" or outcome in _UNANSWERED:
                del seconds["e2e"]
            for name, value in seconds.items():
                self._observe(_TIMES[name], value)
            latencies = [np.diff(times) / 1e9 for times in record.token_ns if len(times) > 1]
            if latencies and "queue" in seconds:
                joined = np.concatenate(latencies)
                self._observe("inter_token_latency_seconds", joined)
                self._observe("request_time_per_output_token_seconds", float(joined.mean()))

    def _count_steps(self, timeline: Timeline | None) -> None:
        """Count the steps since the last call, and all kept steps of a new timeline."""
        column = self._steps.read(timeline)
        prefills = column["prefill_tokens"] > 0
        for kind, chosen in (("decode", ~prefills), ("prefill", prefills)):
            self._observe("step_time_seconds", column["taken_ns"][chosen] / 1e9, kind)
            self._observe("step_bucket_size", column["bucket"][chosen], kind)

    def _observe(self, name: str, values: ArrayLike, label: str = "") -> None:
        self._histograms[name, label].observe(values)

    def _families(self, metric: Metric, series: _Series) -> Iterator[Family]:
        """Return a metric under each of its names."""
        labels = [*self._model, *metric.labels]
        for prefix in (PREFIX, VLLM_PREFIX) if self._vllm_names and metric.vllm else (PREFIX,):
            name = prefix + metric.name
            family = _FAMILIES[metric.kind](name, metric.help, labels=labels)
            for values, value in series.items():
                counted = value if isinstance(value, tuple) else (value,)
                family.add_metric([*self._model.values(), *values], *counted)
            yield family


def _computed(snapshot: ServiceSnapshot) -> dict[str, _Series]:
    """Return the series of metrics that a snapshot does not have as one value."""
    gauges, phase = snapshot.gauges, snapshot.health.phase
    assert gauges is not None
    usable, accepted = gauges.usable_blocks, snapshot.counters.accepted_by_position
    return {
        "num_requests_waiting": {(): gauges.waiting + snapshot.queued_requests},
        "kv_cache_usage_perc": {(): gauges.held_blocks / usable if usable else 0.0},
        "cache_config_info": {(str(gauges.block_size), str(usable)): 1} if usable else {},
        "engine_phase": {(each.value,): float(each is phase) for each in Phase},
        "spec_decode_num_accepted_tokens_per_pos": {
            (str(position),): count for position, count in enumerate(accepted)
        },
    }
