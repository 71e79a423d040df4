"""Metrics of an `AsyncEngine`: each value against the outputs, the records or the engine."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from stepgraph.runtime import AsyncEngine, ServiceConfig
from stepgraph.runtime.errors import OverloadedError
from stepgraph.runtime.service.request_record import RequestRecord

from ..rigs.fake_engine import fake_engine, params
from ..rigs.service_rig import wait_until
from .test_request_records import SlowEngine, listening

prometheus = pytest.importorskip("prometheus_client")

from stepgraph.runtime.service.metrics import METRICS, EngineMetrics  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


class Scrape:
    """Samples of a scrape by name, with the values of their labels."""

    def __init__(self, metrics: EngineMetrics) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        text, self.content_type = metrics.exposition()
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(text.decode()):
            self.kinds[family.name] = family.type
            for sample in family.samples:
                self.samples[sample.name, *sample.labels.values()] = sample.value

    def __call__(self, name: str, *labels: str) -> float:
        return self.samples[f"stepgraph:{name}", *labels]

    def buckets(self, name: str) -> dict[float, float]:
        """Upper bound → count, of a histogram without labels."""
        return {
            float(key[-1]): value
            for key, value in self.samples.items()
            if key[0] == f"stepgraph:{name}_bucket"
        }


def served(engine: AsyncEngine, records: list[RequestRecord], count: int = 20) -> None:
    """Run requests to their end."""
    before = len(records)
    futures = []
    for seed in range(count):
        own = params(seed, 1 + seed, n=1 + seed % 2)
        futures.append(engine.submit([1, 2, 3, 4, 5, 6], own))
    for future in futures:
        future.result()
    wait_until(lambda: len(records) == before + count)


def seconds_of(records: list[RequestRecord]) -> dict[str, list[float]]:
    """The values of each histogram of times, one by one."""
    values: dict[str, list[float]] = {}
    for record in records:
        assert record.started_ns is not None
        first = min(times[0] for times in record.token_ns)
        last = max(times[-1] for times in record.token_ns)
        latencies = [(b - a) / 1e9 for times in record.token_ns for a, b in pairwise(times)]
        own = {
            "time_to_first_token_seconds": [(first - record.submitted_ns) / 1e9],
            "e2e_request_latency_seconds": [(record.ended_ns - record.submitted_ns) / 1e9],
            "request_queue_time_seconds": [(record.started_ns - record.submitted_ns) / 1e9],
            "request_prefill_time_seconds": [(first - record.started_ns) / 1e9],
            "request_decode_time_seconds": [(last - first) / 1e9],
            "request_inference_time_seconds": [(last - record.started_ns) / 1e9],
            "request_prompt_tokens": [float(record.num_prompt_tokens)],
            "request_generation_tokens": [float(record.num_output_tokens)],
            "inter_token_latency_seconds": latencies,
            "request_time_per_output_token_seconds": [
                sum(latencies) / len(latencies) for _ in latencies[:1]
            ],
        }
        for name, times in own.items():
            values.setdefault(name, []).extend(times)
    return values


def test_histograms_of_requests_hold_the_values_of_their_records() -> None:
    with AsyncEngine(lambda: fake_engine()) as engine:
        metrics, records = EngineMetrics(engine), listening(engine)
        served(engine, records)
        scrape = Scrape(metrics)
    expected = seconds_of(records)
    without_labels = {m.name for m in METRICS if m.kind == "histogram" and not m.labels}
    assert expected.keys() == without_labels
    for name, values in expected.items():
        assert scrape(f"{name}_count") == len(values)
        assert scrape(f"{name}_sum") == pytest.approx(sum(values))
        for bound, count in scrape.buckets(name).items():
            assert count == sum(value <= bound for value in values), (name, bound)


def test_counters_and_steps() -> None:
    with AsyncEngine(lambda: fake_engine()) as engine:
        metrics, records = EngineMetrics(engine), listening(engine)
        served(engine, records)
        middle = Scrape(metrics)
        served(engine, records)
        stats = asyncio.run(engine.stats())
        scrape = Scrape(metrics)
    assert scrape("generation_tokens_total") == sum(r.num_output_tokens for r in records)
    prompts = sum(r.num_prompt_tokens * len(r.token_ns) for r in records)
    assert scrape("prompt_tokens_total") == scrape("prefix_cache_queries_total") == prompts
    assert scrape("prefix_cache_hits_total") == stats["cache"]["hit_tokens"] > 0
    assert scrape("request_success_total", "length") == len(records)
    assert scrape("steps_total") == stats["steps"]
    for name in ("step_time_seconds", "step_bucket_size"):
        counts = [scrape(f"{name}_count", kind) for kind in ("decode", "prefill")]
        assert sum(counts) == stats["steps"]
        assert min(counts) > 0
    assert 0 < scrape("step_time_seconds_sum", "decode") < 10
    assert scrape("num_requests_running") == scrape("num_requests_waiting") == 0
    assert scrape("kv_cache_usage_perc") == 0
    assert scrape("cache_config_info", "4", str(stats["blocks"]["usable"])) == 1
    assert (scrape("engine_ready"), scrape("engine_phase", "serving")) == (1, 1)
    for key, value in middle.samples.items():
        if key[0].endswith(("_total", "_bucket", "_count")):
            assert scrape.samples[key] >= value


def test_gauges_while_requests_wait() -> None:
    slow = SlowEngine()
    with AsyncEngine(slow.start) as engine:
        metrics = EngineMetrics(engine)
        for seed in range(5):
            engine.submit([1, 2, 3], params(seed, 40))
        wait_until(lambda: Scrape(metrics)("num_requests_running") == 2)
        scrape = Scrape(metrics)
        assert scrape("num_requests_waiting") == 3
        assert scrape("num_prompt_tokens_waiting") == 9
        assert 0 < scrape("kv_cache_usage_perc") < 1
        assert 0 < scrape("step_age_seconds") < 20
    closed = Scrape(metrics)
    assert (closed("engine_ready"), closed("engine_phase", "closed")) == (0, 1)
    assert closed("num_requests_running") == closed("num_requests_waiting") == 0
    assert closed("generation_tokens_total") >= scrape("generation_tokens_total")


def test_refused_cancelled_and_lost_requests() -> None:
    slow = SlowEngine()
    config = ServiceConfig(max_queued_requests=2)
    with AsyncEngine(slow.start, config) as engine:
        metrics, records = EngineMetrics(engine), listening(engine)

        def submit(name: str, deadline: float | None = None) -> None:
            engine.submit([1, 2], params(1, 40), request_id=name, deadline=deadline)

        submit("a")
        submit("b")
        wait_until(lambda: engine.snapshot().queued_requests == 0)
        submit("cancelled")
        submit("late", 0.2)
        with pytest.raises(OverloadedError):
            submit("overloaded")
        engine.abort("cancelled")
        wait_until(lambda: len(records) == 3)
        engine.abort("b")
        wait_until(lambda: len(records) == 4)
        tokens = Scrape(metrics)("generation_tokens_total")
        assert engine.submit([99], params(1)).exception()
        slow.failure = ValueError("a step failed")
        wait_until(lambda: len(records) == 6)
        scrape = Scrape(metrics)
    assert scrape("requests_cancelled_total", "queue") == 1
    assert scrape("requests_cancelled_total", "decode") == 1
    assert scrape("deadlines_missed_total", "queue") == 1
    assert scrape("requests_shed_total", "overloaded") == 1
    assert scrape("requests_invalid_total") == 1
    assert scrape("requests_failed_total") == 1
    reasons = {r: scrape("request_success_total", r) for r in ("length", "abort", "deadline")}
    assert reasons == {"length": 0, "abort": 2, "deadline": 1}
    assert scrape("e2e_request_latency_seconds_count") == 1
    assert scrape("generation_tokens_total") >= tokens  # also of the lost engine


def test_names_kinds_and_labels() -> None:
    before = {family.name for family in prometheus.REGISTRY.collect()}
    with AsyncEngine(lambda: fake_engine()) as engine:
        metrics = EngineMetrics(engine, model_name="m", vllm_names=True)
        plain = EngineMetrics(engine)
        served(engine, listening(engine), 1)
        scrape, without = Scrape(metrics), Scrape(plain)
    assert all(f"`{metric.name}" in PAGE.read_text() for metric in METRICS)
    names = {f"stepgraph:{metric.name}" for metric in METRICS}
    aliases = {f"vllm:{metric.name}" for metric in METRICS if metric.vllm}
    assert set(without.kinds) == names
    assert scrape.kinds == {
        prefix + m.name: m.kind
        for m in METRICS
        for prefix in ("stepgraph:", "vllm:")
        if prefix == "stepgraph:" or m.vllm
    }
    assert aliases
    for (name, *labels), value in scrape.samples.items():
        assert "m" in labels
        if name.startswith("vllm:"):
            assert scrape.samples[name.replace("vllm:", "stepgraph:"), *labels] == value
    assert {family.name for family in prometheus.REGISTRY.collect()} == before
    text, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    _, content_type = metrics.exposition("application/openmetrics-text; version=x")
    assert content_type.startswith("text/plain")
