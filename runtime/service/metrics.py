"""`EngineMetrics`: the metrics of an `AsyncEngine` for Prometheus (extra `server`).

The step thread does nothing for them. Gauges and counters are read when they are scraped, times of
steps are taken from the engine's timeline then, and requests are counted by a listener.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

from ..engine.engine_stats import EngineGauges
from .async_engine import AsyncEngine
from .health import Phase
from .metric_definitions import METRICS, PREFIX, VLLM_PREFIX, Metric
from .metric_histograms import Counted, Observations
from .request_record import RequestRecord
from .service_snapshot import ServiceSnapshot

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.core import Metric as Family
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'metrics need prometheus-client: pip install "stepgraph[server]"', name=error.name
    ) from error

__all__ = ["EngineMetrics"]

PAUSE_SECONDS = 1e-5
"""Pause between two metrics of a scrape, in which the step thread can take Python's lock."""

_Series = Mapping[tuple[str, ...], float | Counted]
"""Values of the labels → value."""

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
        self._observations = Observations()
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
            snapshot, observed = self._engine.snapshot(), self._observations
            observed.count_steps(snapshot.timeline)
            series = _gauges(snapshot)
            series |= {name: {(): value} for name, value in _counters(snapshot).items()}
            series["spec_decode_num_accepted_tokens_per_pos"] = {
                (str(position),): count
                for position, count in enumerate(snapshot.counters.accepted_by_position)
            }
            for name, counts in observed.counters.items():
                series[name] = _labelled(counts)
            for name, histograms in observed.histograms.items():
                series[name] = _labelled({label: h.counted() for label, h in histograms.items()})
        for metric in METRICS:
            for family in self._families(metric, series[metric.name]):
                yield family
                time.sleep(PAUSE_SECONDS)

    def _count_request(self, record: RequestRecord) -> None:
        with self._lock:
            self._observations.count_request(record)

    def _families(self, metric: Metric, series: _Series) -> Iterator[Family]:
        """Return a metric under each of its names."""
        labels = [*self._model, *metric.labels]
        for prefix in (PREFIX, VLLM_PREFIX) if self._vllm_names and metric.vllm else (PREFIX,):
            name = prefix + metric.name
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(name, metric.help, labels=labels)
                for values, value in series.items():
                    assert isinstance(value, Counted)
                    labelled = [*self._model.values(), *values]
                    histogram.add_metric(labelled, value.buckets, value.sum)
                yield histogram
                continue
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(name, metric.help, labels=labels)
            for values, value in series.items():
                assert not isinstance(value, Counted)
                family.add_metric([*self._model.values(), *values], value)
            yield family


def _labelled(values: Mapping[str, float | Counted]) -> _Series:
    """Return values by label; the label of a metric without labels is empty."""
    return {(label,) if label else (): value for label, value in values.items()}


def _gauges(snapshot: ServiceSnapshot) -> dict[str, _Series]:
    health, gauges = snapshot.health, snapshot.gauges or _NO_ENGINE
    usable = gauges.usable_blocks
    return {
        "num_requests_running": {(): gauges.running},
        "num_requests_waiting": {(): gauges.waiting + snapshot.queued_requests},
        "num_prompt_tokens_waiting": {(): snapshot.queued_tokens},
        "kv_cache_usage_perc": {(): gauges.held_blocks / usable if usable else 0.0},
        "cache_config_info": {(str(gauges.block_size), str(usable)): 1} if usable else {},
        "engine_phase": {(phase.value,): float(phase is health.phase) for phase in Phase},
        "engine_ready": {(): float(health.ready)},
        "step_age_seconds": {(): health.step_age or 0.0},
        "kernel_fallbacks": {(): gauges.kernel_fallbacks},
    }


def _counters(snapshot: ServiceSnapshot) -> dict[str, float]:
    counters = snapshot.counters
    return {
        "prompt_tokens": counters.prompt_tokens,
        "prompt_tokens_cached": counters.cached_tokens,
        "generation_tokens": counters.output_tokens,
        "prefix_cache_queries": counters.prompt_tokens,
        "prefix_cache_hits": counters.cached_tokens,
        "evicted_blocks": counters.evicted_blocks,
        "num_preemptions": counters.preemptions,
        "spec_decode_num_draft_tokens": counters.drafted_tokens,
        "spec_decode_num_accepted_tokens": counters.accepted_tokens,
        "steps": counters.steps,
        "step_fallbacks": counters.fallbacks,
        "gc_collections": counters.collections,
        "gc_seconds": counters.collected_ns / 1e9,
        "engine_restarts": snapshot.restarts,
    }
